"""Grouped convolutions: values and gradients are PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.kernels.tensors import learning, noise, off
from zoo import fast, why
from zoo.kernels.differentiable import grouped_conv, grouped_conv_refused

WINDOWS = [(1, 1, 1), (2, 1, 1), (1, 0, 1), (1, 2, 2), (1, 3, 1), ((2, 1), (1, 0), 1)]


@pytest.mark.parametrize(("stride", "padding", "dilation"), WINDOWS, ids=str)
@pytest.mark.parametrize(("channels", "groups"), [(48, 2), (32, 8)])
def test_values_and_gradients_are_torchs(
    channels: int, groups: int, stride: int, padding: int, dilation: int, device: torch.device
) -> None:
    given = noise(2, channels, 7, 6, device=device), noise(channels, channels // groups, 3, 3, seed=1, device=device) * 0.1
    found = []
    for ours in (True, False):
        x, weight = learning(*given)
        if ours:
            y = grouped_conv(x, weight, stride, padding, dilation, groups=groups)
        else:
            y = F.conv2d(x, weight, None, stride, padding, dilation, groups)
        found.append((y, *torch.autograd.grad(y, (x, weight), noise(*y.shape, seed=2, device=device))))
    for mine, theirs in zip(*found, strict=True):
        assert mine.shape == theirs.shape
        assert off(mine, theirs) < 2e-6


def test_a_weight_in_float32_gets_its_gradient_unrounded(device: torch.device) -> None:
    x, weight = learning(noise(1, 48, 4, 5, device=device).bfloat16(), noise(48, 24, 3, 3, device=device))
    y = grouped_conv(x, weight, 1, 1, groups=2)
    of_x, of_weight = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert (y.dtype, of_x.dtype, of_weight.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    expected = torch.nn.grad.conv2d_weight(x.double(), weight.shape, torch.ones_like(y).double(), padding=1, groups=2)
    assert off(of_weight, expected) < 2e-6


def test_only_what_needs_a_gradient_gets_one(device: torch.device) -> None:
    x, weight = noise(1, 48, 4, 5, device=device), noise(48, 24, 3, 3, device=device)
    y = grouped_conv(x, weight.requires_grad_(), 1, 1, groups=2)
    assert torch.autograd.grad(y.sum(), weight)[0].shape == weight.shape
    y = grouped_conv(x.requires_grad_(), weight.detach(), 1, 1, groups=2)
    assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(("channels", "groups", "said"), [(20, 2, "groups of 10"), (32, 1, "no grouped"), (544, 2, "groups of 272")])
def test_widths_that_no_block_has_are_refused_and_left_to_torch(channels: int, groups: int, said: str, device: torch.device) -> None:
    x, weight = noise(1, channels, 4, 4, device=device), noise(channels, channels // groups, 3, 3, device=device)
    window = {"groups": groups, "stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    assert said in grouped_conv_refused(x, weight, window)
    assert off(grouped_conv(x, weight, 1, 1, groups=groups), F.conv2d(x, weight, None, 1, 1, 1, groups)) < 2e-6


@pytest.mark.gpu
def test_a_network_with_groups_trains_on_them() -> None:
    torch.manual_seed(0)
    parts = (nn.Conv2d(3, 96, 3, padding=1), nn.Conv2d(96, 96, 3, 1, 1, groups=4, bias=False), nn.BatchNorm2d(96), nn.ReLU())
    network = nn.Sequential(*parts, nn.Conv2d(96, 96, 3, 2, 1, groups=4, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten()).cuda()
    x = torch.randn(16, 3, 32, 32, device="cuda")
    model = fast(network, train=True, dtype=torch.bfloat16, example=x, progress=False)
    with torch.autocast("cuda", torch.bfloat16):
        model(x).square().mean().backward()
    assert network[1].weight.grad is not None
    assert "grouped conv 3x3" in str(why(model))
