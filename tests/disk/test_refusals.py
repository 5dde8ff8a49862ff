"""What is written appears whole or not at all, whatever the disk, the system or a kill do meanwhile, and an error names it."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import refusals

QUICK = ("lock", "bundle", "embed .npy")


@pytest.mark.parametrize(
    ("only", "step"),
    [pytest.param(QUICK, 67, id="some calls"), *(pytest.param((name,), 1, marks=pytest.mark.long, id=name) for name in refusals.JOBS)],
)
def test_every_call_that_writes_may_fail(only: tuple[str, ...], step: int, record_property: Callable[[str, object], None]) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no cc, which builds the library that lets calls of the system fail")
    found = refusals.run(*(word for name in only for word in ("--only", name)), "--step", str(step))
    assert not [f"{name}: {fault}" for name, one in found.items() for fault in one["faults"]]
    assert all(one["refused"] for one in found.values())
    for name, one in found.items():
        record_property(f"{name}:", f"{one['refused']} calls failed, {one['passed']} did no harm, {one['tried']} kills, pairs and masks")
