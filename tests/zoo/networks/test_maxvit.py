"""MaxViT computes what torchvision's does, at each size that windows and grids divide."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from parity import assert_equal, assert_same_initialisation
from torch import nn
from torchvision import models

from convert.names import COMPUTED, to_ours
from zoo import MaxViT_T
from zoo.extraction.features import pyramid
from zoo.networks.maxvit import MaxViT, PartitionAttention


class Thin(MaxViT, stem_channels=8, widths=(8, 8, 16, 16), depths=(1, 2, 1, 1), head_channels=4, stochastic_depth=0.2): ...


THIN = partial(
    models.MaxVit,
    stem_channels=8,
    partition_size=7,
    block_channels=[8, 8, 16, 16],
    block_layers=[1, 2, 1, 1],
    head_dim=4,
    stochastic_depth_prob=0.2,
)


def theirs(size: int = 224, thin: bool = False) -> nn.Module:
    """Build torchvision's, and leave the buffers out of its state that follow from the window's size, which ours computes."""
    with torch.device("cpu"):
        made = THIN(input_size=(size, size)) if thin else models.maxvit_t(input_size=(size, size))
    for module in made.modules():
        module._non_persistent_buffers_set |= {name for name in module._buffers if name.endswith(COMPUTED)}
    return made


@pytest.mark.reference
@pytest.mark.long  # a thin one is compared always
@pytest.mark.parametrize("size", [224, 448])
def test_logits_and_gradients_equal_torchvisions(size: int) -> None:
    assert_equal(MaxViT_T, partial(theirs, size), size)


@pytest.mark.reference
@pytest.mark.parametrize("size", [224, 448])
def test_a_thin_one_equals_torchvisions_at_two_sizes(size: int) -> None:
    assert_equal(Thin, partial(theirs, size, thin=True), size)


@pytest.mark.reference
def test_fresh_parameters_are_distributed_as_torchvisions() -> None:
    assert_same_initialisation(MaxViT_T(), theirs())


@pytest.mark.reference
def test_branches_are_dropped_as_often_as_in_torchvisions() -> None:
    with torch.device("meta"):
        ours = MaxViT_T()
    expected = [layer.p for name, layer in theirs().named_modules() if name.endswith("window_attention.stochastic_dropout")]
    mine = [layer.p for name, layer in ours.named_modules() if name.endswith("window_attention.stochastic_depth1")]
    assert mine == pytest.approx(expected)


@pytest.mark.reference
def test_a_file_of_torchvisions_loads_in_spite_of_its_buffers() -> None:
    made = models.maxvit_t().state_dict()
    with torch.device("meta"):
        network = MaxViT_T()
    network.load_state_dict(to_ours(made, network.state_dict(), naming="torchvision", family=MaxViT_T), assign=True)


def test_a_pyramid_has_four_maps() -> None:
    with torch.device("meta"):
        taken = pyramid(MaxViT_T().eval())
        maps = list(taken(torch.empty(1, 3, 224, 448, device="meta")).values())
    assert [tuple(x.shape) for x in maps] == [(1, 64 << n, 56 >> n, 112 >> n) for n in range(4)]
    assert list(taken.strides.values()) == [4, 8, 16, 32]


def test_another_size_is_an_error() -> None:
    with torch.device("meta"):
        network = Thin().eval()
    with pytest.raises(ValueError, match="multiples of 224 pixels, got 256x256"):
        network(torch.empty(1, 3, 256, 256, device="meta"))
    with pytest.raises(ValueError, match="a map of 64x64 pixels can't be divided into groups of 7x7"):
        network.forward_body(torch.empty(1, 3, 256, 256, device="meta"))


@pytest.mark.parametrize(("grid", "seen"), [(False, [0, 1, 6]), (True, [0, 2, 12])], ids=["window", "grid"])
def test_a_window_is_of_neighbours_and_a_grid_of_pixels_far_apart(grid: bool, seen: list[int]) -> None:
    attention: Any = PartitionAttention(4, 4, 7, grid, 0.0).eval()
    x = torch.randn(1, 4, 14, 14, requires_grad=True)
    attention(x)[0, :, 0, 0].sum().backward()
    assert x.grad is not None
    rows = x.grad.abs().sum((0, 1, 3)).nonzero().flatten().tolist()
    assert len(rows) == 7
    assert set(seen) <= set(rows)
