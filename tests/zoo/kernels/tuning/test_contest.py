"""Which candidate wins a step, and how many are timed. Contests run on a CPU; the tests own the times and the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo import MobileNetV3Small
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.merge import merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning import contest
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.steps import ATEN, MERGED, Candidate, Setting

CPU = torch.device("cpu")
COMPILING_S, TIMING_S, LIMIT_S = 20.0, 0.75, 40.0
GUESSES = [
    Candidate("conv", {"a": 1}),
    Candidate("conv", {"a": 2}),
    Candidate("cudnn_graph", {"plan": 0}, compiles=True),
    Candidate("cudnn_graph", {"plan": 1}, compiles=True),
]


class Contest:
    """Contests for a convolution with ReLU, 8 x 6 x 6, in bfloat16.

    Attributes:
        found: what competes for each step.
        us: the time of an op's candidates in microseconds; ops that are not in it take 20.
        results: what an op's candidates compute, from the right values in float32; ops that are not in it compute what PyTorch does.
        seconds: what the clock says.
        free: bytes of the GPU that nobody has.
        events: what happened: calls of candidates by their ops, "waits" for the GPU, "emptied" where memory was given back; calls of the
            thread that holds the contests in capitals.
        timed: the candidates that were timed, in this order.
    """

    def __init__(self) -> None:
        self.found, self.us = list[Candidate](), dict[str, float]()
        self.results: dict[str, Callable[[Tensor], Tensor]] = {}
        self.seconds, self.timed, self._called = 0.0, list[Candidate](), Candidate(ATEN)
        self.free, self.events = 1 << 33, list[str]()

    def bind(self, node: Node, candidate: Candidate, setting: Setting) -> Any:
        result, plain = self.results.get(candidate.op), bind(node, Candidate(ATEN), setting)
        exact = bind(node, Candidate(ATEN), Setting(CPU, torch.float32))

        def bound(inputs: list[Tensor], out: Tensor | None) -> Any:
            self._called = candidate
            main = threading.current_thread() is threading.main_thread()
            self.events.append(candidate.op.upper() if main else candidate.op)
            return plain(inputs, out) if result is None else result(exact([x.float() for x in inputs], None))

        return bound

    def time(self, call: Callable[[], Any]) -> float:
        call()
        self.timed.append(self._called)
        self.seconds += TIMING_S
        return self.us.get(self._called.op, 20.0)

    def compile(self, tasks: Sequence[Any], *_: Any) -> range:
        self.seconds += COMPILING_S
        return range(len(tasks))

    def choices(self, steps: int = 1, images: int = 2, level: str = "quick") -> list[Choice]:
        """Hold the contests of so many steps, each of which is that convolution of so many images."""
        network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()).eval()
        graph, places = understand(network, (torch.empty(images, 8, 6, 6),), {}, CPU)
        (node,) = graph.steps()
        return self.choices_of({str(number): node for number in range(steps)}, places, level)

    def choices_of(self, nodes: dict[str, Node], places: dict[Node, Place], level: str = "quick") -> list[Choice]:
        """Hold the contests of these steps."""
        compilers: Any = self
        found = contest.tune(nodes, places, Setting(CPU, torch.bfloat16), dict.fromkeys(nodes, level), compilers)
        return [choice for _, choice in found]

    def first_calls(self) -> list[str]:
        """Return what happened until the first step was timed, which begins with plain PyTorch."""
        return self.events[: self.events.index(ATEN)]

    def timed_steps(self) -> list[list[Candidate]]:
        """Return what was timed beside PyTorch, step by step."""
        steps: list[list[Candidate]] = []
        for one in self.timed:
            if one.op == ATEN:
                steps.append([])
            else:
                steps[-1].append(one)
        return steps


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Contest:
    """A CPU that takes part in contests."""
    made = Contest()
    monkeypatch.setattr(torch.cuda, "set_device", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: made.events.append("waits"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.events.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (made.free, 1 << 34))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 72)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 8)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(contest, "QUICK_S", LIMIT_S)
    monkeypatch.setattr(contest, "time", SimpleNamespace(monotonic=lambda: made.seconds, perf_counter=lambda: made.seconds))
    monkeypatch.setattr(contest, "graph_time_us", made.time)
    monkeypatch.setattr(contest, "bind", made.bind)
    monkeypatch.setattr(contest, "candidates", lambda *given, **named: iter(made.found))
    return made


def test_each_share_of_the_steps_has_its_share_of_the_time_and_a_late_one_tries_least(
    held: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten steps of five times each would take 57 seconds of 40. A late step times only its best guess that needs no library to compile."""
    monkeypatch.setattr(contest, "GROUP", 1)
    held.found = GUESSES
    assert len(held.choices(10)) == 10
    steps = held.timed_steps()
    assert held.seconds <= LIMIT_S + TIMING_S * (1 + len(GUESSES))
    assert {len(step) for step in steps} == {1, 4}
    assert all(step == GUESSES[: len(step)] for step in steps)
    assert {len(step) for step in steps[:5]} == {len(step) for step in steps[5:]} == {1, 4}


def test_of_a_late_step_libraries_compile_the_best_guess_where_nothing_else_computes_it(
    held: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "GROUP", 1)
    monkeypatch.setattr(contest, "QUICK_S", COMPILING_S)  # all are late but the first
    held.found = GUESSES[2:]
    held.choices(3)
    assert held.timed_steps() == [GUESSES[2:], GUESSES[2:3], GUESSES[2:3]]


def test_when_all_the_time_is_gone_the_best_guess_of_each_op_is_timed(held: Contest) -> None:
    """All ten make their first calls together, so libraries have compiled their kernels before any step is late."""
    held.found = GUESSES
    held.choices(10)
    steps = held.timed_steps()
    assert steps[:6] == [GUESSES] * 6
    assert steps[6:] == [[GUESSES[0], GUESSES[2]]] * 4


def test_nothing_is_late_where_all_is_to_be_tried(held: Contest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "GROUP", 1)
    held.found = GUESSES
    held.choices(10, level="full")
    assert held.seconds > LIMIT_S
    assert held.timed_steps() == [GUESSES] * 10


@pytest.mark.parametrize(
    ("op", "images", "loses", "wins"),
    [
        ("cudnn_graph", 1, 10.0, 9.99),
        ("cudnn_conv", 16, 9.8, 9.6),
        ("cudnn_conv", 1, 9.4, 9.2),
        ("cublaslt", 16, 9.8, 9.6),
        ("cublaslt", 4, 9.2, 9.0),
        ("cublaslt", 1, 6.8, 6.5),
    ],
)
def test_what_needs_memory_beside_the_arena_has_to_be_faster_the_more_the_smaller_the_map(
    op: str, images: int, loses: float, wins: float, held: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A map has 576 bytes an image here, so what counts as a small one is small."""
    monkeypatch.setattr(contest, "SMALL_OUT_OF_PLACE", (1 << 10, contest.SMALL_OUT_OF_PLACE[1]))
    monkeypatch.setattr(contest, "WORKSPACE", tuple((1 << 10 + 2 * i, counts) for i, (_, counts) in enumerate(contest.WORKSPACE)))
    held.found = [Candidate("conv"), Candidate(op)]
    for us, winner in ((loses, "conv"), (wins, op)):
        held.us = {"conv": 10.0, op: us}
        assert [choice.op for choice in held.choices(images=images)] == [winner]


def test_beside_an_exact_result_an_error_below_one_rounding_is_allowed(held: Contest) -> None:
    """PyTorch computes some gates in float32, for example. An error of a whole rounding is too much, however fast the kernel is."""
    held.found, held.us = [Candidate("conv")], {"conv": 1.0}
    off = torch.finfo(torch.bfloat16).eps / 20
    held.results = {ATEN: lambda right: right, "conv": lambda right: right * (1 + off)}
    assert [choice.op for choice in held.choices()] == ["conv"]
    held.results["conv"] = lambda right: right.bfloat16()
    assert [choice.op for choice in held.choices()] == [ATEN]


@pytest.mark.parametrize(("results", "counts"), [(3, [3, 3, 3, 1]), (0, [2] * 5), (100, [10])])
def test_no_more_results_are_made_beside_each_other_than_an_eighth_of_the_free_memory_holds(
    held: Contest, results: int, counts: list[int]
) -> None:
    """A result has 1,152 bytes here; 64 bytes are kept by PyTorch, and free."""
    held.found = [Candidate("conv", {"a": number}) for number in range(10)]
    held.free = 8 * results * 1152 - 64
    held.choices()
    together = [len(part.split()) for part in " ".join(held.first_calls()).split("waits") if part.strip()]
    assert together == counts


def crowded(times: int = 1) -> Callable[[Tensor], Tensor]:
    """Return what has no room at first."""
    left = [None] * times

    def result(right: Tensor) -> Tensor:
        if left:
            left.pop()
            raise torch.OutOfMemoryError("no room beside others")
        return right.bfloat16()

    return result


def test_a_first_call_without_room_is_made_again_alone_and_one_that_fails_is_not(held: Contest) -> None:
    def wrong(right: Tensor) -> Tensor:
        raise RuntimeError("no plan")

    held.found = [Candidate("conv"), Candidate("cublaslt"), Candidate("cudnn_graph")]
    held.results = {"conv": crowded(), "cudnn_graph": wrong}
    held.us = {"conv": 1.0}
    assert [choice.op for choice in held.choices()] == ["conv"]
    calls = held.first_calls()
    assert sorted(calls[: calls.index("emptied")]) == ["conv", "cublaslt", "cudnn_graph", "waits", "waits"]
    assert calls[calls.index("emptied") :] == ["emptied", "conv", "waits"]


def test_what_searches_for_a_thread_alone_is_called_first_by_the_one_that_goes_on(held: Contest) -> None:
    held.found = [Candidate("cudnn_conv"), Candidate("conv")]
    held.results = {"cudnn_conv": crowded()}
    held.choices()
    assert held.first_calls() == ["waits", "CUDNN_CONV", "conv", "waits", "emptied", "CUDNN_CONV", "waits"]


def test_a_merged_step_without_a_kernel_is_not_run(held: Contest) -> None:
    graph, places = understand(MobileNetV3Small().eval(), (torch.empty(2, 3, 64, 64),), {}, CPU)
    merged = next(merge.node for merge in merges(graph, places) if merge.node.op in MERGED)
    (choice,) = held.choices_of({"merged": merged}, places)
    assert (choice.op, choice.us) == (ATEN, 0.0)
    assert not held.timed


def test_plain_pytorch_is_timed_by_cudnns_first_guess_in_a_thread_that_leaves_it_to_nobody(
    held: Contest, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, bool]] = []

    def time(call: Callable[[], Any]) -> float:
        found.append((torch.backends.cudnn.benchmark, threading.current_thread() is threading.main_thread()))
        return held.time(call)

    monkeypatch.setattr(contest, "graph_time_us", time)
    held.found, held.us = [Candidate("cudnn_conv")], {ATEN: 6.0, "cudnn_conv": 7.0}
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        (choice,) = held.choices()
    assert found == [(False, False), (False, True)]
    assert (choice.op, choice.us, choice.aten_us) == (ATEN, 6.0, 6.0)
