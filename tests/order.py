"""An order of the tests that a number says: none may need another before it."""

from __future__ import annotations

import random
from itertools import groupby

import pytest


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Put the files in any order, and the tests of each in any; together they stay, for what their fixtures make is made once."""
    if seed:
        draw = random.Random(seed)
        files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
        draw.shuffle(files)
        for tests in files:
            draw.shuffle(tests)
        items[:] = [item for tests in files for item in tests]
