"""docs/adding.md: the diffs that it shows apply to the code as it is, and what they add works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import documents
import pytest
from documents import DOCS, ROOT

USE = """
import json, pathlib, sys

import torch

import weights, zoo
from convert import sandbox
from weights.sources import resolve
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.ops import load

assert pathlib.Path(zoo.__file__).is_relative_to(sys.argv[1]), zoo.__file__

with torch.device("meta"):
    assert sum(p.numel() for p in zoo.ResNet38().parameters()) == zoo.ResNet38.params
    from zoo.detection.catalogue import RetinaNet_ResNet101_FPN as detector
    assert sum(p.numel() for p in detector().parameters()) == detector.params

nin = zoo.NiN(num_classes=4, in_channels=1).eval()
assert sum(p.numel() for p in zoo.NiN().parameters()) == zoo.NiN.params
assert nin(torch.zeros(2, 1, 32, 32)).shape == (2, 4)
assert zoo.reset_head(nin, 7)(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
assert zoo.features(nin, at=["stride/4"])(torch.zeros(2, 1, 32, 32))["stride/4"].shape[2:] == (8, 8)

assert weights.find("ResNet38").tag == "ours"

assert resolve("s3://acme/wheels/a b.safetensors").url == "https://acme.s3.amazonaws.com/wheels/a%20b.safetensors"
row = {"sources": ["s3://acme/x.safetensors"], "format": "safetensors", "names": "torchvision", "num_classes": 2, "license": "MIT",
       "provenance": "here", "preprocessing": {"interpolation": "bilinear", "mean": [0.0], "std": [1.0]}}
from weights.record import record
assert record("ResNet38", "there", row, "here").sources == ("s3://acme/x.safetensors",)

network = zoo.ResNet20()
lists = {}
for name, tensor in network.state_dict().items():
    module, _, leaf = name.rpartition(".")
    if tensor.dim():
        lists[f"{module.replace('.', '_')}.{leaf}"] = tensor.tolist()
path = pathlib.Path(sys.argv[1]) / "exported.json"
path.write_text(json.dumps(lists))
with sandbox.read(path) as source:
    assert (source.format, source.conventions) == ("jsonlists", {"unknown"})
back = zoo.trained(zoo.ResNet20, path, kernel_convention="correlation")
assert all(torch.equal(tensor, back.state_dict()[name]) for name, tensor in network.state_dict().items())

assert "Mish" in {type(layer).__name__ for layer in zoo.MobileNetV1_025(activation="mish").modules()}

from zoo.commands.app import main
assert main(["size", "resnet20"]) == 0

op = load("leaky")
for case in op.CASES:
    for dtype in op.TOLERANCE:
        outcome = checking.check(op, checking.draw(op, case, dtype, "cpu"), dtype)
        assert not outcome.fault and outcome.error <= outcome.tolerance, (case, dtype, outcome)
print("used")
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for package in ("zoo", "weights", "convert"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def apply(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    return subprocess.run(["git", "apply", "-"], input=text, cwd=folder, env=environment, capture_output=True, text=True)


def test_every_addition_applies_and_works(copy: Path) -> None:
    diffs = documents.blocks(DOCS / "adding.md", "diff")
    assert len(diffs) >= 10
    for diff in diffs:
        applied = apply(diff.text, copy)
        assert applied.returncode == 0, f"{diff}: {applied.stderr}"
    environment = {**os.environ, "PYTHONPATH": str(copy), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    used = subprocess.run([sys.executable, "-c", USE, str(copy)], cwd=copy, env=environment, capture_output=True, text=True)
    assert used.stdout == "ResNet20 has 269,722 parameters\nused\n", used.stderr


def test_a_diff_that_is_out_of_date_does_not_apply(copy: Path) -> None:
    stale = "--- a/zoo/vgg.py\n+++ b/zoo/vgg.py\n@@ -1,2 +1,3 @@\n never there\n+new\n nor this\n"
    assert apply(stale, copy).returncode != 0
