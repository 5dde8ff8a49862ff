"""The first convolution of a network, with what stands behind it, differentiably: images are packed once, there and back.

The weight is packed at every call, for it changes at every step: it is small. Images that ask for a gradient get PyTorch's. What is
made of three channels is the widest map of a network and the cheapest to make again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import Size, around, kept, outline, pair, pooled_from, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import bias_act_grad, image, max_pool, max_pool_grad, stem, stem_weight_grad
from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT
from zoo.kernels.ops._arguments import fastest
from zoo.kernels.ops._layout import empty_map
from zoo.kernels.ops._overlap import kernels_run

Pair = tuple[int, int]


def _stem_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    packed, output, index, x, weight, *recipe = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad[:3]
    act, stride, padding = (ctx.options[name] for name in ("act", "stride", "padding"))
    gradient, sums = rows(gradient), None
    if act != "none":
        output = _made(ctx, packed, *recipe) if recipe else kept(output)
    at_once = of_weight and not of_x and index is None and act in stem_weight_grad.STEPS
    if not at_once and (of_bias or act != "none"):
        sums, *through = bias_act_grad.launch(gradient, output, act=act)
        gradient = through[0] if through else gradient
    if index is not None and (of_x or of_weight):
        gradient = max_pool_grad.launch(gradient, rows(index), **ctx.pool)
    found_x = found_weight = None
    if of_weight:
        shape, dtype = ctx.of_weight
        found_weight = torch.empty(shape, dtype=dtype, device=gradient.device)
        how: dict[str, Any] = {"kernel": shape[1:], "stride": stride, "out": found_weight.view(*shape[:2], -1)}
        if at_once:
            how |= {"kept": output, "act": act, "biased": of_bias}
            if of_bias:
                sums = torch.empty(shape[0], dtype=torch.float32, device=gradient.device)
                how["out"] = (how["out"], sums)
        stem_weight_grad.launch(gradient, packed, **how)
    if of_x:
        seen = empty_map(*x.shape, like=packed)  # of which only the shape matters
        found_x = torch.ops.aten.convolution_backward(
            gradient, seen, weight.to(packed.dtype), None, stride, padding, [1, 1], False, [0, 0], 1, [True, False, False]
        )[0].to(x.dtype)
    return found_x, found_weight, sums.to(ctx.of_bias) if of_bias and sums is not None else None, None, None, None, None


@node(_stem_back)
def _stem(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, options: dict[str, Any], pool: Any, again: bool
) -> Tensor:
    act, stride, padding = options["act"], options["stride"], around(options["padding"])
    packed = image.launch(x, padding=stem.packing(weight.shape, stride, padding, x.shape)["padding"], dtype=dtype)
    parts = (packed, stem.pack_weight(weight.to(dtype), stride), None if bias is None else bias.float())
    shape: dict[str, Any] = {"stride": stride, "size": stem.map_size(x, weight, stride, padding), "act": act}
    config = fastest(stem, *parts, **shape)
    y = stem.launch(*parts, **shape, config=config)
    index, size = None, y.shape[2:]
    if pool is not None:
        y, index = max_pool.launch(y, **pool)
    of_x = ctx.needs_input_grad[0]  # else neither the images themselves are needed nor the weight
    ctx.save_for_backward(
        packed, y if act != "none" and not again else None, index, x if of_x else None, weight if of_x else None,
        *(parts[1:] if again else ()),
    )  # fmt: skip
    ctx.remake, ctx.launch = _again if again else None, (shape, config)
    ctx.options, ctx.pool = options, None if pool is None else pooled_from(size, pool)
    ctx.of_weight, ctx.of_bias = (weight.shape, weight.dtype), None if bias is None else bias.dtype
    return y


def _made(node: Any, packed: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape, config = node.launch
    return stem.launch(packed, weight, bias, **shape, config=config)


def _again(node: Any, packed: Tensor, *saved: Any) -> Tensor:
    """Make a stem's map once more."""
    return _made(node, packed, *saved[-2:])


def stem_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, act: str = "none", stride: Size = 1, padding: Size = 0,
    dtype: torch.dtype | None = None, pool: dict[str, Any] | None = None, again: bool = False,
) -> Tensor:  # fmt: skip
    """Compute ``max_pool(act(conv(x) + bias))`` of images, differentiably.

    Args:
        x: images (N, C, H, W) of at most four channels, of any floating dtype and in any memory format.
        weight: (K, C, KH, KW) in any floating dtype; it is rounded to `dtype`, and its gradient comes back unrounded.
        bias: (K,) in any floating dtype, or None; its gradient comes back unrounded.
        act: what is applied behind the bias, a name of `SLOPES`; the kernels know those of `BY_OUTPUT`.
        stride: in pixels, down and right or one for both.
        padding: zeros above and below, left and right, in pixels.
        dtype: what images and weight are rounded to; that of `x` by default.
        pool: the window of a max pool behind the activation: `kernel`, `stride`, `padding` and `ceil_mode`; None for none.
        again: the output is not kept but made again on the way back, here and by whoever asks `kept_of`; without a pool.

    Returns:
        The map (N, K, OH, OW) in `dtype`. Kept for the way back are the images, packed four channels to a pixel in `dtype`, and with an
        activation the output, or what it is made again from.
    """
    dtype = dtype or x.dtype
    options = {"act": act, "stride": pair(stride), "padding": pair(padding)}
    if kernels_run(x) and not refused(x, weight, bias, dtype=dtype, **options, pool=pool):
        return _stem(x, weight, bias, dtype, options, pool, again and pool is None)
    taken = None if bias is None else bias.to(dtype)
    y = ACTIVATIONS[act](F.conv2d(x.to(dtype), weight.to(dtype), taken, options["stride"], options["padding"]))
    return y if pool is None else F.max_pool2d(y, pool["kernel"], pool["stride"], pool["padding"], ceil_mode=pool["ceil_mode"])


def refused(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, act: str, stride: Pair, padding: Pair, dtype: torch.dtype, pool: Any = None
) -> str:
    """Return "" where the kernels do this, else the reason why not; of shapes and dtypes alone. Arguments as of `stem_conv`."""
    if act not in BY_OUTPUT:
        return f"activation {act}, whose slope the output doesn't tell"
    if not all(t is None or t.is_floating_point() for t in (x, weight, bias)) or x.dim() != 4 or weight.dim() != 4:
        return "no images and kernels of floating numbers"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "a bias that is not one for each channel"
    read = torch.empty(x.shape, dtype=dtype, device="meta")
    if reason := stem.supports(read, weight, bias, stride=stride, padding=around(padding), act=act):
        return reason
    if reason := image.supports(x, padding=stem.packing(weight.shape, stride, around(padding), x.shape)["padding"], dtype=dtype):
        return reason
    size = stem.map_size(x, weight, stride, around(padding))
    out = outline((x.shape[0], weight.shape[0], *size), dtype)
    if pool is not None and (reason := max_pool.supports(out, **pool)):
        return reason
    return bias_act_grad.supports(out, None if act == "none" else out, act=act)
