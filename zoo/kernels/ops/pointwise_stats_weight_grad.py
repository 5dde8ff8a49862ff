"""The weight's gradient of a 1x1 convolution that normalises and activates its input on the way in, as the convolution itself does."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from zoo.kernels.ops import pointwise_stats, pointwise_stats_input_grad
from zoo.kernels.ops._arguments import launches, named, of
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import units
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops._pointwise_stats import weight_kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""The gradient is float32, but normalised inputs are rounded, as the convolution rounds them."""

CASES, LARGE_CASES = pointwise_stats.CASES, pointwise_stats.LARGE_CASES


def reference(
    gradient: Tensor,
    x: Tensor,
    stats: Tensor | None = None,
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    act: str = "none",
) -> Tensor:
    """Compute the gradient of the weight of `pointwise_stats`.

    Args:
        gradient: of the output, a map (N, K, H, W).
        x: the input, a map (N, C, H, W).
        stats: float32 (3, C), the statistics that `x` was normalised by, or None.
        factor: the BatchNorm's weight (C,), or None for ones.
        shift: its bias (C,), or None for zeros.
        act: a name of `SLOPES`.

    Returns:
        float32 (K, C) (float64 for float64), accumulated in the same.
    """
    z = pointwise_stats.normalised(x, stats, factor, shift, act)
    return torch.einsum("nkhw,nchw->kc", gradient.to(z.dtype), z)


@of(reference)
def supports(gradient, x, **norm) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if refused := pointwise_stats.strange(gradient, x):
        return refused
    if gradient.dtype != x.dtype:
        return "maps of several types"
    return pointwise_stats.supports(x, x.new_empty((gradient.shape[1], x.shape[1]), device="meta"), **norm)


@of(reference)
def configs(gradient, x, **_) -> list[dict[str, Any]]:
    """Return launch parameters, the best guess first: a tile's output and input channels, rows at a time, warps, stages, programs."""
    half = x.element_size() == 2
    high, across = (max(16, min(128 if half else 64, triton.next_power_of_2(c))) for c in (gradient.shape[1], x.shape[1]))
    deep = min(64 if half else 32, max(16, triton.next_power_of_2(x.numel() // max(1, x.shape[1]))))
    wanted = [(high, across, deep, 8, 3, 2), (high, across, deep, 4, 3, 2), (high, across, deep, 8, 4, 1)]
    wanted += [(max(16, high // 2), across, deep, 4, 3, 2), (high, max(16, across // 2), deep, 4, 3, 2)]
    wanted += [(max(16, high // 2), max(16, across // 2), deep, 4, 4, 4), (high, across, max(16, deep // 2), 8, 4, 2)]
    # Of 128 x 128 the compiler takes 172 registers a thread where nobody stops it, and spills none of 128, with which two programs fit.
    limit = 128 if half and (high, across) == (128, 128) else None
    return named(pointwise_stats.TILE, [(*wanted[0], limit), *((*entry, None) for entry in wanted)])


@launches(reference, configs, tuned=True)
def launch(gradient, x, stats, factor, shift, act, config, out: Tensor | None = None) -> Tensor:
    """Run the kernels; see `reference`. `out` is contiguous, of any floating dtype."""
    cin, cout, rows = x.shape[1], gradient.shape[1], x.numel() // max(1, x.shape[1])
    out = torch.empty((cout, cin), dtype=torch.float32, device=x.device) if out is None else out
    if x.numel() == 0:
        return out.zero_()
    (v, cin_units, x_step), (vo, cout_units, g_step) = units(16, x), units(16, gradient)
    tiles = triton.cdiv(cout, config["BM"]) * triton.cdiv(cin, config["BN"])
    parts = max(1, min(triton.cdiv(rows, config["BK"]), SMS * config["blocks"] // tiles))
    partials = torch.empty((parts, cout * cin), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        weight_kernel[(tiles, parts)](
            gradient, x, stats, factor, shift, partials, rows, cin_units, cout_units, g_step, x_step, ACT=act, V=v, VO=vo,
            BM=config["BM"], BN=config["BN"], BK=config["BK"], num_warps=config["warps"], num_stages=config["stages"],
            maxnreg=config["registers"], **overlap(x),
        )  # fmt: skip
    return add(partials, out)


@of(reference)
def cost(gradient, x, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    cin, cout = x.shape[1], gradient.shape[1]
    return 2 * gradient.numel() * cin, gradient.numel() * gradient.element_size() + x.numel() * x.element_size() + 4 * cin * cout


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    args = pointwise_stats_input_grad.make(case, *how)
    args.pop("weight")
    return args
