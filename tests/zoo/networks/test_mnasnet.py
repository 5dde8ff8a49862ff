"""MNASNet computes what torchvision's does, at every width."""

from __future__ import annotations

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torchvision import models

from zoo import CATALOGUE, MNASNet0_5, MNASNet1_0, MNASNet1_3

NAMES = [name for name in CATALOGUE if name.startswith("MNASNet")]
SHOWN = "MNASNet0_5"


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("name", [name if name == SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_torchvisions(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], getattr(models, name.lower()), size)


@pytest.mark.reference
def test_all_of_torchvisions_are_there() -> None:
    assert [name.lower() for name in NAMES] == [name for name in models.list_models(module=models) if name.startswith("mnasnet")]


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(MNASNet0_5(), models.mnasnet0_5())


@pytest.mark.reference
def test_torchvision_takes_our_state_dict_for_its_own() -> None:
    ours, theirs = MNASNet0_5(), models.mnasnet0_5()
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.layers[0].weight, ours.layers[0].weight)


def test_dropout_is_before_the_dense_layer() -> None:
    with torch.device("meta"):
        assert [cls(dropout=0.3).classifier[0].p for cls in (MNASNet0_5, MNASNet1_3)] == [0.3, 0.3]
        assert MNASNet0_5().classifier[0].p == 0.2


def test_the_last_convolution_is_never_narrowed() -> None:
    with torch.device("meta"):
        narrow, usual = MNASNet0_5(), MNASNet1_0()
    assert (narrow.layers[0].out_channels, usual.layers[0].out_channels) == (16, 32)
    assert narrow.layers[-3].out_channels == usual.layers[-3].out_channels == 1280
