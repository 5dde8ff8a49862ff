"""A trace is kept for networks that are alike, and for no other; it keeps no network and no number."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo import ResNet20
from zoo.explanation import explain, traces
from zoo.explanation.apart import apart


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "_kept", type(traces._kept)())


class Scaled(nn.Module):
    """What it computes depends on an attribute that is no tensor, and it reads one of its numbers while it is traced."""

    def __init__(self, factor: float, reads: bool = False) -> None:
        super().__init__()
        self.conv, self.factor, self.reads = nn.Conv2d(3, 4, 3, padding=1), factor, reads
        self.limit = nn.Buffer(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu() * self.factor
        return (x if self.reads and float(self.limit) > 1 else -x).mean((2, 3))


def raw(network: nn.Module, at: str | None = None) -> np.ndarray:
    x = torch.linspace(-1, 1, 3 * 32 * 32).view(1, 3, 32, 32)
    return explain(network.eval(), x, "gradcam" if at is None else "hirescam", 1, at)[0].raw


def test_numbers_and_layers_that_change_are_seen() -> None:
    network = ResNet20(num_classes=3)
    first = raw(network)
    assert len(traces._kept) == 1
    network.layer3[0].conv1.weight.data.mul_(-1)  # which no version counter sees
    turned = raw(network)
    assert not np.allclose(first, turned)
    assert len(traces._kept) == 1
    network.layer1[0].conv1.dilation = network.layer1[0].conv1.padding = (2, 2)
    wider = raw(network)
    assert not np.allclose(wider, turned)
    assert len(traces._kept) == 2
    network.layer1[0].conv2 = nn.Identity()
    assert not np.allclose(raw(network), wider)
    assert len(traces._kept) == 3


def test_an_attribute_that_changes_what_is_computed_is_seen() -> None:
    torch.manual_seed(0)
    network = Scaled(1.0)
    one = raw(network, "conv")
    network.factor = 3.0
    assert np.allclose(raw(network, "conv"), 3 * one, rtol=1e-4)


def test_a_network_that_reads_its_numbers_is_traced_with_them() -> None:
    torch.manual_seed(0)
    network = Scaled(1.0, reads=True)
    one = raw(network, "conv")
    network.limit.fill_(2)
    other = raw(network, "conv")
    assert one.any() != other.any() or not np.allclose(one, other)
    assert not traces._kept


def test_what_is_kept_holds_no_network_and_no_numbers() -> None:
    network = ResNet20(num_classes=3)
    raw(network)
    gone = weakref.ref(network)
    ((_, places),) = traces._kept.values()
    assert places is not None
    assert {tensor.device.type for tensor in places.network.state_dict().values()} == {"meta"}
    del network
    gc.collect()
    assert gone() is None


def test_the_last_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MOST", 2)
    for factor in (1.0, 2.0, 1.0, 3.0):
        raw(Scaled(factor), "conv")
    assert [traces._looks(apart(Scaled(f).eval())) in traces._kept for f in (1.0, 2.0, 3.0)] == [True, False, True]
