"""The ops that chains call: on a GPU those of `zoo.kernels.differentiable`, on a CPU PyTorch's functions, of the same numbers.

A function that is named `…_refuses` says, of shapes and dtypes alone, why kernels would not take its arguments.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels import activations
from zoo.kernels.training import shared

Pair = tuple[int, int]
HALF = (torch.bfloat16, torch.float16)
"""Types that tensor cores multiply as they are: products of kernels in float32 would be no faster than PyTorch's."""

WIDER = 2
"""Times the channels that a 1x1 convolution reads: a BatchNorm behind it takes its sums of those where there are so many, or more."""

ACTIVATIONS = {name: None if name == "none" else one.function for name, one in activations.ACTIVATIONS.items() if one.slope is not None}
"""Those with a derivative that kernels know; None leaves a tensor as it is."""


def on_kernels(device: torch.device) -> bool:
    """Tell whether kernels compute what lies there; in a process that only compiles them, nothing lies anywhere."""
    if device.type == "meta" and _triton():
        from zoo.kernels.ops._overlap import assumed

        return assumed()
    return device.type == "cuda" and _triton()


@contextmanager
def tuning(device: torch.device, most: int) -> Iterator[None]:
    """Let kernels try up to `most` launch parameters each in what runs meanwhile; 0 tries none."""
    if not most or not on_kernels(device):
        yield
        return
    from zoo.kernels.ops import _tuned

    with _tuned.tuning(most):
        yield


@lru_cache(maxsize=1)
def _triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
    group: Any = None,
    row: Tensor | None = None,
) -> Tensor:
    """Normalise a map by its own statistics, add a residual, apply an activation; the running statistics are updated as torch's.

    With a group of processes they are the statistics of all their pixels, but for a check, which each process does by itself. A `row`
    holds the map's own, where the convolution that wrote it has taken them.
    """
    group = None if shared.is_alone() else group
    if on_kernels(x.device) or group is not None:
        from zoo.kernels import differentiable as ops

        options: dict[str, Any] = {"momentum": momentum, "eps": eps, "act": act, "group": group, "row": row}
        return ops.batch_norm_act(x, weight, bias, running_mean, running_var, residual, **options)
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


def kept_of(y: Tensor) -> Any:
    """Return what `made_again` makes a map from; None where that is not kept, or PyTorch made it, which doesn't say."""
    if y.grad_fn is None or not _triton():
        return None
    from zoo.kernels import differentiable as ops

    return ops.kept_of(y)


def made_again(kept: Any) -> Tensor:
    """Make a map once more."""
    from zoo.kernels import differentiable as ops

    return ops.made_again(kept)


def conv_norm_act(x: Tensor, kernel: Tensor, *tensors: Tensor, **options: Any) -> Tensor:
    """Convolve with a 1x1 kernel, normalise by the result's statistics, add a residual if there is one, apply an activation."""
    from zoo.kernels import differentiable as ops

    return ops.conv_norm_act(x, kernel, *tensors, **options)


def conv_norm_act_refuses(device: torch.device, x: Tensor, kernel: Tensor, *tensors: Tensor, act: str) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return "PyTorch's functions are as good"
    if len(kernel) < WIDER * x.shape[1]:
        return "no more channels than come in, or hardly more"
    from zoo.kernels.differentiable import widening

    return widening.refused(x, kernel, *tensors, act=act)


def conv_stats(x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convolve with a 1x1 kernel, and take the statistics of the result."""
    from zoo.kernels import differentiable as ops

    return ops.conv_stats(x, kernel)


def conv_stats_refuses(device: torch.device, x: Tensor, kernel: Tensor) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return "PyTorch's convolution is as good"
    from zoo.kernels.ops import pointwise_stats as op

    return op.supports(x, stand_in(tuple(kernel.shape), x.dtype))


def norm_act_conv(
    x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor, kernel: Tensor, *, group: Any = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Normalise a map, apply an activation, convolve with a 1x1 kernel, and take the statistics of the result."""
    from zoo.kernels import differentiable as ops

    group = None if shared.is_alone() else group
    return ops.norm_act_conv(x, weight, bias, running_mean, running_var, kernel, group=group, **options)


def norm_act_conv_refuses(
    device: torch.device, x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, kernel: Tensor, *, act: str
) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return "PyTorch's functions are as good"
    from zoo.kernels.ops import batch_norm_act, pointwise_stats

    marks = stand_in((3, x.shape[1]), torch.float32)
    return batch_norm_act.supports(x, weight, bias, mean, var, act=act) or pointwise_stats.supports(
        x, stand_in(tuple(kernel.shape), x.dtype), marks, weight, bias, act=act
    )


def shortcut_conv(x: Tensor, kernel: Tensor, *, stats: bool) -> tuple[Tensor, ...]:
    """Convolve with a 1x1 kernel, take the statistics of the result, and hand the map on, whose gradient is added to in place."""
    from zoo.kernels.differentiable import shortcut as ops

    return ops.shortcut_conv(x, kernel, stats=stats)


def shortcut_conv_refuses(device: torch.device) -> str:
    """Say why."""
    return "" if on_kernels(device) else "PyTorch's sum is as good"


def dense_block(x: Tensor, *tensors: Tensor, layers: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    """Append to a map what each layer makes of all that is there; also returned are the statistics of the whole.

    Of a layer there are ten tensors: weight, bias, running mean and variance of its first BatchNorm, its 1x1 kernel, the same of its
    second; and `first`, `second` (momentum, eps, act of both), `padding` and `dilation` of the second kernel.
    """
    from zoo.kernels import differentiable as ops

    return ops.dense_block(x, *tensors, layers=ops.dense_layers(layers))


def dense_block_refuses(device: torch.device, x: Tensor, *tensors: Tensor, layers: Sequence[dict[str, Any]]) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device) or x.dtype not in HALF:
        return "PyTorch's functions are as good"
    from zoo.kernels.differentiable import dense as op

    return op.refuses(x, tensors, op.dense_layers(layers))


def depthwise_conv(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """Convolve each channel with its own kernel, which is rounded to the dtype of `x`."""
    if on_kernels(x.device):
        from zoo.kernels import differentiable as ops

        return ops.depthwise_conv(x, weight, stride, padding, dilation)
    return F.conv2d(x, weight.to(x.dtype), None, stride, padding, dilation, x.shape[1])


def depthwise_conv_refuses(
    device: torch.device, x: Tensor, weight: Tensor, out: Tensor, stride: Pair, padding: Pair, dilation: Pair
) -> str:
    """Say why; tensors without data."""
    if weight.shape[1] != 1:
        return "several output channels an input channel"
    if not on_kernels(device):
        return ""
    from zoo.kernels.ops import depthwise, depthwise_input_grad, depthwise_weight_grad

    (top, left), kernel = padding, (weight.shape[2], weight.shape[3])
    taken, read = stand_in(tuple(weight.shape), out.dtype), stand_in(tuple(x.shape), out.dtype)
    return (
        depthwise.supports(read, taken, None, stride=stride, padding=(top, top, left, left), dilation=dilation)
        or depthwise_input_grad.supports(out, taken, size=x.shape[2:], stride=stride, padding=padding, dilation=dilation)
        or depthwise_weight_grad.supports(out, read, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
    )


def conv_bias_act(x: Tensor, weight: Tensor, bias: Tensor, *, act: str, pool: dict[str, Any] | None = None, **window: Any) -> Tensor:
    """Convolve with kernels and a bias, which are rounded to the dtype of `x`, apply an activation, take the largest of each window."""
    if on_kernels(x.device):
        from zoo.kernels.differentiable import convs as ops

        return ops.conv_bias_act(x, weight, bias, act=act, pool=pool, **window)
    y = F.conv2d(x, weight.to(x.dtype), bias.to(x.dtype), **window)
    function = ACTIVATIONS[act]
    y = y if function is None else function(y)
    return y if pool is None else max_pool(y, **pool)


def conv_bias_act_refuses(
    device: torch.device,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    act: str,
    groups: int,
    pool: dict[str, Any] | None = None,
    **window: Pair,
) -> str:
    """Say why; tensors without data."""
    if out.shape[2] * out.shape[3] <= 1:
        return "a pixel an image, which leaves little to gain"
    if not on_kernels(device):
        return ""
    from zoo.kernels.differentiable import convs as ops

    read, taken = stand_in(tuple(x.shape), out.dtype), stand_in(tuple(weight.shape), out.dtype)
    return ops.refused(read, taken, bias, act, {**window, "groups": (groups,)}, pool)


def stem_conv(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype, **options: Any) -> Tensor:
    """Convolve images with kernels, both rounded to a dtype; with a bias, an activation and a max pool where there are such."""
    from zoo.kernels.differentiable import stem as ops

    return ops.stem_conv(x, weight, bias, dtype=dtype, **options)


def stem_conv_refuses(
    device: torch.device, x: Tensor, weight: Tensor, bias: Tensor | None, *, dtype: torch.dtype, pool: dict[str, Any] | None, **options: Any
) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return "PyTorch's convolution is as good"
    if dtype == torch.float32:
        return "TF32 or not is cuDNN's to say"
    from zoo.kernels.differentiable import stem as ops

    return ops.refused(x, weight, bias, dtype=dtype, pool=pool, **options)


def max_pool(x: Tensor, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool) -> Tensor:
    """Take the largest pixel of each window."""
    if on_kernels(x.device):
        from zoo.kernels import differentiable as ops

        return ops.max_pool(x, kernel, stride, padding, ceil_mode)
    return F.max_pool2d(x, kernel, stride, padding, 1, ceil_mode)


def max_pool_refuses(device: torch.device, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, ceil_mode: bool) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return ""
    from zoo.kernels.ops import max_pool as op

    return op.supports(x, kernel=kernel, stride=stride, padding=padding, ceil_mode=ceil_mode)


def avg_pool(x: Tensor, kernel: Pair, ceil_mode: bool) -> Tensor:
    """Average windows that lie side by side."""
    if on_kernels(x.device):
        from zoo.kernels import differentiable as ops

        return ops.avg_pool(x, kernel, ceil_mode)
    return F.avg_pool2d(x, kernel, kernel, 0, ceil_mode)


def avg_pool_refuses(device: torch.device, x: Tensor, out: Tensor, kernel: Pair, ceil_mode: bool) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return ""
    from zoo.kernels.ops import avg_pool_grad, pool

    refused = pool.supports(x, kind="avg", kernel=kernel, stride=kernel, ceil_mode=ceil_mode)
    return refused or avg_pool_grad.supports(out, size=x.shape[2:], kernel=kernel)


def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each image's channels by factors of their own."""
    if on_kernels(x.device):
        from zoo.kernels import differentiable as ops

        return ops.scale_channels(x, gate)
    return x * gate


def scale_channels_refuses(device: torch.device, x: Tensor, gate: Tensor) -> str:
    """Say why; tensors without data."""
    if not on_kernels(device):
        return ""
    from zoo.kernels.ops import scale_channels_grad as op

    return op.supports(x, x, stand_in((gate.shape[0], gate.shape[1]), gate.dtype))


@lru_cache(maxsize=1024)
def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make a tensor without data that has a shape, a dtype and, if it is a map, channels_last memory."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    return x.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else x
