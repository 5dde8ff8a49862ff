"""Loading into a network that exists: all, or nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from weights import WeightsMismatch
from zoo.networks.assignment import assign

State = dict[str, Tensor]


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 2))


def fitting() -> State:
    return {name: torch.rand(value.shape).to(value.dtype) for name, value in network().state_dict().items()}


def test_what_fits_is_the_networks_own_without_a_copy() -> None:
    tensors, target = fitting(), network()
    assert assign(target, tensors) is target
    assert all(torch.equal(value, tensors[name]) for name, value in target.state_dict().items())
    assert target[2].weight.data_ptr() == tensors["2.weight"].data_ptr()
    halves = {name: value.half() if value.is_floating_point() else value for name, value in tensors.items()}
    assert assign(target, halves)[2].weight.dtype == torch.float32


def without(state: State) -> None:
    del state["2.bias"]


def besides(state: State) -> None:
    state["3.weight"] = torch.zeros(1)


def transposed(state: State) -> None:
    state["2.weight"] = state["2.weight"].T


def of_another_network(state: State) -> None:
    for name in list(state):
        state[f"body.{name}"] = state.pop(name)


@pytest.mark.parametrize("spoil", [without, besides, transposed, of_another_network])
def test_what_does_not_fit_changes_nothing(spoil: Callable[[State], None]) -> None:
    target, tensors = network(), fitting()
    spoil(tensors)
    before = {name: (value, value.clone()) for name, value in target.state_dict(keep_vars=True).items()}
    with pytest.raises(WeightsMismatch, match="Nothing was loaded; the network is what it was") as caught:
        assign(target, tensors)
    assert caught.value.missing or caught.value.unexpected or caught.value.misshaped
    after = target.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())


@pytest.mark.parametrize("at", range(6))
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA"), KeyboardInterrupt(), MemoryError()])
def test_an_error_at_any_tensor_changes_nothing(at: int, error: BaseException) -> None:
    target, tensors = network(), fitting()
    before = {name: (value, value.clone()) for name, value in target.state_dict(keep_vars=True).items()}

    class Failing(nn.Module):
        def _load_from_state_dict(self, *_: object) -> None:
            raise error

    children = [target[0], target[1], target[2]]
    spoilt = nn.Sequential(*children[: at % 3], Failing(), *children[at % 3 :]) if at < 3 else target
    if at < 3:
        places = dict(zip(list(target.state_dict()), spoilt.state_dict(), strict=True))
        tensors = {places[name]: value for name, value in tensors.items()}
    else:

        class Spent(Tensor):
            def to(self, *_: object) -> Tensor:
                raise error

        name = list(tensors)[at]
        tensors[name] = tensors[name].as_subclass(Spent)
    with pytest.raises(type(error)):
        assign(spoilt, tensors)
    after = target.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
