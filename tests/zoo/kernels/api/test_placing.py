"""`device="auto"`: a CPU and a GPU are timed once, the faster is taken, and `why` says both times."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo import fast, fast_step, why
from zoo.kernels import arguments as asked
from zoo.kernels.api import placing
from zoo.kernels.api.placing import Way
from zoo.kernels.training import network as training_network
from zoo.kernels.training import segments

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SECOND = torch.device("cpu", 0)
"""What stands for a GPU: no key of a dictionary that the CPU is."""


class Sequence(nn.Module):
    """A GRU of few values, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


def test_the_faster_is_taken_and_both_times_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_milliseconds", lambda call, device: call())
    cpu, gpu, compiled = Way(CPU), Way(GPU), Way(CPU, compiled=True)
    calls: dict[Way, Callable[[], object]] = {cpu: lambda: 0.5, gpu: lambda: 0.25}
    times = placing.timed(calls)
    assert placing.fastest(times, "step") == (gpu, 'device="auto": a step takes 0.5 ms on cpu and 0.25 ms on cuda:0, so cuda:0 was taken')
    assert placing.fastest(times | {gpu: 1.0}, "call")[0] == cpu
    said = 'device="auto": a step takes 0.5 ms on cpu, 0.25 ms on cuda:0 and 0.1 ms on cpu compiled, so cpu compiled was taken'
    assert placing.fastest(times | {compiled: 0.1}, "step") == (compiled, said)


def test_calls_take_turns_and_the_first_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    made, clock = list[str](), iter(range(10_000))
    monkeypatch.setattr(placing.time, "perf_counter", lambda: next(clock))  # each call takes a second, so that few are made
    taken, said = placing.fastest(placing.timed({Way(CPU): lambda: made.append("a"), Way(SECOND): lambda: made.append("b")}), "call")
    assert made == ["a"] * placing.WARMUPS + ["b"] * placing.WARMUPS + ["a", "b"] * placing.LEAST
    assert taken == Way(CPU)
    assert said == 'device="auto": a call takes 1e+03 ms on cpu and 1e+03 ms on cpu:0, so cpu was taken'


def test_each_device_has_a_network_of_its_own_and_the_faster_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [CPU, GPU])
    monkeypatch.setattr(placing, "_milliseconds", lambda call, device: 1.0 if device == CPU else 2.0)
    x = torch.zeros(1, 5, 3)
    built = {device: fast(Sequence(), CPU, example=x, progress=False) for device in (CPU, GPU)}
    model = placing.answering(built.__getitem__, lambda device: (x,))
    assert model is built[CPU]
    assert str(why(model)).splitlines()[-1] == 'device="auto": a call takes 1 ms on cpu and 2 ms on cuda:0, so cpu was taken'


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_the_cpu() -> None:
    x = torch.randn(2, 5, 3)
    own = Sequence().eval()
    model = fast(own, "auto", example=x, progress=False)
    torch.testing.assert_close(model(x), own(x))
    assert "so the CPU was taken" in str(why(model))
    learner = fast(own.train(), "auto", train=True, example=x)
    for twin in (learner, copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
        assert "so the CPU was taken" in str(why(twin))


def test_a_step_learns_nothing_draws_nothing_and_leaves_the_network_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [CPU, SECOND])
    own, x = nn.Sequential(Sequence(), nn.Dropout(0.5)).eval(), torch.randn(2, 5, 3)
    before, drawn = copy.deepcopy(own.state_dict()), torch.get_rng_state()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            taken, at, said = placing.training(own, x, None, "none", None)
        assert taken.type == "cpu"
        assert at == "none"
        assert " ms on cpu and " in said
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not own.training
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())
    assert all(parameter.grad is None for parameter in own.parameters())


@pytest.mark.parametrize(
    ("eager", "compiled", "at", "said"),
    [
        (2.0, 0.5, "full", "2 ms on cpu, 1 ms on cpu:0 and 0.5 ms on cpu compiled, so cpu compiled was taken"),
        (2.0, 1.5, "quick", "2 ms on cpu, 1 ms on cpu:0 and 1.5 ms on cpu compiled, so cpu:0 was taken"),
        (2.0, None, "quick", "2 ms on cpu and 1 ms on cpu:0, so cpu:0 was taken"),  # it was refused, or no faster
        (9.0, 0.5, "quick", "9 ms on cpu and 1 ms on cpu:0, so cpu:0 was taken"),  # hopeless: not tried
    ],
)
def test_the_cpus_compiler_competes_where_it_may_win(
    eager: float, compiled: float | None, at: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Way] = []

    def step(network: Any, args: Any, way: Way, dtype: Any, tune: str, recompute: Any) -> Callable[[], object] | None:
        tried.append(way)
        assert tune == ("full" if way.compiled else "quick")
        ms = compiled if way.compiled else eager if way.device == CPU else 1.0
        return None if ms is None else lambda: ms

    monkeypatch.setattr(placing, "devices", lambda: [CPU, SECOND])
    monkeypatch.setattr(placing, "_step", step)
    monkeypatch.setattr(placing, "_milliseconds", lambda call, device: call())
    taken, tune, line = placing.training(Sequence(), torch.randn(2, 5, 3), None, "quick", None)
    assert line == f'device="auto": a step takes {said}'
    assert tune == at
    assert taken == (CPU if at == "full" else SECOND)
    assert (Way(CPU, compiled=True) in tried) == (eager < 5)


def test_a_compiler_that_fails_leaves_the_other_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(network: Any, args: Any, way: Way, *more: Any) -> Callable[[], object]:
        if way.compiled:
            raise RuntimeError("it broke")
        return lambda: 2.0 if way.device == CPU else 1.0

    monkeypatch.setattr(placing, "devices", lambda: [CPU, SECOND])
    monkeypatch.setattr(placing, "_step", step)
    monkeypatch.setattr(placing, "_milliseconds", lambda call, device: call())
    taken, tune, line = placing.training(Sequence(), torch.randn(2, 5, 3), None, "quick", None)
    assert (taken, tune) == (SECOND, "quick")
    assert line.endswith("so cpu:0 was taken; compiled there it failed: RuntimeError: it broke")


def test_a_plain_step_computes_in_the_dtype_that_is_asked_for() -> None:
    seen: list[torch.dtype] = []

    class Noting(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(super().forward(input).dtype)
            return super().forward(input)

    for dtype in (None, torch.float32, torch.bfloat16):
        step = placing._step(Noting(3, 3), (torch.zeros(1, 3),), Way(CPU), dtype, "none", None)
        assert step is not None
        step()
    assert seen == [torch.float32, torch.float32, torch.bfloat16]


def test_a_network_that_is_moved_to_the_compilers_cpu_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [CPU, SECOND])
    monkeypatch.setattr(placing, "_milliseconds", lambda call, device: 1.0 if "compiled" in call.__qualname__ else (call(), 2.0)[1])
    monkeypatch.setattr(segments, "graph_compiled", lambda graph, given: graph.forward)
    times = iter([2_000.0, 1_000.0] * 2)
    monkeypatch.setattr(training_network, "timer", lambda device: lambda call: (call(), next(times))[1])
    made = placing._step

    def step(network: Any, args: Any, way: Way, *more: Any) -> Callable[[], object] | None:
        call = made(network, args, way, *more)

        def compiled() -> object:
            return call and call()

        return compiled if way.compiled and call is not None else call

    monkeypatch.setattr(placing, "_step", step)
    own = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 2)).train()
    model = fast(own, "auto", train=True, example=torch.randn(2, 4))
    assert [row.kernel for row in why(model).rows] == ["compiled"]
    assert "so cpu compiled was taken" in str(why(model))
    model(torch.randn(3, 4))  # another shape than the example's is not compiled
    assert why(model).rows == []
    assert next(times, None) is None


@pytest.mark.parametrize(
    ("network", "example", "said"),
    [
        (Sequence(), (torch.zeros(1, 5, 3), torch.zeros(1, 1, 4)), "take one tensor"),
        (Sequence(), torch.zeros(1, 5, 9), "RuntimeError"),
        (Sequence().requires_grad_(False), torch.zeros(1, 5, 3), "does not require grad"),
        (nn.GRU(3, 4), None, "pass example="),
    ],
)
def test_where_no_step_can_be_timed_the_model_stays(network: nn.Module, example: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [SECOND, CPU])
    taken, at, line = placing.training(network, example, None, "quick", None)
    assert taken == CPU
    assert at == "quick"
    assert "no step could be timed, so cpu stays" in line
    assert said in line


def test_without_an_example_that_can_be_guessed_answers_come_from_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [SECOND, CPU])
    with pytest.warns(UserWarning, match="runs unchanged"):
        model = fast(nn.GRU(3, 4), "auto", progress=False)
    assert why(model).told[-1].startswith('device="auto": nothing was timed, so cpu was taken: ')


def test_an_example_of_several_tensors_is_moved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "devices", lambda: [SECOND, CPU])
    example = torch.zeros(5, 1, 3), (torch.zeros(1, 1, 4), torch.zeros(1, 1, 4))
    model = fast(nn.LSTM(3, 4).eval(), "auto", example=example, progress=False)
    assert " ms on cpu" in str(why(model))
    args = asked.example_of(nn.LSTM(3, 4), example, torch.device("meta"))
    assert all(leaf.is_meta for leaf in pytree.tree_leaves(args))


def test_what_goes_without_it_says_what_to_do() -> None:
    for named in ({"dtype": "int8"}, {"tune": "background"}):
        with pytest.raises(ValueError, match="name a device"):
            fast(Sequence(), "auto", example=torch.zeros(1, 5, 3), **named)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.gpu
def test_on_a_gpu_both_are_timed() -> None:
    own, x = Sequence(), torch.randn(2, 5, 3)
    model = fast(own, "auto", torch.float32, example=x, progress=False)
    torch.testing.assert_close(model(x.to(model.device)).cpu(), own.eval()(x), rtol=1e-4, atol=1e-5)
    assert " ms on cpu and " in str(why(model))
    learner: Any = fast(own.train(), "auto", torch.float32, train=True, example=x)
    where = next(own.parameters()).device
    assert f"so {where} was taken" in str(why(learner))
    step = fast_step(learner, nn.MSELoss(), torch.optim.SGD(own.parameters(), 0.1), dtype=None)
    losses = [float(step(x.to(where), torch.ones(2, 5, 1, device=where))) for _ in range(30)]
    assert losses[-1] < losses[0]
