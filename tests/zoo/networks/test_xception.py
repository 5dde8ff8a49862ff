"""Xception computes what timm's legacy_xception does, by the same names."""

from __future__ import annotations

import pytest
import timm
from parity import assert_equal, assert_same_initialisation

from zoo import Xception


@pytest.mark.reference
@pytest.mark.parametrize("size", [71, 96])
def test_logits_and_gradients_equal_timms(size: int) -> None:
    assert_equal(lambda: Xception(dropout=0), lambda: timm.create_model("legacy_xception"), size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms() -> None:
    assert_same_initialisation(Xception(), timm.create_model("legacy_xception"))


def test_dropout_is_before_the_dense_layer() -> None:
    network = Xception(num_classes=2, dropout=0.3)
    assert network.dropout.p == 0.3
    assert Xception(num_classes=2).dropout.p == 0.5
