"""A 1x1 convolution at the beginning of a residual block, differentiably: its input's gradient is added where the shortcut's lies.

Autograd adds the gradients of a map that is read twice in a pass of its own, which reads two maps and writes one. Here the shortcut
reads the map as this function hands it on, so that both gradients arrive together, and the product that gives the one adds the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.differentiable.norms import conv_stats_refused
from zoo.kernels.ops import pointwise_stats, pointwise_stats_weight_grad
from zoo.kernels.ops._layout import pixel_stride
from zoo.kernels.ops._overlap import kernels_run


def _shortcut_back(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
    x, kernel = ctx.saved_tensors
    x, gradient, beside = rows(x), gradients[0], gradients[-1]
    if gradient is None:
        return beside, None, None
    gradient, taken, found = rows(gradient), kernel.to(x.dtype), None
    of_x = _added(gradient, taken.flatten(1), beside) if ctx.needs_input_grad[0] else None
    if ctx.needs_input_grad[1]:
        if ctx.stats:
            found = torch.empty(kernel.shape, dtype=kernel.dtype, device=kernel.device)
            pointwise_stats_weight_grad.launch(gradient, x, out=found.view(len(kernel), -1))
        else:
            found = torch.ops.aten.convolution_backward(
                gradient, x, taken, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
            )[1].to(kernel.dtype)
    return of_x, found, None


@node(_shortcut_back)
def _shortcut(ctx: Any, x: Tensor, kernel: Tensor, stats: bool) -> tuple[Tensor, ...]:
    ctx.save_for_backward(x, kernel)
    ctx.stats = stats
    ctx.set_materialize_grads(False)
    if not stats:
        return F.conv2d(x, kernel.to(x.dtype)), x.view_as(x)
    y, row = pointwise_stats.launch(x, kernel.flatten(1).to(x.dtype).contiguous(), act="none")
    ctx.mark_non_differentiable(row)
    return y, row, x.view_as(x)


def _added(gradient: Tensor, kernel: Tensor, beside: Tensor | None) -> Tensor:
    """Return the gradient of a 1x1 convolution's input, added to another one in its memory if it is dense."""
    if beside is None or not _dense(beside) or not _dense(gradient) or beside.dtype != gradient.dtype:
        of_x = F.conv2d(gradient, kernel.t()[:, :, None, None])
        return of_x if beside is None else of_x.add_(beside)
    _pixels(beside).addmm_(_pixels(gradient), kernel)
    return beside


def _dense(x: Tensor) -> bool:
    return pixel_stride(x) == x.shape[1] and x.numel() > 0


def _pixels(x: Tensor) -> Tensor:
    """Return a dense channels_last map as a matrix, a row a pixel."""
    return x.as_strided((x.numel() // x.shape[1], x.shape[1]), (x.shape[1], 1))


def shortcut_conv(x: Tensor, kernel: Tensor, *, stats: bool = False) -> tuple[Tensor, ...]:
    """Convolve with a 1x1 kernel, differentiably, and hand the map on to whoever else reads it.

    The gradient of what is handed on is added to in place. So only somebody may read it who makes that gradient anew, and shows it to
    nobody else; `batch_norm_act` with a residual and an activation does.

    Args:
        x: map (N, C, H, W).
        kernel: (K, C, 1, 1), any floating dtype; it is rounded to that of `x`.
        stats: whether to take the result's statistics too, as `conv_stats` does.

    Returns:
        The map (N, K, H, W) in the dtype of `x`; with `stats` float32 (3, K), its `row` for the BatchNorm behind it, None where no kernel
        runs; and `x`.
    """
    x = rows(x)
    if stats and (not kernels_run(x) or conv_stats_refused(x, kernel)):
        y, again = _shortcut(x, kernel, False)
        return y, None, again  # pyright: ignore[reportReturnType]
    return _shortcut(x, kernel, stats)
