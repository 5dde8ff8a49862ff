"""What results are compared with: right values, of the first and last images where they are many, or of all, some at a time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from zoo.kernels.passes.graph import Node
from zoo.kernels.passes.merge import merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place
from zoo.kernels.tuning import expected
from zoo.kernels.tuning.binding import bind
from zoo.kernels.tuning.contest import random_inputs
from zoo.kernels.tuning.expected import Expected
from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting

CPU = torch.device("cpu")
SETTING = Setting(CPU, torch.bfloat16)


def steps(network: nn.Module, images: Tensor) -> list[tuple[Node, dict[Node, Place]]]:
    """Return the steps of a network that kernels compute, merged ones too."""
    graph, places = understand(network.eval(), (images,), {}, CPU)
    return [(node, places) for node in (*graph.steps(), *(merge.node for merge in merges(graph, places))) if node.op in COMPUTED]


def step(images: int) -> tuple[Node, list[Tensor]]:
    """Return a convolution with ReLU of so many images, 8 x 6 x 6, and inputs for it."""
    node, places = steps(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()), torch.empty(images, 8, 6, 6))[0]
    return node, random_inputs(node, places, SETTING)


def plain(node: Node, inputs: list[Tensor]) -> Any:
    return bind(node, Candidate(ATEN), SETTING)(inputs, None)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare four images of 8 x 6 x 6 at a time."""
    monkeypatch.setattr(expected, "MOST", 4 * 8 * 6 * 6)


@pytest.mark.parametrize(("images", "unseen"), [(1, range(0)), (4, range(0)), (5, range(2, 3)), (12, range(2, 10))])
def test_as_many_images_are_compared_as_there_is_room_for_half_at_either_end(little: None, images: int, unseen: range) -> None:
    node, inputs = step(images)
    right, value = Expected(node, inputs, SETTING), plain(node, inputs)
    for image in range(images):
        turned = value.clone()
        turned[image] *= -1
        assert (right.errors(turned)[0] > 0.1) == (image not in unseen)


@pytest.mark.parametrize("images", [3, 5, 16])
def test_plain_pytorch_is_off_by_its_rounding_alone(little: None, images: int) -> None:
    node, inputs = step(images)
    (error,) = Expected(node, inputs, SETTING).errors(plain(node, inputs))
    assert 0 < error < 8e-3


@pytest.mark.parametrize(("image", "found"), [(0, True), (1, True), (8, False), (14, True), (15, True)])
@pytest.mark.parametrize("wrong", [torch.nan, 9.0])
def test_a_wrong_image_at_either_end_is_found_at_once_and_any_among_all(little: None, image: int, found: bool, wrong: float) -> None:
    node, inputs = step(16)
    value = plain(node, inputs)
    right = expected.errors(node, inputs, SETTING, [value])
    value[image, 3, 2, 2] = wrong
    (error,) = Expected(node, inputs, SETTING).errors(value)
    assert (error > 2e-2) == found
    assert expected.errors(node, inputs, SETTING, [value])[0] > 1e-2 > right[0]


def test_errors_of_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    node, inputs = step(16)
    values = [plain(node, inputs), 1.5 * plain(node, inputs)]
    whole = expected.errors(node, inputs, SETTING, values)
    monkeypatch.setattr(expected, "MOST", 3 * 8 * 6 * 6)  # the last part is of one image
    assert expected.errors(node, inputs, SETTING, values) == pytest.approx(whole, rel=1e-4)
    assert whole[1] == pytest.approx(0.5, rel=1e-2)


@pytest.mark.parametrize("name", ["MobileNetV3Small", "MobileNetV1_025", "ResNet18", "SqueezeNet1_1", "SEResNet18"])
def test_every_kind_of_step_has_its_images_first(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "MOST", 1)  # two images
    kinds: dict[str, tuple[Node, dict[Node, Place]]] = {}
    for node, places in steps(zoo.CATALOGUE[name](), torch.empty(6, 3, 64, 64)):
        kinds.setdefault(f"{node.op} {len(node.inputs)}", (node, places))
    assert len(kinds) > 1
    for node, places in kinds.values():
        inputs = random_inputs(node, places, SETTING)
        value, right = plain(node, inputs), Expected(node, inputs, SETTING)
        assert max(right.errors(value)) < 1e-2
        values = value if isinstance(value, tuple) else (value,)
        assert len(right.errors(value)) == len(values)
        for wrong, image in itertools.product(range(len(values)), range(6)):
            sign = torch.ones(6, *[1] * (values[wrong].dim() - 1))
            sign[image] = -1
            turned = tuple(each * sign.to(each.dtype) if number == wrong else each for number, each in enumerate(values))
            assert (right.errors(turned)[wrong] > 0.5) == (image in (0, 5))
        assert max(expected.errors(node, inputs, SETTING, [value])) < 2e-2
