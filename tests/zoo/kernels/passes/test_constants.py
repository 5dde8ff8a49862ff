"""What no value of an input goes into is computed once, if it is small."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.zoo.kernels.mapped import counted, program
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.plan import Plan


def test_a_large_constant_is_made_anew(device: torch.device) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x.new_zeros((1 << 20) + 1).sum() + x.new_ones(1 << 20).sum()

    graph, _ = understand(Large(), (torch.randn(1, 2, device=device),), {})
    assert counted(graph) == {"add": 2, "new_zeros": 1, "sum": 1}


def test_what_follows_from_small_constants_and_is_large_is_made_anew(device: torch.device) -> None:
    class Grid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            r = torch.arange(1025, device=x.device)
            return x + (r[:, None] - r[None]).float().mean()

    graph, _ = understand(Grid(), (torch.randn(1, 2, device=device),), {})
    assert counted(graph)["sub"] == 1
    assert all(node.attrs["tensor"].numel() <= 1 << 20 for node in graph.nodes if node.op == "const")
    with torch.inference_mode():
        x = torch.randn(1, 2, device=device)
        torch.testing.assert_close(Plan(program(Grid(), x)).eager([x])[0], Grid()(x))


def test_what_takes_values_of_the_input_is_no_constant(device: torch.device) -> None:
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x) + torch.full_like(x[:, :1], 2.0) * x

    x = torch.randn(2, 3, 4, 4, device=device)
    graph, _ = understand(Filled(), (x,), {})
    assert counted(graph) == {"mul": 1, "add": 1} or counted(graph) == {"mul": 1, "pointwise": 1}
    with torch.inference_mode():
        torch.testing.assert_close(Plan(program(Filled(), x)).eager([x])[0], 2 * x)
