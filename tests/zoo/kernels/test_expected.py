"""What candidates are compared with: right values, of the first and last images where they are many."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zoo.kernels.passes import understand
from zoo.kernels.passes.graph import Node
from zoo.kernels.tuning import contest, expected
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.contest import random_inputs
from zoo.kernels.tuning.expected import Expected
from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting

SETTING = Setting(torch.device("cpu"), torch.bfloat16)


def step(images: int) -> tuple[Node, list[Tensor]]:
    """A convolution with ReLU of so many images, 8 x 6 x 6, and inputs for it."""
    network = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()).eval()
    graph, places = understand(network, (torch.empty(images, 8, 6, 6),), {}, torch.device("cpu"))
    node = next(node for node in graph.steps() if node.op in COMPUTED)
    return node, random_inputs(node, places, SETTING)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare two images at either end."""
    monkeypatch.setattr(expected, "MOST", 4 * 8 * 6 * 6)


@pytest.mark.parametrize(("images", "few"), [(1, None), (4, None), (5, 2), (64, 2)])
def test_the_first_and_last_images_are_compared_where_they_are_many(little: None, images: int, few: int | None) -> None:
    assert expected._few(*step(images)) == few


@pytest.mark.parametrize("images", [3, 16])
def test_plain_pytorch_is_off_by_its_rounding_alone(little: None, images: int) -> None:
    node, inputs = step(images)
    value = bind(node, Candidate(ATEN), SETTING)(inputs, None)
    (error,) = Expected(node, inputs, SETTING).errors(value)
    assert 0 < error < 8e-3


@pytest.mark.parametrize(("image", "found"), [(0, True), (1, True), (8, False), (14, True), (15, True)])
@pytest.mark.parametrize("wrong", [torch.nan, 9.0])
def test_a_wrong_image_at_either_end_is_found(little: None, image: int, found: bool, wrong: float) -> None:
    node, inputs = step(16)
    value = bind(node, Candidate(ATEN), SETTING)(inputs, None)
    value[image, 3, 2, 2] = wrong
    (error,) = Expected(node, inputs, SETTING).errors(value)
    assert (error > 2e-2) == found


def test_an_input_without_images_has_all_compared(little: None) -> None:
    node, inputs = step(16)
    assert expected._few(node, [*inputs, torch.ones(8)]) is None
    assert expected._few(node, [*inputs, torch.ones(())]) is None


def test_each_of_several_values_has_its_error(monkeypatch: pytest.MonkeyPatch, little: None) -> None:
    node, inputs = step(16)
    value = bind(node, Candidate(ATEN), SETTING)(inputs, None)
    right = Expected(node, inputs, SETTING)
    right._values = (*right._values, *right._values)
    first, second = right.errors((value, 2 * value))
    assert first < 8e-3
    assert second == pytest.approx(1, rel=1e-2)


def test_what_large_maps_would_not_fit_beside_each_other_runs_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [Node("conv", [], {}, (256, 192, 264, 264), torch.bfloat16), Node("conv", [], {}, (256, 8, 4, 4), torch.bfloat16)]
    trials: list[Any] = [SimpleNamespace(number=number) for number in range(10)]
    largest = 2 * 256 * 192 * 264 * 264
    for room, counts in ((3 * largest, [3, 3, 3, 1]), (0, [2] * 5), (100 * largest, [10])):
        monkeypatch.setattr(contest, "_room", lambda setting, room=room: room)
        parts = list(contest._at_once(trials, nodes, SETTING))
        assert [len(part) for part in parts] == counts
        assert [trial for part in parts for trial in part] == trials
