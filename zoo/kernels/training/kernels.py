"""The ops that chains call: on a GPU those of `zoo.kernels.ops`, on a CPU PyTorch's functions, of the same numbers.

A function that is named `…_refuses` says, of shapes and dtypes alone, why the kernel would not take its arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "none": None,
    "relu": F.relu,
    "relu6": F.relu6,
    "hardswish": F.hardswish,
    "silu": F.silu,
    "leaky_relu_0.1": lambda x: F.leaky_relu(x, 0.1),
    "leaky_relu_0.01": F.leaky_relu,
}


def on_kernels(device: torch.device) -> bool:
    """Tell whether kernels compute what lies there."""
    return device.type == "cuda"


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
) -> Tensor:
    """Normalise a map by its own statistics, add a residual, apply an activation; the running statistics are updated as torch's."""
    if on_kernels(x.device):
        from zoo.kernels.ops import batch_norm_act as op

        return op.batch_norm_act(x, weight, bias, running_mean, running_var, residual, momentum=momentum, eps=eps, act=act)
    y = F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    y = y if residual is None else y + residual
    function = ACTIVATIONS[act]
    return y if function is None else function(y)


def batch_norm_act_refuses(device: torch.device, x: Tensor, parameters: list[Tensor | None], residual: Tensor | None, act: str) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return ""
    from zoo.kernels.ops import batch_norm_act as op

    return op.supports(x, *parameters, residual, act=act)  # pyright: ignore[reportCallIssue]


def depthwise_conv(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]) -> Tensor:
    """Convolve each channel with its own kernel."""
    return F.conv2d(x, weight, None, stride, padding, dilation, x.shape[1])


def depthwise_conv_refuses(device: torch.device, x: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: tuple[int, int]) -> str:
    """Say why; tensors without data."""
    del device, x, stride, padding
    if weight.shape[1] != 1:
        return "several output channels an input channel"
    return "" if dilation == (1, 1) else "dilated"


def max_pool(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], ceil_mode: bool) -> Tensor:
    """Take the largest pixel of each window."""
    return F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode)


def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each channel by a number of its own."""
    return x * gate


@lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor without data that has a shape, a dtype and, if it is a map, channels_last memory."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
