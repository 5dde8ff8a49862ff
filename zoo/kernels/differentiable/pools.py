"""Pooling, differentiably: kept for the way back are a byte an output pixel of a max pool, and nothing of an average."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import Size, outline, pair, pooled_from, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import avg_pool_grad, global_pool, global_pool_grad, max_pool_grad
from zoo.kernels.ops import max_pool as _pool
from zoo.kernels.ops import pool as _windows
from zoo.kernels.ops._overlap import kernels_run

max_pool_refused = _pool.supports


def _max_pool_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    (index,) = ctx.saved_tensors
    return max_pool_grad.launch(rows(gradient), rows(index), **ctx.shape), None


@node(_max_pool_back)
def _max_pool(ctx: Any, x: Tensor, window: dict[str, Any]) -> Tensor:
    y, index = _pool.launch(x, **window)
    ctx.save_for_backward(index)
    ctx.shape = pooled_from(x.shape[2:], window)
    return y


def max_pool(x: Tensor, kernel: Size, stride: Size | None = None, padding: Size = 0, ceil_mode: bool = False) -> Tensor:
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
    x = rows(x)
    window = {"kernel": pair(kernel), "stride": pair(stride or kernel), "padding": pair(padding), "ceil_mode": ceil_mode}
    if kernels_run(x) and not max_pool_refused(x, **window):
        return _max_pool(x, window)
    return F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)  # pyright: ignore[reportArgumentType]


def _avg_pool_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return avg_pool_grad.launch(rows(gradient), **ctx.shape), None, None


@node(_avg_pool_back)
def _avg_pool(ctx: Any, x: Tensor, kernel: tuple[int, int], ceil_mode: bool) -> Tensor:
    ctx.shape = {"size": x.shape[2:], "kernel": kernel}
    return _windows.launch(x, kind="avg", kernel=kernel, stride=kernel, ceil_mode=ceil_mode)


def avg_pool(x: Tensor, kernel: Size, ceil_mode: bool = False) -> Tensor:
    """Average windows that lie side by side, differentiably.

    Args:
        x: map (N, C, H, W).
        kernel: height and width of a window in pixels, or one for both; the stride too.
        ceil_mode: also keep a last window that reaches beyond the image, averaged over what is in it.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`. Nothing is kept for the way back.
    """
    x, window = rows(x), pair(kernel)
    if kernels_run(x) and not avg_pool_refused(x, window, ceil_mode):
        return _avg_pool(x, window, ceil_mode)
    return F.avg_pool2d(x, window, window, ceil_mode=ceil_mode)


def avg_pool_refused(x: Tensor, kernel: tuple[int, int], ceil_mode: bool) -> str:
    """Return "" where the kernels do this, there and back, else the reason why not; of shapes and dtypes alone."""
    sizes = (-(-s // k) if ceil_mode else s // k for s, k in zip(x.shape[2:], kernel, strict=True))
    made = outline((*x.shape[:2], *sizes), x.dtype)
    refused = _windows.supports(x, kind="avg", kernel=kernel, stride=kernel, ceil_mode=ceil_mode)
    return refused or avg_pool_grad.supports(made, size=x.shape[2:], kernel=kernel)


def _mean_back(ctx: Any, gradient: Tensor | None, beside: Tensor | None) -> Tensor | None:
    if gradient is None:
        return beside
    given = gradient.flatten(1).contiguous()
    if beside is None:
        return (given / (ctx.shape[2] * ctx.shape[3]))[:, :, None, None].expand(ctx.shape)
    beside = rows(beside)
    ours = kernels_run(beside) and not global_pool_grad.supports(beside, given)
    return global_pool_grad.launch(beside, given, out=beside) if ours else global_pool_grad.reference(beside, given)


@node(_mean_back)
def _mean(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    ctx.shape = x.shape
    ctx.set_materialize_grads(False)
    ours = kernels_run(x) and not global_pool.supports(x)
    return (global_pool.launch if ours else global_pool.reference)(x), x.view_as(x)


def mean_and_map(x: Tensor, *, keep: bool = True) -> tuple[Tensor, Tensor]:
    """Average the pixels of each channel, differentiably, and hand the map on to whoever else reads it.

    The gradient of what is handed on is added to in place. So only somebody may read it who makes that gradient anew, and shows it to
    nobody else; `scale_channels` does.

    Args:
        x: map (N, C, H, W).
        keep: whether the means are (N, C, 1, 1), else (N, C).

    Returns:
        The means in the dtype of `x`, and a view of `x`, or of its channels_last copy. Nothing is kept for the way back.
    """
    means, again = _mean(rows(x))
    return means if keep else means.flatten(1), again


def mean_and_map_refused(x: Tensor) -> str:
    """Return "" where the kernels do this, there and back, else the reason why not; of shapes and dtypes alone."""
    return global_pool.supports(x) or global_pool_grad.supports(x, x[:, :, 0, 0].contiguous())
