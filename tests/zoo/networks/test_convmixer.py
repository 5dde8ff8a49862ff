"""ConvMixer computes what timm's does, at sizes that patches fill and at others."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn

from zoo import CATALOGUE, ConvMixer_1024_20_KS9_P14
from zoo.networks.convmixer import ConvMixer

NAMES = [name for name, cls in CATALOGUE.items() if issubclass(cls, ConvMixer)]
SHOWN = "ConvMixer_768_32"


class Narrow(ConvMixer, width=8, depth=2, kernel_size=5): ...


@pytest.mark.reference
@pytest.mark.parametrize("size", [42, 61])
@pytest.mark.parametrize("name", [name if name == SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    import timm

    assert_equal(CATALOGUE[name], partial(timm.create_model, name.lower()), size)


@pytest.mark.reference
def test_all_of_timms_are_there() -> None:
    import timm

    assert sorted(name.lower() for name in NAMES) == sorted(timm.list_models(module="convmixer"))


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms() -> None:
    from timm.models.convmixer import ConvMixer as Theirs

    assert_same_initialisation(Narrow(), Theirs(dim=8, depth=2, kernel_size=5, patch_size=7))


def test_a_block_is_a_shortcut_over_places_and_none_over_channels() -> None:
    network = Narrow().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
    block = network.get_submodule("blocks.0")
    assert isinstance(block, nn.Sequential)
    x = torch.randn(2, 8, 6, 6)
    depthwise, gelu, norm = block[0].get_submodule("fn").children()
    mixed = norm(gelu(depthwise(x))) + x
    assert torch.allclose(block(x), block[3](nn.functional.gelu(block[1](mixed))), atol=1e-5)


def test_an_image_smaller_than_a_patch_is_an_error() -> None:
    with torch.device("meta"):
        network = ConvMixer_1024_20_KS9_P14()
    with pytest.raises(ValueError, match="needs images of at least 14x14 pixels, got 13x14"):
        network(torch.empty(1, 3, 13, 14, device="meta"))
