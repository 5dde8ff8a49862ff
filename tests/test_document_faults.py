"""A few mutants of each document that this program writes and reads again; `make faults-documents` takes thousands."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest
from document_faults import Document, Mutator, Result, _outcome, campaign, documents

KINDS = (
    *("lock", "part's note", "cache's notes", "mirror's index", "bundle's manifest", "record", "run's record", "run's settings"),
    *("run's state", "run's log", "embedding's manifest", "embedding's part", "embeddings, npy", "embeddings, safetensors"),
    *("embeddings, parquet", "tar of images", "list of images", "conversion's notes", "golden outputs", "record of measurements", "labels"),
    *("header", "images, parquet", "image"),
)
known = cache(documents)


def test_every_kind_is_listed() -> None:
    assert set(known()) | {"embeddings, parquet", "images, parquet"} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_document_is_read_or_refused_by_an_error_of_ours(kind: str) -> None:
    if kind not in known():
        pytest.skip("pyarrow is not installed")
    document = known()[kind]
    result = campaign(kind, document, math.ceil(30 * document.share), base=7)
    assert result.faults == []


@pytest.mark.parametrize(("kind", "seeds"), [("images, parquet", (2876, 4354, 12761, 15832, 18970)), ("list of images", (7, 291, 423))])
def test_what_was_a_fault_once_is_none(kind: str, seeds: tuple[int, ...]) -> None:
    if kind not in known():
        pytest.skip("pyarrow is not installed")
    result = campaign(kind, known()[kind], 0, seeds=seeds)
    assert result.faults == []
    assert result.read + result.refused.total() == len(seeds)


def test_the_campaign_notices_another_error_and_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise KeyError("best")

    def nameless(folder: Path) -> None:
        raise ValueError("Expecting value: line 1 column 1 (char 0)")

    def hang(folder: Path) -> None:
        while True:
            pass

    monkeypatch.setattr("document_faults.HANG_S", 0.05)
    monkeypatch.setattr("document_faults.signal.signal", lambda *_: None)
    found = [_outcome(Document(lambda _: None, "*", read, (ValueError,)), tmp_path, Result()) for read in (fail, nameless)]
    assert found[0] == "KeyError: \"'best'\""
    assert found[1].startswith("ValueError names no file")
    monkeypatch.undo()
    monkeypatch.setattr("document_faults.HANG_S", 0.05)
    slow = Document(lambda folder: (folder / "x").touch(), "x", lambda folder: folder.name == "whole" or hang(folder), ())
    assert campaign("slow", slow, 1).faults == ["0:0: more than 0.05 s"]


def test_a_mutant_is_the_same_each_time() -> None:
    data = b'{"a": [1, {"b": "c"}], "d": null}'
    assert Mutator("1").json(data) == Mutator("1").json(data)
    assert len({Mutator(str(seed)).json(data) for seed in range(50)}) > 40
