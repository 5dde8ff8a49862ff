"""Grouped convolution, differentiably: ResNeXt's and RegNet's 3x3."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.comparing.precision import uncast
from zoo.kernels.differentiable.maps import Size, around, outline, pair, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import grouped, grouped_weight_grad
from zoo.kernels.ops._arguments import fastest
from zoo.kernels.ops._layout import out_sizes
from zoo.kernels.ops._overlap import kernels_run

Window = dict[str, Any]


def _launched(x: Tensor, weight: Tensor, window: Window) -> Tensor:
    """Convolve with a weight (C, C / groups, KH, KW) in the dtype of `x`."""
    packed = grouped.pack(weight)
    return grouped.launch(x, packed, **window, config=fastest(grouped, x, packed, **window))


def _grouped_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    gradient, x, window = rows(gradient), rows(x), ctx.window
    of_x = of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        grouped_weight_grad.launch(gradient, x, kernel=weight.shape[2:], **window, out=of_weight)
    if ctx.needs_input_grad[0]:
        of_x = _of_map(gradient, weight.to(x.dtype), window, x.shape[2:])
    return of_x, of_weight, None


def _of_map(gradient: Tensor, weight: Tensor, window: Window, size: Any) -> Tensor:
    """Return the gradient of the map that was read: a convolution with the weight turned round, where every pixel was read alike."""
    groups, (stride, padding, dilation) = window["groups"], (window[name] for name in ("stride", "padding", "dilation"))
    reach = [d * (taps - 1) for d, taps in zip(dilation, weight.shape[2:], strict=True)]
    if tuple(stride) == (1, 1) and all(p <= most for p, most in zip(padding, reach, strict=True)):
        turned = weight.unflatten(0, (groups, -1)).transpose(1, 2).flip(3, 4).flatten(0, 1)
        around_it = tuple(most - p for p, most in zip(padding, reach, strict=True))
        return _launched(gradient, turned, {"groups": groups, "stride": (1, 1), "padding": around(around_it), "dilation": dilation})
    rest = [s - ((o - 1) * t - 2 * p + r + 1) for s, o, t, p, r in zip(size, gradient.shape[2:], stride, padding, reach, strict=True)]
    with uncast(gradient.device.type):  # which would round float32 here, as it doesn't on other ways back
        return torch.convolution(gradient, weight, None, [*stride], [*padding], [*dilation], True, rest, groups)


@node(_grouped_back)
def _grouped(ctx: Any, x: Tensor, weight: Tensor, window: Window) -> Tensor:
    ctx.save_for_backward(x, weight)
    ctx.window = window
    return _launched(x, weight.to(x.dtype), {**window, "padding": around(window["padding"])})


def grouped_conv(x: Tensor, weight: Tensor, stride: Size = 1, padding: Size = 0, dilation: Size = 1, *, groups: int) -> Tensor:
    """Convolve groups of channels each with their own kernels, differentiably.

    Args:
        x: map (N, C, H, W).
        weight: kernels (C, C / groups, KH, KW) in any dtype: they are rounded to that of `x`, and their gradient comes back unrounded.
        stride: in pixels, down and right or one for both.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps.
        groups: how many groups the channels fall into.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Kept for the way back are `x` and `weight`.
    """
    window: Window = {"groups": groups, "stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation)}
    x = rows(x)
    if kernels_run(x) and not refused(x, weight, window):
        return _grouped(x, weight, window)
    return F.conv2d(x, weight.to(x.dtype), None, window["stride"], window["padding"], window["dilation"], groups)


def refused(x: Tensor, weight: Tensor, window: Window) -> str:
    """Return "" where the kernels do this, there and back, else the reason why not; of shapes and dtypes alone."""
    taken, shape = torch.empty(weight.shape, dtype=x.dtype, device="meta"), {**window, "padding": around(window["padding"])}
    if reason := grouped.supports(x, taken, None, **shape):
        return reason
    sizes = out_sizes(x, weight.shape[2:], shape["stride"], shape["padding"], shape["dilation"])
    out = outline((*x.shape[:2], *sizes), x.dtype)
    return grouped_weight_grad.supports(out, x, kernel=weight.shape[2:], **window)
