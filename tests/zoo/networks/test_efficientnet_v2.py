"""EfficientNetV2 computes what torchvision's does, and with TensorFlow's padding what timm's does."""

from __future__ import annotations

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from zoo import CATALOGUE, EfficientNetV2_B0, EfficientNetV2_L, EfficientNetV2_S
from zoo.networks.layers import StochasticDepth

PLAIN, NAMES = ("S", "M", "L"), ("B0", "B1", "B2", "B3", "S", "M", "L", "XL")


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("name", [name if name == "S" else pytest.param(name, marks=pytest.mark.long) for name in PLAIN])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[f"EfficientNetV2_{name}"], getattr(models, f"efficientnet_v2_{name.lower()}"), size)


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 65])
@pytest.mark.parametrize("name", [name if name == "B0" else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_tensorflows_padding_equals_timms(name: str, size: int) -> None:
    assert_equal(
        lambda: CATALOGUE[f"EfficientNetV2_{name}"](padding="same", dropout=0, stochastic_depth=0),
        lambda: timm.create_model(f"tf_efficientnetv2_{name.lower()}"),
        size,
        by_order=True,
    )


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(EfficientNetV2_S(), models.efficientnet_v2_s())


def test_a_variants_own_dropout_yields_to_the_argument() -> None:
    with torch.device("meta"):
        assert EfficientNetV2_L(num_classes=2).classifier[0].p == 0.4
        assert EfficientNetV2_L(num_classes=2, dropout=0.0).classifier[0].p == 0.0
        assert {layer.eps for layer in EfficientNetV2_B0().modules() if isinstance(layer, nn.BatchNorm2d)} == {1e-3}


def test_widths_are_rounded_to_the_nearest_multiple_of_8_even_if_that_loses_more_than_a_tenth() -> None:
    with torch.device("meta"):
        network = CATALOGUE["EfficientNetV2_B3"]()
    assert network.features[1][0].block[0][0].out_channels == 16  # 19.2
    assert [len(stage) for stage in network.features[1:7]] == [2, 3, 3, 5, 7, 12]


def test_stochastic_depth_grows_linearly_over_the_blocks_with_a_shortcut() -> None:
    with torch.device("meta"):
        layers = [layer.p for layer in EfficientNetV2_B0().modules() if isinstance(layer, StochasticDepth)]
    assert layers == pytest.approx([0.2 * block / 21 for block in (2, 4, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20)])
    with pytest.raises(ValueError, match="0 <= p < 1"):
        EfficientNetV2_B0(stochastic_depth=20.0)
