"""Squeeze-and-excite's mean adds its gradient to the product's: the sum is autograd's, and nobody's tensor changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.zoo.kernels.tensors import noise, off
from zoo import fast, why
from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.differentiable import mean_and_map, scale_channels
from zoo.kernels.ops import global_pool_grad
from zoo.kernels.training import choosing, kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.recompute import remade
from zoo.kernels.training.record import record


@pytest.mark.parametrize("used", ["both", "the means", "what is handed on"])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("layout", ["rows", "slice", "planes"])
def test_the_gradient_is_the_sum_of_both(used: str, keep: bool, layout: str, device: torch.device) -> None:
    wide = noise(2, 24, 5, 3, device=device)
    x = {"rows": wide[:, :8].contiguous(memory_format=torch.channels_last), "slice": wide[:, 8:16], "planes": wide[:, :8].contiguous()}[
        layout
    ]
    x = x.detach().requires_grad_()
    means, again = mean_and_map(x, keep=keep)
    expected = x.mean((2, 3), keepdim=keep)
    assert means.shape == expected.shape
    assert off(means, expected) < 1e-6
    assert torch.equal(again, x)
    gradients = [noise(*means.shape, seed=1, device=device), noise(2, 8, 5, 3, seed=2, device=device)]
    asked = {"both": [0, 1], "the means": [0], "what is handed on": [1]}[used]
    found = torch.autograd.grad([(means, again)[i] for i in asked], x, [gradients[i].clone() for i in asked])
    wanted = torch.autograd.grad([(expected, x * 1)[i] for i in asked], x, [gradients[i] for i in asked])
    assert off(found[0], wanted[0]) < 1e-6


@pytest.mark.parametrize("case", global_pool_grad.CASES, ids=lambda case: case["name"].replace(" ", "_"))
def test_the_reference_is_what_autograd_computes(case: dict[str, Any]) -> None:
    args = checking.draw(global_pool_grad, case, torch.float32, "cpu")
    beside, gradient = args["beside"].double(), args["gradient"].double()
    x = torch.randn_like(beside, requires_grad=True)
    (wanted,) = torch.autograd.grad([x.mean((2, 3)), x * 1], x, [gradient, beside])
    torch.testing.assert_close(global_pool_grad.reference(beside, gradient), wanted, rtol=1e-12, atol=1e-12)


class Squeezed(nn.Module):
    """A convolution, BatchNorm and SiLU whose map is scaled by what its means say, then one that reads only the product."""

    def __init__(self, how: str = "pool") -> None:
        super().__init__()
        self.how = how
        self.conv, self.norm = nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.one, self.two = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.last = nn.Conv2d(16, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.silu(self.norm(self.conv(x)))
        means: Callable[[Tensor], Tensor] = {
            "pool": self.pool,
            "mean": lambda x: x.mean((2, 3), keepdim=True),
            "negative axes": lambda x: x.mean((-1, -2), keepdim=True),
            "flat": lambda x: x.mean((2, 3))[:, :, None, None],
            "rows": lambda x: x.mean((3,), keepdim=True).mean((2,), keepdim=True),
            "max": lambda x: x.amax((2, 3), keepdim=True),
            "twice": lambda x: x.mean((2, 3), keepdim=True) + x.amax((2, 3), keepdim=True),
            "late": lambda x: x.mean((2, 3), keepdim=True),
        }[self.how]
        if self.how == "late":  # the mean of the map is taken behind the product
            y = x * torch.sigmoid(self.two(torch.relu(self.one(torch.ones_like(x[:, :, :1, :1])))))
            return self.last(y) * means(x).sum()
        gate = torch.sigmoid(self.two(torch.relu(self.one(means(x)))))
        return self.last(gate * x)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let means be found as on a GPU. Where maps are computed it is in float32: the interpreter cuts bfloat16."""
    monkeypatch.setattr(kernels, "mean_and_map_refuses", lambda device, x: "")


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", ["pool", "mean", "negative axes", "flat"])
@pytest.mark.parametrize("recompute", [None, True])
def test_squeezes_learn_as_eager_does(how: str, recompute: bool | None, handed: None) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(Squeezed(how), Squeezed(how)).train()
    quick = copy.deepcopy(eager)
    model = fast(quick, train=True, dtype=torch.float32, example=images(), recompute=recompute)
    assert [row.kernel for row in why(model).rows if "mean" in row.kernel] == ["mean + scale_channels"] * 2
    for seed in range(2):
        for called, network in ((eager, eager), (model, quick)):
            loss = called(images(seed)).square().mean()
            network.zero_grad()
            loss.backward()
        for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
            assert p.grad is not None, name
            assert q.grad is not None, name
            assert off(q.grad, p.grad) < 1e-5, name
    assert not model.unchanged


@pytest.mark.parametrize("how", ["rows", "max", "twice", "late"])
def test_what_is_no_squeeze_keeps_its_calls(how: str, handed: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Squeezed(how).train(), (images(),), {}, torch.device("cpu"))
    chains = steps_of(recording, {})[1]
    assert "scale_channels" in [chain.op for chain in chains]
    assert not any(chain.branch_out is not None for chain in chains)


def test_a_mean_that_is_wrong_goes_and_the_product_stays(handed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(x: Tensor, *, keep: bool) -> tuple[Tensor, Tensor]:
        return x.mean((2, 3), keepdim=keep), x.detach().requires_grad_()

    monkeypatch.setattr(kernels, "mean_and_map", forgets)
    torch.manual_seed(0)
    model = fast(Squeezed().train(), train=True, dtype=torch.float32, example=images())
    rows = why(model).rows
    assert [row.kernel for row in rows if "scale_channels" in row.kernel and not row.note] == ["scale_channels"]
    assert any("gradient of map 0" in row.note for row in rows)


def test_the_scaled_map_is_still_made_again(handed: None) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Squeezed().train(), (images(),), {}, torch.device("cpu"))
    steps, _, _ = steps_of(recording, {})
    found = remade(recording, steps, True)
    norm = next(step for step in steps if getattr(step, "norm", None))
    assert [numbers for numbers in found.maps.values() if norm.makes in numbers] == [(norm.makes,)]


def test_both_gradients_are_computed_where_a_mean_is_timed(handed: None) -> None:
    seen: list[Any] = []

    def clock(call: Any) -> float:
        seen.append([tuple(gradient.shape) for gradient in call()])
        return 1.0 + len(seen)

    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Squeezed().train(), (images(),), {}, torch.device("cpu"))
        found = next(chain for chain in steps_of(recording, {})[1] if chain.branch_out is not None)
        assert choosing.times(recording, found, None, choosing.Times(), clock) == (2.0, 3.0)
    assert seen == [[(4, 16, 6, 6)]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_squeeze_agrees_with_float64_on_the_gpu(dtype: torch.dtype) -> None:
    x = noise(64, 384, 24, 24, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    means, again = mean_and_map(x)
    y = scale_channels(again, means.sigmoid())
    wide = x.detach().double().requires_grad_()
    expected = wide * wide.mean((2, 3), keepdim=True).sigmoid()
    gradient = noise(64, 384, 24, 24, seed=1, device="cuda").to(dtype)
    found, wanted = torch.autograd.grad(y, x, gradient), torch.autograd.grad(expected, wide, gradient.double())
    allowed = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    assert off(y, expected) < allowed
    assert off(found[0], wanted[0]) < allowed
