"""A record of measurements is read whole, shown as what it is, and refused where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zoo.bench.record import Record
from zoo.commands.app import main

FIGURES = ("us", "us_low", "us_high", "images_s", "error", "build_s")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "about": {}, "cells": []}'])
def test_a_file_that_is_no_record_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(text)
    with pytest.raises(ValueError, match=r"record\.json is no (JSON|record)"):
        Record.read(tmp_path / "record.json")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--what", "train"], 2, "record of infer"),
        *(([*told.split()], 2, "nothing is measured") for told in ("--peers compile", "--rounds 3", "--tune full", "--budget-s 0")),
        (["--resume", "--save", "s.json"], 2, "nothing is measured"),
        ([], 0, ""),
    ],
)
def test_a_record_is_shown_as_what_it_is(
    options: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"us": 1.0, "us_low": 1.0, "us_high": 1.0, "images_s": 1e6, "error": 0.0, "build_s": 0.0, "memory_mib": None}
    beforehand = {**row, "build_s": None}  # what was compiled beforehand has no time until it was ready
    ways = {"eager": row, "compile": beforehand}
    cells = [{"model": "ResNet20", "batch": batch, "date": "2026-11-23", "ways": ways} for batch in (8, 1)]
    Record({"dtype": "float32", "type": "cpu"}, cells).write(tmp_path / "r.json")
    assert main(["bench", "--from-json", str(tmp_path / "r.json"), *options]) == code
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split())
    if not code:
        batches = [line.split()[1] for line in shown.out.splitlines() if line.strip().startswith("ResNet20")]
        assert batches == ["1", "1", "8", "8"]  # by network and batch, in whatever order they were measured


@pytest.mark.parametrize(
    "cell",
    [
        {},
        {"model": "A", "batch": 1, "date": "", "ways": {"eager": {}}},
        {"model": "A", "batch": "1", "ways": {}},
        {"model": "A", "batch": 1, "date": "", "ways": {"eager": {**dict.fromkeys(FIGURES, 1.0), "build_s": "soon"}}},
        {"model": "A", "batch": 1, "date": "", "ways": {"eager": dict.fromkeys(FIGURES[:-1], 1.0)}},
        *(
            {"model": "A", "batch": 1, "date": "", "ways": {"fast": {**dict.fromkeys(FIGURES, 1.0), "memory_mib": None, "ops": ops}}}
            for ops in ([], {"conv": 3}, {"conv": {"steps": 1}}, {"conv": {"steps": 1, "us": "2", "pytorch_us": None}})
        ),
        3,
    ],
)
def test_a_damaged_record_is_refused(cell: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(json.dumps({"format": 1, "about": {}, "cells": [cell]}))
    assert main(["bench", "--from-json", str(tmp_path / "r.json")]) != 0
    assert "damaged" in capsys.readouterr().err
