"""Global response normalisation as a gate: the same numbers, by the authors' order of axes and by timm's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

CPU = torch.device("cpu")


class Authors(nn.Module):
    """GRN with channels last, between two layers."""

    def __init__(self, eps: Any = 1e-6, power: float = 2.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(6, 8, 1), nn.ReLU())
        self.last, self.eps, self.power = nn.Conv2d(8, 4, 1), eps, power
        self.weight, self.bias = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).permute(0, 2, 3, 1)
        norm = torch.linalg.vector_norm(x, self.power, dim=(1, 2), keepdim=True)
        x = x + torch.addcmul(self.bias, self.weight, x * (norm / (norm.mean(-1, keepdim=True) + self.eps)))
        return self.last(x.permute(0, 3, 1, 2))


class Timm(Authors):
    """GRN with channels first."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        norm = x.norm(p=2, dim=(2, 3), keepdim=True)
        x = x + torch.addcmul(
            self.bias.view(1, -1, 1, 1), self.weight.view(1, -1, 1, 1), x * (norm / (norm.mean(1, keepdim=True) + self.eps))
        )
        return self.last(x)


class Read(Authors):
    """GRN whose result is returned too, so that its bias has to be added."""

    def forward(self, x: Tensor) -> Any:
        x = self.first(x).permute(0, 2, 3, 1)
        norm = x.norm(p=2, dim=(1, 2), keepdim=True)
        x = x + torch.addcmul(self.bias, self.weight, x * (norm / (norm.mean(-1, keepdim=True) + self.eps)))
        return x.permute(0, 3, 1, 2)


@pytest.mark.parametrize(
    ("network", "found"), [(Authors(), 1), (Timm(), 1), (Read(), 1), (Authors(power=3.0), 0), (Authors(nn.Parameter(torch.tensor(0.1))), 0)]
)
def test_a_response_norm_is_a_gate(network: nn.Module, found: int) -> None:
    network, x = network.double().eval(), torch.randn(2, 6, 5, 3, dtype=torch.float64)
    graph, places = understand(network, (x,), {}, CPU)
    steps = Counter(step.op for step in graph.steps())
    assert steps["response_gate"] == found
    if found and not isinstance(network, Read):
        assert steps == {"conv": 2, "response_gate": 1}  # and nothing element-wise is left
    program = Program(graph, places, {}, Setting(CPU, torch.float64), Weights(), compiled=False)
    got = program.run([[x.contiguous(memory_format=torch.channels_last)] * len(program.forms[graph.inputs[0]])])[0]
    torch.testing.assert_close(got, network(x))
