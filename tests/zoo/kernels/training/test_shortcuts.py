"""A residual block's first convolution adds its input's gradient to the shortcut's: the sum is autograd's, and nobody's tensor changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.tensors import noise, off
from zoo import fast, why
from zoo.kernels.differentiable.shortcut import shortcut_conv
from zoo.kernels.training import choosing, kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.checking import Check
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Chain, Without


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("used", ["both", "the convolution", "what is handed on"])
@pytest.mark.parametrize("layout", ["rows", "slice", "planes"])
def test_the_gradient_is_the_sum_of_both(stats: bool, used: str, layout: str, device: torch.device) -> None:
    wide = noise(2, 24, 5, 3, device=device)
    x = {"rows": wide[:, :8].contiguous(memory_format=torch.channels_last), "slice": wide[:, 8:16], "planes": wide[:, :8].contiguous()}[
        layout
    ]
    x, kernel = x.detach().requires_grad_(), (noise(6, 8, 1, 1, device=device) / 3).requires_grad_()
    y, *row, again = shortcut_conv(x, kernel, stats=stats)
    expected = F.conv2d(x, kernel)
    assert off(y, expected) < 1e-6
    assert torch.equal(again, x)
    assert [r.shape for r in row] == [(3, 6)] * stats
    gradients = [noise(2, 6, 5, 3, seed=1, device=device), noise(2, 8, 5, 3, seed=2, device=device)]
    asked = {"both": [0, 1], "the convolution": [0], "what is handed on": [1]}[used]
    found = torch.autograd.grad([(y, again)[i] for i in asked], [x, kernel], [gradients[i].clone() for i in asked], allow_unused=True)
    wanted = torch.autograd.grad([(expected, x * 1)[i] for i in asked], [x, kernel], [gradients[i] for i in asked], allow_unused=True)
    assert off(found[0], wanted[0]) < 1e-6
    assert (found[1] is None) == (wanted[1] is None)
    assert found[1] is None or off(found[1], wanted[1]) < 1e-6


def test_the_sum_lies_where_the_other_gradient_was_and_frozen_kernels_get_none(device: torch.device) -> None:
    x, kernel = noise(2, 8, 5, 3, device=device).requires_grad_(), noise(6, 8, 1, 1, device=device)
    y, again = shortcut_conv(x, kernel)
    gradients = [noise(2, 6, 5, 3, seed=1, device=device), noise(2, 8, 5, 3, seed=2, device=device)]
    (found,) = torch.autograd.grad([y, again], x, gradients)
    assert found.data_ptr() == gradients[1].data_ptr()
    kernel.requires_grad_()
    y, again = shortcut_conv(x.detach(), kernel)
    (found,) = torch.autograd.grad([y, again], kernel, gradients)
    assert off(found, torch.autograd.grad(F.conv2d(x.detach(), kernel), kernel, gradients[0])[0]) < 1e-6


class Block(nn.Module):
    """A bottleneck; with `linear` nothing is applied behind the sum."""

    def __init__(self, linear: bool = False) -> None:
        super().__init__()
        self.linear = linear
        self.one, self.first = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.three, self.third = nn.Conv2d(8, 16, 1, bias=False), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.one(x)))
        y = torch.relu(self.second(self.two(y)))
        y = self.third(self.three(y)) + x
        return y if self.linear else torch.relu_(y)


class Blocks(nn.Sequential):
    """Blocks whose inputs are read twice, one without an activation, one whose input is read once more."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), *(Block(linear) for linear in (False, False, True, False)))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self[3](self[2](self[1](self[0](x))))
        x = self[4](x)
        return self[5](x) * torch.sigmoid(x)


class Wider(nn.Module):
    """A bottleneck that halves the map, and its shortcut with it, which is computed last or first; `looks` at its input once more."""

    def __init__(self, looks: bool = False, shortcut_first: bool = False) -> None:
        super().__init__()
        self.looks, self.shortcut_first = looks, shortcut_first
        self.one, self.first = nn.Conv2d(16, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 24, 3, 2, 1, bias=False), nn.BatchNorm2d(24)
        self.beside, self.third = nn.Conv2d(16, 24, 1, 2, bias=False), nn.BatchNorm2d(24)

    def forward(self, x: Tensor) -> Tensor:
        beside = self.third(self.beside(x)) if self.shortcut_first else None
        y = self.second(self.two(torch.relu(self.first(self.one(x)))))
        y = torch.relu(y + (self.third(self.beside(x)) if beside is None else beside))
        return y * x.mean() if self.looks else y


FOUND = ["1x1 + shortcut", "1x1 + shortcut"]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let shortcuts be found as on a GPU."""
    monkeypatch.setattr(kernels, "shortcut_conv_refuses", lambda device: "")


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    eager = Blocks().train()
    quick = copy.deepcopy(eager)
    return eager, quick, fast(quick, train=True, dtype=torch.bfloat16, example=images())


def learn(called: nn.Module, network: nn.Module, seed: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = called(images(seed)).float().square().mean()
    network.zero_grad()
    loss.backward()


@pytest.mark.parametrize("frozen", [(), ("2.one.weight",), ("0.weight", "1.weight", "1.bias")])
def test_blocks_learn_as_eager_does(frozen: tuple[str, ...], handed: None) -> None:
    eager, quick, model = pair()
    assert [row.kernel for row in why(model).rows if "shortcut" in row.kernel] == FOUND
    for network in (eager, quick):
        for name in frozen:
            network.get_parameter(name).requires_grad_(False)
    for seed in range(2):
        learn(eager, eager, seed)
        learn(model, quick, seed)
        for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or q.grad is None or off(q.grad, p.grad) < 0.03, name
    assert not model.unchanged
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())


@pytest.mark.parametrize("frozen", [(), ("3.one.weight",), ("3.beside.weight",), ("0.weight", "1.weight", "1.bias")])
@pytest.mark.parametrize("shortcut_first", [False, True])
def test_a_shortcut_that_changes_the_shape_has_its_gradient_added_in_the_same_product(
    shortcut_first: bool, frozen: tuple[str, ...], handed: None
) -> None:
    torch.manual_seed(0)
    wider = Wider(shortcut_first=shortcut_first)
    eager = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), wider).train()
    for name in frozen:
        eager.get_parameter(name).requires_grad_(False)
    quick = copy.deepcopy(eager)
    model = fast(quick, train=True, dtype=torch.bfloat16, example=images())
    assert [row.layers for row in why(model).rows if "shortcut" in row.kernel] == ["3.one"]
    for seed in range(2):
        learn(eager, eager, seed)
        learn(model, quick, seed)
        for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            assert p.grad is None or q.grad is None or off(q.grad, p.grad) < 0.03, name
    assert not model.unchanged
    torch.testing.assert_close(quick.state_dict(), eager.state_dict())


def test_a_convolution_is_not_done_before_its_kernel_is_there(handed: None) -> None:
    """Its kernel is computed behind the shortcut's convolution, which would have to come later."""

    class Late(Wider):
        def forward(self, x: Tensor) -> Tensor:
            beside = self.third(self.beside(x))
            kernel = self.one.weight + 0 * beside.mean()
            y = self.second(self.two(torch.relu(self.first(nn.functional.conv2d(x, kernel.to(x.dtype))))))
            return torch.relu(y + beside)

    network = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Late()).train()
    model = fast(network, train=True, dtype=torch.bfloat16, example=images())
    assert not any("shortcut" in row.kernel for row in why(model).rows)


def test_a_map_that_three_read_is_handed_on_to_none(handed: None) -> None:
    network = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Wider(looks=True)).train()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(network, (images(),), {}, torch.device("cpu"))
    assert not any(chain.branch_out is not None for chain in steps_of(recording, {})[1])


def test_the_users_gradient_of_the_output_stays_as_it_is(handed: None) -> None:
    eager, _, model = pair()
    x, results = images(1), []
    for called in (eager, model):
        with torch.autocast("cpu", torch.bfloat16):
            y = called(x)
        gradient = noise(*y.shape).to(y.dtype)
        before = gradient.clone()
        y.backward(gradient)
        assert torch.equal(gradient, before)
        results.append(gradient)
    assert not model.unchanged


def test_a_sum_that_forgets_a_summand_is_found_and_the_rest_stays(handed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(x: Tensor, kernel: Tensor, *, stats: bool) -> tuple[Tensor, ...]:
        return F.conv2d(x, kernel), x.detach().requires_grad_()

    monkeypatch.setattr(kernels, "shortcut_conv", forgets)
    eager, quick, model = pair()
    rows = why(model).rows
    assert not any("shortcut" in row.kernel for row in rows)
    assert len([row for row in rows if "gradient of map 0" in row.note]) == len(FOUND)
    assert sum("residual" in row.kernel for row in rows) == 4
    learn(eager, eager, 0)
    learn(model, quick, 0)
    for p, q in zip(eager.parameters(), quick.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def conv_stats(x: Tensor, kernel: Tensor) -> tuple[Tensor, str]:
    return F.conv2d(x, kernel), "row"


def test_statistics_and_the_shortcut_are_handed_on_together_or_one_without_the_other(handed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "conv_stats_refuses", lambda *_: "")
    monkeypatch.setattr(kernels, "conv_stats", conv_stats)
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Blocks().train(), (images(),), {}, torch.device("cpu"))
    without: Without = {}
    seen = []
    for _ in range(4):
        steps, found, _ = steps_of(recording, without)
        of_first = next((s for s in steps if isinstance(s, Chain) and any(call.layer == "2.one" for call in s.calls)), None)
        seen.append(None if of_first is None else of_first.op)
        residual = next(chain for chain in found if chain.branch_in is not None or "residual" in chain.op)
        assert (residual.branch_in is not None) == ("shortcut" in (seen[-1] or ""))
        if of_first is not None:
            without[of_first.key] = "because"
    assert seen == ["1x1, statistics + shortcut", "1x1, statistics", "1x1 + shortcut", None]


def test_both_gradients_are_computed_where_a_shortcut_is_timed(handed: None) -> None:
    seen: list[Any] = []

    def clock(call: Any) -> float:
        seen.append([tuple(gradient.shape) for gradient in call()])
        return 1.0 + len(seen)

    with torch.autocast("cpu", torch.bfloat16):
        recording = record(Blocks().train(), (images(),), {}, torch.device("cpu"))
        found = next(chain for chain in steps_of(recording, {})[1] if chain.branch_out is not None)
        assert choosing.times(recording, found, None, choosing.Times(), clock) == (2.0, 3.0)
    assert seen == [[(4, 16, 6, 6), (8, 16, 1, 1)]] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_shapes_agree_with_float64_on_the_gpu(dtype: torch.dtype, stats: bool) -> None:
    x, kernel = (
        noise(32, 256, 56, 56, device="cuda").to(dtype).requires_grad_(),
        (noise(64, 256, 1, 1, device="cuda") / 16).requires_grad_(),
    )
    gradients = [noise(32, 64, 56, 56, seed=1, device="cuda").to(dtype), noise(32, 256, 56, 56, seed=2, device="cuda").to(dtype)]
    y, *_, again = shortcut_conv(x, kernel, stats=stats)
    wide = [x.detach().double().requires_grad_(), kernel.detach().to(dtype).double().requires_grad_()]
    expected = F.conv2d(wide[0], wide[1])
    wanted = torch.autograd.grad([expected, wide[0] * 1], wide, [g.double() for g in gradients])
    found = torch.autograd.grad([y, again], [x, kernel], gradients)
    assert found[0].data_ptr() == gradients[1].data_ptr()
    allowed = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for mine, exact in zip((y, *found), (expected, *wanted), strict=True):
        assert off(mine, exact) < allowed


class Forked(nn.Module):
    """Two convolutions of what the network is given, of which the 1x1 one hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.three(x)


def test_a_chain_that_hands_on_what_the_network_is_given_is_compared_where_that_does_not_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "shortcut_conv_refuses", lambda device: "")
    torch.manual_seed(0)
    network, images = Forked().to(torch.bfloat16).train(), torch.randn(2, 8, 6, 6, dtype=torch.bfloat16)
    recording = record(network, (images,), {}, torch.device("cpu"))
    assert [chain.branch_out is not None for chain in steps_of(recording, {})[1]] == [True]
    assert not Check(network, recording, (images,), {}, torch.device("cpu")).verdict().without
