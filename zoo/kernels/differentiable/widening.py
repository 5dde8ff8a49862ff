"""A 1x1 convolution with BatchNorm behind it, differentiably, whose own map is never in memory and is not kept.

It pays where the convolution widens: BatchNorm's sums are then taken of the few channels that come in, both ways. What is kept is the
input, the output, which the next convolution keeps anyway, and matrices of a weight's size. The output can be made again of the few
channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import kept, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.differentiable.norms import batch_norm_act
from zoo.kernels.ops import pointwise_norm, pointwise_norm_grad
from zoo.kernels.ops._layout import empty_map
from zoo.kernels.ops._overlap import kernels_run

_flat = pointwise_norm.PACK["weight"]


def _conv_norm_act_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, kernel, weight, stats, spread, level, y, *how = ctx.saved_tensors
    needed, gradient, x = ctx.needs_input_grad, rows(gradient), rows(x)
    y = _made(ctx, x, weight, *how) if how and ctx.act != "none" else kept(y)
    of_kernel = torch.empty(kernel.shape, dtype=kernel.dtype, device=x.device)
    out = (empty_map(*x.shape, like=x), of_kernel.view(spread.shape), torch.empty_like(stats[:2]))
    out += () if y is None else (empty_map(*gradient.shape, like=gradient),)
    tensors = (gradient, x, _flat(kernel), weight, stats, spread, level, y)
    of_x, _, sums, *more = pointwise_norm_grad.launch(*tensors, act=ctx.act, of_x=needed[0], out=out)
    of_weight, of_bias = (sums[place].to(weight.dtype) if needed[3 - place] else None for place in (1, 0))
    of_residual = (more[0] if more else gradient) if needed[6] else None
    return of_x if needed[0] else None, of_kernel if needed[1] else None, of_weight, of_bias, None, None, of_residual, None, None


@node(_conv_norm_act_back)
def _conv_norm_act(
    ctx: Any, x: Tensor, kernel: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, residual: Any, options: Any, again: bool
) -> Tensor:
    (n, cin, h, w), cout, running = x.shape, len(kernel), (mean, var)
    matrices = [torch.empty(size, dtype=torch.float32, device=x.device) for size in ((3, cout), (cout, cin), (cin,))]
    y = empty_map(n, cout, h, w, x)
    recipe: dict[str, Any] | None = {} if again else None
    pointwise_norm.launch(x, _flat(kernel), weight, bias, *running, residual, **options, out=(y, *matrices, *running), recipe=recipe)
    torch.autograd.graph.increment_version(running)
    ctx.act, ctx.eps, ctx.remake = options["act"], options["eps"], _again if again else None
    how = () if recipe is None else (bias, recipe["packed"], recipe["sums"])
    ctx.config = None if recipe is None else recipe["config"]
    ctx.save_for_backward(x, kernel, weight, *matrices, None if again or ctx.act == "none" else y, *how)
    return y


def _made(node: Any, x: Tensor, weight: Tensor, bias: Tensor, packed: Tensor, sums: Tensor) -> Tensor:
    how = {"eps": node.eps, "act": node.act, "config": node.config}
    return pointwise_norm.once_more(x, factor=weight, shift=bias, packed=packed, sums=sums, **how)


def _again(node: Any, x: Tensor, _: Tensor, weight: Tensor, *saved: Any) -> Tensor:
    """Make the map of a 1x1 convolution with its BatchNorm once more."""
    return _made(node, rows(x), weight, *saved[-3:])


def refused(x: Tensor, kernel: Tensor, *tensors: Any, act: str) -> str:
    """Return "" where kernels do this, else the reason why not; of shapes and dtypes alone, arguments as for `conv_norm_act`."""
    if x.dtype == torch.float16:
        return "float16, in whose range the matrices of the way back don't fit where gradients are small"
    return pointwise_norm.supports(x, kernel, *tensors, act=act)


def conv_norm_act(
    x: Tensor,
    kernel: Tensor,
    weight: Tensor,
    bias: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    residual: Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    act: str = "none",
    again: bool = False,
) -> Tensor:
    """Compute ``act(batch_norm(conv(x)) + residual)`` for a 1x1 kernel, differentiably; running statistics move in place, as PyTorch's do.

    Args: as in `pointwise_norm.reference`, on any device and in any memory format; `kernel` (K, C, 1, 1) of any floating dtype is rounded
        to that of `x`, and its gradient comes back unrounded; and

        again: the output is not kept but made again on the way back, here and by whoever asks `kept_of`; without a residual.

    Returns:
        The map (N, K, H, W) in channels_last memory, in the dtype of `x`.

    Raises:
        ValueError: there is one value a channel, which has no variance, as PyTorch says.
    """
    x, residual = rows(x), None if residual is None else rows(residual)
    if x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {(1, len(kernel), 1, 1)}")
    tensors, options = (weight, bias, running_mean, running_var, residual), {"momentum": momentum, "eps": eps, "act": act}
    if not kernels_run(x) or refused(x, kernel, *tensors, act=act):
        return batch_norm_act(F.conv2d(x, kernel.to(x.dtype)), *tensors, **options)
    return _conv_norm_act(x, kernel, *tensors, options, again and residual is None)
