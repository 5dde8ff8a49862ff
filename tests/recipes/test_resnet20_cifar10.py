"""The recipe of the embedded checkpoint runs from a folder of images to a file that `trained` loads."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run the recipe as the command line would, in this process: torch takes seconds to load."""
    torch.set_num_threads(1)
    for switch in ("deterministic", "benchmark"):  # which the recipe turns, and which turn back
        monkeypatch.setattr(torch.backends.cudnn, switch, getattr(torch.backends.cudnn, switch))

    def command(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [str(RECIPE), *map(str, arguments)])
        runpy.run_path(str(RECIPE), run_name="__main__")
        return capsys.readouterr().out

    return command


def test_a_folder_of_images_becomes_a_checkpoint_and_its_log(pictures: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "made" / "net.safetensors"
    run(pictures, "--out", out, "--epochs", 8, "--batch-size", 20, "--device", "cpu")
    log = json.loads(out.with_suffix(".json").read_text())
    assert log["test_top1"] > 60
    assert log["settings"]["seed"] == 0
    assert len(log["epochs"]) == 8
    assert trained(ResNet20, out).num_classes == 10


def test_a_holdout_never_reads_the_test_split(pictures: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    (pictures / "test").rename(pictures / "elsewhere")
    out = tmp_path / "n.safetensors"
    assert "holdout_top1" in run(pictures, "--out", out, "--epochs", 1, "--batch-size", 20, "--device", "cpu", "--holdout", 50)


def test_a_folder_without_images_is_explained(tmp_path: Path, run: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match=r"cifar10_train\.npz"):  # which Python shows without a traceback
        run(tmp_path)
