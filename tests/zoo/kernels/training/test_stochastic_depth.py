"""A residual block with stochastic depth adds its branch in one pass; a 1x1 convolution of one pixel is a product."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.kernels.stretches import same
from tests.zoo.kernels.tensors import noise, off
from zoo import fast, why
from zoo.kernels.differentiable import add_branch
from zoo.kernels.training import choosing, convolutions, kernels, planning, segments
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.compiling import _works
from zoo.kernels.training.contest import Contest, stretches_of
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Replay
from zoo.kernels.training.rounding import to_round


@pytest.mark.parametrize("layout", ["rows", "slice", "planes"])
@pytest.mark.parametrize("learns", ["both", "the branch", "the shortcut"])
def test_the_sum_is_that_of_autograd(layout: str, learns: str, device: torch.device) -> None:
    wide = noise(3, 24, 5, 3, device=device)
    branch = {"rows": wide[:, :8].contiguous(memory_format=torch.channels_last), "slice": wide[:, 8:16], "planes": wide[:, :8].contiguous()}
    given = [
        branch[layout].detach().requires_grad_(learns != "the shortcut"),
        noise(3, 8, 5, 3, seed=1, device=device).requires_grad_(learns != "the branch"),
    ]
    share = torch.tensor([0.0, 1.25, 1.25], device=device).view(3, 1, 1, 1)
    y, expected = add_branch(given[0], share, given[1]), given[0] * share + given[1]
    assert off(y, expected) < 1e-6
    gradient = noise(3, 8, 5, 3, seed=2, device=device)
    before, asked = gradient.clone(), [t for t in given if t.requires_grad]
    for got, right in zip(torch.autograd.grad(y, asked, gradient), torch.autograd.grad(expected, asked, gradient), strict=True):
        assert off(got, right) < 1e-6
    assert torch.equal(gradient, before)


class Block(nn.Module):
    """A convolution, BatchNorm and stochastic depth beside a shortcut, added as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.share = nn.Parameter(torch.rand(4, 1, 1, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y, kind = self.norm(self.conv(x)), self.kind
        share = torch.empty((len(x), 1, 1, 1), dtype=y.dtype, device=y.device).bernoulli_(0.5).div_(0.5)
        if kind == "by the branch":
            share = share * y.mean((1, 2, 3), keepdim=True)
        if kind == "learns":
            share = self.share.to(y.dtype)
        if kind == "filled by what learns":
            share = y.new_ones((len(x), 1, 1, 1))
            share[1:] = self.share[1:].to(y.dtype)
        if kind == "copied from the branch":
            share = y.new_ones((len(x), 1, 1, 1))
            share.view(-1).copy_(y.mean((1, 2, 3)))
        if kind == "asks for a gradient":
            share = torch.rand((len(x), 1, 1, 1), dtype=y.dtype, requires_grad=True)
        if kind == "added to itself":
            return y * share + y
        y = share * y if kind == "turned" else y * share
        if kind == "read twice":
            return y + x + y.tanh()
        if kind == "not added":
            return F.silu(y)
        if kind == "in place":
            y += x
            return y
        return x + y if kind == "turned" else y + x


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sums be found as on a GPU. Where maps are computed it is in float32: the interpreter cuts bfloat16."""
    monkeypatch.setattr(kernels, "add_branch_refuses", lambda device, *maps: "")


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(seed))


def replayed(network: nn.Module, x: Tensor) -> tuple[list[str], Any]:
    recording = record(network, (x,), {}, torch.device("cpu"))
    steps, chains, counted = steps_of(recording, {})
    replay = Replay(recording, steps, counted)
    return [chain.op for chain in chains], lambda x: replay(replay.at(network), [x])


@pytest.mark.parametrize("kind", ["", "turned", "in place"])
def test_blocks_learn_as_eager_does(kind: str, found: None) -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(Block(kind), Block(kind)).train()
    quick = copy.deepcopy(eager)
    ops, run = replayed(quick, images())
    assert ops.count("stochastic depth + residual") == 2
    for called in (eager, run):
        torch.manual_seed(5)
        called(images(1)).square().mean().backward()
    for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or off(q.grad, p.grad) < 1e-5, name


@pytest.mark.parametrize(
    "kind",
    ["by the branch", "learns", "read twice", "not added", "filled by what learns", "copied from the branch", "asks for a gradient",
     "added to itself"],
)  # fmt: skip
def test_what_is_something_else_keeps_its_calls(kind: str, found: None) -> None:
    assert "stochastic depth + residual" not in replayed(Block(kind).train(), images())[0]


class Gated(nn.Module):
    """Blocks that each image takes or leaves by what it shows, as SkipNet's."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(8, 1) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = x.tanh() * torch.sigmoid(gate(x.mean((2, 3)))).view(-1, 1, 1, 1) + x
        return x


def test_deep_networks_of_gates_are_followed_to_the_end() -> None:
    torch.manual_seed(0)
    model = fast(Gated(400).train(), train=True, dtype=torch.float32, tune="none", example=images())
    assert not model.unchanged


def test_a_share_that_learns_is_refused_by_name(device: torch.device) -> None:
    with pytest.raises(ValueError, match="a share without a gradient"):
        add_branch(noise(2, 8, 3, 3, device=device), torch.ones(2, 1, 1, 1, requires_grad=True), noise(2, 8, 3, 3, device=device))


def test_a_sum_that_is_right_stays(found: None) -> None:
    torch.manual_seed(0)
    model = fast(nn.Sequential(Block(""), Block("in place")).train(), train=True, dtype=torch.float32, example=images())
    assert [row.note for row in why(model).rows if "stochastic" in row.kernel] == ["", ""]


def test_a_drawn_share_has_no_gradient_where_a_sum_is_timed(found: None) -> None:
    seen: list[Any] = []

    def clock(call: Any) -> float:
        seen.append([tuple(gradient.shape) for gradient in call()])
        return 1.0 + len(seen)

    recording = record(Block("").train(), (images(),), {}, torch.device("cpu"))
    chain = next(chain for chain in steps_of(recording, {})[1] if "stochastic" in chain.op)
    assert choosing.times(recording, chain, None, choosing.Times(), clock) == (2.0, 3.0)
    assert seen[0] == seen[1]
    assert (4, 1, 1, 1) not in seen[0]


def test_a_drawn_share_has_no_gradient_where_a_sum_is_compiled(found: None) -> None:
    works = [work for work in _works(record(Block("").train(), (images(),), {}, torch.device("cpu"))) if "stochastic" in work.name]
    assert works
    assert [[learns for *_, learns in work.reads] for work in works] == [[True, False, True]] * len(works)


def test_a_sum_that_is_wrong_goes(found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "add_branch", lambda branch, share, x: branch + x)
    torch.manual_seed(0)
    model = fast(Block("").train(), train=True, dtype=torch.float32, example=images())
    assert [row.kernel for row in why(model).rows if "stochastic" in row.kernel and not row.note] == []
    assert any("output" in row.note for row in why(model).rows)


class Scaled(nn.Module):
    """A block with a layer scale or a layer norm beside its stochastic depth, as `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.scale, self.behind = nn.Parameter(torch.rand(8, 1, 1)), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y, kind = self.norm(self.conv(x)), self.kind
        if kind == "a layer scale":
            y = (y * self.scale).permute(0, 2, 3, 1).permute(0, 3, 1, 2)
        if kind == "a product":
            y = self.conv(y)
        if kind == "a chain's map in place":
            y.tanh_()
        if kind == "a call's map in place":
            y = self.conv(y)
            y.tanh_()
        y = x + y * torch.empty((len(x), 1, 1, 1), dtype=y.dtype, device=y.device).bernoulli_(0.5).div_(0.5)
        if kind == "a layer norm":
            return self.behind(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if kind == "in place behind":
            y.tanh_()
        if kind == "like it":
            return self.conv(y) + x.flatten().view_as(y).tanh()
        if kind == "views":
            return y.flatten(2).transpose(1, 2).tanh()
        return self.conv(y)


@pytest.mark.parametrize(
    ("kind", "yields"),
    [("", False), ("a product", False), ("a layer scale", True), ("a layer norm", True), ("a chain's map in place", False),
     ("a call's map in place", True), ("in place behind", True), ("like it", False), ("views", True)],
)  # fmt: skip
def test_a_sum_yields_to_the_compiler_where_that_runs_what_is_around_it(kind: str, yields: bool, found: None) -> None:
    torch.manual_seed(0)
    recording = record(Scaled(kind).train(), (images(),), {}, torch.device("cpu"))
    steps, chains, _ = steps_of(recording, {})
    sums = [chain.key for chain in chains if "stochastic" in chain.op]
    assert len(sums) == 1
    assert list(segments.yielding(recording, steps)) == sums * yields


@pytest.mark.parametrize("kind", ["", "a layer scale"])
def test_the_compiler_gets_a_sum_that_yields(kind: str, found: None) -> None:
    torch.manual_seed(0)
    network = Scaled(kind).train()
    recording = record(network, (images(),), {}, torch.device("cpu"))
    sums = {chain.key for chain in steps_of(recording, {})[1] if "stochastic" in chain.op}
    times = iter([100.0, 110.0, 80.0, 90.0])

    def clock(call: Any) -> float:
        call()
        return next(times)

    won = Contest(network, recording, (images(),), {}, clock, choosing.Times(), same).won({}, None, beside=True)
    assert won.way == ("islands" if kind else "whole")  # between convolutions there is nothing to compile
    assert won.without == dict.fromkeys(sums, segments.TAKEN) if kind else segments.TAKEN not in won.without.values()
    taken = {call.name for segment in stretches_of(won.replay) for call in segment.calls}
    assert "add" in taken


def test_a_sum_that_yields_is_no_row_of_its_own(found: None, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([100.0, 110.0, 80.0, 90.0])
    monkeypatch.setattr(planning, "Contest", partial(Contest, compiler=same))
    monkeypatch.setattr(planning, "WAYS", ("chains", "whole", "islands"))
    monkeypatch.setattr(planning.choosing, "slower", lambda *_: {})

    def clock(call: Any) -> float:
        call()
        return next(times)

    torch.manual_seed(0)
    made = planning.checked(Scaled("a layer scale").train(), (images(),), {}, planning.Known(), clock)
    assert [row.kernel for row in made.rows if "stochastic" in row.kernel or row.note == segments.TAKEN] == []
    assert any(row.kernel == planning.COMPILED for row in made.rows)


class Gate(nn.Module):
    """Two 1x1 convolutions of a map's means."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1, bias=False), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        means = x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.two(torch.tanh(self.one(means)))) + self.three(means)


def test_convolutions_of_one_pixel_are_products(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    eager = Gate().train()
    quick, x = copy.deepcopy(eager), images().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(quick, (x,), {}, torch.device("cpu"))
        assert "1x1 of one pixel" not in [chain.op for chain in steps_of(recording, {})[1]]
        monkeypatch.setattr(convolutions.kernels, "on_kernels", lambda device: True)
        steps, chains, counted = steps_of(recording, {})
        monkeypatch.undo()
        assert [chain.op for chain in chains].count("1x1 of one pixel") == 2
        replay = Replay(recording, steps, counted)
        assert {recording.values[n].place for n in to_round(recording, steps)[0]} >= {("one", "weight"), ("one", "bias"), ("two", "weight")}
        outs = [replay(replay.at(quick), [x]), eager(x)]
    for out in outs:
        out.float().square().mean().backward()
    assert off(outs[0], outs[1]) < 1e-2
    for (name, p), q in zip(eager.named_parameters(), quick.parameters(), strict=True):
        assert q.grad is not None
        assert p.grad is not None
        assert off(q.grad, p.grad) < 2e-2, name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_shapes_agree_with_float64_on_the_gpu(dtype: torch.dtype) -> None:
    given = [noise(64, 48, 96, 96, seed=s, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last) for s in range(2)]
    given = [t.requires_grad_() for t in given]
    share = torch.empty(64, 1, 1, 1, device="cuda", dtype=dtype).bernoulli_(0.5).div_(0.5)
    y = add_branch(given[0], share, given[1])
    wide = [t.detach().double().requires_grad_() for t in given]
    expected = wide[0] * share.double() + wide[1]
    gradient = noise(64, 48, 96, 96, seed=2, device="cuda").to(dtype)
    found = torch.autograd.grad(y, given, gradient)
    wanted = torch.autograd.grad(expected, wide, gradient.double())
    allowed = {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype]
    for mine, exact in zip((y, *found), (expected, *wanted), strict=True):
        assert off(mine, exact) < allowed
