"""The recipe of the embedded checkpoint runs from a folder of images to a file that `trained` loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zoo import ResNet20, trained

RECIPE = Path(__file__).parents[2] / "recipes" / "resnet20_cifar10.py"
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Ten classes that differ in brightness alone: learnt in seconds, and only if images and labels stay together."""
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 4)):
        for index, name in enumerate(CLASSES):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.clip(20 + 23 * index + random.normal(0, 3, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}  # threads that wait for a busy core spin, and make seconds of milliseconds
    return subprocess.run([sys.executable, str(RECIPE), *arguments], capture_output=True, text=True, env=alone)


def test_a_folder_of_images_becomes_a_checkpoint_and_its_log(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "net.safetensors"
    done = run(str(pictures), "--out", str(out), "--epochs", "8", "--batch", "20", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    log = json.loads(out.with_suffix(".json").read_text())
    assert log["test_top1"] > 60
    assert log["settings"]["seed"] == 0
    assert len(log["epochs"]) == 8
    assert trained(ResNet20, out).num_classes == 10


def test_a_holdout_never_reads_the_test_split(pictures: Path, tmp_path: Path) -> None:
    (pictures / "test").rename(pictures / "elsewhere")
    done = run(
        str(pictures), "--out", str(tmp_path / "n.safetensors"), "--epochs", "1", "--batch", "20", "--device", "cpu", "--holdout", "50"
    )
    assert done.returncode == 0, done.stderr
    assert "holdout_top1" in done.stdout


def test_a_folder_without_images_is_explained(tmp_path: Path) -> None:
    done = run(str(tmp_path))
    assert done.returncode == 1
    assert "cifar10_train.npz" in done.stderr
    assert "Traceback" not in done.stderr
