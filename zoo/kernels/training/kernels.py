"""The ops that chains call, each differentiable and of the same numbers as PyTorch's functions that it stands for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS = {"none": None, "relu": F.relu, "relu6": F.relu6, "hardswish": F.hardswish, "silu": F.silu}


def batch_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    residual: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
    act: str,
    training: bool = True,
) -> Tensor:
    """Normalise a map, add a residual, and apply an activation; the running statistics are updated as torch updates them."""
    y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
    y = y if residual is None else y + residual
    function = ACTIVATIONS[act]
    return y if function is None else function(y)


def depthwise_conv(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """Convolve each channel with its own kernel."""
    return F.conv2d(x, weight, None, stride, padding, dilation, x.shape[1])


def depthwise_conv_refuses(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    dtype: torch.dtype,
) -> str:
    """Say why a depthwise convolution is none that the kernel does."""
    del x, stride, padding, dtype
    if weight[1] != 1:
        return "several output channels an input channel"
    return "" if dilation == (1, 1) else "dilated"


def max_pool(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], ceil_mode: bool) -> Tensor:
    """Take the largest pixel of each window."""
    return F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode)


def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each channel by a number of its own."""
    return x * gate
