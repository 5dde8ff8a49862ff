"""Which steps are timed, and how many candidates each has."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.ops import cudnn_conv, depthwise
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning import choose as choosing
from zoo.kernels.tuning import contest
from zoo.kernels.tuning.binding import blanks
from zoo.kernels.tuning.candidates import candidates
from zoo.kernels.tuning.choices import Choice, Choices
from zoo.kernels.tuning.choose import choose, kernels
from zoo.kernels.tuning.steps import Setting, describe
from zoo.kernels.tuning.tasks import Task

SETTING = Setting(torch.device("cpu"), torch.bfloat16)


class Block(nn.Module):
    """A depthwise convolution whose pixels are gated, and one whose pixels are not."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.first = nn.Conv2d(32, 32, 1)
        self.gated = nn.Sequential(nn.Conv2d(32, 32, 3, 1, 1, groups=32), nn.SiLU())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(32, 8, 1), nn.ReLU(), nn.Conv2d(8, 32, 1))
        self.narrow = nn.Conv2d(32, 32, 1)
        self.free = nn.Sequential(nn.Conv2d(32, 32, 3 if alike else 5, 1, 1 if alike else 2, groups=32), nn.SiLU())
        self.last = nn.Conv2d(32, 16, 1)  # with which another merge is possible

    def forward(self, x: Tensor) -> Tensor:
        x = self.gated(self.first(x))
        return self.last(self.free(self.narrow(x * self.squeeze(x).sigmoid())))


def graph_of(alike: bool) -> tuple[Graph, dict[Node, Place]]:
    return understand(Block(alike).eval(), (torch.zeros(2, 32, 14, 14),), {})


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Choices:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path))
    return Choices(torch.device("cpu"))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Node], Collection[str]]]:
    """What is given to a contest that only says that ATen won."""
    given: list[tuple[dict[str, Node], Collection[str]]] = []

    def tune(
        nodes: dict[str, Node], places: dict[Node, Place], setting: Setting, levels: dict[str, str], *rest: Any
    ) -> Iterator[tuple[str, Choice]]:
        given.append((nodes, {key for key, level in levels.items() if level == "part"}))
        yield from ((key, Choice("aten", {}, 1.0, 1.0, 1, levels[key])) for key in nodes)

    monkeypatch.setattr(choosing, "tune", tune)
    return given


@pytest.mark.parametrize("alike", [False, True])
def test_a_part_of_a_gated_step_has_few_candidates_unless_it_is_a_step_of_its_own_elsewhere(
    alike: bool, choices: Choices, timed: list[tuple[dict[str, Node], Collection[str]]]
) -> None:
    graph, places = graph_of(alike)
    choose(graph, places, SETTING, "quick", choices, Compilers((9, 0)))
    [(nodes, parts)] = timed
    depthwise = {key for key, node in nodes.items() if node.op == "conv" and node.attrs["groups"] > 1}
    assert len(depthwise) == (1 if alike else 2)
    assert len(depthwise & set(parts)) == (0 if alike else 1)
    assert any(node.op == "depthwise_squeeze" for node in nodes.values())


def test_a_part_is_timed_again_where_it_is_a_step_of_its_own(
    choices: Choices, timed: list[tuple[dict[str, Node], Collection[str]]]
) -> None:
    for alike in (False, False, True):
        graph, places = graph_of(alike)
        choose(graph, places, SETTING, "quick", choices, Compilers((9, 0)))
    first, second, third = ({key for key, node in nodes.items() if node.op == "conv"} & set(parts) for nodes, parts in timed)
    [part] = first
    assert not second
    assert not third
    assert part not in timed[1][0]
    assert part in timed[2][0]
    for level in ("part", "quick"):
        choices.put(part, Choice("aten", {}, 1.0, 1.0, 1, level))
        assert (choices.get(part, "quick") is None) == (level == "part")


def test_few_are_fewer() -> None:
    graph, _ = graph_of(False)
    node = next(node for node in graph.steps() if node.op == "conv" and node.attrs["groups"] > 1)
    x = torch.zeros(2, 32, 14, 14).to(memory_format=torch.channels_last).bfloat16()
    counts = [sum(c.op == "depthwise" for c in candidates(node, [x], SETTING, limits)) for limits in contest.LIMITS.values()]
    assert counts[0] == 2 < counts[1] < counts[2]


@pytest.mark.parametrize(
    ("level", "ours", "there"), [("quick", True, False), ("part", True, False), ("full", True, True), ("quick", False, True)]
)
def test_cudnn_competes_for_a_depthwise_convolution_where_nothing_of_ours_does_or_all_is_tried(
    level: str, ours: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_conv, "supports", lambda *args, **options: "")
    if not ours:
        monkeypatch.setattr(depthwise, "supports", lambda *args, **options: "another shape")
    graph, places = graph_of(False)
    both = [node for node in graph.steps() if node.op == "conv" and node.roles == ["x"]]
    assert {node.attrs["groups"] > 1 for node in both} == {False, True}
    for node in both:
        found = {one.op for one in candidates(node, blanks(node, places, SETTING), SETTING, contest.LIMITS[level])}
        assert ("cudnn_conv" in found) == (there or node.attrs["groups"] == 1)


def test_what_was_timed_or_is_not_to_be_is_not_compiled(choices: Choices, timed: list[tuple[dict[str, Node], Collection[str]]]) -> None:
    graph, places = graph_of(False)
    assert kernels(graph, places, SETTING, "none", choices) == []
    before = kernels(graph, places, SETTING, "quick", choices)
    choose(graph, places, SETTING, "quick", choices, Compilers((9, 0)))
    assert {describe(task.node, places, SETTING) for task in before} == timed[0][0].keys()
    assert len(before) > len(timed[0][0]) > 4
    again, places = graph_of(False)
    assert kernels(again, places, SETTING, "quick", choices) == []


def test_what_is_begun_with_is_what_a_contest_compiles(choices: Choices) -> None:
    asked: list[str] = []

    class Listening:
        def compile(self, tasks: list[Task], seconds: float | None, progress: Any) -> set[int]:
            asked.extend(task.key for task in tasks)
            raise KeyboardInterrupt

    graph, places = graph_of(False)
    before = kernels(graph, places, SETTING, "quick", choices)
    compilers: Any = Listening()
    with pytest.raises(KeyboardInterrupt):
        choose(graph, places, SETTING, "quick", choices, compilers)
    assert asked == [task.key for task in before]


class Weighty(nn.Module):
    """A step of each reason to be timed early, behind one that has none: often there, wide, or of many products."""

    def __init__(self) -> None:
        super().__init__()
        self.light = nn.Conv2d(3, 16, 1)
        self.often = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(12))
        self.wide, self.back = nn.Conv2d(16, 512, 1), nn.Conv2d(512, 16, 1)
        self.deep = nn.Conv2d(16, 2048, 1)
        self.products = nn.Conv2d(2048, 2048, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.light(x)
        for layer in self.often:
            x = layer(x).sigmoid()
        x = self.back(self.wide(x).tanh())
        return self.products(self.deep(nn.functional.adaptive_avg_pool2d(x, 5)).sin())


def test_what_a_call_spends_most_time_in_is_timed_first(choices: Choices, timed: list[tuple[dict[str, Node], Collection[str]]]) -> None:
    graph, places = understand(Weighty().eval(), (torch.zeros(8, 3, 64, 64, device="meta"),), {})
    choose(graph, places, SETTING, "quick", choices, Compilers((9, 0)))
    [(nodes, _)] = timed
    convolutions = ["x".join(map(str, node.attrs["weight"].shape)) for node in nodes.values() if node.op == "conv"]
    early, late = convolutions[:4], convolutions[4:]
    assert set(early) == {"16x16x3x3", "512x16x1x1", "16x512x1x1", "2048x2048x3x3"}
    assert set(late) == {"16x3x1x1", "2048x16x1x1"}
