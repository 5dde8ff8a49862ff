"""Networks through the passes that random ones rarely are: their merged steps give what they gave in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.zoo.kernels.answers import close, eager
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting


def through_the_passes(network: nn.Module, x: Tensor, dtype: torch.dtype) -> Any:
    """Compute a network by its merged steps, in their references."""
    with torch.no_grad():
        graph, places = understand(network, (x,), {})
        apply(graph, merges(graph, places)[:1], places)
        program = Program(graph, places, {}, Setting(x.device, dtype), Weights())
        return pytree.tree_unflatten(program.run([[x.to(dtype).contiguous(memory_format=torch.channels_last)]]), graph.spec)


def test_layers_behind_a_merged_head_read_a_map() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 6, 1)).eval()
    stacked = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 6), nn.Linear(6, 4)).eval()
    for network in (pooled, stacked):
        close(through_the_passes(network, x, torch.float32), eager(network, x))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.a(x)
        return y, self.b(y)


def test_a_value_that_is_returned_and_read_again_keeps_the_plans_type_inside() -> None:
    torch.manual_seed(0)
    network, x = Two().eval(), torch.randn(2, 3, 8, 8)
    for got, want in zip(through_the_passes(network, x, torch.bfloat16), eager(network, x), strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)
