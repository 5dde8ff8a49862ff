"""Res2Net and Res2NeXt compute what timm's do."""

from __future__ import annotations

from functools import partial

import pytest
import timm
import torch
from parity import assert_equal, assert_same_initialisation

from zoo import CATALOGUE, Res2Net50_26w_4s, Res2Net50D

NAMES = [name for name in CATALOGUE if name.startswith(("Res2Net", "Res2NeXt"))]
SHOWN = ("Res2Net50_26w_4s", "Res2Net50D", "Res2NeXt50")


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
@pytest.mark.parametrize("name", [name if name in SHOWN else pytest.param(name, marks=pytest.mark.long) for name in NAMES])
def test_logits_and_gradients_equal_timms(name: str, size: int) -> None:
    assert_equal(CATALOGUE[name], partial(timm.create_model, name.lower()), size)


@pytest.mark.reference
def test_all_of_timms_are_there() -> None:
    assert sorted(name.lower() for name in NAMES) == sorted(timm.list_models("res2ne*"))


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms_before_the_last_scales_are_zero() -> None:
    assert_same_initialisation(Res2Net50_26w_4s(), timm.create_model("res2net50_26w_4s", zero_init_last=False))


def test_a_split_reads_its_own_channels_and_those_before_it() -> None:
    """Figure 2b: the response of split i has seen splits 1 to i, and the last one is passed on as it came."""
    block = Res2Net50_26w_4s().layer1[1].eval()
    x = torch.randn(1, 256, 6, 6, generator=torch.Generator().manual_seed(0))
    widths = [26, 26, 26, 26]
    caught: list[torch.Tensor] = []
    block.conv3.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    with torch.inference_mode():
        block(x)
        before = block.relu1(block.bn1(block.conv1(x))).split(widths, 1)
    maps = caught[0].split(widths, 1)
    with torch.inference_mode():
        expected = block.bns[0](block.convs[0](before[0])).relu()
        torch.testing.assert_close(maps[0], expected)
        expected = block.bns[1](block.convs[1](before[1] + expected)).relu()
        torch.testing.assert_close(maps[1], expected)
    assert torch.equal(maps[3], before[3])


def test_v1b_has_a_deep_stem() -> None:
    assert Res2Net50D(in_channels=1).get_submodule("conv1.0").weight.shape == (32, 1, 3, 3)
