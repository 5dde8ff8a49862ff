"""The first convolution of a network and the 3x3 max pool of stride 2 behind it, one pass: the convolution's map stays in registers.

A program owns a strip of pooled rows over their whole width. For each row of the convolution it multiplies the even and the odd
columns apart; the maximum over three rows comes first, then the neighbouring column's maximum is fetched from the next lane. The last
row of a window is carried to the window below, so no row within a strip is computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from . import image, stem
from ._activation import activate
from ._arguments import given, launches, named, of, partly
from ._dense import product
from ._layout import empty_map, pixel_stride, reachable
from ._overlap import begin, overlap
from .pool import pooled_size

TOLERANCE = stem.TOLERANCE

MONOTONE = ("none", "relu", "relu6", "hardsigmoid", "sigmoid", "leaky_relu_0.1", "leaky_relu_0.01")
"""Activations that the maximum may precede: they keep order."""


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    stride: tuple[int, int] = (1, 1), padding: tuple[int, int, int, int] = stem.NOTHING, act: str = "none",
    pool_padding: int = 1, ceil_mode: bool = False, tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Return the 3x3 maxima, at stride 2, of act(convolution of x with weight, plus bias).

    Args:
        x: images (N, C, H, W), C at most 4.
        weight: (Cout, C, KH, KW).
        bias: (Cout,), or None.
        stride: of the convolution (vertical, horizontal).
        padding: of the convolution, pixels of zeros (top, bottom, left, right).
        act: a name of `ACTIVATIONS`; the kernel takes those of `MONOTONE`.
        pool_padding: pixels at every side of the convolution's map that no maximum takes: 0 or 1.
        ceil_mode: pool windows that begin inside the map and end outside count, as in PyTorch.
        tf32: let the kernel multiply float32 in TF32.

    Returns:
        (N, Cout, PH, PW). The kernel accumulates in float32, rounds once, and writes channels_last; tolerances as in `TOLERANCE`.
        A pixel that is not finite also reaches outputs whose run holds it, as in `stem.reference`.
    """
    y = stem.reference(x, weight, bias, stride=stride, padding=padding, act=act)
    if 0 in y.shape:
        return y.new_empty(_shape(x, weight, stride, padding, pool_padding, ceil_mode, None))
    return F.max_pool2d(y, 3, 2, pool_padding, ceil_mode=ceil_mode)


@of(reference)
def prepare(x, weight, bias, stride, padding, **how) -> dict[str, Any]:
    """Return the arguments of `launch` for those of `reference`: packed images and weights, and the sizes of both maps.

    Images are packed as for `stem`, weights as `stem.pack_weight(weight, stride, 1)`.
    """
    packed = image.launch(x, **stem.packing(weight.shape, stride, padding, x.shape))
    arrays = {"x": packed, "weight": stem.pack_weight(weight.to(x.dtype), stride, 1), "bias": None if bias is None else bias.float()}
    return {**arrays, "stride": stride, "map_size": stem.map_size(x, weight, stride, padding), **how}


def _shape(
    x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int, int, int],
    pool_padding: int, ceil_mode: bool, map_size: tuple[int, int] | None,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Return N, Cout, PH, PW from plain arguments, or from packed ones, which bring `map_size`."""
    sizes = map_size or stem.map_size(x, weight, stride, padding)
    ph, pw = (pooled_size(size, 3, 2, pool_padding, pool_padding, ceil_mode) for size in sizes)
    return x.shape[0], weight.shape[0], ph, pw


@of(reference)
def supports(x, weight, bias, stride, padding, act, pool_padding, ceil_mode, tf32) -> str:
    """Return "" where the kernel takes these arguments of `reference`, else the reason why not."""
    if act not in MONOTONE:
        return f"{act} doesn't keep order, so it can't follow the maximum"
    if pool_padding not in (0, 1):
        return f"pool padding {pool_padding}"
    why = stem.supports(x, weight, bias, stride=stride, padding=padding, act=act, tf32=tf32)
    if why:
        return why
    _, _, ph, pw = _shape(x, weight, stride, padding, pool_padding, ceil_mode, None)
    if ph < 1 or pw < 1:
        return "no output"
    return "" if _lanes(pw, pool_padding) <= 256 else "rows wider than a tile"


def _lanes(pw: int, pool_padding: int) -> int:
    # Without padding the last window takes the first column of the window beyond it.
    return max(16, triton.next_power_of_2(pw + (pool_padding == 0)))


@partly(reference)
def configs(
    x, weight, stride, padding, pool_padding, ceil_mode, tf32, map_size: tuple[int, int] | None = None, **_
) -> list[dict[str, int]]:
    """Return launch parameters to try, the best guess first, for the arguments of `reference` or of `launch`.

    bm is the columns of a tile, of one strip or several; bn its channels, bk the depth of one product, rows the pooled rows of a strip.
    """
    n, cout, ph, pw = _shape(x, weight, stride, padding, pool_padding, ceil_mode, map_size)
    lanes = _lanes(pw, pool_padding)
    bn = min(64, max(16, triton.next_power_of_2(cout)))
    packed = weight.dim() == 3
    depth = weight.shape[1] * weight.shape[2] if packed else 4 * weight.shape[2] * stem.run_pixels(weight.shape[3], stride[1], 1)
    whole = triton.next_power_of_2(depth)
    bm = max(64, lanes)
    # Every strip computes one row that the strip above had too: as tall as leaves two programs for each multiprocessor.
    tall = max(1, min(math.ceil(ph / 4), n * ph // (132 * 2)))
    low = math.ceil(tall / 2)
    warps = max(4, bm // 16)
    if x.dtype == torch.float32 and not tf32:
        # Products in full float32 keep both operands in registers.
        tried = [(lanes, min(bn, 32), 32, min(4, ph), 4, 1), (lanes, 16, 32, min(2, ph), 4, 1), (lanes, 16, 16, min(4, ph), 4, 1)]
    elif n * ph < 132 * 8:
        tried = [(bm, min(bn, width), min(whole, bk), min(rows, ph), 4, 1) for rows, width, bk in
                 ((1, 32, 256), (1, 16, 256), (1, 64, 64), (2, 32, 64), (2, 16, 256), (1, 32, 64))]  # fmt: skip
    else:
        # What spills no registers comes first. 64 channels in 4 warps just fit; 32 leave room for a third program.
        half, quarter = min(bn, 32), min(bn, 16)
        if depth > 256:
            shapes = [
                (half, 64, tall, 2 * warps), (half, 16, tall, warps), (quarter, 64, tall, warps), (half, 64, low, 2 * warps),
                (quarter, 32, tall, warps), (quarter, 64, low, warps), (half, 32, tall, warps), (bn, 64, tall, 2 * warps),
            ]  # fmt: skip
        else:
            shapes = [
                (bn, 32, tall, warps), (half, 64, tall, warps), (half, 32, tall, warps), (bn, 64, tall, 2 * warps),
                (bn, 32, low, warps), (half, 256, tall, warps), (half, 64, low, warps), (bn, 256, tall, 2 * warps),
                (bn, 32, 2 * tall, warps), (half, 64, 2 * tall, warps), (quarter, 256, tall, warps), (bn, 64, tall, warps),
            ]  # fmt: skip
        tried = [(bm, width, min(whole, bk), rows, many, 1) for width, bk, rows, many in shapes]
    return named("bm bn bk rows warps", (config[:5] for config in tried if stem.fits(config, depth, x.element_size())))


@launches(reference, configs)
def launch(
    x, weight, bias, stride, act, pool_padding, ceil_mode, tf32, config, map_size: tuple[int, int], out: Tensor | None = None, **_
) -> Tensor:
    """Run the kernel.

    Args:
        x: images packed as for `stem.launch`: (N, Hp, Wp, 4), contiguous, 16-byte aligned.
        weight: what `stem.pack_weight(weight, stride, 1)` returned, in the dtype of `x`.
        bias: (Cout,) in float32, or None.
        map_size: (OH, OW), the size of the convolution's map.
        out: (N, Cout, PH, PW) in channels_last memory or a channel slice of such; allocated if None.
        config: one of `configs`.

    Returns:
        (N, Cout, PH, PW), channels_last: `out`.

    Raises:
        ValueError: `out` has another shape, or channels that don't lie beside each other.
    """
    n, cout, ph, pw = _shape(x, weight, stride, stem.NOTHING, pool_padding, ceil_mode, map_size)
    out = empty_map(n, cout, ph, pw, x) if out is None else out
    ld = pixel_stride(out)
    if ld is None or out.shape != (n, cout, ph, pw) or not reachable(out):
        raise ValueError(f"out: {tuple(out.shape)} with strides {out.stride()} instead of channels_last {(n, cout, ph, pw)}")
    if out.numel() == 0:
        return out
    lanes = _lanes(pw, pool_padding)
    strips = triton.cdiv(ph, config["rows"])
    options: dict[str, Any] = {
        "OH": map_size[0], "OW": map_size[1], "PH": ph, "PW": pw, "LANES": lanes, "ROWS": config["rows"],
        "STRIPS": strips, "COUT": cout, "KH": weight.shape[1], "RUN": weight.shape[2], "HP": x.shape[1], "WP": x.shape[2],
        "STRIDE_H": stride[0], "STRIDE_W": stride[1], "PADDED": pool_padding, "ACT": act,
        "PRECISION": "tf32" if tf32 else "ieee", "BM": config["bm"], "BN": config["bn"], "BK": config["bk"],
        "num_warps": config["warps"], **overlap(x),
    }  # fmt: skip
    _stem_pool[(triton.cdiv(n * strips, config["bm"] // lanes) * triton.cdiv(cout, config["bn"]),)](
        x, weight, bias, out, n * strips, ld, **options
    )
    return out


@of(reference)
def cost(x, weight, bias, stride, padding, pool_padding, ceil_mode, **_) -> tuple[int, int]:
    """Return (operations, bytes) for the arguments of `reference`: images and weights read once, the pooled map written once."""
    operations, _ = stem.cost(x, weight, bias, stride=stride, padding=padding)
    written = math.prod(_shape(x, weight, stride, padding, pool_padding, ceil_mode, None))
    return operations, (x.numel() + weight.numel() + written) * x.element_size()


@triton.jit
def _row(x, column, row, chunks, taken, OH: tl.constexpr, DEPTH: tl.constexpr, RUN: tl.constexpr, STRIDE_H: tl.constexpr,
         WP: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One row of the convolution at the columns whose runs begin at `column`, minus infinity where the map has no such pixel."""
    start = column + tl.minimum(tl.maximum(row, 0), OH - 1) * (STRIDE_H * WP * 4)
    acc = tl.zeros((BM, BN), tl.float32)
    for base in tl.static_range(0, DEPTH, BK):  # pyright: ignore[reportGeneralTypeIssues]
        depth = base + tl.arange(0, BK)
        runs = x + start[:, None] + ((depth // RUN) * (WP * 4) + depth % RUN)[None, :]
        a = tl.load(runs) if base + BK <= DEPTH else tl.load(runs, mask=(depth < DEPTH)[None, :], other=0.0)
        acc = product(a, chunks[base // BK], acc, PRECISION)
    return tl.where((taken & (row >= 0) & (row < OH))[:, None], acc, float("-inf"))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _stem_pool(
    x, weight, bias, out, strips, ld,
    OH: tl.constexpr, OW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, COUT: tl.constexpr, KH: tl.constexpr, RUN: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDED: tl.constexpr, ACT: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    DEPTH: tl.constexpr = KH * RUN
    NB: tl.constexpr = (COUT + BN - 1) // BN
    EXACT: tl.constexpr = NB * BN == COUT and DEPTH % BK == 0
    j = (tl.program_id(0) % NB) * BN + tl.arange(0, BN)
    chunks = ()
    for base in tl.static_range(0, DEPTH, BK):  # pyright: ignore[reportGeneralTypeIssues]
        k = base + tl.arange(0, BK)
        at = weight + j[None, :] * DEPTH + k[:, None]
        chunk = tl.load(at) if EXACT else tl.load(at, mask=(j < COUT)[None, :] & (k < DEPTH)[:, None], other=0.0)
        chunks = chunks + (chunk,)  # noqa: RUF005 (Triton doesn't unpack)
    shift = tl.zeros((BN,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + j, mask=j < COUT, other=0.0).to(tl.float32)

    m = tl.arange(0, BM)
    lane = m % LANES
    strip = (tl.program_id(0) // NB) * (BM // LANES) + m // LANES
    there = tl.minimum(strip, strips - 1)
    n = there // STRIPS
    first = (there % STRIPS) * ROWS
    even_taken = 2 * lane < OW
    odd_taken = 2 * lane + 1 < OW
    even_at = n * (HP * WP * 4) + tl.minimum(2 * lane, OW - 1) * (STRIDE_W * 4)
    odd_at = n * (HP * WP * 4) + tl.minimum(2 * lane + 1, OW - 1) * (STRIDE_W * 4)
    # With padding, a window begins with the odd column of the window before; without, it ends with the even column of the next.
    beside = tl.maximum(m - 1, 0) if PADDED else tl.minimum(m + 1, BM - 1)
    neighbours = tl.broadcast_to(beside[:, None], (BM, BN))
    edge = lane == 0 if PADDED else lane == LANES - 1
    inside = ((lane < PW) & (strip < strips))[:, None] & (j < COUT)[None, :]

    top = 2 * first - PADDED
    even = _row(x, even_at, top, chunks, even_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK)
    odd = _row(x, odd_at, top, chunks, odd_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK)
    # Not pipelined: four tiles of rows a step, twice over, would leave no room for a second program.
    for index in tl.range(0, ROWS, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        row = top + 2 * index
        e = _larger(even, _row(x, even_at, row + 1, chunks, even_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK))
        o = _larger(odd, _row(x, odd_at, row + 1, chunks, odd_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK))
        even = _row(x, even_at, row + 2, chunks, even_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK)
        odd = _row(x, odd_at, row + 2, chunks, odd_taken, OH, DEPTH, RUN, STRIDE_H, WP, PRECISION, BM, BN, BK)
        e = _larger(e, even)
        o = _larger(o, odd)
        side = tl.gather(o if PADDED else e, neighbours, 0)
        y = _larger(_larger(e, o), tl.where(edge[:, None], float("-inf"), side))
        y = activate(y + shift[None, :], ACT).to(out.dtype.element_ty)
        to = out + (((n * PH + first + index) * PW + lane) * ld)[:, None] + j[None, :]
        tl.store(to, y, mask=inside & (first + index < PH)[:, None])


CASES: list[dict[str, Any]] = [
    {"name": "ResNet", "x": (2, 3, 11, 14), "weight": (24, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3), "act": "relu"},
    {"name": "GoogLeNet", "x": (1, 3, 12, 14), "weight": (16, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3), "act": "relu",
     "pool_padding": 0, "ceil_mode": True},
    {"name": "SqueezeNet", "x": (1, 3, 15, 18), "weight": (40, 7, 7), "stride": (2, 2), "act": "relu", "pool_padding": 0,
     "ceil_mode": True},
    {"name": "AlexNet", "x": (1, 3, 27, 31), "weight": (16, 11, 11), "stride": (4, 4), "padding": (2, 2, 2, 2), "act": "relu",
     "pool_padding": 0},
    {"name": "SAME, no bias", "x": (2, 3, 12, 13), "weight": (24, 3, 3), "stride": (2, 2), "padding": (0, 1, 0, 1), "bias": False},
    {"name": "stride 1, grey", "x": (1, 1, 9, 8), "weight": (6, 3, 3), "padding": (1, 1, 1, 1), "act": "leaky_relu_0.1"},
    {"name": "ceil with padding", "x": (1, 3, 16, 12), "weight": (16, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1),
     "ceil_mode": True, "act": "relu6"},
    {"name": "several strips", "x": (2, 2, 26, 9), "weight": (8, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1), "act": "sigmoid"},
    {"name": "a full tile of columns", "x": (1, 3, 5, 129), "weight": (8, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1),
     "act": "hardsigmoid"},
    {"name": "one pixel", "x": (1, 4, 1, 1), "weight": (8, 3, 3), "padding": (1, 1, 1, 1), "act": "leaky_relu_0.01"},
    {"name": "no image", "x": (0, 3, 16, 16), "weight": (8, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)},
]  # fmt: skip

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{name}, batch {n}", "x": (n, 3, 224, 224), "weight": weight, "stride": (s, s), "padding": (p, p, p, p), "act": "relu",
     "pool_padding": pool, "ceil_mode": ceil}
    for n in (256, 1)
    for name, weight, s, p, pool, ceil in (
        ("ResNet", (64, 7, 7), 2, 3, 1, False),
        ("GoogLeNet", (64, 7, 7), 2, 3, 0, True),
        ("SqueezeNet", (96, 7, 7), 2, 0, 0, True),
        ("AlexNet", (64, 11, 11), 4, 2, 0, False),
    )
]  # fmt: skip


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of `reference` for a case."""
    return {**stem.make(case, *how), **given(case, "pool_padding", "ceil_mode")}
