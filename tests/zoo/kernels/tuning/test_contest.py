"""Which candidate wins a step, and how many are timed. Contests run on a CPU; the tests own the times and the clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning import contest
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.steps import ATEN, Candidate, Setting

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
        timed: the candidates that were timed, in this order.
    """

    def __init__(self) -> None:
        self.found, self.us = list[Candidate](), dict[str, float]()
        self.results: dict[str, Callable[[Tensor], Tensor]] = {}
        self.seconds, self.timed, self._called = 0.0, list[Candidate](), Candidate(ATEN)

    def bind(self, node: Node, candidate: Candidate, setting: Setting) -> Any:
        result, plain = self.results.get(candidate.op), bind(node, Candidate(ATEN), setting)
        exact = bind(node, Candidate(ATEN), Setting(CPU, torch.float32))

        def bound(inputs: list[Tensor], out: Tensor | None) -> Any:
            self._called = candidate
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
        nodes: dict[str, Node] = {str(number): node for number in range(steps)}
        around: dict[Node, Place] = places
        compilers: Any = self
        found = contest.tune(nodes, around, Setting(CPU, torch.bfloat16), dict.fromkeys(nodes, level), compilers)
        return [choice for _, choice in found]

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
    for name in ("synchronize", "empty_cache", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(contest, "_room", lambda setting: 1 << 30)
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
