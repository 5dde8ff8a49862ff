"""Ops with their gradients, as networks that train call them: kernels where they run, else the references under autograd.

Any device and any memory format is taken; maps come back in channels_last memory. Each function is one node of the autograd graph that
keeps no more than its arguments and what it says; none waits for the device, so a step that calls them can be captured as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zoo.kernels.differentiable.convs import conv_bias_act
from zoo.kernels.differentiable.dense import dense_block, dense_layers
from zoo.kernels.differentiable.norms import batch_norm_act, conv_stats, norm_act_conv
from zoo.kernels.differentiable.shortcut import shortcut_conv
from zoo.kernels.differentiable.stem import stem_conv
from zoo.kernels.ops import (
    avg_pool_grad,
    depthwise,
    depthwise_input_grad,
    depthwise_weight_grad,
    max_pool_grad,
    pointwise,
    scale_channels_grad,
)
from zoo.kernels.ops import (
    cross_entropy as _entropy,
)
from zoo.kernels.ops import (
    max_pool as _pool,
)
from zoo.kernels.ops import (
    pool as _windows,
)
from zoo.kernels.ops._depthwise import pack
from zoo.kernels.ops._layout import pixel_stride
from zoo.kernels.ops._tuned import chosen, tuning
from zoo.kernels.ops.pointwise import kernels_run

__all__ = [
    "avg_pool", "batch_norm_act", "conv_bias_act", "conv_stats", "cross_entropy", "dense_block", "dense_layers", "depthwise_conv",
    "max_pool", "norm_act_conv", "scale_channels", "shortcut_conv", "stem_conv", "tuning",
]  # fmt: skip


def _rows(x: Tensor) -> Tensor:
    """Return a map whose pixels lie in rows, as kernels read it."""
    return x if pixel_stride(x) else x.contiguous(memory_format=torch.channels_last)


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


class _Depthwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, window: dict[str, tuple[int, int]]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight)
        ctx.window = window
        (top, left), stride, dilation = window["padding"], window["stride"], window["dilation"]
        around = (top, top, left, left)
        packed, shape = pack(weight.to(x.dtype)), {"stride": stride, "padding": around, "dilation": dilation}
        config = chosen(
            "depthwise",
            (x, packed, *shape.values()),
            lambda: depthwise.configs(x, packed, None, **shape),
            lambda c: depthwise.launch(x, packed, None, **shape, config=c),
        )
        return depthwise.launch(x, packed, None, **shape, config=config)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        gradient, size, kernel = _rows(gradient), x.shape[2:], weight.shape[2:]
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = depthwise_input_grad.launch(gradient, pack(weight.to(x.dtype)), size=size, **ctx.window)
        if ctx.needs_input_grad[1]:
            of_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
            depthwise_weight_grad.launch(gradient, x, kernel=kernel, **ctx.window, out=of_weight[:, 0])
        return of_x, of_weight, None


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """Convolve each channel with its own kernel, differentiably.

    Args:
        x: map (N, C, H, W).
        weight: kernels (C, 1, KH, KW) in any dtype: they are rounded to that of `x`, and their gradient comes back unrounded.
        stride: in pixels, down and right or one for both.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Kept for the way back are `x` and `weight`.
    """
    window = {"stride": _pair(stride), "padding": _pair(padding), "dilation": _pair(dilation)}
    x = _rows(x)
    if _depthwise_runs(x, weight, window):
        result = _Depthwise.apply(x, weight, window)
        assert isinstance(result, Tensor)
        return result
    return F.conv2d(x, weight.to(x.dtype), None, **window, groups=x.shape[1])


def _depthwise_runs(x: Tensor, weight: Tensor, window: dict[str, tuple[int, int]]) -> bool:
    (top, left), around = window["padding"], {}
    if not kernels_run(x) or weight.shape[:2] != (x.shape[1], 1):
        return False
    around = {"padding": (top, top, left, left), "stride": window["stride"], "dilation": window["dilation"]}
    taken = torch.empty(weight.shape, dtype=x.dtype, device="meta")
    if depthwise.supports(x, taken, None, **around):
        return False
    out = torch.empty((*x.shape[:2], *depthwise.out_sizes(x, taken, **around)), dtype=x.dtype, device="meta").contiguous(
        memory_format=torch.channels_last
    )
    return not (
        depthwise_input_grad.supports(out, taken, size=x.shape[2:], **window)
        or depthwise_weight_grad.supports(out, x, kernel=weight.shape[2:], **window)
    )


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: dict[str, Any]) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, index = _pool.launch(x, **window)
        ctx.save_for_backward(index)
        ctx.shape = {"size": x.shape[2:], **{key: window[key] for key in ("kernel", "stride", "padding")}}
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        return max_pool_grad.launch(_rows(gradient), index, **ctx.shape), None


def max_pool(
    x: Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
) -> Tensor:
    """Pool the maximum of windows, differentiably.

    Args:
        x: map (N, C, H, W).
        kernel: height and width of a window in pixels, or one for both.
        stride: pixels from window to window, down and right or one for both; the kernel's by default.
        padding: pixels above and below, left and right, or one for all; they never win.
        ceil_mode: also keep a last window that reaches beyond the padding.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Kept for the way back is a byte an output pixel.
    """
    x = _rows(x)
    window = {"kernel": _pair(kernel), "stride": _pair(stride or kernel), "padding": _pair(padding), "ceil_mode": ceil_mode}
    if kernels_run(x) and not _pool.supports(x, **window):
        result = _MaxPool.apply(x, window)
        assert isinstance(result, Tensor)
        return result
    return F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)  # pyright: ignore[reportArgumentType]


class _AvgPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int], ceil_mode: bool) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.shape = {"size": x.shape[2:], "kernel": kernel}
        return _windows.launch(x, kind="avg", kernel=kernel, stride=kernel, ceil_mode=ceil_mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return avg_pool_grad.launch(_rows(gradient), **ctx.shape), None, None


def avg_pool(x: Tensor, kernel: int | Sequence[int], ceil_mode: bool = False) -> Tensor:
    """Average windows that lie side by side, differentiably.

    Args:
        x: map (N, C, H, W).
        kernel: height and width of a window in pixels, or one for both; the stride too.
        ceil_mode: also keep a last window that reaches beyond the image, averaged over what is in it.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Nothing is kept for the way back.
    """
    x, window = _rows(x), _pair(kernel)
    sizes = (-(-s // k) if ceil_mode else s // k for s, k in zip(x.shape[2:], window, strict=True))
    made = torch.empty((*x.shape[:2], *sizes), dtype=x.dtype, device="meta").contiguous(memory_format=torch.channels_last)
    refused = _windows.supports(x, kind="avg", kernel=window, stride=window, ceil_mode=ceil_mode)
    if kernels_run(x) and not (refused or avg_pool_grad.supports(made, size=x.shape[2:], kernel=window)):
        result = _AvgPool.apply(x, window, ceil_mode)
        assert isinstance(result, Tensor)
        return result
    return F.avg_pool2d(x, window, window, ceil_mode=ceil_mode)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, gate)
        return pointwise.launch(x, gate=gate)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, gate = ctx.saved_tensors
        of_x, of_gate = scale_channels_grad.launch(_rows(gradient), x, gate)
        return of_x, of_gate.to(gate.dtype)


def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each image's channels by factors of their own, differentiably.

    Args:
        x: map (N, C, H, W).
        gate: (N, C) or (N, C, 1, 1), any floating dtype.

    Returns:
        The map in the dtype of `x`. Kept for the way back are `x` and `gate`, both of whose gradients come from one pass.
    """
    x, factors = _rows(x), gate.flatten(1).contiguous()
    if kernels_run(x) and not scale_channels_grad.supports(x, x, factors):
        result = _Scale.apply(x, factors)
        assert isinstance(result, Tensor)
        return result
    return x * factors[:, :, None, None].to(x.dtype)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss, gradient, share = _entropy.launch(logits, target, smoothing=smoothing)
        ctx.save_for_backward(gradient, share)
        ctx.kind = logits.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Scaled before it is rounded: without the factor of a GradScaler most of it would be below what float16 holds.
        of_sum, share = ctx.saved_tensors
        return torch.mul(of_sum, gradient * share, out=torch.empty_like(of_sum, dtype=ctx.kind)), None, None


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the images that count, differentiably in the logits.

    Args:
        logits: (N, K), any floating dtype.
        target: int64 (N,), a class each, -100 for an image that doesn't count; or (N, K) shares, which PyTorch computes.
        label_smoothing: this share of each label is spread evenly over all classes, 0 to 1.

    Returns:
        A scalar, float32 (float64 for float64). Kept for the way back is the gradient, which the same pass has computed.
    """
    if kernels_run(logits) and not _entropy.supports(logits, target, smoothing=label_smoothing):
        result = _Entropy.apply(logits, target, label_smoothing)
        assert isinstance(result, Tensor)
        return result
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target, label_smoothing=label_smoothing)
