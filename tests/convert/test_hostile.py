"""Damaged files are refused or read, never more: 200 mutations a format here, 10,000 by ``python tests/convert/hostile.py``."""

from __future__ import annotations

import random

import pytest
from hostile import mutate, run

from convert.formats import formats


@pytest.mark.parametrize("format", sorted(formats()))
def test_mutated_files_are_refused_or_read(format: str) -> None:
    outcomes, faults = run(format, 200)
    assert faults == []
    assert sum(outcomes.values()) == 200
    assert sum(outcomes.values()) > outcomes.get("read", 0), "the mutations did no harm, so they prove nothing"


def test_mutations_are_the_same_each_time_and_damage_most_files() -> None:
    data = bytes(range(256)) * 8
    made = [mutate(data, random.Random(seed)) for seed in range(100)]
    assert made == [mutate(data, random.Random(seed)) for seed in range(100)]
    assert sum(each != data for each in made) > 80
