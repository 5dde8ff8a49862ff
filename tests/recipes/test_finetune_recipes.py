"""The recipes that fine-tune run from a folder of images to what they promise."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    """Ten classes that differ in brightness alone, as JPEG files end to end."""
    chance = np.random.default_rng(0)
    for name, count in (("train", 40), ("test", 10)):
        files, labels = [], []
        for index in range(count):
            labels.append(index % 10)
            pixels = np.clip(20 + 23 * labels[-1] + chance.normal(0, 3, (32, 32, 3)), 0, 255).astype(np.uint8)
            file = BytesIO()
            Image.fromarray(pixels).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), np.uint8))
        offset = np.cumsum([0, *map(len, files)])
        np.savez(tmp_path / f"cifar10_{name}.npz", jpeg=np.concatenate(files), offset=offset, label=np.array(labels, np.uint8))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a recipe as the command line would, in this process: torch takes seconds to load."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)

    def command(recipe: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [recipe, *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(RECIPES / recipe), run_name="__main__")
        assert left.value.code is None
        return capsys.readouterr().out

    return command


def test_mobilenetv2_with_a_stem_for_small_images_trains_and_is_measured_once(cifar: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "x"
    told = json.loads(run("mobilenetv2_cifar10.py", cifar, "--out", out, "--steps", 1, "--batch-size", 10, "--device", "cpu"))
    assert told["steps"] == 1
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["images"] == 10
    assert told["top1"] == pytest.approx(metrics["accuracy"])
    assert json.loads((out / "settings.json").read_text())["val"].endswith("cifar10_test.npz")
    assert sum('"eval"' in line for line in (out / "log.jsonl").read_text().splitlines()) == 1


def test_fine_tuning_and_training_from_scratch_are_drawn_at_equal_steps(cifar: Path, tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "x"
    told = json.loads(
        run("finetune_vs_scratch.py", cifar, "cifar10", "--model", "ResNet20", "--out", out, "--images", 40, "--test", 10, "--steps", 2,
            "--batch-size", 8, "--eval-every", 1, "--device", "cpu")
    )  # fmt: skip
    assert {name: [step for step, _ in found["curve"]] for name, found in told.items()} == {"fine-tuned": [1, 2], "from scratch": [1, 2]}
    assert (out / "compared.png").is_file()


def test_scaling_is_measured_between_processes(tmp_path: Path, run: Callable[..., str]) -> None:
    out = tmp_path / "scaling.json"
    run("finetune_scaling.py", "--gpus", "1", "--model", "ResNet20", "--batch-size", 4, "--side", 32, "--steps", 9, "--images", 20,
        "--device", "cpu", "--out", out)  # fmt: skip
    (row,) = json.loads(out.read_text())["rows"]
    assert row["efficiency"] == 1
    assert row["images_s"] == pytest.approx(4 * 1000 / row["ms_a_step"])
