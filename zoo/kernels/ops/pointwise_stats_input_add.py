"""The way back through a 1x1 convolution and the BatchNorm before it, into a map where the gradients of many such layers add up.

BatchNorm's gradient is that of its output times a factor a channel, less a share of two sums: a level, and a tilt times x. Where many
BatchNorms read the same channels, as in a DenseNet's block, the first part alone is added while it is computed, and what of level and
tilt is owed adds up beside it, two floats a channel, until somebody needs the gradient. So no layer reads its map a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.ops import pointwise_stats, pointwise_stats_input_grad
from zoo.kernels.ops._activation import affine
from zoo.kernels.ops._arguments import Drawing, launches, of, partly
from zoo.kernels.ops._layout import DTYPES, empty_map, pixel_stride, reachable
from zoo.kernels.ops._norm_grad import add

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK = pointwise_stats.PACK


def reference(
    gradient: Tensor,
    weight: Tensor,
    x: Tensor,
    stats: Tensor,
    total: Tensor,
    factor: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    act: str = "none",
) -> tuple[Tensor, Tensor]:
    """Add what needs no sums of the gradient of `pointwise_stats`' input to a map, and take the sums.

    Args:
        gradient: of the output, a map (N, K, H, W).
        weight: (K, C, 1, 1).
        x: the input, a map (N, C, H, W), maybe a channel slice.
        stats: float32 (3, C), the statistics that `x` was normalised by.
        total: map of the shape of `x`, maybe a channel slice: what is there already.
        factor: the BatchNorm's weight (C,), or None for ones.
        shift: its bias (C,), or None for zeros.
        act: a name of `SLOPES`.

    Returns:
        `total` plus the gradient of the normalised map times the BatchNorm's factor over its deviation, in the dtype of `total`; float32
        (2, C), the sums over pixels of the gradient of the normalised map and of its product with that map.
    """
    g, normal = pointwise_stats_input_grad.before_activation(gradient, weight, x, stats, factor, shift, act)
    slanted = g * affine(stats[1].to(g.dtype)[:, None, None], factor, None)
    return (total.to(g.dtype) + slanted).to(total.dtype), torch.stack([g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))])


@of(reference)
def configs(total, **rest) -> list[dict[str, Any]]:
    """Return launch parameters, the best guess first: those of `pointwise_stats_input_grad`."""
    return pointwise_stats_input_grad.configs(**rest)


@of(reference)
def supports(x, total, **rest) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not; the weight packed or not."""
    if total.shape != x.shape or total.dtype not in DTYPES or pixel_stride(total) is None or not reachable(total):
        return "what is added to is no map of the same shape in channels_last memory that 32-bit indices reach"
    return pointwise_stats_input_grad.supports(x=x, **rest)


@partly(reference)
def launch(x, total, out: tuple[Tensor, Tensor] | None = None, config: Any = None, **rest) -> tuple[Tensor, Tensor]:
    """Run the kernels; arguments as in `reference`, but the weight packed (K, C). The map of `out` may be `total`, or a channel slice."""
    n, cin, h, w = x.shape
    to, sums = out or (empty_map(n, cin, h, w, total), torch.empty((2, cin), dtype=torch.float32, device=x.device))
    if x.numel() == 0:
        return to, sums.zero_()
    add(partial_add(x=x, total=total, out=to, config=config, **rest), sums)
    return to, sums


@launches(reference, configs, tuned=True)
def partial_add(out: Tensor, **rest) -> Tensor:
    """Write the map; return float32 (R, 2, C), the sums of the programs' rows. The kernel behind must be one of ours."""
    return pointwise_stats_input_grad.partial_sums(out=out, **rest)


@of(reference)
def cost(total, **rest) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); the weight packed or not."""
    flop, moved = pointwise_stats_input_grad.cost(**rest)
    return flop, moved + total.numel() * total.element_size()


CASES, LARGE_CASES = pointwise_stats_input_grad.CASES, pointwise_stats_input_grad.LARGE_CASES


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    return {"total": Drawing(*how).map(case["shape"], case.get("wide", 0)), **pointwise_stats_input_grad.make(case, *how)}
