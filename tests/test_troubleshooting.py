"""docs/troubleshooting.md: every error class that a user can meet stands there with what to do, under a name that can be imported."""

from __future__ import annotations

import importlib
from types import ModuleType

import documents
import pytest
from documents import DOCS


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("making.errors")


def test_every_error_class_has_an_entry(errors: ModuleType) -> None:
    assert errors.without_entry() == []
    assert len(errors.classes()) > 50


def test_a_class_without_an_entry_and_an_entry_without_a_class_are_named(errors: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {heading: {name: do for name, do in entries.items() if name != "weights.Offline"} for heading, entries in errors.DO.items()}
    monkeypatch.setattr(errors, "DO", fewer)
    assert errors.without_entry() == ["weights.errors.Offline"]
    with pytest.raises(ValueError, match=r"weights\.errors\.Offline stand"):
        errors.write()
    monkeypatch.setattr(errors, "CAUGHT", {**errors.CAUGHT, "weights.errors.Gone": "nothing"})
    assert "weights.errors.Gone" in errors.without_entry()


def test_a_name_of_the_page_is_an_error_that_can_be_caught_as_it_says(errors: ModuleType) -> None:
    rows = [
        line.split(" | ") for line in documents.read(DOCS / "troubleshooting.md").splitlines() if line.startswith("| `") and "." in line
    ]
    shown = {row[0].strip("| `"): row[1].strip("`") for row in rows if len(row) == 4}
    assert {*shown} == {name for entries in errors.DO.values() for name in entries}
    for name, caught in shown.items():
        module, _, own = name.rpartition(".")
        error = getattr(importlib.import_module(module), own)
        assert any(base.__name__ == caught for base in error.__mro__ if base.__module__ == "builtins"), name
