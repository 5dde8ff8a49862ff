"""The recipes for dreams: the time of a step beside eager PyTorch's, and the sheet of layers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from tests.zoo.dreaming.dreams import picture

RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_step_is_timed_in_turns_only_after_both_gave_the_same_picture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["bench_dream.py", "--device", "cpu", "--model", "ResNet20", "--size", "32", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", line)
    recipe = runpy.run_path(str(RECIPES / "bench_dream.py"))
    assert recipe["main"]() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ResNet20 at layer2, 32 px on cpu, ours: one call after the other"
    assert [line.partition(":")[0] for line in lines[2:]] == ["throughput", "latency"]
    assert all(line.endswith("x") and "eager PyTorch" in line for line in lines[2:])
    recipe["main"].__globals__["RATE"] = 9.0  # of the rival alone from here on, for ours has been given it
    recipe["main"].__globals__["steps"] = lambda pull, x, rate, *limits: recipe["steps"](pull, x, 1.0, *limits)
    assert recipe["main"]() == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no time is printed: the pictures differ"


def test_the_sheet_has_a_cell_for_each_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("photo", "guide"):
        picture(40, 30, seed=len(name)).save(tmp_path / f"{name}.png")
    line = ["dream_layers.py", str(tmp_path / "sheet.png"), "--model", "ResNet20", "--at", "layer1", "layer2", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", [*line, "--photo", str(tmp_path / "photo.png"), "--guide", str(tmp_path / "guide.png")])
    recipe = runpy.run_path(str(RECIPES / "dream_layers.py"))
    monkeypatch.setitem(recipe["main"].__globals__, "WIDTH", 40)
    monkeypatch.setitem(recipe["main"].__globals__, "HEIGHT", 30)
    recipe["main"]()
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (2 * (3 * 48 + 8), 2 * (2 * 64 + 8))
