"""What a network holds: every replaced, added or removed object is seen, with and without versions of dictionaries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from zoo.kernels.api import held
from zoo.kernels.api.held import Held


class Network(nn.Module):
    """A layer, a BatchNorm, and a layer without anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.act = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU()


@pytest.fixture(params=["versions", "objects"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Network:
    if request.param == "objects":
        monkeypatch.setattr(held, "_dict_version", None)
    return Network()


def _parameter(network: Network) -> None:
    network.layer.weight = nn.Parameter(network.layer.weight.detach())


def _buffer(network: Network) -> None:
    network.norm.running_mean = torch.zeros(3)


def _layer(network: Network) -> None:
    network.act = nn.ReLU()


def _gone(network: Network) -> None:
    del network.layer.bias


def _come(network: Network) -> None:
    network.act.register_buffer("more", torch.zeros(1))


def _come_at_once(network: Network) -> None:
    network.act._buffers.update({"more": torch.zeros(1)})


def _none(network: Network) -> None:
    network.layer.bias = None


def _past_the_module(network: Network) -> None:
    network.layer._parameters["weight"] = nn.Parameter(torch.zeros(3, 3))


@pytest.mark.parametrize("change", [_parameter, _buffer, _layer, _gone, _come, _come_at_once, _none, _past_the_module])
def test_what_is_replaced_is_seen_until_it_is_back(change: Callable[[Network], None], network: Network) -> None:
    before = [(one, dict(one)) for module in network.modules() for one in (module._parameters, module._buffers, module._modules)]
    found = Held(network)
    assert not found.is_replaced()
    change(network)
    assert [found.is_replaced(), found.is_replaced()] == [True, True]
    for one, content in before:
        one.clear()
        one.update(content)
    assert not found.is_replaced()
    change(network)
    assert found.is_replaced()


def test_what_is_written_is_seen(network: Network) -> None:
    found = Held(network)
    assert not found.is_written()
    network.norm.running_var.mul_(2)  # pyright: ignore[reportOptionalMemberAccess]
    assert found.is_written()
    assert not found.is_replaced()


def test_objects_are_not_compared_where_no_dictionary_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    if held._dict_version is None:
        pytest.fail("this PyTorch tells no versions of dictionaries: the slow way works, and this file's figures are another's")
    found = Held(Network())
    monkeypatch.setattr(held, "chain", None)  # comparing would fail
    assert not found.is_replaced()


def test_tensors_of_inference_mode_have_no_versions(network: Network) -> None:
    with torch.inference_mode():
        network.norm.running_mean = torch.zeros(3)
    assert not Held(network).is_written()
