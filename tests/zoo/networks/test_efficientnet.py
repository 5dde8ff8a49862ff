"""EfficientNet computes what torchvision's does, and with TensorFlow's padding what timm's does."""

from __future__ import annotations

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from zoo import CATALOGUE, EfficientNetB0, EfficientNetB7
from zoo.networks.layers import StochasticDepth

SHOWN = (0, 3)
"""The first, and one that is wider and deeper; the others differ in the same two numbers."""


@pytest.mark.reference
@pytest.mark.parametrize("number", [n if n in SHOWN else pytest.param(n, marks=pytest.mark.long) for n in range(8)])
def test_logits_and_gradients_equal_torchvisions(number: int) -> None:
    assert_equal(CATALOGUE[f"EfficientNetB{number}"], getattr(models, f"efficientnet_b{number}"), size=64)


@pytest.mark.reference
@pytest.mark.parametrize(("number", "size"), [(0, 64), (0, 65), pytest.param(5, 64, marks=pytest.mark.long)])
def test_tensorflows_padding_equals_timms(number: int, size: int) -> None:
    assert_equal(
        lambda: CATALOGUE[f"EfficientNetB{number}"](padding="same", norm_eps=1e-3, dropout=0, stochastic_depth=0),
        lambda: timm.create_model(f"tf_efficientnet_b{number}"),
        size,
        by_order=True,
        statistics=number < 5,  # timm has no momentum of 0.01
    )


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(EfficientNetB0(), models.efficientnet_b0())


def test_a_variants_own_dropout_and_eps_yield_to_the_arguments() -> None:
    def settings(network: nn.Module) -> tuple[float, set[float]]:
        return network.classifier[0].p, {layer.eps for layer in network.modules() if isinstance(layer, nn.BatchNorm2d)}

    with torch.device("meta"):
        assert settings(EfficientNetB0(num_classes=2)) == (0.2, {1e-5})
        assert settings(EfficientNetB0(num_classes=2, dropout=0.0, norm_eps=1e-3)) == (0.0, {1e-3})
        assert settings(EfficientNetB7(num_classes=2)) == (0.5, {1e-3})


def test_stochastic_depth_grows_linearly_and_may_be_none() -> None:
    def probabilities(**options: float) -> list[float]:
        with torch.device("meta"):
            network = EfficientNetB0(**options)
        return [layer.p for layer in network.modules() if isinstance(layer, StochasticDepth)]

    assert probabilities() == pytest.approx([0.2 * block / 16 for block in (2, 4, 6, 7, 9, 10, 12, 13, 14)])
    assert set(probabilities(stochastic_depth=0.0)) == {0.0}
    with pytest.raises(ValueError, match="0 <= p < 1"):
        EfficientNetB0(stochastic_depth=20.0)


@pytest.mark.reference
@pytest.mark.parametrize("number", [n if n == 0 else pytest.param(n, marks=pytest.mark.long) for n in range(5)])
def test_lite_networks_equal_timms(number: int) -> None:
    assert_equal(
        lambda: CATALOGUE[f"EfficientNetLite{number}"](dropout=0, stochastic_depth=0),
        lambda: timm.create_model(f"tf_efficientnet_lite{number}"),
        65,
        by_order=True,
    )


def test_of_lite_networks_stem_head_and_ends_are_never_scaled() -> None:
    with torch.device("meta"):
        largest = CATALOGUE["EfficientNetLite4"]()
    assert largest.features[0][0].out_channels == 32
    assert (largest.features[8][0].in_channels, largest.features[8][0].out_channels) == (448, 1280)
    assert [len(stage) for stage in largest.features[1:8]] == [1, 4, 4, 6, 6, 8, 1]
    assert {type(layer).__name__ for layer in largest.modules()}.isdisjoint({"SqueezeExcitation", "SiLU"})
