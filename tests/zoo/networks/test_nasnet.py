"""NASNetALarge computes what timm's does; a narrow one too, of timm's class, which has no keyword for the number of cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from timm.models.nasnet import NASNetALarge as Theirs
from torch import nn

from zoo import NASNetALarge, NASNetAMobile
from zoo.networks.nasnet import NASNetA


class Narrow(NASNetA, repeats=6, penultimate=192, stem_channels=8, skip_reduction=True): ...


def theirs(**options: Any) -> nn.Module:
    return Theirs(drop_rate=0.5, **options)


@pytest.mark.reference
@pytest.mark.parametrize("size", [64, 97])
def test_logits_and_gradients_equal_timms(size: int) -> None:
    assert_equal(Narrow, lambda: theirs(num_features=192, stem_size=8), size)


@pytest.mark.reference
@pytest.mark.long
@pytest.mark.parametrize("size", [64, 97])
def test_the_large_ones_logits_and_gradients_equal_timms(size: int) -> None:
    assert_equal(NASNetALarge, theirs, size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_timms() -> None:
    assert_same_initialisation(Narrow(), theirs(num_features=192, stem_size=8))


def test_the_mobile_one_reads_the_reduced_map_beside_its_reduction() -> None:
    with torch.device("meta"):
        network = NASNetAMobile()
    read: dict[str, int] = {}
    network.cell_4.register_forward_pre_hook(lambda _, maps: read.update(beside=maps[1].shape[2]))
    network.reduction_cell_0.register_forward_pre_hook(lambda _, maps: read.update(reduced=maps[0].shape[2]))
    assert network(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    assert read == {"beside": 28, "reduced": 28}


def test_zeros_around_a_map_take_part_in_keras_maxima() -> None:
    pools = [NASNetAMobile(padding=padding).cell_stem_0.comb_iter_1_left for padding in ("same", "zero")]
    same, zero = (pool(torch.full((1, 1, 4, 4), -1.0)) for pool in pools)
    assert same.tolist() == [[[[-1, -1], [-1, -1]]]]
    assert zero.tolist() == [[[[-1, 0], [0, 0]]]]


def test_another_padding_is_an_error() -> None:
    with pytest.raises(ValueError, match='padding is "same"'):
        NASNetAMobile(padding="symmetric")
