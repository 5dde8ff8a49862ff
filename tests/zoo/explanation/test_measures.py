"""`measure`: curves, shuffled weights, boxes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from explained import Bright
from PIL import Image
from torch import Tensor, nn

from zoo.explanation import CannotExplain, explain, measure
from zoo.explanation.measures import BLOCKS, blurred, curve, order, shuffled, spearman
from zoo.networks.model import Model


def photograph(x: int, y: int) -> Image.Image:
    pixels = np.full((256, 256, 3), 60, np.uint8)
    pixels[y - 24 : y + 24, x - 24 : x + 24] = 255
    return Image.fromarray(pixels)


def test_the_method_beats_random_where_the_answer_is_one_bright_patch(bright: Model) -> None:
    bright.fc.weight.data *= 20
    places = [(80, 90), (170, 180), (90, 170)]
    boxes = [[(x - 24, y - 24, x + 24, y + 24)] for x, y in places]
    found = measure(bright, [photograph(*place) for place in places], "gradcam", target=0, boxes=boxes)
    assert found.images == 3
    assert found.pointing == {"method": 1.0, "centre": 0.0}
    assert found.insertion["method"] > found.insertion["random"]
    assert found.deletion["method"] < found.deletion["random"]
    assert found.numbers()["deletion"] == found.deletion
    text = "\n".join(found.lines())
    assert "deletion, lower better" in text
    assert "pointing game" in text
    assert "depends on the weights: " in text


def test_blocks_go_in_the_order_of_the_map(bright: Model) -> None:
    shown = explain(bright, photograph(200, 60), target=0)
    row, column = divmod(int(order(shown, 224, 224)[0]), BLOCKS)
    assert (column + 0.5) / BLOCKS == pytest.approx(((200 - 16) / 224), abs=0.5 / BLOCKS + 0.07)
    assert (row + 0.5) / BLOCKS == pytest.approx(((60 - 16) / 224), abs=0.5 / BLOCKS + 0.07)


def test_a_curve_is_the_area_under_what_is_left() -> None:
    """The probability is the share of blocks that still are bright: both areas are 1/2 whatever the order."""
    image = torch.zeros(1, 64, 64)
    image[:, ::2] = 1

    def sharp(x: Tensor) -> Tensor:
        return (x[:, :, 1:] - x[:, :, :-1]).abs().gt(0.9).float().mean((1, 2, 3))

    deletion, insertion = curve(image, torch.randperm(BLOCKS**2), sharp)
    assert deletion == pytest.approx(0.5, abs=0.06)
    assert insertion == pytest.approx(0.5, abs=0.06)


def test_blur_keeps_flat_images_and_sizes() -> None:
    flat = torch.full((3, 20, 30), 0.7)
    assert torch.allclose(blurred(flat), flat, atol=1e-6)
    noise = torch.randn(3, 32, 32)
    assert blurred(noise).std() < noise.std() / 4


def test_shuffling_leaves_the_network_alone_and_keeps_every_value(small: Model) -> None:
    before = {name: value.clone() for name, value in small.state_dict().items()}
    twin = shuffled(small, ["fc", "conv1"], seed=1)
    assert all(torch.equal(before[name], value) for name, value in small.state_dict().items())
    assert isinstance(twin, nn.Module)
    assert not torch.equal(twin.fc.weight, small.fc.weight)
    assert torch.equal(twin.fc.weight.sort().values.flatten().sort().values, small.fc.weight.flatten().sort().values)
    assert torch.equal(twin.layer1[0].conv1.weight, small.layer1[0].conv1.weight)


def test_a_map_that_knows_no_class_hardly_depends_on_the_classifier(small: Model, images: Tensor) -> None:
    """Eigen-CAM reads no classifier; Grad-CAM does."""
    blind, seeing = measure(small, images, "eigencam"), measure(small, images, "gradcam")
    assert blind.classifier_randomised == pytest.approx(1)
    assert not blind.depends_on_weights
    assert "hardly" in blind.lines()[-1]
    assert seeing.classifier_randomised is not None
    assert seeing.classifier_randomised < 0.9
    assert measure(small, images, "gradcam") == seeing


def test_spearman_by_hand() -> None:
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 90])) == pytest.approx(1)
    assert spearman(np.array([1.0, 2, 3]), np.array([3.0, 2, 1])) == pytest.approx(-1)
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 3, 4])) == pytest.approx(0.9486833)
    assert spearman(np.zeros(3), np.array([1.0, 2, 3])) == 0


def test_what_has_no_probability_is_refused(small: Model, images: Tensor) -> None:
    with pytest.raises(CannotExplain, match="give one target"):
        measure(small, images, target=["cat", "dog"])
    with pytest.raises(CannotExplain, match="which a difference and an embedding have none of"):
        measure(small, images[:1], target=np.ones(64, np.float32))
    with pytest.raises(ValueError, match="2 images and boxes for 1"):
        measure(small, images, "gradcam", boxes=[[(0, 0, 1, 1)]])
    with pytest.raises(CannotExplain, match="no method"):
        measure(Bright(), torch.rand(1, 3, 64, 64), "nothing")
