"""How many calls a sample of a clock is of."""

from __future__ import annotations

import pytest

from zoo.kernels.timing import calls_of_a_sample


@pytest.mark.parametrize(("us", "count"), [(0.0, 50), (10, 50), (100, 20), (1_000, 4), (6_000, 4), (31_000, 3), (60_000, 2), (300_000, 1)])
def test_a_sample_is_of_calls_behind_each_other(us: float, count: int) -> None:
    assert calls_of_a_sample(us) == count
