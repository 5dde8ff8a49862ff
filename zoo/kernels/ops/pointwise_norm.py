"""A 1x1 convolution with BatchNorm in train mode, a residual and an activation behind it, written once: the map in between never is.

A convolution, BatchNorm's statistics and what applies them read and write the convolution's map four times. Here the statistics come
from the convolution's input, whose channels are few where this pays: see `_pointwise_norm`. Its way back is `pointwise_norm_grad`.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT
from zoo.kernels.ops._arguments import Drawing, named, of, partly
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops._pointwise_norm import finish_kernel, moments_kernel, spread_kernel
from zoo.kernels.ops._tuned import chosen

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK: dict[str, Any] = {"weight": lambda weight: weight.flatten(1).contiguous()}
SUMS = "rows sum_warps sum_stages programs"
TILE = "BM BN BK warps stages"
"""Launch parameters of the pass that sums, and of the one that writes."""


def reference(
    x: Tensor,
    weight: Tensor,
    factor: Tensor,
    shift: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    residual: Tensor | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    act: str = "none",
) -> tuple[Tensor, ...]:
    """Compute ``act(batch_norm(conv(x)) + residual)``.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        weight: (K, C, 1, 1), any floating dtype; it is rounded to that of `x`.
        factor: BatchNorm's weight (K,).
        shift: its bias (K,).
        running_mean: (K,).
        running_var: (K,).
        residual: map (N, K, H, W), added before the activation.
        momentum: the new statistics' share of the running ones.
        eps: added to the variance.
        act: a name of `BY_OUTPUT`.

    Returns:
        The map (N, K, H, W) in the dtype of `x`, rounded once; float32 (3, K) of the convolution's means, 1 / deviations, and 1 / pixels;
        float32 (K, C), the rounded weight times the covariances of the channels of `x`; float32 (C,), their means; the new running
        statistics, of an unbiased variance. With no pixels statistics are zeros and the running ones stay.

    Source:
        Ioffe and Szegedy 2015, https://arxiv.org/abs/1502.03167, algorithm 1, of a linear map's mean and covariance.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    packed, count = weight.flatten(1).to(x.dtype), x.numel() // max(1, x.shape[1])
    y = F.conv2d(x.to(wide), packed.to(wide)[:, :, None, None])
    new = (running_mean.clone(), running_var.clone())
    if not count:
        zeros = [y.new_zeros(size) for size in ((3, len(weight)), packed.shape, (x.shape[1],))]
        return y.to(x.dtype), *zeros, *new
    mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3), correction=0)
    old = [t.to(wide) for t in new]
    moved = (old[0].lerp(mean, momentum), old[1].lerp(var * count / max(count - 1, 1), momentum))
    inverse = (var + eps).rsqrt()
    z = (y - mean[:, None, None]) * (inverse * factor.to(wide))[:, None, None] + shift.to(wide)[:, None, None]
    z = ACTIVATIONS[act](z if residual is None else z + residual.to(wide)).to(x.dtype)
    level = x.to(wide).mean((0, 2, 3))
    off = (x.to(wide) - level[:, None, None]).transpose(0, 1).flatten(1)
    stats = torch.stack([mean, inverse, torch.full_like(mean, 1 / count)])
    return z, stats, packed.to(wide) @ (off @ off.t() / count), level, *(m.to(t.dtype) for m, t in zip(moved, new, strict=True))


@of(reference)
def rival(x, weight, factor, shift, running_mean, running_var, residual, momentum, eps, act) -> Tensor:
    """Compute the map by PyTorch's own operators, each a pass, for a comparison of times."""
    y = F.conv2d(x, weight.to(x.dtype))
    y = F.batch_norm(y, running_mean.clone(), running_var.clone(), factor, shift, True, momentum, eps)
    return ACTIVATIONS[act](y if residual is None else y + residual)


@of(reference)
def supports(x, weight, factor, shift, running_mean, running_var, residual, act, **_) -> str:
    """Return "" where the kernels take these arguments, else the reason why not; the weight packed or not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if weight.numel() != weight.shape[0] * x.shape[1] or weight.dtype not in DTYPES:
        return f"a weight {tuple(weight.shape)} is no 1x1 kernel over {x.shape[1]} channels"
    if act not in BY_OUTPUT:
        return f"activation {act}, whose slope the output doesn't tell"
    vectors = (factor, shift, running_mean, running_var)
    if any(p.shape != weight.shape[:1] or p.dtype not in DTYPES or not p.is_contiguous() for p in vectors):
        return "BatchNorm's weight, bias and running statistics are not one for each channel"
    n, _, h, w = x.shape
    if residual is not None and (residual.shape != (n, len(weight), h, w) or residual.dtype not in DTYPES):
        return "a residual of another shape, or not of float32, bfloat16 or float16"
    most = x.numel() // max(1, x.shape[1]) * max(x.shape[1], len(weight))
    return unreadable(x, residual, small=most < 2**31 - 2**24)


def tiles(rows: int, outputs: int, inner: int, itemsize: int) -> list[dict[str, int]]:
    """Return launch parameters of a product whose tiles are written by a program each, the best guess first."""
    half = itemsize == 2
    wanted = [(128, 128, 64, 4, 3), (64, 128, 64, 4, 3), (128, 64, 64, 4, 3)]
    wanted += [(128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (64, 256, 64, 8, 3)]
    if inner <= 128:  # the memory is waited for, not the product
        wanted[:2] = wanted[1::-1]
    most = (min(128 if half else 64, triton.next_power_of_2(rows)), min(256 if half else 64, triton.next_power_of_2(outputs)))
    most = [max(16, size) for size in (*most, min(64 if half else 16, triton.next_power_of_2(inner)))]
    sizes = [(min(bm, most[0]), min(bn, most[1]), min(bk, most[2]), *rest) for bm, bn, bk, *rest in wanted]
    return named(TILE, sizes)


def _sums(x: Tensor) -> list[dict[str, int]]:
    """Return launch parameters of the pass that sums, the best guess first: rows at a time, warps, stages, programs a multiprocessor."""
    rows = max(16, min(64 if x.element_size() == 2 else 32, triton.next_power_of_2(x.numel() // max(1, x.shape[1]))))
    few = max(16, rows // 2)
    wanted = [(rows, 4, 4, 2), (rows, 4, 3, 4), (rows, 8, 4, 2), (few, 4, 4, 4)]  # of fewer, each adds more digits up, and loses some
    if x.shape[1] > 64:  # more than four warps have registers for
        wanted = [(rows, 8, 4, 2), (rows, 8, 3, 4), (few, 8, 4, 2), (few, 8, 4, 4)]
    return named(SUMS, wanted)


@of(reference)
def configs(x, weight, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: of the pass that sums (`SUMS`), and of the one that writes (`TILE`)."""
    first, second = _sums(x), tiles(x.numel() // max(1, x.shape[1]), len(weight), x.shape[1], x.element_size())
    return [first[min(i, len(first) - 1)] | second[min(i, len(second) - 1)] for i in range(max(len(first), len(second)))]


def moments(x: Tensor, config: dict[str, int] | None = None) -> Tensor:
    """Return float32 (C * C + C,): sums over pixels of products of channels, then of channels. The kernel behind must be one of ours."""
    if config is None:
        config = chosen("moments", (x,), lambda: _sums(x), lambda c: moments(x, c))
    rows, cin, (v, *sizes) = x.numel() // x.shape[1], x.shape[1], units(16, x)
    size = max(16, min(128 if x.element_size() == 2 else 64, triton.next_power_of_2(cin)))
    across = triton.cdiv(cin, size)
    parts = max(1, min(triton.cdiv(rows, config["rows"]), SMS * config["programs"] // across**2))
    partials = torch.empty((parts, cin * cin + cin), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        moments_kernel[(across**2, parts)](
            x, partials, rows, *sizes, SAME=across == 1, V=v, BM=size, BN=size, BK=config["rows"],
            num_warps=config["sum_warps"], num_stages=config["sum_stages"], **overlap(x),
        )  # fmt: skip
        return add(partials, torch.empty(cin * cin + cin, dtype=torch.float32, device=x.device))


def _finish(
    x: Tensor, packed: Tensor, sums: Tensor, affine: tuple[Tensor, Tensor], residual: Tensor | None, act: str, rest: tuple[float, float],
    out: Tensor | None, stats: Tensor, old: Any, new: Any, config: dict[str, int] | None,
) -> dict[str, int]:  # fmt: skip
    """Write the map and the statistics, and move the running ones; return the launch parameters."""
    (n, cin, h, w), cout = x.shape, len(packed)
    if config is None:
        given = (x, packed, sums, affine, residual, act, rest)
        config = chosen(
            "pointwise_norm", (x, packed, residual, act), lambda: tiles(n * h * w, cout, cin, x.element_size()),
            lambda c: _finish(*given, None, torch.empty_like(stats), None, None, c),
        )  # fmt: skip
    out = empty_map(n, cout, h, w, x) if out is None else out
    (v, cin_units, x_step), (vo, cout_units, out_step, more) = units(16, x), units(16, out, residual)
    finish_kernel[(triton.cdiv(n * h * w, config["BM"]) * triton.cdiv(cout, config["BN"]),)](
        x, packed, sums, *affine, residual, out, stats, *(old or (None, None)), *(new or (None, None)), n * h * w, len(sums),
        float(n * h * w), *rest, cin_units, cout_units, x_step, more, out_step, ACT=act, V=v, VO=vo,
        BM=config["BM"], BN=config["BN"], BK=config["BK"], num_warps=config["warps"], num_stages=config["stages"], **overlap(x),
    )  # fmt: skip
    return config


@partly(reference)
def launch(
    x, weight, factor, shift, running_mean, running_var, residual, momentum, eps, act,
    out: tuple[Tensor, ...] | None = None, config: dict[str, int] | None = None, recipe: dict[str, Any] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Run the kernels; see `reference`, but the weight is packed (K, C). The map of `out` may be a slice, running ones the old ones.

    A `recipe` gets what `once_more` takes: `packed`, the rounded weight, `sums` of its channels, and the `config`.
    """
    (n, cin, h, w), cout, old = x.shape, len(weight), (running_mean, running_var)
    if out is None:
        sizes = ((3, cout), (cout, cin), (cin,))
        out = (empty_map(n, cout, h, w, x), *(torch.empty(size, dtype=torch.float32, device=x.device) for size in sizes))
        out += (torch.empty_like(running_mean), torch.empty_like(running_var))
    y, stats, spread, level, *new = out
    if not x.numel():
        for result in (stats, spread, level):
            result.zero_()
        for result, before in zip(new, old, strict=True):
            result.copy_(before)
        if recipe is not None:
            recipe |= {"packed": weight, "sums": stats, "config": None}
        return out
    both = moments(x, config)
    high, wide = (max(16, min(64, triton.next_power_of_2(size))) for size in (cout, cin))
    groups, packed = triton.cdiv(cin, wide), torch.empty_like(weight, dtype=x.dtype)
    sums = torch.empty((groups, 2, cout), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        spread_kernel[(triton.cdiv(cout, high) * groups,)](
            weight, both, packed, spread, level, sums, float(n * h * w), cin, cout, BJ=high, BK=wide, BL=wide, num_warps=4, **overlap(x)
        )
    config = _finish(x, packed, sums, (factor, shift), residual, act, (eps, momentum), y, stats, old, new, config)
    if recipe is not None:
        recipe |= {"packed": packed, "sums": sums, "config": config}
    return out


@partly(reference)
def once_more(x, factor, shift, eps, act, packed: Tensor, sums: Tensor, config: dict[str, int] | None, **_) -> Tensor:
    """Return a map that `launch` has made without a residual, to the last bit; `packed`, `sums` and `config` are its `recipe`'s."""
    (n, _, h, w), cout = x.shape, len(packed)
    y = empty_map(n, cout, h, w, x)
    if x.numel():
        stats = torch.empty((3, cout), dtype=torch.float32, device=x.device)
        _finish(x, packed, sums, (factor, shift), None, act, (eps, 0.0), y, stats, None, None, config)
    return y


@of(reference)
def cost(x, weight, residual, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); the weight packed or not."""
    pixels, cin, cout = x.numel() // max(1, x.shape[1]), x.shape[1], len(weight)
    maps = x.numel() + pixels * cout * (1 if residual is None else 2)
    return 2 * pixels * cin * (cout + cin), x.element_size() * (maps + cin * cout) + 4 * cin * (cout + 1) + 40 * cout


CASES: list[dict[str, Any]] = [
    {"name": "relu", "shape": (2, 16, 5, 7), "outputs": 32, "act": "relu"},
    {"name": "residual, relu", "shape": (2, 16, 4, 5), "outputs": 64, "act": "relu", "residual": True},
    {"name": "odd channels, relu6", "shape": (2, 7, 5, 5), "outputs": 19, "act": "relu6", "residual": True},
    {"name": "slice", "shape": (1, 24, 5, 3), "outputs": 40, "wide": 64},
    {"name": "1x1 image, leaky", "shape": (13, 20, 1, 1), "outputs": 8, "act": "leaky_relu_0.1"},
    {"name": "deep", "shape": (1, 144, 4, 9), "outputs": 16, "act": "relu", "residual": True},
    {"name": "many pixels", "shape": (2, 96, 28, 15), "outputs": 32, "act": "relu"},
    {"name": "two tiles of channels", "shape": (1, 160, 20, 17), "outputs": 144},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "outputs": 8, "act": "relu"},
]
"""`shape` (N, C, H, W) of the input; `wide`: maps are slices of maps this wide."""

_REAL = ((64, 56, 256, True), (128, 28, 512, True), (256, 14, 1024, True), (512, 7, 2048, True), (24, 56, 144, False), (96, 14, 576, False))
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px} to {k}{' add' * more} relu", "shape": (n, c, px, px), "outputs": k, "act": "relu", "residual": more}
    for n in (256, 32)
    for c, px, k, more in _REAL
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case; the input's means differ from 0."""
    (n, c, h, w), k, wide, draw = case["shape"], case["outputs"], case.get("wide", 0), Drawing(*how)
    args: dict[str, Any] = {"x": draw.map(case["shape"], wide).add_(draw.normal(c).to(draw.dtype)[:, None, None])}
    args |= {"weight": draw.normal(k, c, 1, 1) / c**0.5, "factor": 1 + 0.3 * draw.normal(k), "shift": draw.normal(k)}
    args |= {"running_mean": 0.2 * draw.normal(k), "running_var": (1 + 0.1 * draw.normal(k)).abs(), "act": case.get("act", "none")}
    if case.get("residual"):
        args["residual"] = draw.map((n, k, h, w), wide and k + 16)
    return args
