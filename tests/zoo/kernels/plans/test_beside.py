"""Kernels that are compiled beside the reference are the plan's. Listing them leaves the plan's graph as it was."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.kernels.works import SETTING
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.plans import build
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.choose import choose
from zoo.kernels.tuning.tasks import Task


class Noting:
    """Compilers that note what they are asked for."""

    def __init__(self) -> None:
        self.begun: list[Task] = []

    def begin(self, tasks: list[Task]) -> None:
        self.begun = tasks


@pytest.mark.parametrize("name", ["SqueezeNet1_1", "MobileNetV3Small", "DenseNet121"])
def test_what_is_begun_is_what_a_plan_launches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        graph, places = understand(zoo.network(name).eval(), (torch.zeros(1, 3, 64, 64),), {}, SETTING.device, dtype=SETTING.dtype)
    compilers: Any = Noting()
    request: Any = SimpleNamespace(choices=Choices(SETTING.device))
    before = [repr(node) for node in graph.nodes]
    build._begin(compilers, graph, places, SETTING, request)
    assert [repr(node) for node in graph.nodes] == before
    tasks = build._tasks(graph, places, SETTING, choose(graph, places, SETTING, "none", request.choices, compilers))
    assert len(tasks) > 5
    assert [task.key for task in compilers.begun] == [task.key for task in tasks]
    begun = {id(task.node) for task in compilers.begun}
    assert not begun & {id(task.node) for task in tasks}


def test_what_can_not_be_copied_is_compiled_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise TypeError("cannot pickle")

    compilers: Any = Noting()
    monkeypatch.setattr(build, "copied", fails)
    none: Any = None
    build._begin(compilers, none, none, SETTING, none)
    assert not compilers.begun
