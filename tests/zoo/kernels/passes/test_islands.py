"""Operators between kernels, gathered for PyTorch's compiler: the same values, whoever runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans import segment
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")


class Between(nn.Module):
    """Convolutions, and between them operators of several values, two of which are read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        y = torch.cumsum(x, 3).tanh()
        z = self.second(y) * 1.5
        return self.third(torch.sin(z) + y), y


class Shuffled(nn.Module):
    """ShuffleNet's unit: half of the channels passes, and all are shuffled."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for branch in self.branches:
            left, right = x.chunk(2, 1)
            both = torch.cat((left, branch(right)), 1)
            x = both.view(x.shape[0], 2, 4, *x.shape[2:]).transpose(1, 2).reshape(x.shape)
        return x


CASES = [(Between(), (2, 4, 6, 5)), (Shuffled(), (2, 8, 4, 4))]


def run(network: nn.Module, shape: tuple[int, ...], compiled: bool) -> tuple[Any, Any, list[Any]]:
    network, x = network.eval(), torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graph, places = understand(network, (x,), {}, CPU, islands=True)
    program = Program(graph, places, {}, Setting(CPU, torch.float32), Weights(), compiled=compiled)
    got = program.run([[x.contiguous(memory_format=torch.channels_last)] * len(program.forms[graph.inputs[0]])])
    expected = network(x)
    return got, list(expected) if isinstance(expected, tuple) else [expected], [step for step in graph.steps() if step.op == "island"]


@pytest.mark.parametrize(("network", "shape"), CASES)
def test_islands_compute_what_the_network_does(network: nn.Module, shape: tuple[int, ...]) -> None:
    got, expected, islands = run(network, shape, compiled=False)
    torch.testing.assert_close(got, expected)
    assert islands


def test_what_a_kernel_parts_is_two_islands() -> None:
    _, _, islands = run(*CASES[0], compiled=False)
    names = [[step.attrs["func"]._overloadpacket.__name__ for step in island.attrs["body"] if step.op == "aten"] for island in islands]
    assert names[0] == ["cumsum", "tanh"]
    assert len(names) == 2
    assert "sin" in names[1]


def test_a_shuffle_and_its_concatenation_are_one_island() -> None:
    _, _, islands = run(*CASES[1], compiled=False)
    assert len(islands) == 4
    assert all(any(step.op == "cat" for step in island.attrs["body"]) for island in islands)


def test_the_compiler_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_compiled", {})
    network = nn.Sequential(nn.Conv2d(4, 4, 1), Waves(), nn.Conv2d(4, 4, 1), Waves(), nn.Conv2d(4, 4, 1))
    got, expected, islands = run(network, (2, 4, 6, 5), compiled=True)
    torch.testing.assert_close(got, expected)
    made = list(segment._compiled.values())
    assert None not in made
    assert (len(made), len(islands)) == (1, 2)  # two that are alike are compiled once


def test_where_the_compiler_fails_pytorchs_operators_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(segment, "_compiled", {})
    monkeypatch.setattr(segment.Segment, "_compile", broken)
    got, expected, _ = run(*CASES[0], compiled=True)
    torch.testing.assert_close(got, expected)
    assert set(segment._compiled.values()) == {None}


def test_an_island_survives_a_merge_of_what_it_reads() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Waves(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(1, 3, 16, 16)
    graph, places = understand(network, (x,), {}, CPU, islands=True)
    possible = merges(graph, places)
    assert [merge.node.op for merge in possible] == ["stem_pool"]
    apply(graph, possible, places)
    program = Program(graph, places, {}, Setting(CPU, torch.float32), Weights(), compiled=False)
    inputs = [[x.contiguous(memory_format=torch.channels_last)] * len(program.forms[graph.inputs[0]])]
    torch.testing.assert_close(program.run(inputs)[0], network(x))


class Waves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) * torch.exp(x.flip(2))


def test_a_network_of_kernels_alone_has_none() -> None:
    network = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)).eval()
    graph, _ = understand(network, (torch.zeros(1, 4, 5, 5),), {}, CPU, islands=True)
    assert all(step.op != "island" for step in graph.steps())
