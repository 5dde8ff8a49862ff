"""BatchNorm with what stands beside it, differentiably: the activation and the residual behind it, a 1x1 convolution behind those.

A chain ``conv, BN, act, 1x1, BN, act`` is ``y, row = conv_stats(...)``, ``y, row = norm_act_conv(y, ..., row=row)``,
``batch_norm_act(y, ..., row=row)``: each map is read once forward, and the activated ones are never in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import kept, of_affine, rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import pointwise_stats, pointwise_stats_input_grad, pointwise_stats_weight_grad
from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT
from zoo.kernels.ops._arguments import partly
from zoo.kernels.ops._exchange import added, gathered, joined, row_of
from zoo.kernels.ops._layout import empty_map
from zoo.kernels.ops._norm import apply
from zoo.kernels.ops._norm_grad import back
from zoo.kernels.ops._overlap import kernels_run
from zoo.kernels.ops.batch_norm_act import configs as forward_configs
from zoo.kernels.ops.batch_norm_act import launch, reference, supports, take_statistics
from zoo.kernels.ops.batch_norm_act_grad import configs as back_configs
from zoo.kernels.ops.batch_norm_act_grad import gradients


def _batch_norm_act_back(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight, bias, stats, beside = ctx.saved_tensors
    needed = ctx.needs_input_grad
    of_x, sums, *more = gradients(gradient, rows(x), weight, bias, stats, kept(beside), act=ctx.act, group=ctx.group, of_x=needed[0])
    of_weight, of_bias = of_affine(sums, (weight, bias), needed[1:3])
    of_residual = (more[0] if more else gradient) if needed[5] else None
    return of_x if needed[0] else None, of_weight, of_bias, None, None, of_residual, None, None, None


@node(_batch_norm_act_back)
def _batch_norm_act(
    ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    residual: Tensor | None, options: dict[str, Any], group: Any, row: Tensor | None,
) -> Tensor:  # fmt: skip
    """Normalise by the kernels, under autograd. Running statistics are updated in place."""
    tensors, act = (x, weight, bias, running_mean, running_var, residual), options["act"]
    if kernels_run(x) and not supports(*tensors, **options):
        y, stats = empty_map(*x.shape, like=x), torch.empty((3, x.shape[1]), dtype=torch.float32, device=x.device)
        running = () if running_mean is None or running_var is None else (running_mean, running_var)
        launch(*tensors, **options, group=group, row=row, out=(y, stats, *running))
        if options["training"] and running:
            torch.autograd.graph.increment_version(running)
    else:
        y, stats = _plain(tensors, options, group)
    beside = None if residual is None or act == "none" else y if act in BY_OUTPUT else residual
    ctx.save_for_backward(x, weight, bias, stats, beside)
    ctx.act, ctx.group = act, group if options["training"] else None
    ctx.remake = _again if residual is None else None
    return y


def _plain(tensors: tuple[Any, ...], options: dict[str, Any], group: Any) -> tuple[Tensor, Tensor]:
    """Compute the map and the statistics by the reference, over a group by what it takes for running ones; the running ones move."""
    x, weight, bias, *running, residual = tensors
    if group is None or not options["training"]:
        y, stats, *new = reference(*tensors, **options)
        for old, moved in zip(running, new, strict=False):
            old.copy_(moved)
        return y, stats
    count, mean, squares = joined(gathered(row_of(x), group))
    frozen: dict[str, Any] = {**options, "training": False}
    y, stats, *_ = reference(x, weight, bias, mean, squares / count, residual, **frozen)
    stats[2] = 1 / count
    if running[0] is not None:
        running[0].lerp_(mean.to(running[0].dtype), options["momentum"])
        running[1].lerp_((squares / (count - 1)).to(running[1].dtype), options["momentum"])
    return y, stats


@partly(reference)
def batch_norm_act(
    x, weight, bias, running_mean, running_var, residual, training, group: Any = None, row: Tensor | None = None, **how
) -> Tensor:
    """Compute ``act(batch_norm(x) + residual)``, differentiably; running statistics move in place, as PyTorch's do.

    Args: as in `reference`, on any device and in any memory format, and

        group: processes whose pixels count too, a `torch.distributed` process group; None for this process's alone.
        row: float32 (3, C), where the convolution that wrote `x` has taken its statistics: see `norm_act_conv`.

    Returns:
        The map (N, C, H, W) in channels_last memory, in the dtype of `x`.

    Raises:
        ValueError: there is one value a channel, which has no variance, as PyTorch says.
    """
    if training and group is None and x.shape[0] * x.shape[2] * x.shape[3] == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(x.shape)}")
    options = {**how, "training": training}
    tensors = (rows(x), weight, bias, running_mean, running_var, kept(residual))
    if group is None and not kernels_run(x):
        y, _, *new = reference(*tensors, **options)
        with torch.no_grad():
            for old, moved in zip((running_mean, running_var), new, strict=False):
                assert old is not None
                old.copy_(moved)
        return y
    return _batch_norm_act(*tensors, options, group, row)


def _again(node: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, stats: Tensor, _: Any) -> Tensor:
    """Make a map of `batch_norm_act` without a residual once more."""
    x = rows(x)
    if kernels_run(x):
        y = empty_map(*x.shape, like=x)
        if x.numel():
            apply(x, None, stats, weight, bias, node.act, y, forward_configs(x)[0])
        return y
    mean, inverse = (row[:, None, None] for row in stats[:2])
    factor, shift = (fill if p is None else p.to(stats.dtype)[:, None, None] for p, fill in ((weight, 1.0), (bias, 0.0)))
    return ACTIVATIONS[node.act]((x.to(stats.dtype) - mean) * inverse * factor + shift).to(x.dtype)


def _conv_stats_back(ctx: Any, gradient: Tensor, _: Any) -> tuple[Any, ...]:
    x, weight, bias, kernel, stats = ctx.saved_tensors
    gradient, x, flat = rows(gradient), rows(x), _flat(kernel, x)  # hooks may lay out anew what was saved
    of_x = of_weight = of_bias = of_kernel = None
    if stats is None:
        if ctx.needs_input_grad[0]:
            of_x = F.conv2d(gradient, flat.t()[:, :, None, None])
    elif any(ctx.needs_input_grad[:3]):
        of_z, sums = pointwise_stats_input_grad.launch(gradient, flat, x, stats, weight, bias, act=ctx.act)
        if ctx.needs_input_grad[0]:
            of_x = empty_map(*x.shape, like=x)
            of_all = sums if ctx.group is None else added(sums, ctx.group)
            back(of_z, x, weight, bias, stats, None, "none", of_all, of_x, back_configs(of_z, x)[0])
        of_weight, of_bias = of_affine(sums, (weight, bias), ctx.needs_input_grad[1:3])
    if ctx.needs_input_grad[3]:
        of_kernel = torch.empty(kernel.shape, dtype=kernel.dtype, device=kernel.device)
        pointwise_stats_weight_grad.launch(gradient, x, stats, weight, bias, act=ctx.act, out=of_kernel.view(len(kernel), -1))
    return of_x, of_weight, of_bias, of_kernel, None, None, None


@node(_conv_stats_back)
def _conv_stats(
    ctx: Any, x: Tensor, weight: Any, bias: Any, kernel: Tensor, stats: Tensor | None, act: str, group: Any
) -> tuple[Tensor, Tensor]:
    """A 1x1 convolution, of `act(norm(x))` where there are statistics, and its output's statistics, which have no gradient."""
    y, row = pointwise_stats.launch(x, _flat(kernel, x), stats, weight, bias, act=act)
    ctx.save_for_backward(x, weight, bias, kernel, stats)
    ctx.act, ctx.group = act, group
    ctx.mark_non_differentiable(row)
    return y, row


def _flat(kernel: Tensor, x: Tensor) -> Tensor:
    return kernel.flatten(1).to(x.dtype).contiguous()


def conv_stats(x: Tensor, kernel: Tensor) -> tuple[Tensor, Tensor | None]:
    """Convolve with a 1x1 kernel, differentiably, and take the result's statistics on the way.

    Args:
        x: map (N, C, H, W).
        kernel: (K, C, 1, 1), any floating dtype; it is rounded to that of `x`, and its gradient comes back unrounded.

    Returns:
        The map (N, K, H, W) in the dtype of `x`, and float32 (3, K), its `row` for the BatchNorm behind it; None where no kernel runs.
    """
    x = rows(x)
    if not kernels_run(x) or conv_stats_refused(x, kernel):
        return F.conv2d(x, kernel.to(x.dtype)), None
    return _conv_stats(x, None, None, kernel, None, "none", None)


def conv_stats_refused(x: Tensor, kernel: Tensor, *norm: Tensor | None, act: str = "none") -> str:
    """Return "" where a kernel does this, behind a BatchNorm if there is one, else the reason why not; of shapes and dtypes alone."""
    return pointwise_stats.supports(x, torch.empty(kernel.shape, dtype=x.dtype, device="meta"), *norm, act=act)


def norm_act_conv(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    kernel: Tensor,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    act: str = "none",
    training: bool = True,
    group: Any = None,
    row: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``conv(act(batch_norm(x)))`` for a 1x1 kernel, differentiably; running statistics move in place, as PyTorch's do.

    Args: as in `batch_norm_act`, and

        kernel: (K, C, 1, 1), any floating dtype; it is rounded to that of `x`, and its gradient comes back unrounded.
        row: float32 (3, C), what this function or `conv_stats` has returned with `x`; without one a pass takes the statistics.

    Returns:
        The map (N, K, H, W) in the dtype of `x`, and its own float32 (3, K) for the BatchNorm behind it; None where no kernel runs. Kept
        for the way back is `x`, not what the convolution saw.

    Raises:
        ValueError: there is one value a channel, which has no variance, as PyTorch says.
    """
    x, options = rows(x), {"momentum": momentum, "eps": eps, "act": act, "training": training}
    if not kernels_run(x) or norm_act_conv_refused(x, weight, bias, running_mean, running_var, kernel, act=act, training=training):
        z = batch_norm_act(x, weight, bias, running_mean, running_var, **options, group=group, row=row)
        return F.conv2d(z, kernel.to(x.dtype)), None
    stats = torch.empty((3, x.shape[1]), dtype=torch.float32, device=x.device)
    running = None if running_mean is None or running_var is None else (running_mean, running_var)
    with torch.no_grad():
        moved = {"eps": eps, "momentum": momentum, "training": training}
        take_statistics(x.detach(), stats, running, running or (), **moved, group=group, row=row)
        if running and training:
            torch.autograd.graph.increment_version(running)
    return _conv_stats(x, weight, bias, kernel, stats, act, group if training else None)


def norm_act_conv_refused(
    x: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, kernel: Tensor, *, act: str, training: bool = True
) -> str:
    """Return "" where kernels do this, else the reason why not; of shapes and dtypes alone."""
    refused = supports(x, weight, bias, running_mean, running_var, act=act, training=training)
    return refused or conv_stats_refused(x, kernel, torch.empty((3, x.shape[1]), device="meta"), weight, bias, act=act)
