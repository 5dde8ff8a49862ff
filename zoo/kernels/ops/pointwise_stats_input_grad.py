"""The way back through a 1x1 convolution and the activation before it, with the sums that the BatchNorm before that needs."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops import pointwise_stats
from zoo.kernels.ops._activation import SLOPES, affine
from zoo.kernels.ops._arguments import launches, named, of, partly
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import empty_map, units
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops._pointwise_stats import input_kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK = pointwise_stats.PACK


def reference(
    gradient: Tensor,
    weight: Tensor,
    x: Tensor,
    stats: Tensor,
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    act: str = "none",
) -> tuple[Tensor, Tensor]:
    """Compute the gradient before the activation of `pointwise_stats`, and its sums.

    Args:
        gradient: of the output, a map (N, K, H, W).
        weight: (K, C, 1, 1).
        x: the input, a map (N, C, H, W).
        stats: float32 (3, C), the statistics that `x` was normalised by.
        factor: the BatchNorm's weight (C,), or None for ones.
        shift: its bias (C,), or None for zeros.
        act: a name of `SLOPES`.

    Returns:
        The gradient of the normalised map (N, C, H, W) in the dtype of `gradient`; float32 (2, C) with its sums over pixels and those
        of its product with the normalised map: the gradients of bias and weight, and all that the gradient of `x` still needs.
    """
    g, normal = before_activation(gradient, weight, x, stats, factor, shift, act)
    g = g.to(gradient.dtype).to(normal.dtype)
    return g.to(gradient.dtype), torch.stack([g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))])


def before_activation(
    gradient: Tensor, weight: Tensor, x: Tensor, stats: Tensor, factor: Any, shift: Any, act: str
) -> tuple[Tensor, Tensor]:
    """Return the gradient before the activation and the normalised map, in float32 (float64 for float64); arguments as in `reference`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    mean, inverse = (row[:, None, None] for row in stats.to(wide)[:2])
    normal = (x.to(wide) - mean) * inverse
    g = F.conv2d(gradient.to(wide), weight.flatten(1).t()[:, :, None, None].to(wide))
    return SLOPES[act](g, affine(normal, factor, shift)), normal


@of(reference)
def supports(gradient, weight, x, stats, **norm) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not; the weight packed or not."""
    if refused := pointwise_stats.strange(gradient, x):
        return refused
    if gradient.shape[1] != weight.shape[0] or gradient.dtype != weight.dtype:
        return "a gradient of other channels or another type than the weight"
    return pointwise_stats.supports(x, weight, stats, **norm)


@of(reference)
def configs(weight, x, **_) -> list[dict[str, Any]]:
    """Return launch parameters, the best guess first: a tile's pixels, channels and depth, warps, stages, programs, a thread's registers.

    Of the first in half precision two programs fit; the compiler takes registers for one where nobody stops it.
    """
    rows, across, inner = x.numel() // max(1, x.shape[1]), x.shape[1], len(weight)
    if x.element_size() == 2:
        bm, bn, all_of = min(64, rows), min(64, across), triton.next_power_of_2(inner)
        # One step reads all of the weights where they leave room: before GPUs that know bfloat16, 64 KiB.
        deep = all_of if all_of <= (256 if x.dtype == torch.bfloat16 else 128) else 64
        fit = 1 if deep > 128 else 2
        wanted = [(bm, bn, deep, 8, 3, fit, 128), (bm, bn, deep, 8, 2, 2, 128), (bm, min(32, bn), deep, 8, 2, fit + 1, 80)]
        wanted += [(bm, min(128, across), deep, 16, 2, 1, 128), (bm, bn, deep, 8, 3, 1, None), (bm, bn, min(deep, 64), 8, 3, 2, 128)]
    else:
        bm, bn, deep = min(64, rows), min(64, across), min(16, inner)
        wanted = [(bm, bn, deep, 8, 4, 2, None), (bm // 2, bn, deep, 4, 3, 3, None), (bm, bn // 2, deep, 8, 3, 3, None)]
    tiles = ((*(max(16, triton.next_power_of_2(size)) for size in entry[:3]), *entry[3:]) for entry in wanted)
    return named(pointwise_stats.TILE, tiles)


@partly(reference)
def partial_sums(gradient, weight, x, stats, factor, shift, act, out: Tensor, config: dict[str, Any], total: Any = None) -> Tensor:
    """Write the map, with `total` what it is added to; return float32 (R, 2, C), sums of programs' rows. The kernel behind must be ours."""
    rows, cin, cout = x.numel() // x.shape[1], x.shape[1], weight.shape[0]
    (v, cin_units, *steps), (vo, cout_units, g_step) = units(16, x, total, out), units(16, gradient)
    across = triton.cdiv(cin, config["BN"])
    parts = max(1, min(triton.cdiv(rows, config["BM"]), SMS * config["blocks"] // across))
    partials = torch.empty((parts, 2, cin), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        input_kernel[(across, parts)](
            gradient, weight, x, stats, factor, shift, total, out, partials, rows, cin_units, cout_units, g_step, *steps, ACT=act,
            V=v, VO=vo, BM=config["BM"], BN=config["BN"], BK=config["BK"],
            ONCE=cout <= config["BK"], num_warps=config["warps"], num_stages=config["stages"], maxnreg=config["registers"], **overlap(x),
        )  # fmt: skip
    return partials


@launches(reference, configs, tuned=True)
def launch(gradient, x, config, out: tuple[Tensor, Tensor] | None = None, **rest) -> tuple[Tensor, Tensor]:
    """Run the kernels; arguments as in `reference`, but the weight packed (K, C). The map of `out` may be a channel slice."""
    n, cin, h, w = x.shape
    to, sums = out or (empty_map(n, cin, h, w, gradient), torch.empty((2, cin), dtype=torch.float32, device=x.device))
    if x.numel() == 0:
        return to, sums.zero_()
    add(partial_sums(gradient=gradient, x=x, out=to, config=config, **rest), sums)
    return to, sums


@of(reference)
def cost(gradient, weight, x, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); the weight packed or not."""
    moved = gradient.numel() * gradient.element_size() + 2 * x.numel() * x.element_size() + weight.numel() * weight.element_size()
    return 2 * gradient.numel() * x.shape[1], moved + 8 * x.shape[1]


CASES = [case for case in pointwise_stats.CASES if "act" in case]
LARGE_CASES = [case for case in pointwise_stats.LARGE_CASES if case["act"]]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    return {"gradient": pointwise_stats.gradient_of(case, *how), **pointwise_stats.make(case, *how)}
