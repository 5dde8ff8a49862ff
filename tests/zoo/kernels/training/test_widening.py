"""A 1x1 convolution that widens, with its BatchNorm: sums taken of the few channels that come in are those of the many that go out."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.kernels.alive import Alive
from tests.zoo.kernels.tensors import learning, noise, off
from zoo import fast, why
from zoo.kernels import differentiable
from zoo.kernels.differentiable.widening import refused
from zoo.kernels.ops import pointwise_norm, pointwise_norm_grad
from zoo.kernels.ops._overlap import kernels_run
from zoo.kernels.training import checking, choosing, kernels, recompute
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import record
from zoo.kernels.training.replay import Chain, Replay

ACTS: dict[str, Any] = {"none": lambda z: z, "relu": F.relu, "relu6": F.relu6, "leaky_relu_0.1": lambda z: F.leaky_relu(z, 0.1)}


def parts(
    channels: int = 12, outputs: int = 40, size: tuple[int, int] = (5, 3), device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, kernel = noise(3, channels, *size, device=device) + 0.7, noise(outputs, channels, 1, 1, device=device) / channels**0.5
    return x, kernel, 1 + 0.3 * noise(outputs, device=device), noise(outputs, seed=1, device=device)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("act", list(ACTS))
def test_map_statistics_and_gradients_are_those_of_convolution_and_batch_norm(act: str, residual: bool, device: torch.device) -> None:
    given = [*parts(device=device), *([noise(3, 40, 5, 3, seed=2, device=device)] if residual else [])]
    running = [noise(40, device=device), noise(40, device=device).abs()]
    mine, theirs, moved = learning(*given), learning(*(g.double() for g in given)), [r.clone() for r in running]
    x, kernel, weight, bias, *rest = mine
    y = differentiable.conv_norm_act(x, kernel, weight, bias, moved[0], moved[1], rest[0] if rest else None, act=act)
    wanted = [r.double() for r in running]
    z = F.batch_norm(F.conv2d(theirs[0], theirs[1]), wanted[0], wanted[1], theirs[2], theirs[3], True, 0.1, 1e-5)
    z = ACTS[act](z + theirs[4] if residual else z)
    assert off(y, z) < 2e-6
    assert all(off(a, b) < 2e-6 for a, b in zip(moved, wanted, strict=True))
    gradient = noise(3, 40, 5, 3, seed=3, device=device)
    for found, expected in zip(torch.autograd.grad(y, mine, gradient), torch.autograd.grad(z, theirs, gradient.double()), strict=True):
        assert off(found, expected) < 2e-5


@pytest.mark.parametrize("learns", range(5))
def test_only_what_learns_gets_a_gradient(learns: int, device: torch.device) -> None:
    given = [*parts(device=device), noise(3, 40, 5, 3, seed=2, device=device)]
    mine = [g.clone().requires_grad_(place == learns) for place, g in enumerate(given)]
    theirs = [g.double().requires_grad_(place == learns) for place, g in enumerate(given)]
    running = [torch.zeros(40, device=device), torch.ones(40, device=device)]
    x, kernel, weight, bias, residual = mine
    y = differentiable.conv_norm_act(x, kernel, weight, bias, running[0], running[1], residual, act="relu")
    z = F.relu(F.batch_norm(F.conv2d(theirs[0], theirs[1]), None, None, theirs[2], theirs[3], True) + theirs[4])
    for out in (y, z):
        out.backward(noise(3, 40, 5, 3, seed=3, device=device).to(out.dtype))
    for place, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.grad is None) == (place != learns)
        if a.grad is not None and b.grad is not None:
            assert off(a.grad, b.grad) < 2e-5


@pytest.mark.parametrize("act", list(ACTS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_map_that_is_made_again_is_the_same_to_the_last_bit(act: str, dtype: torch.dtype, device: torch.device) -> None:
    x, kernel, weight, bias = parts(device=device)
    found = []
    for again in (False, True):
        given = learning(x.to(dtype), kernel, weight, bias)
        running = [torch.zeros(40, device=device), torch.ones(40, device=device)]
        y = differentiable.conv_norm_act(given[0], given[1], given[2], given[3], running[0], running[1], act=act, again=again)
        saved: Any = y.grad_fn
        assert any(t is not None and t.shape == y.shape for t in saved.saved_tensors) == (act != "none" and not again)
        node = differentiable.kept_of(y)
        assert (node is not None) == again
        if again:
            assert torch.equal(differentiable.made_again(node), y)
        found.append([y.detach(), *running, *torch.autograd.grad(y, given, noise(*y.shape, seed=3, device=device).to(dtype))])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", [pointwise_norm, pointwise_norm_grad], ids=lambda op: op.__name__)
def test_references_are_right_in_double_precision(op: Any) -> None:
    x, kernel, weight, bias = (p.double() for p in parts(channels=3, outputs=5))
    running, residual = (torch.zeros(5).double(), torch.ones(5).double()), noise(3, 5, 5, 3, seed=2).double()

    def forward(*tensors: Tensor) -> Tensor:
        x, kernel, weight, bias, residual = tensors
        return pointwise_norm.reference(x, kernel, weight, bias, running[0], running[1], residual, act="relu")[0]

    given = learning(x, kernel, weight, bias, residual)
    if op is pointwise_norm:
        assert torch.autograd.gradcheck(forward, given)
        return
    y, stats, spread, level, *_ = pointwise_norm.reference(x, kernel, weight, bias, *running, residual, act="relu")
    gradient = noise(3, 5, 5, 3, seed=3).double()
    of_x, of_kernel, sums, of_residual = op.reference(gradient, x, kernel, weight, stats, spread, level, y, act="relu")
    wanted = torch.autograd.grad(forward(*given), given, gradient)
    for found, expected in zip((of_x, of_kernel[:, :, None, None], sums[1], sums[0], of_residual), wanted, strict=True):
        assert off(found, expected) < 1e-12


def test_a_mean_far_from_zero_costs_no_more_than_rounding_the_map_does(device: torch.device) -> None:
    """Means of ten deviations, in bfloat16: PyTorch's variance is of a rounded map, ours of sums in float32."""
    x, kernel, weight, bias = parts(16, 64, (16, 16), device)
    x = (x + 10).bfloat16()
    running = [torch.zeros(64, device=device), torch.ones(64, device=device)]
    y = differentiable.conv_norm_act(x, kernel, weight, bias, *running)
    exact = F.batch_norm(F.conv2d(x.double(), kernel.bfloat16().double()), None, None, weight.double(), bias.double(), True)
    eager = F.batch_norm(F.conv2d(x, kernel.bfloat16()), None, None, weight, bias, True)
    assert off(y, exact) <= off(eager, exact)
    assert off(y, exact) < 4e-3


def test_one_value_a_channel_is_an_error(device: torch.device) -> None:
    x, kernel, weight, bias = parts(size=(1, 1), device=device)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        differentiable.conv_norm_act(x[:1], kernel, weight, bias, torch.zeros(40), torch.ones(40))


class Block(nn.Module):
    """A bottleneck, with a shortcut that widens too."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.first = nn.Conv2d(width, 8, 1, bias=False), nn.BatchNorm2d(8)
        self.two, self.second = nn.Conv2d(8, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.widens = width < 32
        if self.widens:
            self.three, self.third = nn.Conv2d(width, 32, 1, bias=False), nn.BatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(self.one(x)))
        return torch.relu(self.second(self.two(y)) + (self.third(self.three(x)) if self.widens else x))


class Blocks(nn.Sequential):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Block(), Block(32))


@pytest.fixture
def widening(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let convolutions that widen be found as on a GPU."""

    def refuses(device: torch.device, x: Tensor, kernel: Tensor, *tensors: Tensor, act: str) -> str:
        return "narrow" if len(kernel) < kernels.WIDER * x.shape[1] else pointwise_norm.supports(x, kernel, *tensors, act=act)

    monkeypatch.setattr(kernels, "conv_norm_act_refuses", refuses)


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def ready(recompute: bool | None = None) -> tuple[nn.Module, nn.Module, Any]:
    torch.manual_seed(0)
    eager = Blocks().train()
    quick = copy.deepcopy(eager)
    return eager, quick, fast(quick, train=True, dtype=torch.bfloat16, example=images(), recompute=recompute)


FOUND = ["1x1 + batch_norm", "1x1 + batch_norm + residual + relu", "1x1 + batch_norm + residual + relu"]


@pytest.mark.parametrize("recompute", [None, True])
@pytest.mark.parametrize("frozen", [(), ("3.two.weight",), ("3.third.weight", "3.third.bias", "0.weight")])
def test_blocks_learn_as_eager_does(frozen: tuple[str, ...], recompute: bool | None, widening: None) -> None:
    """Both lose digits to bfloat16; over all parameters and three batches, ours no more than eager does."""
    eager, quick, model = ready(recompute)
    exact = copy.deepcopy(eager)
    assert sorted(row.kernel for row in why(model).rows if row.kernel.startswith("1x1 +")) == FOUND
    for network in (eager, quick, exact):
        for name in frozen:
            network.get_parameter(name).requires_grad_(False)
    ratios: list[float] = []
    for seed in range(3):
        for called, network, casts in ((eager, eager, True), (model, quick, True), (exact, exact, False)):
            with torch.autocast("cpu", torch.bfloat16, casts):
                loss = called(images(seed)).float().square().mean()
            network.zero_grad()
            loss.backward()
        for (name, p), q, r in zip(eager.named_parameters(), quick.parameters(), exact.parameters(), strict=True):
            if p.grad is None or q.grad is None or r.grad is None:
                assert name in frozen
                assert p.grad is q.grad is r.grad is None
            else:
                assert off(q.grad, r.grad) < 0.15, name
                ratios.append(math.log(off(q.grad, r.grad) / off(p.grad, r.grad)))
        for (name, p), q in zip(exact.named_buffers(), quick.buffers(), strict=True):
            assert off(q, p) < 0.01, name
    assert math.exp(sum(ratios) / len(ratios)) < 1.2


class Tail(nn.Module):
    """A convolution that widens, its BatchNorm, and what a test puts behind them."""

    def __init__(self, behind: Any) -> None:
        super().__init__()
        self.before, self.conv, self.norm, self.behind = (
            nn.Conv2d(3, 8, 3, bias=False),
            nn.Conv2d(8, 32, 1, bias=False),
            nn.BatchNorm2d(32),
            behind,
        )

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(self.before(x))
        return self.behind(z, self.norm(z))


TAILS: dict[str, tuple[Any, list[str]]] = {
    "found": (lambda z, y: torch.relu(y) * 2, ["1x1 + batch_norm + relu"]),
    "read by somebody else": (lambda z, y: torch.relu(y) * z.sigmoid(), []),
    "relu, written later, as PyTorch refuses": (lambda z, y: torch.relu(y) + 1, ["1x1 + batch_norm + relu"]),
    "relu6, not written": (lambda z, y: F.relu6(y) * 2, ["1x1 + batch_norm + relu6"]),
    "relu6, written later": (lambda z, y: F.relu6(y).mul_(2), []),
    "leaky, added to later": (lambda z, y: F.leaky_relu(y, 0.1).add_(1), []),
    "relu6, the network's output": (lambda z, y: F.relu6(y), []),
}


@pytest.mark.parametrize("behind", list(TAILS))
def test_it_is_found_where_nobody_notices(behind: str, widening: None) -> None:
    network = Tail(TAILS[behind][0]).train()
    model = fast(network, train=True, dtype=torch.bfloat16, example=images())
    assert [row.kernel for row in why(model).rows if row.kernel.startswith("1x1 +")] == TAILS[behind][1]
    with torch.autocast("cpu", torch.bfloat16):
        y = model(images())
    if behind == "relu6, the network's output":
        y.mul_(2)
    y.float().square().mean().backward()
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize(
    ("act", "names"),
    [("relu6", ["batch_norm + residual"]), ("silu", ["batch_norm + residual + silu"]), ("relu", ["batch_norm + residual + relu"])],
)
def test_a_sum_behind_batch_norm_that_is_written_later_keeps_its_activation_apart(act: str, names: list[str]) -> None:
    """PyTorch keeps the sum for the slope, or relu's own result, which nobody may write; kernels the result, or the residual."""

    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            y = getattr(F, act)(self.norm(self.conv(x)) + x)
            return y.mul_(2) if act == "relu6" else y * 2

    network = Adds().train()
    model = fast(network, train=True, dtype=torch.float32, example=images())
    assert [row.kernel for row in why(model).rows if row.kernel.startswith("batch_norm")] == names
    model(images()).square().mean().backward()


@pytest.mark.parametrize("which", ["conv_norm_act", "norm_act_conv"])
def test_maps_that_a_hook_lays_out_anew_are_read_as_they_lie(which: str, device: torch.device) -> None:
    """`save_on_cpu` gives what was saved back in the order of its axes."""
    x, kernel, weight, bias = parts(device=device)
    weight, bias = (weight, bias) if which == "conv_norm_act" else (weight[:12], bias[:12])

    def gradients(hooked: bool) -> tuple[Tensor, ...]:
        given = learning(x, kernel, weight, bias)
        running = [torch.zeros(len(weight), device=device), torch.ones(len(weight), device=device)]
        again = torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(memory_format=torch.contiguous_format), lambda t: t)
        with again if hooked else contextlib.nullcontext():
            if which == "conv_norm_act":
                y = differentiable.conv_norm_act(*given, running[0], running[1], act="relu")  # pyright: ignore[reportCallIssue]
            else:
                y, _ = differentiable.norm_act_conv(given[0], given[2], given[3], running[0], running[1], given[1], act="relu")
        return torch.autograd.grad(y, given, noise(*y.shape, seed=3, device=device))

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        assert off(found, expected) < 1e-6


def test_float16_is_left_to_others() -> None:
    x, kernel, *tensors = (kernels.stand_in(shape, torch.float16) for shape in ((2, 8, 4, 4), (32, 8, 1, 1), *[(32,)] * 4))
    assert "range" in refused(x, kernel, *tensors, act="relu")
    assert not refused(x.bfloat16(), kernel.bfloat16(), *(t.float() for t in tensors), act="relu")


def test_a_convolution_that_another_chain_has_is_left_to_it(widening: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "stem_conv_refuses", lambda *args, **options: "")
    network = nn.Sequential(nn.Conv2d(4, 16, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()).train()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(network, (torch.randn(2, 4, 4, 4).bfloat16(),), {}, torch.device("cpu"))
    assert [chain.op for chain in steps_of(recording, {})[1]] == ["stem conv 1x1", "batch_norm + relu"]


@pytest.mark.usefixtures("widening")
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = differentiable.conv_norm_act

    def planted(x: Tensor, kernel: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
        return right(x, kernel + 0.2 * (kernel - kernel.detach()), *tensors, **options)  # the right map, a gradient too large

    monkeypatch.setattr(differentiable, "conv_norm_act", planted)
    _, _, model = ready()
    rows = [row for row in why(model).rows if row.kernel.startswith("1x1 +")]
    assert all(row.note for row in rows), rows
    assert any("gradient" in row.note for row in why(model).rows)


@pytest.mark.usefixtures("widening")
def test_what_is_widened_for_a_convolution_is_made_again_where_that_is_asked_for() -> None:
    """MobileNetV2's blocks: the depthwise convolution would keep it, and so would its activation."""

    def block() -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(8, 48, 1, bias=False), nn.BatchNorm2d(48), nn.ReLU6(),
            nn.Conv2d(48, 48, 3, 1, 1, groups=48, bias=False), nn.BatchNorm2d(48), nn.ReLU6(),
            nn.Conv2d(48, 8, 1, bias=False), nn.BatchNorm2d(8),
        )  # fmt: skip

    torch.manual_seed(0)
    network, x = nn.Sequential(block(), block()).train(), torch.randn(2, 8, 6, 6).contiguous(memory_format=torch.channels_last)
    found: list[list[Tensor]] = []
    room: list[int] = []
    for asked in (None, True):
        twin = copy.deepcopy(network)
        with torch.autocast("cpu", torch.bfloat16):
            recording = record(twin, (x.bfloat16(),), {}, torch.device("cpu"))
            steps = steps_of(recording, {})[0]
            again = recompute.remade(recording, steps, asked)
            wide = [step.makes for step in steps if isinstance(step, Chain) and step.frees]
            assert len(wide) == 2
            made = {number for numbers in again.maps.values() for number in numbers}
            assert made >= set(wide) if asked else not made & set(wide)
            replay, given = Replay(recording, steps, remade=again), x.bfloat16()
            with Alive(x.device) as alive:
                y = replay(replay.at(twin), [given])
                gc.collect()  # Triton's interpreter leaves what it was given in a circle of its own
                room.append(alive.bytes)
            around = checkpoint(replay, replay.at(twin), [given], use_reentrant=False)  # which keeps what it keeps
        losses = [out.float().square().mean() for out in (y, around)]
        found += [[y.detach(), *torch.autograd.grad(loss, [*twin.parameters()])] for loss in losses]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)
    # Of two blocks; on a CPU beside a GPU, which has no kernels, PyTorch's BatchNorm keeps its own map.
    assert room[0] - room[1] >= (2 * 2 * 48 * 6 * 6 * 2 if kernels_run(x) else 0)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize("worth", [0, recompute.WORTH])
def test_what_widens_has_its_input_made_again_where_that_frees_much(worth: int) -> None:
    def block(inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(outer, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        )  # fmt: skip

    others = [nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), *(nn.Conv2d(64, 64, 3, padding=1) for _ in range(12))]
    network = nn.Sequential(block(16, 64), *others).train()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(network, (torch.empty(2, 64, 8, 8),), {}, torch.device("cpu"))
    for without, again in (({}, [] if worth else [16]), ({chain.key: "slow" for chain in steps_of(recording, {})[1] if chain.frees}, [])):
        steps = steps_of(recording, without)[0]
        maps = [number for numbers in recompute.remade(recording, steps, None, worth).maps.values() for number in numbers]
        assert [recording.values[number].shape[1] for number in maps] == again
        assert len(recompute.remade(recording, steps, True).maps) > 1
        assert not recompute.remade(recording, steps, False)


@pytest.mark.usefixtures("widening")
def test_a_check_of_few_images_makes_again_what_many_would_be_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def spied(recording: Any, steps: Any, recomputed: bool | None, worth: int) -> recompute.Remade:
        made = recompute.remade(recording, steps, recomputed, worth)
        asked.append((worth, len(made)))
        return made

    monkeypatch.setattr(checking, "remade", spied)
    monkeypatch.setattr(recompute, "SHARE", 1.0)
    ready()
    *checks, run = asked
    assert checks
    assert all(worth == 0 and maps for worth, maps in checks)
    assert run == (recompute.WORTH, 0)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize(("ours", "stays"), [(9.0, True), (10.1, True), (10.3, False)])
def test_a_chain_that_keeps_a_map_less_needs_only_be_as_fast(ours: float, stays: bool) -> None:
    network = nn.Sequential(nn.Conv2d(16, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()).train()
    with torch.autocast("cpu", torch.bfloat16):
        recording = record(network, (torch.randn(2, 16, 4, 4).bfloat16(),), {}, torch.device("cpu"))
    left = [ours, 10.0, 12.0, 5.0, 9.0]

    def clock(call: Any) -> float:
        call()
        return left.pop(0)

    with torch.autocast("cpu", torch.bfloat16):
        without = choosing.slower(recording, {}, choosing.Times(), clock)
    chains = steps_of(recording, without)[1]
    assert [(chain.op, bool(chain.note)) for chain in chains] == [("1x1 + batch_norm + relu", not stays)] + [
        ("batch_norm + relu", False)
    ] * (not stays)
    assert left == [5.0, 9.0] * stays


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_no_number_stays_none(value: float, device: torch.device) -> None:
    x, kernel, weight, bias = parts(device=device)
    x = x.clone()
    x[1, 3, 2, 1] = value
    running, wanted = ([torch.zeros(40, device=device), torch.ones(40, device=device)] for _ in range(2))
    y = differentiable.conv_norm_act(x, kernel, weight, bias, running[0], running[1], act="relu")
    z = F.relu(F.batch_norm(F.conv2d(x, kernel), wanted[0], wanted[1], weight, bias, True))
    assert torch.equal(y.isnan(), z.isnan())
    assert [r.isfinite().any().item() for r in running] == [r.isfinite().any().item() for r in wanted] == [False, False]
