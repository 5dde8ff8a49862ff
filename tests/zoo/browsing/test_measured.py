"""What the page takes out of records of `zoo bench`."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

from weights import MalformedFile
from zoo.bench.record import Record
from zoo.browsing.measured import Measured, merged, of_record, read_record, remember, remembered, shipped, table

DOCS = Path(__file__).parents[3] / "docs"
ABOUT = {"type": "cpu", "device": "A CPU", "threads": 2, "dtype": "float32", "tune": "quick", "versions": {"torch": "2.14.1"}}


def cell(model: str, batch: int = 1, speed: float = 20.123456, side: int = 224, **more: Any) -> dict[str, Any]:
    return {"model": model, "batch": batch, "size": side, "date": "2026-11-24", "ways": {"fast": {"images_s": speed}}} | more


def record(*cells: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"format": 1, "about": ABOUT | about, "cells": list(cells)}


def test_a_record_becomes_a_table_a_batch() -> None:
    one, eight = of_record(record(cell("VGG19", 8), cell("ResNet50"), cell("VGG19", date="2026-11-26", speed=7)), "r.json", mine=True)
    assert one == Measured(
        "A CPU, 2 threads",
        "fast(), float32",
        1,
        "2026-11-24 to 2026-11-26",
        "torch 2.14.1",
        {"ResNet50": (224, 20.12), "VGG19": (224, 7.0)},
        True,
    )
    assert (eight.batch, eight.rates) == (8, {"VGG19": (224, 20.12)})
    assert one.label == "A CPU, 2 threads: fast(), float32, one image"
    assert eight.label == "A CPU, 2 threads: fast(), float32, 8 images at once"


def test_what_failed_has_no_speed() -> None:
    assert of_record(record(cell("VGG19", ways={"fast": {"failed": "no memory"}}), cell("VGG11", ways={"eager": {}})), "r.json") == []


@pytest.mark.parametrize("name", ["benchmarks-h200.json", "benchmarks-h100.json", "benchmarks-cpu.json"])
def test_the_projects_own_records_are_read_as_zoo_bench_reads_them(name: str) -> None:
    """`zoo.bench.record` loads torch, so the page has a reader of its own: it must find the same."""
    theirs = Record.read(DOCS / name)
    ours = {(network, one.batch): speed for one in read_record(DOCS / name) for network, (_, speed) in one.rates.items()}
    speeds = {(c["model"], c["batch"]): c["ways"]["fast"] for c in theirs.cells if "fast" in c["ways"]}
    speeds = {key: way["images_s"] for key, way in speeds.items() if "failed" not in way}
    assert ours.keys() == speeds.keys()
    assert all(math.isclose(ours[key], speed, rel_tol=1e-3) for key, speed in speeds.items())


DAMAGES: dict[str, Any] = {
    "no cells": lambda r: r.pop("cells"),
    "another format": lambda r: r.update(format=2),
    "cells are no list": lambda r: r.update(cells={}),
    "about is a list": lambda r: r.update(about=[]),
    "no device": lambda r: r["about"].pop("device"),
    "a cell is a word": lambda r: r["cells"].append("VGG19"),
    "no network": lambda r: r["cells"][0].pop("model"),
    "a network that is a number": lambda r: r["cells"][0].update(model=1),
    "no ways": lambda r: r["cells"][0].pop("ways"),
    "ways are a list": lambda r: r["cells"][0].update(ways=[1]),
    "a way is a number": lambda r: r["cells"][0]["ways"].update(fast=1),
    "no figure": lambda r: r["cells"][0]["ways"]["fast"].pop("images_s"),
    "a figure that is a word": lambda r: r["cells"][0]["ways"]["fast"].update(images_s="many"),
    "a speed of nothing": lambda r: r["cells"][0]["ways"]["fast"].update(images_s=0),
    "a speed that is no number": lambda r: r["cells"][0]["ways"]["fast"].update(images_s=math.nan),
    "a batch of none": lambda r: r["cells"][0].update(batch=0),
    "a batch that is true": lambda r: r["cells"][0].update(batch=True),
    "no size": lambda r: r["cells"][0].pop("size"),
    "a date that is a number": lambda r: r["cells"][0].update(date=20261124),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_record_is_refused_by_name(name: str, tmp_path: Path) -> None:
    whole = record(cell("VGG19"), cell("ResNet50"))
    assert of_record(whole, "r.json")
    damaged = copy.deepcopy(whole)
    DAMAGES[name](damaged)
    (path := tmp_path / "mine.json").write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=r"mine\.json' is (no|a damaged) record of `zoo bench`.*; measure again into another file"):
        read_record(path)


@pytest.mark.parametrize("text", ["", "{", '{"format": 1, ', "[]", "null", "7"])
def test_what_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "mine.json").write_text(text)
    with pytest.raises((ValueError, MalformedFile), match=r"(?i)measure again into another file"):
        read_record(path)


def test_a_record_of_training_is_refused() -> None:
    with pytest.raises(ValueError, match="a record of training; the page shows inference"):
        of_record(record(cell("VGG19"), what="train"), "r.json")


def test_what_was_measured_alike_is_put_together() -> None:
    (first,) = of_record(record(cell("VGG19", speed=1), cell("VGG11", speed=2)), "a.json")
    (second,) = of_record(record(cell("VGG19", speed=3, date="2026-11-30")), "b.json")
    (other,) = of_record(record(cell("VGG19", speed=4), dtype="bfloat16"), "c.json")
    together, apart = merged([first, second, other])
    assert together.rates == {"VGG19": (224, 3.0), "VGG11": (224, 2.0)}
    assert together.when == "2026-11-24 to 2026-11-30"
    assert apart == other


def test_the_table_that_ships_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text(table(shipped()), encoding="utf-8")
    monkeypatch.setattr("zoo.browsing.measured.TABLE", tmp_path / "speeds.json")
    assert shipped.__wrapped__() == shipped()
    assert {one.machine for one in shipped()} >= {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}


def test_records_that_were_saved_are_remembered_until_they_are_gone(tmp_path: Path, own_cache: Path) -> None:
    assert remembered() == []
    kept, gone = tmp_path / "kept.json", tmp_path / "gone.json"
    for path in (kept, gone):
        path.write_text("{}")
        remember(path)
    remember(kept)
    assert sorted(remembered()) == [gone, kept]
    gone.unlink()
    assert sorted(remembered()) == [gone, kept]  # once more, to be told
    assert remembered() == [kept]
    assert len(list((own_cache / "bench").iterdir())) == 1


def test_a_record_on_a_disk_that_is_away_is_not_forgotten(tmp_path: Path, own_cache: Path) -> None:
    (disk := tmp_path / "disk").mkdir()
    (disk / "mine.json").write_text("{}")
    remember(disk / "mine.json")
    disk.rename(tmp_path / "away")
    for _ in range(2):
        assert remembered() == [disk / "mine.json"]
    (tmp_path / "away").rename(disk)
    assert remembered() == [disk / "mine.json"]


def test_a_cache_that_cannot_be_written_remembers_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "file" / "cache"))
    remember(tmp_path / "mine.json")
    assert remembered() == []


def test_a_damaged_note_is_no_record(tmp_path: Path, own_cache: Path) -> None:
    remember(tmp_path / "mine.json")
    (note,) = (own_cache / "bench").iterdir()
    for text in ("", "[]", '{"path": 3}', '{"path": "\\u0000"}'):
        note.chmod(0o644)
        note.write_text(text)
        assert remembered() == []
        note.write_text("{}")
