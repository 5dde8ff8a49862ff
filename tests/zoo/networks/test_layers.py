"""Shared blocks compute what the reference libraries' do."""

from __future__ import annotations

import pytest
import torch
from parity import relative
from timm.layers import Conv2dSame as TimmConv2dSame
from torch import nn
from torchvision import ops
from torchvision.models._utils import _make_divisible

from zoo.networks.layers import (
    ACTIVATIONS,
    Conv2dSame,
    MaxPoolSame,
    SqueezeExcitation,
    StochasticDepth,
    activation,
    conv2d,
    divisible,
    imagenet_to_inception,
)


@pytest.mark.reference
@pytest.mark.parametrize("kernel", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_same_padding_equals_timms(kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    ours, theirs = Conv2dSame(2, 3, kernel, stride), TimmConv2dSame(2, 3, kernel, stride)
    theirs.load_state_dict(ours.state_dict())
    for height, width in ((7, 8), (8, 7), (9, 12), (1, 2)):
        images = torch.randn(1, 2, height, width)
        assert ours(images).shape[2:] == (-(-height // stride), -(-width // stride))
        assert torch.equal(ours(images), theirs(images))


def test_same_padding_at_stride_2_puts_the_odd_pixel_right_and_below() -> None:
    # TensorFlow's own numbers for an 8x8 ramp and a 3x3 ramp kernel: 47.4 where symmetric padding gives 13.3
    ramp, kernel = torch.arange(64.0).view(1, 1, 8, 8), torch.arange(9.0).view(1, 1, 3, 3) / 10
    first = []
    for padding in ("same", "symmetric"):
        layer = conv2d(1, 1, 3, stride=2, padding=padding)
        layer.weight = nn.Parameter(kernel)
        first.append(layer(ramp)[0, 0, 0, 0].item())
    assert first == pytest.approx([47.4, 13.3])


def test_even_padding_is_that_of_an_even_size_for_depthwise_convolutions_only() -> None:
    # of a 9x9 ramp SAME pads (1, 1), and (0, 1) is what it pads at 8x8
    ramp, kernel = torch.arange(81.0).view(1, 1, 9, 9).repeat(1, 2, 1, 1), torch.ones(2, 1, 3, 3)
    even = conv2d(2, 2, 3, stride=2, groups=2, padding="even")
    even.weight = nn.Parameter(kernel)
    assert even(ramp).shape[2:] == (4, 4)
    assert even(ramp)[0, :, 0, 0].tolist() == [ramp[0, 0, :3, :3].sum().item()] * 2
    same = conv2d(2, 2, 3, stride=2, groups=2, padding="same")
    same.weight = even.weight
    assert torch.equal(even(ramp[:, :, :8, :8]), same(ramp[:, :, :8, :8]))
    assert type(conv2d(2, 2, 3, stride=2, padding="even")) is Conv2dSame
    assert type(conv2d(2, 2, 3, groups=2, padding="even")) is nn.Conv2d


@pytest.mark.parametrize(("size", "first"), [(7, 8.0), (8, 18.0)])
def test_max_pools_with_same_padding_begin_where_the_padding_allows(size: int, first: float) -> None:
    ramp = torch.arange(float(size * size)).view(1, 1, size, size)
    pooled = MaxPoolSame(2)(ramp)
    assert pooled.shape[2:] == (4, 4)
    assert pooled[0, 0, 0, 0].item() == first  # of pixels up to (1, 1) where one row of padding comes first, else up to (2, 2)
    assert (MaxPoolSame(2)(-1 - ramp) < 0).all()  # padding is never the maximum


def test_same_padding_at_stride_1_is_an_ordinary_convolution() -> None:
    assert type(conv2d(1, 1, 3, padding="same")) is nn.Conv2d
    assert type(conv2d(1, 1, 3, stride=2, padding="same")) is Conv2dSame


@pytest.mark.reference
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9])
def test_stochastic_depth_draws_what_torchvision_draws(p: float) -> None:
    ours, theirs, images = StochasticDepth(p), ops.StochasticDepth(p, "row"), torch.randn(64, 2, 3, 3)
    outputs, states = [], []
    for layer in (ours, theirs):
        torch.manual_seed(1)
        outputs.append(layer(images))
        states.append(torch.get_rng_state())
    assert torch.allclose(*outputs, rtol=1e-6, atol=0)
    assert torch.equal(*states)
    assert torch.equal(ours.eval()(images), images)


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_stochastic_depth_refuses_what_is_no_probability(p: float) -> None:
    with pytest.raises(ValueError, match="0 <= p < 1"):
        StochasticDepth(p)


@pytest.mark.reference
def test_squeeze_excitation_equals_torchvisions() -> None:
    torch.manual_seed(0)
    ours, theirs, images = (
        SqueezeExcitation(8, 2, nn.SiLU(), nn.Hardsigmoid()),
        ops.SqueezeExcitation(8, 2, nn.SiLU, nn.Hardsigmoid),
        torch.randn(2, 8, 5, 5),
    )
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours(images), theirs(images))


@pytest.mark.reference
def test_widths_are_rounded_as_torchvisions() -> None:
    widths = [factor * step for factor in (0.35, 0.5, 0.75, 1.0, 1.1, 1.4) for step in range(1, 2000, 7)]
    assert [divisible(width) for width in widths] == [_make_divisible(width, 8) for width in widths]


def test_inceptions_range_is_that_of_images_normalised_by_a_half() -> None:
    images = torch.rand(2, 3, 4, 4)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    torch.testing.assert_close(imagenet_to_inception((images - mean) / std), images * 2 - 1)


def test_inceptions_range_takes_grey_images_and_more_channels() -> None:
    images = torch.randn(2, 5, 4, 4)
    turned = imagenet_to_inception(images)
    assert torch.equal(turned[:, :3], imagenet_to_inception(images[:, :3]))
    assert torch.equal(turned[:, 3:], imagenet_to_inception(images[:, 3:].repeat(1, 2, 1, 1)[:, :3])[:, :2])
    grey = images[:, :1]
    assert relative(imagenet_to_inception(grey), imagenet_to_inception(grey.expand(-1, 3, -1, -1)).mean(1, keepdim=True)) < 1e-6


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_fresh_modules_and_never_in_place(name: str) -> None:
    assert activation(name) is not activation(name)
    assert not getattr(activation(name), "inplace", False)
