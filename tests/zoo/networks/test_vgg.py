"""VGG computes what torchvision's does."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import CATALOGUE, VGG11, VGG11_BN

SHOWN = ("VGG11", "VGG16_BN")
"""With BatchNorm and without; the others differ in a table alone, whose counts `test_catalogue.py` knows."""
VARIANTS = [f"VGG{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_BN")]


@pytest.mark.reference
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in VARIANTS])
def test_logits_and_gradients_equal_torchvisions(name: str) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower()), size=32)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(VGG11_BN(num_classes=10), models.vgg11_bn(num_classes=10))


def test_dropout_is_the_probability_of_both_hidden_layers() -> None:
    with torch.device("meta"):
        network = VGG11(num_classes=2, dropout=0.1)
    assert [network.classifier[i].p for i in (2, 5)] == [0.1, 0.1]
