"""Convolutions with their bias, activation and max pool, differentiably: nothing is kept that eager PyTorch wouldn't keep.

The bias is added and the activation applied where the convolution writes, or in one pass over it. Back, one pass gives the gradient before
the activation and the bias's; behind a max pool it runs over the pooled map, for a window's winner is positive where the pooled pixel is.
The weight's gradient comes before the map's, so that what was read, if it was made again, is gone when that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.comparing.precision import uncast
from zoo.kernels.differentiable.maps import Size, around, kept, outline, pair, pooled_from, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import bias_act_grad, cudnn_conv, max_pool, max_pool_grad, pointwise
from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT
from zoo.kernels.ops._overlap import kernels_run
from zoo.kernels.ops._tuned import chosen


def _ways(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, groups: int) -> list[dict[str, Any]]:
    """Return the ways to convolve, the best guess first; cuDNN has ReLU alone."""
    fused = act == "relu" and torch.backends.cudnn.enabled and not cudnn_conv.supports(x, weight, bias, act=act, groups=groups)
    if not fused or torch.version.cuda is None:
        return [{"fused": False}]
    return [{"fused": groups == 1}, {"fused": groups != 1}]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, window: dict[str, Any], config: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Return the output, and what its activation's slope is told by: the output itself or the convolution without its bias."""
    stride, padding, dilation, groups = ([*window[name]] for name in ("stride", "padding", "dilation", "groups"))
    if config["fused"]:  # under the caller's flags: whether cuDNN times its kernels, and rounds to TF32
        y = torch.cudnn_convolution_relu(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups[0])
        return y, y
    z = rows(torch.convolution(x, weight, None, stride, padding, dilation, False, [0, 0], groups[0]))
    y = pointwise.launch(z, shift=None if bias is None else bias.float(), act=act, out=z if act in BY_OUTPUT else None)
    return y, y if act in BY_OUTPUT else z


def _conv_bias_act_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *read, weight, bias, told = ctx.saved_tensors
    gradient, of_b = _through(ctx, gradient, told, bias, ctx.needs_input_grad[2])
    return *_of_both(ctx, gradient, read, weight), of_b, None, None


@node(_conv_bias_act_back)
def _conv_bias_act(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: str, window: dict[str, Any]) -> Tensor:
    y, told = _made(x, weight, bias, act, window)
    read = x if ctx.needs_input_grad[1] else None
    ctx.save_for_backward(read, weight, None if act in BY_OUTPUT else bias, told if act != "none" else None)
    ctx.act, ctx.window, ctx.size, ctx.of_bias = act, window, x.shape[2:], None if bias is None else bias.dtype
    return y


def _convolved_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    *read, weight = ctx.saved_tensors
    return *_of_both(ctx, gradient, read, weight), None, None, None


@node(_convolved_back)
def _convolved(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, act: str, window: dict[str, Any]) -> Tensor:
    """A convolution with bias and activation that nobody but `_pooled` reads: what comes back is the gradient before both."""
    ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
    ctx.window, ctx.size = window, x.shape[2:]
    return _made(x, weight, bias, act, window)[0]


def _pooled_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    pooled, index = ctx.saved_tensors
    of_map, of_bias = ctx.needs_input_grad[:2]
    gradient, of_b = _through(ctx, gradient, pooled, None, of_bias)
    return max_pool_grad.launch(gradient, rows(index), **ctx.pool) if of_map else None, of_b, None, None


@node(_pooled_back)
def _pooled(ctx: Any, convolved: Tensor, bias: Tensor | None, act: str, pool: dict[str, Any]) -> Tensor:
    """The max pool behind `_convolved`, a node of its own: what it keeps is gone before the convolution's gradients need room."""
    y, index = max_pool.launch(rows(convolved), **pool)
    ctx.save_for_backward(y if act != "none" else None, index)
    ctx.act, ctx.of_bias = act, None if bias is None else bias.dtype
    ctx.pool = pooled_from(convolved.shape[2:], pool)
    return y


def _through(ctx: Any, gradient: Tensor, told: Tensor | None, bias: Tensor | None, of_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Return the gradient before the activation, told by what was kept, and the bias's where it is needed."""
    gradient, sums = rows(gradient), None
    if of_bias or ctx.act != "none":
        sums, *through = bias_act_grad.launch(gradient, kept(told), None if ctx.act in BY_OUTPUT else bias, act=ctx.act)
        gradient = through[0] if through else gradient
    return gradient, sums.to(ctx.of_bias) if ctx.of_bias is not None and of_bias and sums is not None else None


def _of_both(ctx: Any, gradient: Tensor, read: list[Any], weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of a convolution's map and weight; `read` alone holds that map, which is let go before its gradient is made."""
    of_weight = None
    if ctx.needs_input_grad[1]:
        shape, groups = ([*ctx.window[name]] for name in ("stride", "padding", "dilation")), ctx.window["groups"][0]
        how = (None, *shape, False, [0, 0], groups, [False, True, False])
        of_weight = torch.ops.aten.convolution_backward(gradient, read[0], weight, *how)[1]
    read.clear()
    return _of_map(gradient, weight, ctx.window, ctx.size) if ctx.needs_input_grad[0] else None, of_weight


def _made(x: Tensor, weight: Tensor, bias: Tensor | None, act: str, window: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Run `_forward` in the way that was chosen."""
    config = chosen(
        "conv_bias_act", (x, weight, act, *window.values()), lambda: _ways(x, weight, bias, act, window["groups"][0]),
        lambda c: _forward(x, weight, bias, act, window, c),
    )  # fmt: skip
    return _forward(x, weight, bias, act, window, config)


def _of_map(gradient: Tensor, weight: Tensor, window: dict[str, Any], size: Sequence[int]) -> Tensor:
    """Return the gradient of a convolution's map of `size`, for which that map itself is not needed: a transposed convolution."""
    stride, padding, dilation = ([*window[name]] for name in ("stride", "padding", "dilation"))
    reach = zip(size, gradient.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    rest = [whole - ((out - 1) * s - 2 * p + d * (taps - 1) + 1) for whole, out, taps, s, p, d in reach]
    with uncast(gradient.device.type):  # which would round float32 here, as it doesn't on other ways back
        return torch.convolution(gradient, weight, None, stride, padding, dilation, True, rest, window["groups"][0])


def conv_bias_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, act: str = "none", stride: Size = 1, padding: Size = 0, dilation: Size = 1,
    groups: int = 1, pool: dict[str, Any] | None = None,
) -> Tensor:  # fmt: skip
    """Compute ``max_pool(act(conv(x) + bias))``, differentiably.

    Args:
        x: map (N, C, H, W).
        weight: (K, C / groups, KH, KW) in any floating dtype: it is rounded to that of `x`.
        bias: (K,) in any floating dtype, or None; its gradient comes back unrounded.
        act: what is applied behind the bias, a name of `SLOPES`.
        stride: in pixels, down and right or one for both.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps.
        groups: channel groups.
        pool: the window of a max pool behind the activation, as `max_pool` takes it: `kernel`, `stride`, `padding` and `ceil_mode`; None
            for none. The activation must be one of `BY_OUTPUT`.

    Returns:
        The map (N, K, OH, OW) in the dtype of `x`. Kept for the way back are `x`, the rounded `weight`, and what the activation's slope
        is told by: the output, or for `hardswish` and `silu` the convolution. With a pool it is the pooled map and a byte for each of
        its pixels, and the map in between is not kept.
    """
    weight = weight.to(x.dtype)
    window = {"stride": pair(stride), "padding": pair(padding), "dilation": pair(dilation), "groups": (groups,)}
    if kernels_run(x) and not refused(x, weight, bias, act, window, pool):
        x = x.contiguous(memory_format=torch.channels_last)
        if pool is None:
            return _conv_bias_act(x, weight, bias, act, window)
        return _pooled(_convolved(x, weight, None if bias is None else bias.detach(), act, window), bias, act, pool)
    y = F.conv2d(x, weight, None if bias is None else bias.to(x.dtype), stride, padding, dilation, groups)  # pyright: ignore[reportArgumentType]
    y = ACTIVATIONS[act](y)
    return y if pool is None else F.max_pool2d(y, pool["kernel"], pool["stride"], pool["padding"], ceil_mode=pool["ceil_mode"])


def refused(
    x: Tensor, weight: Tensor, bias: Tensor | None, act: str, window: dict[str, Any], pool: dict[str, Any] | None = None
) -> str:  # fmt: skip
    """Return "" where kernels do this, else the reason why not; of shapes and dtypes alone.

    Arguments as of `conv_bias_act`, but the weight is in the dtype of `x`, and `window` holds `stride`, `padding`, `dilation` and `groups`,
    a tuple each.
    """
    if x.dim() != 4 or weight.dim() != 4 or weight.dtype != x.dtype:
        return "maps and weights that don't fit each other"
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_floating_point()):
        return "a bias that is not one for each channel"
    if bias is None and act == "none":
        return "a convolution alone"
    oh, ow = cudnn_conv.sizes(x, weight, {**window, "padding": around(window["padding"])})
    if oh < 1 or ow < 1:
        return "a window larger than the image"
    out = outline((x.shape[0], weight.shape[0], oh, ow), x.dtype)
    if pool is not None:
        if act not in BY_OUTPUT:
            return f"a pool behind {act}, whose slope the pooled map doesn't tell"
        if reason := max_pool.supports(out, **pool):
            return reason
    slope = None if bias is None or act in BY_OUTPUT else torch.empty(weight.shape[0], dtype=bias.dtype, device="meta")
    return bias_act_grad.supports(out, None if act == "none" else out, slope, act=act)
