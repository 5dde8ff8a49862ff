"""Branches whose results are added become one convolution, factors go into weights, and mixers into their pool: the same numbers."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.program import Program
from zoo.kernels.plans.rows import cost
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")


def steps(network: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Counter[str]:
    """Compare a network, by the references of its steps in float64, and count these."""
    generator = torch.Generator().manual_seed(0)
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point() and not getattr(tensor, "kept", False):
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator).abs() * 0.5 + 0.2)
    network, x = network.double().eval(), x.double()
    graph, places = understand(network, (x,), {}, CPU, dtype=dtype)
    program = Program(graph, places, {}, Setting(CPU, torch.float64), Weights(), compiled=False)
    found = program.run([[x.contiguous(memory_format=torch.channels_last)] * len(program.forms[graph.inputs[0]])])[0]
    with torch.no_grad():
        expected = network(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))  # biases are float32
    return Counter(step.op for step in graph.steps())


def conv(kernel: Any, width: int = 6, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Conv2d(6, width, kernel, bias=False, **options), nn.BatchNorm2d(width))


class Branches(nn.Module):
    """Adds up what several branches make of a map."""

    def __init__(self, *branches: nn.Module, act: bool = True) -> None:
        super().__init__()
        self.branches, self.act = nn.ModuleList(branches), act

    def forward(self, x: Tensor) -> Tensor:
        made: Any = 0  # as MobileOne begins
        for branch in self.branches:
            made = made + branch(x)
        return torch.relu(made) if self.act else made


@pytest.mark.parametrize(
    "branches",
    [
        (conv(3, padding=1), conv(1), nn.BatchNorm2d(6)),  # RepVGG
        (conv(1), conv(3, padding=1)),
        (nn.BatchNorm2d(6), conv(3, padding=1, groups=6), conv(1, groups=6), conv(3, padding=1, groups=6)),  # MobileOne
        (conv(3, padding=1, groups=2), nn.BatchNorm2d(6)),
        (conv(3, padding=1, stride=2), conv(1, stride=2)),
        (conv(5, padding=2), conv(3, padding=1)),
        (conv((3, 1), padding=(1, 0)), conv(1)),
        (conv(3, padding=2, dilation=2), conv(1), nn.BatchNorm2d(6)),
        (nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1)),  # with biases
    ],
)
def test_branches_are_one_convolution(branches: tuple[nn.Module, ...]) -> None:
    assert steps(Branches(*branches), torch.randn(2, 6, 9, 8)) == {"conv": 1}


@pytest.mark.parametrize(
    "branches",
    [
        (conv(3, padding=1, stride=2), conv(1, stride=2), nn.Sequential(nn.AvgPool2d(2), nn.BatchNorm2d(6))),
        (conv((3, 1), padding=(1, 0)), conv((1, 3), padding=(0, 1))),  # neither window holds the other
        (conv(3, padding=1), conv(3, padding=2, dilation=2)),
        (conv(3, padding=1), conv(1, groups=6)),
        (conv(3, padding=1), nn.Sequential(conv(1), nn.ReLU())),
        (conv(3, padding=1), nn.Sequential(nn.ReLU(), conv(1))),  # of another map
    ],
)
def test_other_branches_stay(branches: tuple[nn.Module, ...]) -> None:
    assert steps(Branches(*branches), torch.randn(2, 6, 8, 8)).total() > 1


class Read(nn.Module):
    """One branch is read elsewhere too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = conv(3, padding=1), conv(1)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.a(x)
        return (wide + self.b(x)) * torch.sigmoid(wide)


def test_a_branch_that_is_read_elsewhere_stays() -> None:
    assert steps(Read(), torch.randn(2, 6, 8, 8))["conv"] == 2


class Mixer(nn.Module):
    """Pooling as MetaFormers mix pixels; `kind` names the one thing that is special."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.pool = kind, nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.norm, self.scale, self.side = nn.BatchNorm2d(6), nn.Parameter(torch.ones(6, 1, 1)), nn.Conv2d(6, 6, 1)
        self.largest = nn.MaxPool2d(3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.side(x)
        if self.kind == "alone":
            return self.pool(y) - y
        if self.kind == "no residual":
            return (self.pool(y) - y) * self.scale
        if self.kind == "of another map":
            return x + self.scale * (self.pool(y) - x)
        if self.kind == "the other way round":
            return x + self.scale * (y - self.pool(y))
        if self.kind == "largest":
            return x + self.scale * (self.largest(y) - y)
        if self.kind == "read twice":
            pooled = self.pool(y)
            return x + self.scale * (pooled - y) + torch.relu(pooled)
        return x + self.scale * (self.pool(y) - y)


@pytest.mark.parametrize("kind", ["alone", "no residual", "with a residual", "of another map"])
def test_a_mixer_is_one_pool(kind: str) -> None:
    assert steps(Mixer(kind), torch.randn(2, 6, 7, 5)) == {"conv": 1, "pool": 1}


@pytest.mark.parametrize("kind", ["the other way round", "largest", "read twice"])
def test_what_is_no_mixer_is_computed_as_it_is(kind: str) -> None:
    assert steps(Mixer(kind), torch.randn(2, 6, 7, 5))["pool"] == 1


class Behind(nn.Module):
    """A mixer of what a BatchNorm and an activation made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.pool, self.scale = nn.BatchNorm2d(6), nn.AvgPool2d(3, 1, 1), nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(x))
        return x + self.scale * (self.pool(y) - y)


def test_what_a_mixer_reads_twice_is_computed_once() -> None:
    network, x = Behind(), torch.randn(2, 6, 7, 5)
    assert steps(network, x) == {"pointwise": 1, "pool": 1}
    graph, _ = understand(network, (x.double(),), {}, CPU)
    (pool,) = [node for node in graph.steps() if node.op == "pool"]
    assert pool.attrs.get("scale") is None
    assert [pool.argument(role) for role in ("x", "less")] == [pool.inputs[0]] * 2
    narrow, two = cost(pool, Setting(CPU, torch.float32)), 2 * x.numel() * 4
    assert two < narrow[1] < two + x.numel() * 4 + 100  # the map, the residual and the result


class Turned(nn.Module):
    """Positions as rotations of pairs, whose differences stand between operators that no kernel takes."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
        angle = torch.arange(a.shape[-1], dtype=x.dtype, device=x.device)
        c, s = angle.cos(), angle.sin()
        return torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)


def test_differences_that_no_step_takes_in_stay_with_their_neighbours() -> None:
    x = torch.randn(2, 3, 5, 8)
    steps(Turned(), x)  # computes the same
    graph, _ = understand(Turned(), (x,), {}, CPU, islands=True)
    assert [step.op for step in graph.steps()] == ["island"]


class Faint(nn.Module):
    """A factor as small as those that ConvNeXt begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 1)
        self.scale = nn.Buffer(torch.full((6, 1, 1), 1e-6))
        self.scale.kept = True  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv(x)


def test_small_factors_go_into_weights_where_these_keep_their_bits() -> None:
    x = torch.randn(2, 6, 4, 4)
    assert steps(Faint(), x, torch.bfloat16) == {"conv": 1}
    assert steps(Faint(), x, torch.float16) == steps(Faint(), x) == {"conv": 1, "pointwise": 1}


class RepMixer(nn.Module):
    """FastViT's mixer as it learns (Vasu et al. 2023): branches less a BatchNorm, scaled, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer, self.norm = Branches(conv(3, padding=1, groups=6), nn.BatchNorm2d(6), act=False), nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * (self.mixer(x) - self.norm(x))


def test_a_mixer_of_branches_is_one_convolution() -> None:
    assert steps(RepMixer(), torch.randn(2, 6, 7, 5), torch.bfloat16) == {"conv": 1}


@pytest.mark.gpu
@pytest.mark.parametrize(("network", "expected"), [(RepMixer(), {"conv": 1}), (Mixer("with a residual"), {"conv": 1, "pool": 1})])
def test_on_a_gpu_too_what_the_passes_make_lies_where_the_weights_lie(network: nn.Module, expected: dict[str, int]) -> None:
    x = torch.randn(2, 6, 7, 5, device="cuda")
    graph, _ = understand(network.cuda().eval(), (x,), {}, x.device, dtype=torch.bfloat16)
    assert Counter(step.op for step in graph.steps()) == expected
