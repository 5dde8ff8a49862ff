"""A chain stays where it is faster than what it stands for; chains alike are timed once, and by one process for all."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.kernels.measuring import timing
from zoo.kernels.training import choosing
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import record
from zoo.kernels.tuning.choices import Choices

CPU = torch.device("cpu")


def layers(channels: int = 6, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(channels, 6, 3, stride, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU())


def test_a_chain_that_is_no_faster_than_pytorch_is_left_alone_and_each_shape_is_timed_once() -> None:
    recording = record(layers(3).train(), (torch.randn(4, 3, 8, 8),), {}, CPU)
    known = choosing.Times()
    calls: list[int] = []

    def clock(*samples: float) -> choosing.Timer:
        left = list(samples)

        def time(call: Any) -> float:
            call()
            calls.append(1)
            return left.pop(0)

        return time

    ((makes, why),) = choosing.slower(recording, {}, known, clock(10.0, 9.0)).items()
    assert why == "no faster: 10 us, without it 9 us"
    assert steps_of(recording, {makes: why})[1][0].note == why
    assert len(calls) == 2
    assert choosing.slower(recording, {}, known, clock())
    assert choosing.slower(recording, {}, choosing.Times(), clock(5.0, 9.0)) == {}


class Twice(nn.Module):
    """The same layers twice over, and once at another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Sequential(layers(), layers()), layers(stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


def test_chains_alike_are_timed_once_and_never_again_on_this_machine() -> None:
    calls = [0]

    def clock(call: Any) -> float:
        call()
        calls[0] += 1
        return float(calls[0])

    def found(times: choosing.Times) -> Any:
        calls[0] = 0
        recording = record(Twice().train(), (torch.randn(4, 6, 9, 9),), {}, CPU)
        slow = choosing.slower(recording, {}, times, clock)
        times.save()
        return slow, [choosing.measured(recording, chain, times) for chain in steps_of(recording, slow)[1]]

    first = found(choosing.Times(Choices(CPU)))
    assert calls[0] == 2 * 2  # of three chains two are the same, each with what it stands for
    assert first[1][0] == first[1][1] != first[1][2]
    assert found(choosing.Times(Choices(CPU))) == first
    assert calls[0] == 0
    kept = json.loads(Choices(CPU).path.read_text())["choices"]
    assert [key for key in kept if key.startswith("training batch_norm + relu, 4x6x9x9 float32, ")]
    Choices(CPU).path.write_text("{")
    with pytest.warns(UserWarning, match="can't be read"):
        assert found(choosing.Times(Choices(CPU))) == first
    assert calls[0] == 4


def test_the_chains_of_a_network_are_of_few_kinds() -> None:
    recording = record(zoo.ResNet50().train(), (torch.randn(1, 3, 64, 64),), {}, CPU)
    chains = steps_of(recording, {})[1]
    assert (len(chains), len({choosing._key(recording, chain) for chain in chains})) == (54, 21)


def test_chains_are_timed_sparingly(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[bool]()

    def time(call: Any, sparing: bool = False) -> float:
        told.append(sparing)
        return 1.0

    monkeypatch.setattr(timing, "graph_time_us", time)
    clock = choosing.timer(torch.device("cuda"))
    assert clock is not None
    assert clock(lambda: None) == 1.0
    assert told == [True]
