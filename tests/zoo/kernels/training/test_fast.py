"""`fast(train=True)` is the network: modes, copies, averages, accumulation, autocast, checkpoints; and its check finds what is wrong."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zoo import fast, fast_step, plain, why
from zoo.finetuning.average import Average
from zoo.kernels import arguments as asked
from zoo.kernels.training import FastTraining, kernels, segments
from zoo.kernels.training import network as training_network


class Net(nn.Module):
    """A residual block, a depthwise convolution, a gate, a pool and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 8, 1), nn.Sigmoid())
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.stem(x))
        y = self.norm(self.deep(x))
        y += x
        y = torch.relu_(y)
        return self.head(self.drop((self.gate(y) * y).mean((2, 3))))


CHAINS = ["batch_norm + relu", "max_pool 3x3", "depthwise 3x3", "batch_norm + residual + relu", "scale_channels"]


def images(seed: int = 0, count: int = 4) -> Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


def pair(network: type[nn.Module] = Net) -> tuple[nn.Module, nn.Module, FastTraining]:
    """An eager network, its copy, and the copy made fast."""
    torch.manual_seed(0)
    eager = network().train()
    quick = copy.deepcopy(eager)
    return eager, quick, fast(quick, train=True, example=images())


def same(a: nn.Module, b: nn.Module) -> None:
    torch.testing.assert_close(b.state_dict(), a.state_dict())
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            torch.testing.assert_close(q.grad, p.grad)


def learn(called: Any, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss = called(images(seed)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_every_chain_is_found_and_plain_gives_the_network_back() -> None:
    _, quick, model = pair()
    assert [row.kernel for row in why(model).rows] == CHAINS
    assert plain(model) is quick
    assert plain(fast(model, train=True, example=images())) is quick
    assert dict(model.named_parameters()).keys() == dict(quick.named_parameters()).keys()
    assert all(a is b for a, b in zip(model.parameters(), quick.parameters(), strict=True))
    assert model.state_dict().keys() == quick.state_dict().keys()
    assert model.head is quick.head


def test_the_check_leaves_buffers_gradients_and_random_numbers_as_they_were() -> None:
    torch.manual_seed(0)
    network = Net().train()
    network.head.weight.grad = torch.ones_like(network.head.weight)
    before, drawn = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    fast(network, train=True, example=images())
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert [name for name, p in network.named_parameters() if p.grad is not None] == ["head.weight"]


def test_any_sequence_of_train_and_eval_steps_leaves_the_same_statistics() -> None:
    eager, quick, model = pair()
    optimizers = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (eager, quick)]
    for seed, mode in enumerate("tetetmt"):
        outputs = []
        for network, optimizer in zip((eager, model), optimizers, strict=True):
            network.train(mode != "e")
            if mode == "m":  # a norm keeps its statistics while the rest trains
                (network.norm if network is eager else quick.norm).eval()  # pyright: ignore[reportCallIssue]
            if mode == "e":
                with torch.no_grad():
                    outputs.append(network(images(seed)))
            else:
                outputs.append(learn(network, optimizer, seed))
        torch.testing.assert_close(outputs[1], outputs[0])
    same(eager, quick)
    assert int(quick.norm.num_batches_tracked) == 4


@pytest.mark.parametrize("scaled", [False, True])
def test_autocast_gives_the_same_step_with_a_scaler_too(scaled: bool) -> None:
    eager, quick, model = pair()
    for network, called in ((eager, eager), (quick, model)):
        scaler = torch.amp.GradScaler("cpu", enabled=scaled)
        optimizer = torch.optim.SGD(network.parameters(), 0.1)
        for seed in range(2):
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16):
                loss = called(images(seed)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    same(eager, quick)
    assert not model.unchanged
    assert len(why(model).plans) == 2


def test_accumulated_gradients_frozen_channels_and_averages_are_the_networks_own() -> None:
    eager, quick, model = pair()
    found = []
    for network, called in ((eager, eager), (quick, model)):
        network.stem.requires_grad_(False)
        average, optimizer = Average(called, 0.9), torch.optim.AdamW(network.parameters(), 0.01)
        for step in range(2):
            optimizer.zero_grad()
            for part in range(2):
                torch.manual_seed(part)
                (called(images(2 * step + part)).square().mean() / 2).backward()
            optimizer.step()
            average.update(called, step)
        found.append(average.tensors)
        network.stem.requires_grad_(True)
        optimizer.zero_grad()
        called(images(9)).sum().backward()
    same(eager, quick)
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_the_whole_network_gives_the_same_gradients_and_statistics(reentrant: bool) -> None:
    eager, quick, model = pair()
    for called in (eager, model):
        torch.manual_seed(3)
        x = images().requires_grad_()
        result: Any = checkpoint(called, x, use_reentrant=reentrant)
        result.square().mean().backward()
    same(eager, quick)


def test_copies_and_pickles_train_like_the_network_and_share_nothing() -> None:
    eager, quick, model = pair()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    learn(eager, torch.optim.SGD(eager.parameters(), 0.1), 1)
    for twin in twins:
        assert isinstance(twin, FastTraining)
        learn(twin, torch.optim.SGD(twin.parameters(), 0.1), 1)
        same(eager, plain(twin))
        assert plain(twin) is not quick
    learn(model, torch.optim.SGD(quick.parameters(), 0.1), 1)
    same(eager, quick)


def test_loaded_weights_a_new_head_and_another_size_are_followed() -> None:
    eager, quick, model = pair()
    state = {name: value + 0.1 if value.is_floating_point() else value for name, value in eager.state_dict().items()}
    for network in (eager, quick):
        torch.manual_seed(0)
        network.load_state_dict(state)
        network.head = nn.Linear(8, 3)
    for size in (16, 20):
        x = torch.randn(3, 3, size, size)
        torch.manual_seed(1)
        right = eager(x)
        torch.manual_seed(1)
        torch.testing.assert_close(model(x), right)
    same(eager, quick)
    assert not model.unchanged


class Draws(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.choice([1.0, 2.0])


class Looks(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Remembers(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x.shape
        return super().forward(x)


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Rounds(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Any = Straight.apply(x)
        return super().forward(result)


class Checkpoints(Net):
    def forward(self, x: Tensor) -> Tensor:
        result: Any = checkpoint(super().forward, x, use_reentrant=False)
        return result


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (Draws, "Python's random"),
        (Looks, "Looks"),
        (Remembers, "changes last"),
        (Rounds, "autograd function"),
        (Checkpoints, "saved by hooks"),
    ],
)
def test_what_a_recording_would_not_repeat_trains_unchanged_and_why_says_so(network: type[Net], reason: str) -> None:
    torch.manual_seed(0)
    eager = network().train()
    quick = copy.deepcopy(eager)
    with pytest.warns(UserWarning, match="trains unchanged"):
        model = fast(quick, train=True, example=images())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for called in (eager, model):
            random.seed(0)
            torch.manual_seed(0)
            called(images()).sum().backward()
    assert reason in str(why(model))
    same(eager, quick)


def test_the_plan_that_was_not_used_for_longest_goes_and_unchanged_speaks_of_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_network, "KEPT_PLANS", 2)
    model = fast(nn.Linear(3, 2).train(), train=True, example=torch.zeros(4, 3))
    planned: list[int] = []
    real = training_network.checked
    monkeypatch.setattr(training_network, "checked", lambda *parts: planned.append(len(parts[1][0])) or real(*parts))
    for count in (5, 4, 6, 4, 5):  # at the six the four was used last, so the five goes
        model(torch.zeros(count, 3))
    assert planned == [5, 6, 5]


def test_hooks_of_inner_modules_are_called() -> None:
    eager, quick, model = pair()
    seen: list[str] = []
    handle = quick.head.register_forward_hook(lambda *_: seen.append("head"))  # pyright: ignore[reportCallIssue]
    for called in (eager, model):
        torch.manual_seed(0)
        called(images()).sum().backward()
    assert seen == ["head"]
    assert "a hook of head" in model.unchanged
    same(eager, quick)
    handle.remove()
    model(images())
    assert not model.unchanged


class _Wrong(torch.autograd.Function):
    """Half the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / 2


def wrong_backward(real: Any) -> Any:
    return lambda *args, **kwargs: _Wrong.apply(real(*args, **kwargs))


def wrong_statistics(real: Any) -> Any:
    def op(x: Tensor, weight: Any, bias: Any, mean: Tensor, var: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
        return real(x, weight, bias, mean, var, *rest, **kwargs | {"momentum": 1.1 * kwargs["momentum"]})

    return op


def raises(real: Any) -> Any:
    def op(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of registers")

    return op


def test_what_is_compared_are_pictures_and_gradients_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = kernels.max_pool

    def op(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        y = real(x, *rest, **options)
        if y.requires_grad:
            seen.append(x.detach())
            y.register_hook(seen.append)
        return y

    monkeypatch.setattr(kernels, "max_pool", op)
    pair()
    assert len(seen) >= 4
    assert all(tensor.abs().max() < 100 and tensor[0].std() > 1e-4 and not torch.equal(tensor[0], tensor[1]) for tensor in seen)


@pytest.mark.parametrize(
    ("op", "fault", "said"),
    [
        ("batch_norm_act", wrong_backward, "gradient"),
        ("batch_norm_act", wrong_statistics, "statistic running_"),
        ("depthwise_conv", wrong_backward, "gradient of map 0"),
        ("max_pool", wrong_backward, "gradient"),
        ("scale_channels", wrong_backward, "gradient"),
        ("scale_channels", raises, "out of registers"),
    ],
)
def test_a_planted_fault_is_found_that_chain_falls_back_and_the_rest_stays(
    op: str, fault: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, op, fault(getattr(kernels, op)))
    eager, quick, model = pair()
    rows = why(model).rows
    fallen = [row for row in rows if row.kernel == "aten"]
    assert len(fallen) == (2 if op == "batch_norm_act" else 1)
    assert all(said in row.note for row in fallen)
    assert len(rows) == len(CHAINS)
    for called, network in ((eager, eager), (model, quick)):
        learn(called, torch.optim.SGD(network.parameters(), 0.1), 0)
    same(eager, quick)


def test_a_fault_that_no_chain_shows_alone_is_found_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = kernels.scale_channels

    def op(x: Tensor, gate: Tensor) -> Tensor:
        calls.append(1)
        result = real(x, gate)
        return result if len(calls) == 1 else _Wrong.apply(result)  # pyright: ignore[reportReturnType]

    monkeypatch.setattr(kernels, "scale_channels", op)
    eager, quick, model = pair()
    assert any("whole network was wrong" in row.note for row in why(model).rows)
    assert not model.unchanged
    for called, network in ((eager, eager), (model, quick)):
        learn(called, torch.optim.SGD(network.parameters(), 0.1), 0)
    same(eager, quick)


def test_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "device_of", lambda device, auto=False: torch.device("cuda", 0))
    with pytest.raises(ValueError, match="move the model itself"):
        fast(nn.Linear(3, 3), "cuda", train=True)
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        pair()[2]._replicate_for_data_parallel()
    with pytest.raises(TypeError, match="takes a module"):
        fast(F.relu, train=True)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_two_chains_share_a_norm_only_in_their_order() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            a = self.norm(self.conv(x))
            b = self.norm(self.conv(a))
            return torch.relu(a + b)

    eager, quick, model = pair(Twice)
    for called in (eager, model):
        called(images()).square().mean().backward()
    same(eager, quick)


class Activated(nn.BatchNorm2d):
    """A class of its own, as timm's, that exchanges nothing."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input))


def test_a_norm_of_a_class_of_its_own_is_recorded_with_its_activation_where_no_processes_are_connected() -> None:
    def network() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), Activated(4), nn.Flatten())

    eager, quick, model = pair(network)  # pyright: ignore[reportArgumentType]
    assert [row.kernel for row in why(model).rows] == ["batch_norm + relu"]
    for called in (eager, model):
        called(images()).square().mean().backward()
    same(eager, quick)


def test_values_written_in_place_behind_a_view_are_seen() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(self.conv(x))
            first = y[:, :2]
            torch.relu_(y)
            z = first * 2
            z[:, 0] = 1.0
            return z.flatten(1)

    eager, quick, model = pair(Views)
    assert not model.unchanged
    outputs = [called(images()) for called in (eager, model)]
    torch.testing.assert_close(outputs[1], outputs[0])
    for out in outputs:
        out.square().mean().backward()
    same(eager, quick)


def test_a_first_call_inside_of_a_checkpoint_is_planned_beside_it() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    network(images())
    model = fast(network.train(), train=True, example=images())
    more = torch.cat([images(), images()])
    torch.utils.checkpoint.checkpoint(model, more, use_reentrant=False).sum().backward()
    assert all(p.grad is not None for p in network.parameters())
    assert not model.unchanged


def test_why_tells_plans_with_and_without_autocast_apart() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).train()
    images = torch.randn(4, 3, 8, 8)
    model = fast(network, train=True, dtype=torch.float32, example=images)
    with torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert [plan.given for plan in why(model).plans] == ["4x3x8x8", "4x3x8x8, autocast bfloat16"]


class Branching(nn.Module):
    """A layer whose sign hangs on what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else -self.layer(x)


def test_a_branch_on_values_is_named_with_its_line() -> None:
    with pytest.warns(UserWarning, match="trains unchanged"):
        model = fast(Branching().train(), train=True, example=torch.ones(2, 4))
    assert "forward branches on values, or reads them, in line" in model.unchanged
    assert "of test_fast.py: return self.layer(x) if x.sum() > 0 else -self.layer(x)" in model.unchanged


def test_training_in_eval_mode_is_warned_of_once_and_looking_is_not() -> None:
    x = torch.ones(2, 4)
    model = fast(nn.Sequential(nn.Linear(4, 4)).eval(), train=True, example=x)
    with torch.no_grad():
        model(x)
    with pytest.warns(UserWarning, match=r"in eval mode.*call model\.train\(\)"):
        model(x)
    model(x)
    model.train()
    assert "no plan yet; the next call in train mode makes one" in str(why(model))
    model(x)
    assert "on a CPU PyTorch's functions compute all of this, and nothing is timed" in str(why(model))
    for looked_at in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        looked_at.eval()
        looked_at(x)  # it has trained, and is looked at now


def test_a_network_that_trained_unchanged_may_be_looked_at(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.ones(2, 4)
    own = nn.Sequential(nn.Linear(4, 4)).train()
    model = fast(own, train=True, example=x)
    own[0].register_forward_hook(lambda *_: None)
    model(x)
    model.eval()(x)
    assert not recwarn.list


def test_a_step_in_eval_mode_warns_once(recwarn: pytest.WarningsRecorder) -> None:
    network = nn.Sequential(nn.Linear(4, 4)).eval()
    step = fast_step(fast(network, train=True, example=torch.ones(2, 4)), nn.MSELoss(), torch.optim.SGD(network.parameters(), 0.1))
    for _ in range(2):
        step(torch.ones(2, 4), torch.ones(2, 4))
    assert len(recwarn.list) == 1


def test_a_line_that_has_no_text_is_named_alone() -> None:
    space: dict[str, object] = {"nn": nn}
    exec("class Typed(nn.Linear):\n    def forward(self, x):\n        return x if x.sum() > 0 else -x", space)
    with pytest.warns(UserWarning, match=r"in line 3 of <string>$"):
        fast(space["Typed"](4, 4).train(), train=True, example=torch.ones(2, 4))  # pyright: ignore[reportCallIssue]


def test_full_tuning_tries_the_compiler_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(graph: fx.GraphModule, given: Sequence[object]) -> object:
        return graph.forward

    times = iter([10_000.0, 5_000.0, 10_000.0, 20_000.0])
    monkeypatch.setattr(segments, "graph_compiled", one_by_one)
    monkeypatch.setattr(training_network, "timer", lambda device: lambda call: (call(), next(times))[1])
    x = torch.randn(2, 4)
    own = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).train()
    for run_by, said in ((["compiled"], "5.00 ms there and back instead of 10.00"), ([], "20.00 ms, no faster than 10.00")):
        model = fast(own, train=True, tune="full", example=x)
        assert [row.kernel for row in why(model).rows] == run_by
        assert f"PyTorch's compiler alone: {said}" in str(why(model))
        torch.testing.assert_close(model(x), own(x))
    assert next(times, None) is None
    assert "nothing is timed" in str(why(fast(own, train=True, example=x)))


def test_on_a_cpu_the_compiler_is_not_asked_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def noting(graph: fx.GraphModule, given: Sequence[object]) -> object:
        asked.append(1)
        return graph.forward

    times = iter([1_000.0, 2_000.0, 1_000.0, 2_000.0, 1_000.0])
    monkeypatch.setattr(segments, "graph_compiled", noting)
    monkeypatch.setattr(training_network, "timer", lambda device: lambda call: (call(), next(times))[1])
    own = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).train()
    model = fast(own, train=True, tune="full", example=torch.randn(2, 4))
    assert len(asked) == 1
    model(torch.randn(3, 4))  # it lost, and would for another number of images
    assert len(asked) == 1
    dropping = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)).train()
    assert "PyTorch's compiler was given nothing" in str(why(fast(dropping, train=True, tune="full", example=torch.randn(2, 4))))
    model = fast(own, train=True, tune="full", example=torch.randn(2, 4))
    with torch.no_grad():  # in which a compiled way would not be used
        model(torch.randn(2, 4))
    assert len(asked) == 2
    assert next(times, None) is None


def test_a_compiler_that_fails_on_a_cpu_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(graph: fx.GraphModule, given: Sequence[object]) -> object:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(segments, "graph_compiled", failing)
    x = torch.randn(2, 4)
    own = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).train()
    model = fast(own, train=True, tune="full", example=x)
    assert "PyTorch's compiler alone: not served, RuntimeError: no C++ compiler" in str(why(model))
    torch.testing.assert_close(model(x), own(x))
