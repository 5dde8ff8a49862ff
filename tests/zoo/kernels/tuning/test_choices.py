"""What timing has found outlives the process, merges with what others found, and is no worse than nothing where it is damaged."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from zoo.kernels import ops
from zoo.kernels.tuning import choices
from zoo.kernels.tuning.choices import CPU_ROOMS, GPU_ROOMS, Choice, Choices, _code, pack, shipped, slug

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


CARD = {"format": 1, "device": "NVIDIA X1", "capability": "9.0", "multiprocessors": 132, "cudnn": 91000, "torch": "2.11"}
BROUGHT = {
    "a": Choice("conv", {"BM": 64}, 2.0, 4.0),
    "b": Choice("cudnn_graph", {"plan": 3}, 1.0, 2.0),
    "c": Choice("pool", {}, 1.0, 2.0, level="none"),
}


def bring(content: bytes, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "SHIPPED", place)
    (place / f"{slug(str(CARD['device']))}.json.gz").write_bytes(content)


def test_the_packages_choices_count_where_nothing_was_found_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(choices, "facts", lambda device: CARD)
    bring(pack(CARD, BROUGHT), tmp_path, monkeypatch)
    found = Choices(CPU)
    assert found.get("a", "quick") == BROUGHT["a"]
    assert found.get("a", "full") is None
    assert found.get("c") is None  # it was guessed
    assert found.is_shipped("a")
    found.put("a", Choice("conv", {"BM": 128}, 1.0, 4.0))
    assert found.get("a") == Choice("conv", {"BM": 128}, 1.0, 4.0)
    assert not found.is_shipped("a")
    found.save()
    assert Choices(CPU).get("b", "quick") == BROUGHT["b"]
    again = Choices(CPU)
    again.forget("b")
    again.save()
    assert again.get("b") is None  # it turned out wrong here
    assert Choices(CPU).get("b") is None
    found.forget("a")
    assert found.get("a") is None


@pytest.mark.parametrize(
    ("other", "left"),
    [
        ({"device": "NVIDIA X2"}, []),
        ({"multiprocessors": 66}, []),
        ({"capability": "8.0"}, []),
        ({"cudnn": 92000}, ["a"]),
        ({"torch": "3.0"}, ["a", "b"]),
    ],
)
def test_choices_of_other_cards_do_not_count_and_numbers_of_another_cudnn_neither(
    other: dict[str, Any], left: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bring(pack(CARD, BROUGHT), tmp_path, monkeypatch)
    assert sorted(shipped(CARD | other)) == left


HARMS = {
    "cut": lambda data: data[: len(data) // 2],
    "no gzip": lambda data: b"{}",
    "no device": lambda data: pack({}, BROUGHT),
    "a word for a time": lambda data: pack(CARD, {"a": Choice("conv", {}, cast("float", "x"))}),
}


@pytest.mark.parametrize("damage", HARMS.values(), ids=HARMS.keys())
def test_a_damaged_file_of_the_package_is_ignored_with_a_warning(damage: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bring(damage(pack(CARD, BROUGHT)), tmp_path, monkeypatch)
    with pytest.warns(UserWarning, match="install kernelzoo again"):
        assert shipped(CARD) == {}


def test_every_file_of_the_package_can_be_read_and_is_of_the_device_that_its_name_says() -> None:
    assert choices.SHIPPED is not None
    files = sorted(choices.SHIPPED.glob("*.json.gz"))
    assert files
    for file in files:
        content = json.loads(gzip.decompress(file.read_bytes()))
        assert file.name == f"{slug(content['device'])}.json.gz"
        assert len(shipped(content)) == len(content["choices"]) > 100
        assert {choice.op for choice in shipped(content).values()} <= {
            *ops.discover(),
            "aten",
            "depthwise_squeeze",
            "plan",
            "torch.compile",
        }
