"""Two networks that differ only in which modules are one have traces of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.explanation.traces import _looks


class Two(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3, 1)
        self.b = self.a if shared else nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.a(x)))


class Tied(Two):
    def __init__(self) -> None:
        super().__init__(shared=False)
        self.b.weight = self.a.weight


def test_a_module_that_is_called_twice_is_not_taken_for_two() -> None:
    assert _looks(Two(shared=True)) != _looks(Two(shared=False))
    assert _looks(Two(shared=True)) == _looks(Two(shared=True))


def test_tied_weights_are_not_taken_for_two() -> None:
    one, other = Tied(), Two(shared=False)
    assert [key[4] for key in _looks(one)] != [key[4] for key in _looks(other)]  # pyright: ignore[reportIndexIssue, reportGeneralTypeIssues]


def test_another_forward_is_another_trace() -> None:
    network, before = Two(shared=True), Two.forward
    looks = _looks(network)
    try:
        Two.forward = lambda self, x: self.a(x)  # pyright: ignore[reportAttributeAccessIssue]
        assert _looks(network) != looks
    finally:
        Two.forward = before
