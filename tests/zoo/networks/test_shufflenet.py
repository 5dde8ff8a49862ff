"""ShuffleNet V2 computes what torchvision's does."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import CATALOGUE, ShuffleNetV2_x0_5
from zoo.networks.shufflenet import ChannelShuffle

SMALLEST, *LARGER = ("ShuffleNetV2_x0_5", "ShuffleNetV2_x1_0", "ShuffleNetV2_x1_5", "ShuffleNetV2_x2_0")
"""The larger ones differ in widths alone, whose counts `test_catalogue.py` knows."""


@pytest.mark.reference
@pytest.mark.parametrize("size", [33, 64])
@pytest.mark.parametrize("name", [SMALLEST, *(pytest.param(name, marks=pytest.mark.long) for name in LARGER)])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower().replace("netv2", "net_v2")), size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(ShuffleNetV2_x0_5(), models.shufflenet_v2_x0_5())


def test_a_shuffle_takes_a_channel_of_each_half_in_turns() -> None:
    channels = torch.arange(6.0).view(1, 6, 1, 1)
    assert ChannelShuffle()(channels).flatten().tolist() == [0, 3, 1, 4, 2, 5]
