"""Weights rounded together: the numbers of autocast, unrounded gradients' dtype, frozen ones without a gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zoo import MobileNetV2, ResNet18, ResNet50
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Replay
from zoo.kernels.training.rounding import TOGETHER, rounded, to_round
from zoo.networks.model import Model


def replay_of(network: nn.Module, x: torch.Tensor) -> Replay:
    recording = record(network, (x,), {}, x.device)
    steps, _, counted = steps_of(recording, {})
    return Replay(recording, steps, counted)


def test_a_step_with_weights_rounded_together_is_that_of_autocast_to_the_last_bit(device: torch.device) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 1, bias=False), nn.Flatten(), nn.Linear(8 * 36, 5), nn.Linear(5, 5)
    ).to(device)
    network[2].weight.requires_grad_(False)
    twin, x = copy.deepcopy(network), torch.randn(2, 3, 8, 8).to(device)
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        replay = replay_of(network, x)
        out, expected = replay(replay.at(network), [x]), twin(x)
    assert to_round(replay.recording, replay.steps)[1] == torch.bfloat16
    assert torch.equal(out, expected)
    for result in (out, expected):
        result.float().square().sum().backward()
    for ours, theirs in zip(network.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or (ours.grad.dtype == torch.float32 and torch.equal(ours.grad, theirs.grad))


@pytest.mark.parametrize("network", [ResNet18, ResNet50, MobileNetV2])
def test_weights_of_plain_convolutions_and_linear_layers_are_rounded_together(network: type[Model]) -> None:
    built, x = network().train(), torch.empty(2, 3, 64, 64)
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(built, (x,), {}, x.device)
    numbers, dtype = to_round(recording, steps_of(recording, {})[0])
    assert dtype == torch.bfloat16
    found = {recording.values[number].place for number in numbers}
    assert found >= {(name, part) for name, layer in built.named_modules() if isinstance(layer, nn.Linear) for part in ("weight", "bias")}
    assert len(numbers) > 15


def test_a_weight_that_something_else_reads_too_stays_as_it_is() -> None:
    class Decayed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) + self.linear.weight.sum()

    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Decayed(), (x,), {}, x.device)
    numbers, _ = to_round(recording, steps_of(recording, {})[0])
    assert [recording.values[number].place for number in numbers] == [("linear", "bias")]


def test_a_weight_that_the_network_hands_out_stays_as_it_is() -> None:
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.linear.weight

    x = torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Open(), (x,), {}, x.device)
    numbers, _ = to_round(recording, steps_of(recording, {})[0])
    assert [recording.values[number].place for number in numbers] == [("linear", "bias")]


def test_without_autocast_nothing_is_rounded() -> None:
    x = torch.empty(2, 3, 32, 32)
    recording = record(ResNet18().train(), (x,), {}, x.device)
    assert to_round(recording, steps_of(recording, {})[0]) == ([], None)


def test_gradients_arrive_in_groups_so_that_an_exchange_of_the_first_need_not_wait_for_the_last() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)) for _ in range(2 * TOGETHER)]
    copies = rounded(weights, torch.bfloat16)
    sum(copy.sum() for copy in copies[TOGETHER:]).backward()  # type: ignore[union-attr]
    assert [weight.grad is not None for weight in weights] == [False] * TOGETHER + [True] * TOGETHER


def test_a_gradient_that_never_came_is_none_and_no_zeros() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    rounded(weights, torch.float16)[1].sum().backward()
    assert [weight.grad is not None for weight in weights] == [False, True, False]
