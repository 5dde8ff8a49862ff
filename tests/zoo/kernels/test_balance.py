"""Weights are rounded, and biases keep the means where they were: a plan in half precision is nearer to the network than plain eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from tests.zoo.kernels.networks import settled
from zoo.kernels import build as building
from zoo.kernels.balance import balance, key, mean_shifts
from zoo.kernels.build import understand
from zoo.kernels.candidates import Setting, Weights
from zoo.kernels.parity import ALLOWED, natural_images
from zoo.kernels.program import Program

CPU = torch.device("cpu")


def error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


def planned(model: nn.Module, x: Tensor, dtype: torch.dtype, balanced: bool) -> Tensor:
    setting = Setting(CPU, dtype)
    graph, places = understand(model, (x,), {})
    if balanced:
        learnt = natural_images(tuple(x.shape), CPU, seed=5)
        balance(graph, mean_shifts(graph, places, [[learnt]], setting), setting)
    image = x.to(dtype).contiguous(memory_format=torch.channels_last)
    return Program(graph, places, {}, setting, Weights()).run([[image]])[0]


@pytest.mark.parametrize("picture", ["natural", "noise"])  # shifts are measured on other pictures of the first kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("cls", [zoo.ResNet20, zoo.ResNet44])
def test_a_balanced_plan_passes_where_folding_alone_need_not(cls: Any, dtype: torch.dtype, picture: str) -> None:
    model = settled(cls)
    torch.manual_seed(1)
    x = natural_images((8, 3, 32, 32), CPU) if picture == "natural" else torch.randn(8, 3, 32, 32)
    with torch.no_grad():
        want = copy.deepcopy(model).double()(x.double())
        eager = error(copy.deepcopy(model).to(dtype)(x.to(dtype)), want)
        balanced, folded = (error(planned(model, x, dtype, way), want) for way in (True, False))
    assert balanced <= ALLOWED * eager
    assert balanced < folded
    if dtype == torch.bfloat16 and picture == "natural":
        assert folded > ALLOWED * eager  # these weights happen to fold badly


def test_a_shift_is_what_rounding_takes_from_the_mean() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.relu(self.first(x)))

    torch.manual_seed(0)
    model, x = Two().eval(), 3 + torch.randn(4, 3, 9, 9)
    setting = Setting(CPU, torch.bfloat16)
    graph, places = understand(model, (x,), {})
    shifts = mean_shifts(graph, places, [[x[:4]], [x[:4]]], setting)
    weight = model.first.weight.detach()
    off = nn.functional.conv2d(x, weight - weight.bfloat16().float(), padding=1).mean((0, 2, 3))
    first, second = (node for node in graph.nodes if node.op == "conv")
    torch.testing.assert_close(shifts[key(first)], off, rtol=1e-4, atol=1e-7)
    assert key(second) not in shifts  # without a bias there is nothing to put it into
    before = first.attrs["bias"].clone()
    balance(graph, shifts, setting)
    torch.testing.assert_close(first.attrs["bias"], before + off, rtol=1e-5, atol=1e-7)
    assert first.attrs["weight"].dtype == second.attrs["weight"].dtype == torch.bfloat16
    assert torch.equal(model.first.weight, weight)  # the network itself stays as it was


@pytest.mark.parametrize("batch", [1, 20])
def test_every_convolution_of_a_plan_has_its_shift_whatever_the_batch(batch: int) -> None:
    model, setting = settled(zoo.ResNet20), Setting(CPU, torch.bfloat16)
    batches = [((natural_images((batch, 3, 32, 32), CPU, seed),), {}) for seed in range(2 if batch == 1 else 1)]
    graph, places = understand(model, *batches[0])
    shifts = building._shifts(model, graph, places, batches, setting)  # of a large batch some images only are looked at
    assert shifts.keys() == {key(node) for node in graph.nodes if node.op == "conv" and node.attrs["bias"] is not None}
    assert len(shifts) == 20  # 19 convolutions and the last layer; the shortcuts have no parameters
