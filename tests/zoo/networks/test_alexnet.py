"""AlexNet computes what torchvision's does."""

from __future__ import annotations

import pytest
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import AlexNet


@pytest.mark.reference
@pytest.mark.parametrize("size", [63, pytest.param(96, marks=pytest.mark.long)])
def test_logits_and_gradients_equal_torchvisions(size: int) -> None:
    assert_equal(AlexNet, models.alexnet, size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(AlexNet(num_classes=10), models.alexnet(num_classes=10))
