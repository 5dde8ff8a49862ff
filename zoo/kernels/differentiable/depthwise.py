"""Depthwise convolution, differentiably: each channel with its own kernel, and a bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import Size, around, outline, pair, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import bias_act_grad, depthwise, depthwise_input_grad, depthwise_weight_grad
from zoo.kernels.ops._arguments import fastest
from zoo.kernels.ops._depthwise import pack
from zoo.kernels.ops._overlap import kernels_run


def _depthwise_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    gradient, x, size, kernel = rows(gradient), rows(x), x.shape[2:], weight.shape[2:]  # hooks may lay out anew what was saved
    of_x = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_x = depthwise_input_grad.launch(gradient, pack(weight.to(x.dtype)), size=size, **ctx.window)
    if ctx.needs_input_grad[1]:
        of_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        depthwise_weight_grad.launch(gradient, x, kernel=kernel, **ctx.window, out=of_weight[:, 0])
    if ctx.of_bias is not None and ctx.needs_input_grad[2]:
        of_bias = bias_act_grad.launch(gradient, None, act="none")[0].to(ctx.of_bias)
    return of_x, of_weight, of_bias, None


@node(_depthwise_back)
def _depthwise(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, window: dict[str, tuple[int, int]]) -> Tensor:
    ctx.save_for_backward(x, weight)
    ctx.window, ctx.of_bias = window, None if bias is None else bias.dtype
    packed, shape = pack(weight.to(x.dtype)), {**window, "padding": around(window["padding"])}
    shift = None if bias is None else bias.float()
    return depthwise.launch(x, packed, shift, **shape, config=fastest(depthwise, x, packed, shift, **shape))


def depthwise_conv(
    x: Tensor, weight: Tensor, stride: Size = 1, padding: Size = 0, dilation: Size = 1, bias: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its own kernel, differentiably.

    Args:
        x: map (N, C, H, W).
        weight: kernels (C, 1, KH, KW) in any dtype: they are rounded to that of `x`, and their gradient comes back unrounded.
        stride: in pixels, down and right or one for both.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps.
        bias: (C,) in any floating dtype, or None; its gradient comes back unrounded.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Kept for the way back are `x` and `weight`.
    """
    window = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
    x = rows(x)
    if kernels_run(x) and not refused(x, weight, window):
        return _depthwise(x, weight, bias, window)
    return F.conv2d(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype), **window, groups=x.shape[1])


def refused(x: Tensor, weight: Tensor, window: dict[str, tuple[int, int]]) -> str:
    """Return "" where the kernels do this, there and back, else the reason why not; of shapes and dtypes alone."""
    if weight.shape[:2] != (x.shape[1], 1):
        return "several output channels an input channel"
    taken, shape = torch.empty(weight.shape, dtype=x.dtype, device="meta"), {**window, "padding": around(window["padding"])}
    if reason := depthwise.supports(x, taken, None, **shape):
        return reason
    out = outline((*x.shape[:2], *depthwise.out_sizes(x, taken, **shape)), x.dtype)
    return depthwise_input_grad.supports(out, taken, size=x.shape[2:], **window) or depthwise_weight_grad.supports(
        out, x, kernel=weight.shape[2:], **window
    )
