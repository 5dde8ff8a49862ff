"""What a captured step holds for: each change of it is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zoo.kernels.training.watching import Watch


def model() -> Any:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()), nn.Linear(4, 2))


def grow(network: Any) -> None:
    network[1].add_module("more", nn.Linear(2, 2))


def register(network: Any) -> None:
    network[1][1].register_parameter("slope", nn.Parameter(torch.ones(1)))


CHANGES: dict[str, Callable[[Any], object]] = {
    "a mode": lambda network: network[1][0].eval(),
    "a module in another's place": lambda network: network[1].__setitem__(1, nn.ReLU6()),
    "a module more": grow,
    "a module less": lambda network: network.pop(2),
    "other memory": lambda network: setattr(network[0].weight, "data", network[0].weight.data.clone()),
    "another parameter": lambda network: setattr(network[2], "bias", nn.Parameter(torch.zeros(2))),
    "a parameter more": register,
    "one that no longer learns": lambda network: network[0].bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_each_change_is_noticed(change: str) -> None:
    network = model()
    watch = Watch(network)
    before = watch.state()
    assert watch.state() == before
    kept = copy.copy(network[1]._modules), network[0].weight.data  # what is replaced stays alive, so that no address is given twice
    CHANGES[change](network)
    after = watch.state()
    assert after != before
    assert watch.state() == after
    del kept


def test_what_comes_back_is_what_was() -> None:
    network = model()
    watch = Watch(network)
    before = watch.state()
    network.eval()
    assert watch.state() != before
    network.train()
    assert watch.state() == before


def test_a_module_that_gets_the_address_of_one_that_is_gone_is_another() -> None:
    network = model()
    watch = Watch(network)
    seen = set()
    for number in range(20):
        network[1][1] = nn.GELU() if number % 2 else nn.SiLU()
        seen.add(watch.state())
    assert len(seen) == 20
