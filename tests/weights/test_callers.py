"""Warnings point at the line that called the package, however it was called."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weights.callers import stacklevel
from zoo import fast, fast_step


def eager_step() -> object:
    network = nn.Linear(2, 2).eval()
    step = fast_step(network, nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1))
    return step(torch.zeros(1, 2), torch.zeros(1, 2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: fast(nn.GRU(3, 4), "cpu", progress=False),
        lambda: fast(nn.GRU(3, 4), "auto", progress=False),
        lambda: fast(nn.GRU(3, 4).train(), train=True),
        lambda: torch.no_grad()(lambda: fast(nn.GRU(3, 4), "cpu", progress=False))(),
        eager_step,
    ],
    ids=["answers", "either device", "training", "through PyTorch", "a step"],
)
def test_a_warning_names_the_callers_file(call: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    assert found
    assert {one.filename for one in found} == {__file__}


def test_outside_of_the_package_it_is_the_line_itself() -> None:
    assert stacklevel() == 1
