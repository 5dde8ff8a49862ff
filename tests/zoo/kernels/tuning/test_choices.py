"""What timing has found outlives the process, merges with what others found, and is no worse than nothing where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from zoo.kernels.tuning.choices import CPU_ROOMS, GPU_ROOMS, Choice, Choices, _code

CPU = torch.device("cpu")


def test_choices_survive_the_process_and_merge_with_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    mine, theirs = Choices(CPU), Choices(CPU)
    mine.put("a", Choice("conv", {"BM": 64}, 2.0, 4.0))
    theirs.put("b", Choice("pool", {}, 1.0, 2.0, level="full"))
    mine.save()
    theirs.save()
    found = Choices(CPU)
    assert found.get("a") == Choice("conv", {"BM": 64}, 2.0, 4.0)
    assert found.get("a", "full") is None
    assert found.get("b", "full") is not None
    found.forget("a")
    found.save()
    assert Choices(CPU).get("a") is None
    assert json.loads(found.path.read_text())["choices"]["b"]["op"] == "pool"


DAMAGES = {
    "cut": lambda text: text[: len(text) // 2],
    "another version": lambda text: text.replace('"format": 1', '"format": 99'),
    "no table": lambda text: "[]",
    "a word for a time": lambda text: text.replace('"us": 2.0', '"us": "x"'),
}


@pytest.mark.parametrize(("changed", "rooms"), [("pointwise.py", GPU_ROOMS), ("openvino.py", CPU_ROOMS), ("apart.py", CPU_ROOMS)])
def test_what_was_changed_is_timed_anew_and_nothing_else(monkeypatch: pytest.MonkeyPatch, changed: str, rooms: tuple[str, ...]) -> None:
    before, path, read = {each: _code(each) for each in (GPU_ROOMS, CPU_ROOMS)}, Choices(CPU).path, Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: read(self) + (b"#" if self.name == changed else b""))
    _code.cache_clear()
    try:
        assert {each for each in before if _code(each) != before[each]} == {rooms}
        assert (Choices(CPU).path != path) == (rooms == CPU_ROOMS)
    finally:
        _code.cache_clear()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_and_foreign_files_of_choices_are_ignored_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damage: Any
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    choices = Choices(CPU)
    choices.put("a", Choice("conv", {}, 2.0, 4.0))
    choices.save()
    choices.path.write_text(damage(choices.path.read_text()))
    with pytest.warns(UserWarning, match="ignored"):
        assert Choices(CPU).get("a") is None


def test_a_folder_that_can_not_be_written_only_warns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file"))
    choices = Choices(CPU)
    choices.put("a", Choice("conv"))
    with pytest.warns(UserWarning, match="could not be kept"):
        choices.save()
