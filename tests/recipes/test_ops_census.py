"""The census of ops: what won how many steps, and what won none."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from recipes.ops_census import Census, content, main

CHOICES = {"conv bfloat16 a": ["conv", {}, 2.0, 8.0, "quick"], "conv bfloat16 b": ["conv", {}, 2.0, 4.0, "quick"]}


def test_wins_and_gains_are_counted_of_both_kinds_of_file(tmp_path: Path) -> None:
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps({"choices": CHOICES}).encode()))
    (tmp_path / "b.json").write_text(json.dumps({"choices": {"mean c": {"op": "aten", "us": 3.0, "aten_us": 3.0}}}))
    found = Census()
    for name in ("a.json.gz", "b.json"):
        found.add(content(tmp_path / name))
    assert found.table().splitlines()[2:] == ["| `conv` | 2 | 3.00 | conv 2 |", "| `aten` | 1 |  | mean 1 |"]
    assert found.without(["conv", "pool"]) == ["pool"]


def test_the_census_of_what_ships_names_ops_that_exist(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["ops_census"])
    main()
    shown = capsys.readouterr().out
    assert "| `conv` | " in shown
    assert "`window_attention`" in shown.rpartition("Without a win:")[2]
    assert "_grad" not in shown
