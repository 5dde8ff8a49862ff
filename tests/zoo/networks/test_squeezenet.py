"""SqueezeNet computes what torchvision's does, partial windows of its pools included."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from zoo import CATALOGUE, SqueezeNet1_0


@pytest.mark.reference
@pytest.mark.parametrize("size", [33, 64])
@pytest.mark.parametrize("name", ["SqueezeNet1_0", "SqueezeNet1_1"])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower()), size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(SqueezeNet1_0(), models.squeezenet1_0())


def test_pools_keep_a_partial_last_window() -> None:
    pools = [layer for layer in SqueezeNet1_0().features if isinstance(layer, nn.MaxPool2d)]
    # conv1 makes 109x109 of 224x224; Caffe's sizes are 54, 27 and 13, ceil-mode pooling's of torchvision's 109 the same
    sizes = [109]
    for pool in pools:
        sizes.append(pool(torch.empty(1, 1, sizes[-1], sizes[-1])).shape[-1])
    assert sizes == [109, 54, 27, 13]
