"""BatchNorms and 1x1 convolutions that become one chain compute what they did, and come apart where they are wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo import fast, why
from zoo.kernels.training import kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Chain


class Bottleneck(nn.Module):
    """Two 1x1 convolutions around a 3x3 one, and a third whose activated map is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 16, 3, padding=1)
        self.reduce, self.first = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.expand, self.third = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.twice, self.last = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = torch.relu(self.first(self.reduce(x)))
        y = torch.relu_(self.second(self.conv(y)))
        y = torch.relu(self.third(self.expand(y)) + x)
        return self.last(self.twice(y)) + y


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let chains be made as on a GPU; return the rows that are handed on, for which there are no kernels here."""
    seen: list[Any] = []

    def conv_stats(x: Tensor, kernel: Tensor) -> tuple[Tensor, str]:
        return nn.functional.conv2d(x, kernel), "row"

    def norm_act_conv(*parts: Any, row: Any = None, **options: Any) -> tuple[Tensor, str]:
        y = batch_norm_act(*parts[:-1], row=row, **options)
        return nn.functional.conv2d(y, parts[-1]), "row"

    def batch_norm_act(*parts: Any, row: Any = None, **options: Any) -> Tensor:
        seen.append(row)
        return real(*parts, **options)

    real = kernels.batch_norm_act
    monkeypatch.setattr(kernels, "conv_stats", conv_stats)
    monkeypatch.setattr(kernels, "norm_act_conv", norm_act_conv)
    monkeypatch.setattr(kernels, "batch_norm_act", batch_norm_act)
    monkeypatch.setattr(kernels, "conv_stats_refuses", lambda *_: "")
    monkeypatch.setattr(kernels, "norm_act_conv_refuses", lambda *_, **__: "")
    return seen


def train(called: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.autocast("cpu", torch.bfloat16):
        called(torch.randn(4, 16, 6, 6, generator=generator)).float().square().mean().backward()


def test_statistics_travel_from_the_convolution_to_the_norm_behind_it(joined: list[Any]) -> None:
    torch.manual_seed(0)
    eager = Bottleneck().train()
    quick = copy.deepcopy(eager)
    model = fast(quick, train=True, dtype=torch.bfloat16, example=torch.randn(4, 16, 6, 6))
    rows = [row.kernel for row in why(model).rows]
    assert rows == [
        "conv 3x3 + bias", "1x1, statistics", "batch_norm + relu", "batch_norm + relu + 1x1", "batch_norm + residual + relu",
        "1x1, statistics", "batch_norm + residual",
    ]  # fmt: skip
    joined.clear()
    for called in (eager, model):
        train(called, 1)
    assert joined == ["row", None, "row", "row"]
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())
    for p, q in zip(eager.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_a_wrong_join_comes_apart_into_its_norm(joined: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernels.norm_act_conv
    monkeypatch.setattr(kernels, "norm_act_conv", lambda *parts, **options: (1.5 * whole(*parts, **options)[0], "row"))
    model = fast(Bottleneck().train(), train=True, dtype=torch.bfloat16, example=torch.randn(4, 16, 6, 6))
    rows = {row.kernel for row in why(model).rows if not row.note}
    assert "batch_norm + relu" in rows
    assert "batch_norm + relu + 1x1" not in rows
    assert any("output" in row.note for row in why(model).rows)


def test_without_half_precision_or_a_gpu_nothing_is_joined() -> None:
    network = Bottleneck().train()
    _, found, _ = steps_of(record(network, (torch.randn(4, 16, 6, 6),), {}, torch.device("cpu")), {})
    assert all(isinstance(chain, Chain) and "1x1" not in chain.op for chain in found)
