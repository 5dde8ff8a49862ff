"""The way back through a 1x1 convolution with BatchNorm in train mode, a residual and an activation behind it.

The gradient and, for the activation's slope, the output are read once, the gradient before the activation is written, which is the
residual's too, and read once more: the convolution's map is not needed. See `_pointwise_norm`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops import bias_act_grad, pointwise_norm, pointwise_stats, pointwise_stats_weight_grad
from zoo.kernels.ops._activation import SLOPES
from zoo.kernels.ops._arguments import Drawing, named, of, partly
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import empty_map, pixel_stride, reachable, units
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops._pointwise_norm import bend_kernel, products_kernel, settle_kernel, source_kernel
from zoo.kernels.ops._tuned import chosen

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK = pointwise_norm.PACK
PRODUCTS = "PM PN PK sum_warps sum_stages programs turned"
"""Launch parameters of the pass that sums; empty where it is several: the activation's, and a product's."""


def reference(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    factor: Tensor,
    stats: Tensor,
    spread: Tensor,
    level: Tensor,
    kept: Tensor | None = None,
    *,
    act: str = "none",
) -> tuple[Tensor, ...]:
    """Compute the gradients of `pointwise_norm`.

    Args:
        gradient: of the output, a map (N, K, H, W).
        x: the input, a map (N, C, H, W), maybe a channel slice.
        weight: (K, C, 1, 1), any floating dtype.
        factor: BatchNorm's weight (K,).
        stats: float32 (3, K), as the way there has returned it.
        spread: float32 (K, C), likewise.
        level: float32 (C,), likewise.
        kept: the output, if there is an activation.
        act: a name of `BY_OUTPUT`.

    Returns:
        The gradient of x in the dtype of `x`; float32 (K, C), the weight's; float32 (2, K), those of BatchNorm's bias and weight; and
        with an activation the gradient before it, which is the residual's, in the dtype of `gradient`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    g = gradient.to(wide)
    if act != "none" and kept is not None:
        g = SLOPES[act](g, kept.to(wide)).to(gradient.dtype).to(wide)
    taken = weight.flatten(1).to(x.dtype).to(wide)
    mean, inverse, share = (row[:, None, None] for row in stats.to(wide))
    normal = (F.conv2d(x.to(wide), taken[:, :, None, None]) - mean) * inverse
    sums = torch.stack([g.sum((0, 2, 3)), (g * normal).sum((0, 2, 3))])
    first, second = (row[:, None, None] for row in sums)
    of_y = (g - (first + normal * second) * share) * (inverse * factor.to(wide)[:, None, None])
    of_x = F.conv2d(of_y, taken.t()[:, :, None, None]).to(x.dtype)
    results = (of_x, torch.einsum("nkhw,nchw->kc", of_y, x.to(wide)), sums)
    return results if kept is None else (*results, g.to(gradient.dtype))


@of(reference)
def supports(gradient, x, weight, factor, stats, spread, level, kept, act) -> str:
    """Return "" where the kernels take these arguments, else the reason why not; the weight packed or not."""
    if refused := pointwise_norm.supports(x, weight, *[factor] * 4, kept, act=act):
        return refused
    if gradient.dtype != x.dtype:
        return "maps of several types"
    if (kept is None) != (act == "none"):
        return "an activation without its output, or an output without one"
    sizes = ((stats, (3, len(weight))), (spread, (len(weight), x.shape[1])), (level, x.shape[1:2]))
    if any(m.shape != size or m.dtype != torch.float32 or not m.is_contiguous() for m, size in sizes):
        return "not what the way there has returned"
    if gradient.shape != (x.shape[0], len(weight), *x.shape[2:]) or pixel_stride(gradient) is None:
        return "a gradient of another shape, or not in channels_last memory"
    return "" if reachable(gradient) else "larger than 32-bit indices reach"


def _products(gradient: Tensor, x: Tensor, act: str) -> list[dict[str, int]]:
    """Return launch parameters of the pass that sums, the best guess first; empty ones where kernels of other ops do it."""
    if act == "none":
        return [{}]
    half = x.element_size() == 2
    high, across = (max(16, min(128 if half else 64, triton.next_power_of_2(m.shape[1]))) for m in (gradient, x))
    deep = max(16, min(64 if half else 32, triton.next_power_of_2(x.numel() // max(1, x.shape[1]))))
    low = max(16, high // 2)
    wanted = [(high, across, deep, 8, 3, 2, 1), (high, across, deep, 8, 4, 1, 1)]
    wanted += [(low, across, deep, 4, 4, 2, 1), (low, across, deep, 4, 3, 4, 0)]
    if across > 64:
        wanted[:2] = wanted[1::-1]
    found = named(PRODUCTS, wanted)
    return [*found[:2], {}, *found[2:]]  # a dictionary that says nothing of the pass: bias_act_grad, and a product for itself


@of(reference)
def configs(gradient, x, act, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: of the pass that sums (`PRODUCTS`), and of the one that writes."""
    first, second = _products(gradient, x, act), _tiles(gradient, x)
    return [first[min(i, len(first) - 1)] | second[min(i, len(second) - 1)] for i in range(max(len(first), len(second)))]


def _tiles(gradient: Tensor, x: Tensor) -> list[dict[str, int]]:
    return pointwise_norm.tiles(x.numel() // max(1, x.shape[1]), x.shape[1], gradient.shape[1], x.element_size())


def _sum(
    gradient: Tensor, x: Tensor, kept: Tensor | None, act: str, through: Tensor | None, config: dict[str, int] | None
) -> Tensor:  # fmt: skip
    """Return float32 (K * C + K,): sums of products of gradients and inputs, then of gradients; before the activation, written too."""
    (n, cin, h, w), cout = x.shape, gradient.shape[1]
    through = empty_map(n, cout, h, w, gradient) if through is None and kept is not None else through
    if config is None:
        config = chosen(
            "pointwise_norm_grad, sums", (gradient, x, kept, act), lambda: _products(gradient, x, act),
            lambda c: _sum(gradient, x, kept, act, None, c),
        )  # fmt: skip
    out = torch.empty(cout * cin + cout, dtype=torch.float32, device=x.device)
    if "PM" not in config:
        sums = (out[cout * cin :],) if through is None else (out[cout * cin :], through)
        bias_act_grad.launch(gradient, kept, act=act, out=sums)
        pointwise_stats_weight_grad.launch(gradient if through is None else through, x, out=out[: cout * cin].view(cout, cin))
        return out
    (v, cin_units, x_step), (vo, cout_units, *steps, out_step) = units(16, x), units(16, gradient, kept, through)
    tiles = triton.cdiv(cout, config["PM"]) * triton.cdiv(cin, config["PN"])
    parts = max(1, min(triton.cdiv(n * h * w, config["PK"]), SMS * config["programs"] // tiles))
    partials = torch.empty((parts, cout * cin + cout), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        products_kernel[(tiles, parts)](
            gradient, kept, x, partials, through, n * h * w, cin_units, cout_units, *steps, x_step, out_step, ACT=act,
            TURNED=config["turned"], V=v, VO=vo, BM=config["PM"], BN=config["PN"], BK=config["PK"],
            num_warps=config["sum_warps"], num_stages=config["sum_stages"], **overlap(x),
        )  # fmt: skip
        return add(partials, out)


def _source(
    gradient: Tensor, x: Tensor, slanted: Tensor, bent: Tensor, levels: Tensor, out: Any, config: dict[str, int] | None
) -> None:  # fmt: skip
    """Write the gradient of x."""
    n, cin, h, w = x.shape
    if config is None:
        config = chosen(
            "pointwise_norm_grad, input", (gradient, x), lambda: _tiles(gradient, x),
            lambda c: _source(gradient, x, slanted, bent, levels, None, c),
        )  # fmt: skip
    out = empty_map(n, cin, h, w, x) if out is None else out
    (v, cin_units, *steps), (vo, cout_units, g_step) = units(16, x, out), units(16, gradient)
    source_kernel[(triton.cdiv(n * h * w, config["BM"]) * triton.cdiv(cin, config["BN"]),)](
        gradient, x, slanted, bent, levels, out, n * h * w, len(levels), cin_units, cout_units, g_step, *steps,
        V=v, VO=vo, BM=config["BM"], BN=config["BN"], BK=config["BK"], num_warps=config["warps"], num_stages=config["stages"],
        **overlap(x),
    )  # fmt: skip


@partly(reference)
def launch(
    gradient, x, weight, factor, stats, spread, level, kept, act,
    of_x: bool = True, out: tuple[Tensor, ...] | None = None, config: dict[str, int] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the kernels; see `reference`, but the weight is packed (K, C).

    Args:
        of_x: whether the gradient of x is wanted; its memory is left as it is where not.
        out: results to write; maps may be channel slices, the weight's gradient of any floating dtype.
        config: one of `configs`; what was found fastest, or the first, if None.

    Returns:
        `out`.
    """
    (n, cin, h, w), cout = x.shape, len(weight)
    if out is None:
        out = (empty_map(n, cin, h, w, x), *(torch.empty(size, dtype=torch.float32, device=x.device) for size in ((cout, cin), (2, cout))))
        out += () if kept is None else (empty_map(n, cout, h, w, gradient),)
    to, of_weight, sums, *more = out
    if not x.numel():
        of_weight.zero_()
        sums.zero_()
        return out
    products = _sum(gradient, x, kept, act, more[0] if more else None, config)
    slanted, tilt = torch.empty_like(weight, dtype=x.dtype), torch.empty(cout, dtype=torch.float32, device=x.device)
    deep = max(16, min(128 if x.element_size() == 2 else 64, triton.next_power_of_2(cout)))
    low, wide = (max(16, min(most, triton.next_power_of_2(cin))) for most in (64, 32))
    groups, columns = triton.cdiv(cin, low), triton.cdiv(cin, wide)
    bent, levels = torch.empty((2, cin, cin), dtype=x.dtype, device=x.device), tilt.new_empty((groups, cin))
    with followed_by_ours(of_x):
        settle_kernel[(triton.cdiv(cout, 4),)](
            products, weight, factor, stats, spread, level, of_weight, slanted, sums, tilt, cin, cout, BJ=4,
            BK=max(32, min(256, triton.next_power_of_2(cin))), num_warps=4, **overlap(x),
        )  # fmt: skip
        if not of_x:
            return out
        bend_kernel[(groups * columns,)](
            weight, slanted, tilt, sums, stats, level, bent, levels, cin, cout, BL=low, BK=wide, BJ=deep, num_warps=4, **overlap(x)
        )
    _source(more[0] if more else gradient, x, slanted, bent, levels, to, config)
    return out


@of(reference)
def cost(gradient, x, kept, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move): the gradient before the activation is written, and read again."""
    cin, cout = x.shape[1], gradient.shape[1]
    maps = 3 * x.numel() + gradient.numel() * (2 if kept is None else 4)
    return 4 * gradient.numel() * cin + 2 * x.numel() * cin, maps * x.element_size() + 4 * cin * cout + 8 * cout


CASES, LARGE_CASES = pointwise_norm.CASES, pointwise_norm.LARGE_CASES


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case: what the way there returns of the input that is drawn."""
    args, draw = pointwise_norm.make(case, *how), Drawing(*how)
    residual = args.pop("residual", None)
    act = args.pop("act")
    exact = {name: value.double() for name, value in args.items()}  # in which there is no TF32
    exact["weight"] = args["weight"].to(draw.dtype).double()
    y, *taken = pointwise_norm.reference(**exact, residual=None if residual is None else residual.double(), act=act)
    y, (stats, spread, level) = y.to(draw.dtype), (m.float() for m in taken[:3])
    gradient = pointwise_stats.gradient_of(case, *how)
    kept = None if act == "none" else y.contiguous(memory_format=torch.channels_last)
    found = {"gradient": gradient, "x": args["x"], "weight": args["weight"], "factor": args["factor"]}
    return {**found, "stats": stats, "spread": spread, "level": level, "kept": kept, "act": act}
