"""What PyTorch's compiler runs of a step: which calls, in what order, and what is served when it is slower, wrong or fails."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zoo import fast, fast_step, why
from zoo.kernels.training import contest, kernels
from zoo.kernels.training import segments as segments_of
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.choosing import Times
from zoo.kernels.training.contest import Contest, Won, compiled, served, stretches_of
from zoo.kernels.training.kernels import patch_conv
from zoo.kernels.training.record import Call, Recording, record
from zoo.kernels.training.replay import Replay
from zoo.kernels.training.segments import Compiler, early, inductor, stretches
from zoo.kernels.tuning.choices import Choices

CPU = torch.device("cpu")


class Depth(nn.Module):
    """Stochastic depth as torchvision's (`like` left out) and as timm's, which asks the map for an empty tensor."""

    def __init__(self, like: bool) -> None:
        super().__init__()
        self.like = like

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], 1, 1)
        kept = (x.new_empty(shape) if self.like else torch.empty(shape, dtype=x.dtype, device=x.device)).bernoulli_(0.7)
        return x * kept.div_(0.7)


class Tokens(nn.Module):
    """A BatchNorm, which is a chain, and tokens, which are none."""

    def __init__(self, like: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)
        self.first, self.grow, self.shrink = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop, self.depth, self.last = nn.Dropout(dropout), Depth(like), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        x = x + self.depth(self.drop(self.shrink(F.gelu(self.grow(self.first(x))))))
        return self.last(x.mean(1))


def same(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """Compile nothing: the graph's functions, one after the other."""
    return graph.forward


def recorded(network: nn.Module, images: Tensor) -> Recording:
    return record(network, (images,), {}, CPU)


def names(steps: Any) -> list[str]:
    return [step.name for step in steps if isinstance(step, Call)]


def step(network: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor) -> list[Tensor]:
    """Return what a step with a fixed seed makes: the outputs and all gradients."""
    torch.manual_seed(3)
    out = run(images)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), list(network.parameters()))]


def replay(network: nn.Module, images: Tensor, compiler: Compiler) -> Replay:
    recording = recorded(network, images)
    steps, _, counted = steps_of(recording, {})
    found = compiled(recording, steps, counted, compiler, None, beside=True)
    assert found is not None
    return found


@pytest.mark.parametrize("like", [False, True])
def test_numbers_of_stochastic_depth_are_drawn_first_and_are_the_network_s(like: bool) -> None:
    network, images = Tokens(like).train(), torch.randn(4, 3, 16, 16)
    recording = recorded(network, images)
    steps = early(recording, steps_of(recording, {})[0])
    assert names(steps)[:3] == ["empty", "bernoulli_", "div_"]
    found = replay(network, images, same)
    assert len(stretches_of(found)) == 1
    twin = copy.deepcopy(network)
    places = found.at(network)
    for ours, theirs in zip(step(network, lambda x: found(places, [x]), images), step(twin, twin, images), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_where_dropout_draws_for_data_nothing_is_moved_and_the_draws_stay_the_network_s() -> None:
    network, images = Tokens(dropout=0.5).train(), torch.randn(4, 3, 16, 16)
    recording = recorded(network, images)
    steps = steps_of(recording, {})[0]
    assert early(recording, steps) == steps
    found = replay(network, images, same)
    calls = [call.name for segment in stretches_of(found) for call in segment.calls]
    assert "dropout" not in calls
    assert "bernoulli_" not in calls
    twin = copy.deepcopy(network)
    places = found.at(network)
    for ours, theirs in zip(step(network, lambda x: found(places, [x]), images), step(twin, twin, images), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


class Odd(nn.Module):
    """Calls that a compiler must not have, between such that it may."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.one, self.two = kind, nn.LayerNorm(8), nn.LayerNorm(8)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.one(x))
        if self.kind == "a buffer is written":
            self.seen.add_(x.detach().mean((0, 1)))
        elif self.kind == "no gradients":
            with torch.no_grad():
                x = x + x.amax()
        elif self.kind == "an autocast of its own":
            with torch.autocast("cpu", torch.bfloat16):
                x = x + F.linear(x, x[0, :8]).float()
        return F.gelu(self.two(x))


@pytest.mark.parametrize("kind", ["a buffer is written", "no gradients", "an autocast of its own"])
def test_what_a_compiler_would_do_otherwise_divides_a_stretch(kind: str) -> None:
    network, images = Odd(kind).train(), torch.randn(2, 8, 8)
    recording = recorded(network, images)
    steps = steps_of(recording, {})[0]
    found = stretches(recording, steps)
    assert len(found) == 2
    between = steps[found[0].end : found[1].first]
    assert {"a buffer is written": "add_", "no gradients": "amax", "an autocast of its own": "linear"}[kind] in names(between)


def test_convolutions_and_products_alone_are_no_stretch() -> None:
    network = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).train()
    recording = recorded(network, torch.randn(2, 8))
    assert stretches(recording, steps_of(recording, {})[0]) == []


def test_a_stretch_is_compiled_once_and_runs_plainly_where_it_was_not_compiled_for() -> None:
    network, images = Tokens().train(), torch.randn(4, 3, 16, 16)
    made: list[int] = []

    def counting(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        made.append(len(given))
        return lambda *tensors: [tensor + 1 for tensor in graph.forward(*tensors)]

    found = replay(network, images, counting)
    places = found.at(network)
    first, second = found(places, [images]), found(places, [images])
    assert len(made) == 1
    assert first.shape == second.shape
    torch.manual_seed(3)
    shifted = found(places, [images])
    with torch.no_grad():
        torch.manual_seed(3)
        plain = found(places, [images])
    assert not torch.allclose(shifted, plain)  # the compiler's was wrong on purpose, and no gradient was wanted
    network.first.weight.requires_grad_(False)
    torch.manual_seed(3)
    torch.testing.assert_close(found(places, [images]).detach(), plain)
    assert len(made) == 1


def won(network: nn.Module, images: Tensor, times: list[float], compiler: Compiler = same, choices: Choices | None = None) -> Won:
    """Return what is served where the clock says these microseconds, one call after the other."""
    waiting = iter(times)

    def clock(call: Callable[[], object]) -> float:
        call()
        return next(waiting)

    return Contest(network, recorded(network, images), (images,), {}, clock, Times(choices), compiler).won({}, None, True)


class Blocks(nn.Module):
    """Blocks of tokens with a BatchNorm, which is a chain, between any two; the last one computes something else."""

    def __init__(self, orders: Any = (None,) * 4) -> None:
        super().__init__()
        self.orders = orders
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])
        self.grow = nn.ModuleList([nn.Linear(8, 16) for _ in range(4)])
        self.shrink, self.slopes = nn.ModuleList([nn.Linear(16, 8) for _ in range(4)]), (0.1, 0.1, 0.1, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        for norm, grow, shrink, slope, order in zip(self.norms, self.grow, self.shrink, self.slopes, self.orders, strict=True):
            x = norm(x)
            x = x if order is None else x.flatten(2)[:, :, order].unflatten(2, x.shape[2:])
            x = x + shrink(F.leaky_relu(grow(x.permute(0, 2, 3, 1)), slope)).permute(0, 3, 1, 2)
        return x.mean((2, 3))


def test_what_blocks_have_in_common_is_compiled_once() -> None:
    torch.manual_seed(0)
    network, images, seen = Blocks().train(), torch.randn(4, 8, 6, 6), list[int]()
    made = replay(network, images, lambda graph, given: seen.append(len(given)) or same(graph, given))
    places = made.at(network)
    got, expected = step(network, lambda x: made(places, [x]), images), step(network, network, images)
    assert len(stretches_of(made)) == 4
    assert len(seen) == 2  # the first three are one; the last has another slope
    torch.testing.assert_close(got, expected)


def test_what_differs_in_what_is_long_to_write_is_not_taken_for_the_same() -> None:
    orders = [np.arange(1600) for _ in range(4)]
    orders[1][800:900] = orders[1][800:900][::-1]
    assert repr(orders[0]) == repr(orders[1])
    torch.manual_seed(0)
    network, images = Blocks(orders).train(), torch.randn(2, 8, 40, 40)
    made = replay(network, images, same)
    places = made.at(network)
    got, expected = step(network, lambda x: made(places, [x]), images), step(network, network, images)
    torch.testing.assert_close(got, expected)


@pytest.fixture
def tokens() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Tokens().train(), torch.randn(4, 3, 16, 16)


def test_the_fastest_way_is_served_and_said(tokens: tuple[nn.Module, Tensor]) -> None:
    before = {name: tensor.clone() for name, tensor in tokens[0].state_dict().items()}
    found = won(*tokens, [100.0, 110.0, 80.0, 70.0])
    assert found.way == "whole"
    assert found.errors
    assert "0.07 ms there and back instead of 0.08" in found.notes[-1]
    assert all(torch.equal(before[name], tensor) for name, tensor in tokens[0].state_dict().items())
    assert won(*tokens, [100.0, 110.0, 80.0, 90.0]).way == "islands"


def test_the_compiler_alone_is_not_asked_where_operators_are_far_behind_the_islands(tokens: tuple[nn.Module, Tensor]) -> None:
    found = won(*tokens, [100.0, 110.0, 110.0 / contest.SURE])  # the clock would be asked no fourth time
    assert found.way == "islands"
    assert found.notes[-1].endswith("not tried, for PyTorch's operators take 1.5 times as long")


def test_what_is_no_faster_is_not_served_and_what_can_not_be_is_not_compiled(tokens: tuple[nn.Module, Tensor]) -> None:
    found = won(*tokens, [100.0, 110.0, 99.0, 120.0])
    assert found.way == "chains"
    assert len(found.notes) == 2
    assert won(*tokens, [100.0, 100.0 * contest.SURE]).way == "chains"  # the clock would be asked no third time


def test_a_compiler_that_is_wrong_or_fails_is_not_served(tokens: tuple[nn.Module, Tensor]) -> None:
    def wrong(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        return lambda *tensors: [1.01 * tensor for tensor in graph.forward(*tensors)]

    def failing(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        raise RuntimeError("no such lowering\nand more")

    found = won(*tokens, [100.0, 110.0, 50.0, 40.0], wrong)
    assert found.way == "chains"
    assert all("not served" in note for note in found.notes)
    found = won(*tokens, [100.0, 110.0], failing)
    assert found.way == "chains"
    assert found.notes[0].endswith("not served, RuntimeError: no such lowering")


def test_the_compiler_gets_the_whole_where_what_lies_between_few_chains_is_refused(
    tokens: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrongs: list[bool] = []

    def wrong_between(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        wrongs.append(not any(tensor.shape == tokens[1].shape for tensor in given))
        factor = 1.1 if wrongs[-1] else 1.0
        return lambda *tensors: [factor * tensor for tensor in graph.forward(*tensors)]

    monkeypatch.setattr(contest, "FEW", 1.0)
    found = won(*tokens, [100.0, 110.0, 50.0])
    assert found.way == "islands"
    assert len(found.notes) == 1  # the whole was not tried
    found = won(*tokens, [100.0, 110.0, 50.0, 60.0], wrong_between)
    assert found.way == "whole"
    assert "not served" in found.notes[0]
    assert True in wrongs
    assert wrongs[-1] is False


def test_where_kernels_are_wrong_inside_of_a_stretch_the_compiler_gets_it_without_them(
    tokens: tuple[nn.Module, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments_of, "on_kernels", lambda device: True)
    right = kernels.gelu_linear
    found = won(*tokens, [100.0, 110.0, 80.0, 90.0])
    assert (found.way, found.us) == ("islands", 80.0)
    assert "norms and activations back by kernels: 0.08 ms" in found.notes[0]
    monkeypatch.setattr(kernels, "gelu_linear", lambda *given, **options: 1.1 * right(*given, **options))
    found = won(*tokens, [100.0, 110.0, 80.0, 85.0, 90.0, 95.0])
    assert (found.way, found.us) == ("islands", 85.0)
    assert "norms and activations back by kernels: not served, outputs" in found.notes[0]
    assert "between them: 0.09 ms" in found.notes[1]


class TwiceTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 2 * gradients[0]


def test_what_is_refused_for_its_gradients_names_the_parameter_that_is_worst(tokens: tuple[nn.Module, Tensor]) -> None:
    def doubling(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        return lambda *tensors: graph.forward(*(TwiceTheGradient.apply(t) if t.shape == (16, 8) else t for t in tensors))

    found = won(*tokens, [100.0, 110.0, 50.0, 40.0], doubling)
    assert found.way == "chains"
    assert "parameter gradients" in found.notes[0]
    assert "grow.weight's error is" in found.notes[0]


def test_what_won_is_remembered_for_the_same_network_and_what_learns_of_it(
    tokens: tuple[nn.Module, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    assert won(*tokens, [100.0, 110.0, 80.0, 90.0], choices=Choices(CPU)).way == "islands"
    later = won(*tokens, [70.0], choices=Choices(CPU))  # one way is built, compared and timed, none raced
    assert later.way == "islands"
    assert later.errors
    assert next(tmp_path.rglob("*.json")).is_file()
    tokens[0].stem.weight.requires_grad_(False)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
    assert won(*tokens, [100.0, 200.0], choices=Choices(CPU)).way == "chains"


def test_what_asks_for_no_gradient_is_compared_too(tokens: tuple[nn.Module, Tensor]) -> None:
    def doubled(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        return lambda *tensors: [2 * tensor for tensor in graph.forward(*tensors)]

    tokens[0].requires_grad_(False)
    found = won(*tokens, [100.0, 110.0, 50.0, 40.0], doubled)
    assert found.way == "chains"
    assert all("outputs: relative error" in note for note in found.notes)


def test_a_contest_without_room_serves_chains_and_uses_up_no_random_numbers(tokens: tuple[nn.Module, Tensor]) -> None:
    def full(call: Callable[[], object]) -> float:
        call()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    network, images = tokens
    before = torch.get_rng_state()
    found = served(Contest(network, recorded(network, images), (images,), {}, full, Times(), same), {}, None, beside=True)
    assert found.way == "chains"
    assert "out of memory" in found.notes[0]
    assert torch.equal(torch.get_rng_state(), before)


def test_what_lies_otherwise_in_memory_is_laid_out_for_what_was_compiled(tokens: tuple[nn.Module, Tensor]) -> None:
    network = Odd("nothing").train()
    images = torch.randn(2, 8, 8)
    strides: list[tuple[int, ...]] = []

    def noting(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        def run(*tensors: Tensor) -> Any:
            strides.append(tensors[0].stride())
            return graph.forward(*tensors)

        return run

    found = replay(network, images, noting)
    places = found.at(network)
    there = found(places, [images])
    turned = images.transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(found(places, [turned]), there)
    assert len(strides) == 2
    assert strides[0] == strides[1] != turned.stride()


@pytest.mark.long
def test_the_compiler_itself_learns_what_the_network_learns(tokens: tuple[nn.Module, Tensor]) -> None:
    network, images = tokens
    with torch.autocast("cpu", torch.bfloat16):
        found = won(network, images, [100.0, 110.0, 80.0, 40.0], inductor)
        assert found.way == "whole"
        loss = found.replay(found.replay.at(network), [images]).square().sum()
    once, twice = (torch.autograd.grad(loss, network.parameters(), retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize("kernel", [(4, 4), (2, 8)])
def test_windows_side_by_side_are_a_product_with_the_same_gradients(kernel: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 9, 17, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(5, 3, *kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    ours, theirs = patch_conv(x, weight, bias, dtype=torch.float64), F.conv2d(x, weight, bias, kernel)
    torch.testing.assert_close(ours, theirs)
    assert ours.is_contiguous(memory_format=torch.channels_last)
    gradient = torch.randn_like(theirs)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight, bias), gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
def test_on_a_gpu_a_transformer_s_step_is_captured_with_what_the_compiler_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    torch.manual_seed(0)
    network = Tokens().cuda().train()
    twin = copy.deepcopy(network)
    images, labels = torch.randn(32, 3, 64, 64, device="cuda"), torch.randint(5, (32,), device="cuda")
    model = fast(network, train=True, example=images, progress=False)
    optimizer = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
    learner = fast_step(model, nn.CrossEntropyLoss(), optimizer)
    losses = [float(learner(images, labels)) for _ in range(12)]
    assert learner.replayed > 0
    assert "PyTorch's compiler" in str(why(model))
    usual = torch.optim.SGD(twin.parameters(), 0.1, momentum=0.9)
    plain = []
    for _ in range(12):
        usual.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(twin(images), labels)
        loss.backward()
        usual.step()
        plain.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    assert abs(losses[-1] - plain[-1]) < 0.2 * abs(plain[0] - plain[-1]) + 0.05  # stochastic depth draws otherwise in either


class Cut(nn.Module):
    """Two branches, one of which is looked at and learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.stem(x)).flatten(2).transpose(1, 2)
        return torch.tanh(self.left(y)) + torch.sigmoid(self.right(y)).detach()


def test_a_gradient_of_nothing_is_zeros_in_every_way() -> None:
    def full(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        """Give every tensor a gradient, as a compiled stretch does."""
        return lambda *tensors: [out + 0 * sum(t.sum() for t in tensors) for out in graph.forward(*tensors)]

    torch.manual_seed(0)
    found = won(Cut().train(), torch.randn(4, 3, 16, 16), [100.0, 110.0, 80.0, 90.0], full)
    assert found.way == "islands"


def test_what_has_another_shape_is_wrong(tokens: tuple[nn.Module, Tensor]) -> None:
    def longer(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        return lambda *tensors: [out[None] for out in graph.forward(*tensors)]

    class Last(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = tokens[0]

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.body(x)) * 2

    found = won(Last().train(), tokens[1], [100.0, 110.0, 80.0, 70.0], longer)
    assert found.way == "chains"
    assert any("outputs: relative error inf" in note for note in found.notes), found.notes
