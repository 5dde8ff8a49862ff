"""GhostNet computes what timm's does; the gates' layers alone have other names."""

from __future__ import annotations

from functools import partial

import pytest
import timm
from parity import assert_equal

from zoo import CATALOGUE, GhostNet_100

NAMES = [name for name in CATALOGUE if name.startswith("GhostNet")]
SHOWN = "GhostNet_050"


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("name", [name if name == SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], partial(timm.create_model, name.lower()), size, by_order=True)


@pytest.mark.reference
def test_names_are_timms_but_the_gates() -> None:
    theirs = timm.create_model("ghostnet_100").state_dict()
    ours = {
        name.replace(".se.fc1.", ".se.conv_reduce.").replace(".se.fc2.", ".se.conv_expand."): tensor.shape
        for name, tensor in GhostNet_100().state_dict().items()
    }
    assert ours == {name: tensor.shape for name, tensor in theirs.items()}


@pytest.mark.reference
def test_fresh_parameters_have_timms_deviations() -> None:
    theirs = timm.create_model("ghostnet_050").state_dict()
    ours = CATALOGUE["GhostNet_050"]().state_dict()
    for name, tensor in ours.items():
        if ".se." not in name and tensor.dim() > 1 and tensor.numel() > 10_000:
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.05), name
