"""Tiles: together they have the gradient of the whole, wherever a network's layers look at a part of the picture alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import zoo
from tests.zoo.dreaming.dreams import drawn, levels, picture
from zoo import CATALOGUE
from zoo.dreaming import dream
from zoo.dreaming.cutting import Cut, cut
from zoo.dreaming.gradients import Pull
from zoo.dreaming.tiles import Reading, tiles
from zoo.networks.model import Model

LAYERS = {
    "VGG11": "relu3_1",
    "ResNet18": "layer2",
    "GoogLeNet": "inception3a",
    "InceptionV3": "Mixed_5b",
    "DenseNet121": "features.transition1",
    "SqueezeNet1_1": "fire5",
    "MobileNetV2": "stride/8",
    "EfficientNetLite0": "stride/8",
    "ResNet20": "layer2",
}
"""Zero padding; shortcuts; pools that round up; no padding; concatenations; pools that round up; depthwise; TensorFlow's padding."""
EXACT = (
    *("VGG11", "ResNet18", "AlexNet", "SqueezeNet1_0", "DenseNet121", "MobileNetV1", "MobileNetV2", "GoogLeNet", "InceptionV3", "Xception"),
    *("EfficientNetLite0", "RegNetX_200MF", "MNASNet0_5", "InceptionV4", "InceptionResNetV2", "ResNet50V2"),
    *("ConvNeXt_Atto", "EfficientNetV2_S", "MobileNetV4_Conv_Small", "NASNetAMobile"),
)


def pull(network: Cut, core: int | None, guide: Any = None) -> Pull:
    ones = torch.ones(1, 3, 1, 1, dtype=network.dtype)
    return Pull(network, ones, torch.zeros_like(ones), guide, core)


def gradient(network: Cut, x: torch.Tensor, core: int | None, guide: Any = None) -> torch.Tensor:
    return pull(network, core, guide).of_pictures(x, (5, -7), torch.full_like(x, float("nan")))


def apart(whole: torch.Tensor, tiled: torch.Tensor) -> float:
    assert whole.abs().max() > 0
    return float((whole - tiled).abs().max() / whole.abs().max())


@pytest.mark.parametrize("name", LAYERS)
def test_the_gradient_of_tiles_is_that_of_the_whole(name: str) -> None:
    network = cut(drawn(CATALOGUE[name]), LAYERS[name])
    assert network.reading.exact
    x = torch.rand(1, 3, 139, 206) * 255
    whole = gradient(network, x, None)
    plan = pull(network, 40).tiles(139, 206)
    assert len(plan) > 6
    assert apart(whole, gradient(network, x, 40)) < 1e-5


@pytest.mark.parametrize(("name", "layer"), [("GoogLeNet", "inception3a"), ("EfficientNetLite0", "stride/8")])
def test_a_halo_that_is_too_small_is_noticed(name: str, layer: str) -> None:
    network = cut(drawn(CATALOGUE[name]), layer)
    small = replace(network, reading=replace(network.reading, before=4, after=4))
    x = torch.rand(1, 3, 139, 206) * 255
    assert apart(gradient(network, x, None), gradient(small, x, 40)) > 1e-3


@pytest.mark.long
@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_of_tiles_is_that_of_the_whole_for_every_family_that_says_so(name: str) -> None:
    """The first of each family, at stride 8, in double precision."""
    network = cut(drawn(CATALOGUE[name]).double(), "stride/8")
    assert network.reading.exact
    x = torch.rand(1, 3, 304, 341, dtype=torch.float64) * 255
    assert len(pull(network, 64).tiles(304, 341)) > 1
    assert apart(gradient(network, x, None), gradient(network, x, 64)) < 1e-11


def test_with_a_guide_tiles_are_pulled_as_the_whole(network: Model) -> None:
    small = cut(network, "layer2")
    guide = pull(small, None).vectors(torch.rand(1, 3, 30, 20) * 255)
    x = torch.rand(1, 3, 61, 77) * 255
    assert apart(gradient(small, x, None, guide), gradient(small, x, 16, guide)) < 1e-5


def test_several_layers_are_tiled_together(network: Model) -> None:
    both = cut(network, ["layer1", "layer3"])
    x = torch.rand(1, 3, 61, 77) * 255
    assert apart(gradient(both, x, None), gradient(both, x, 16)) < 1e-5


def test_a_network_that_sees_the_whole_picture_says_so_and_its_tiles_are_like_it() -> None:
    model = drawn(zoo.MobileNetV3Small)
    network = cut(model, "stride/8")
    assert not network.reading.exact
    x = torch.rand(1, 3, 192, 160) * 255
    whole, tiled = gradient(network, x, None), gradient(network, x, 96)
    assert torch.isfinite(tiled).all()
    assert float(torch.corrcoef(torch.stack([whole.flatten(), tiled.flatten()]))[0, 1]) > 0.9


def test_attention_and_norms_over_places_are_not_taken_for_local() -> None:
    for cls in (zoo.Swin_T, zoo.PoolFormer_S12, zoo.EfficientNetB0, zoo.ConvNeXtV2_Atto, zoo.ResNetV2_50x1_BiT):
        with torch.device("meta"):
            model: Model = cls().eval()
        model.to_empty(device="cpu")
        assert not cut(model, "stride/16").reading.exact, cls.__name__


def test_a_tiled_dream_is_the_whole_dream(network: Model) -> None:
    image, how = picture(75, 61), {"at": "layer2", "steps": 3, "octaves": 2, "jitter": 8, "progress": False}
    whole, tiled = (levels(dream(network, image, tile=tile, **how)) for tile in (0, 16))
    assert abs(whole - tiled).max() <= 1
    assert (whole != tiled).mean() < 1e-3


def test_every_element_of_a_map_belongs_to_one_tile() -> None:
    for length, core, step, before, after in ((100, 16, 4, 10, 9), (203, 50, 8, 0, 30), (64, 64, 16, 40, 40), (33, 1, 8, 5, 5)):
        plan = tiles(length, length, core, Reading(step, before, after, exact=True))
        rows = sorted({(tile.rows.first, tile.rows.last) for tile in plan})
        assert rows[0][0] == 0
        assert rows[-1][1] == length
        assert all(one[1] == other[0] for one, other in pairwise(rows))
        for row in (tile.rows for tile in plan):
            assert row.start % step == 0
            assert row.start == 0 or row.start <= row.first - before
            assert row.stop == length or row.stop >= row.last + after
