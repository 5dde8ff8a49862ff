"""The weight's gradient of a grouped convolution: for each block of channels one product over all pixels, which programs share out.

What an output pixel has seen of its block is gathered tap by tap where it is read, so that nothing is unfolded in memory. Narrow groups
share a block, as in `grouped`, and what lies between them is computed and dropped. Parts are added in a fixed order.
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.grad import conv2d_weight

from zoo.kernels.ops import grouped
from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import DTYPES, out_size, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""The gradient is float32 and nothing before it is rounded."""


def reference(
    gradient: Tensor,
    x: Tensor,
    *,
    groups: int,
    kernel: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Compute the gradient of a grouped convolution's weight.

    Args:
        gradient: of the output, a map (N, C, OH, OW).
        x: the input, a map (N, C, H, W).
        groups: how many groups the channels fall into.
        kernel: (KH, KW), in taps.
        stride: down and right, in pixels.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps, down and right.

    Returns:
        float32 (C, C / groups, KH, KW) (float64 for float64), accumulated in the same.
    """
    c, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    shape = (c, c // groups, *kernel)
    if not x.numel():
        return x.new_zeros(shape, dtype=wide)
    window: Any = (stride, padding, dilation)  # conv2d_weight is typed for one number, and takes two
    return conv2d_weight(x.to(wide), shape, gradient.to(wide), *window, groups=groups)


OUT = torch.contiguous_format


@of(reference)
def rival(gradient, x, groups, kernel, stride, padding, dilation) -> Tensor:
    """Compute the same by cuDNN in the dtype of the maps, for a comparison of times."""
    return conv2d_weight(x, (x.shape[1], x.shape[1] // groups, *kernel), gradient, stride, padding, dilation, groups=groups)


@of(reference)
def supports(gradient, x, groups, kernel, stride, padding, dilation) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES or gradient.dtype != x.dtype:
        return "not maps of one type, float32, bfloat16 or float16"
    weight = torch.empty((x.shape[1], x.shape[1] // max(groups, 1), *kernel), dtype=x.dtype, device="meta")
    if reason := grouped.narrow(x, weight, groups):
        return reason
    sizes = [out_size(s, k, t, p, p, d) for s, k, t, p, d in zip(x.shape[2:], kernel, stride, padding, dilation, strict=True)]
    if gradient.shape != (*x.shape[:2], *sizes):
        return f"a gradient {tuple(gradient.shape)} of an output {(*x.shape[:2], *sizes)}"
    return unreadable(gradient, x)


@triton.jit
def _weight(
    gradient, x, partials, rows, channels, height, width, out_height, out_width, g_units, x_units,
    V: tl.constexpr, EACH: tl.constexpr, WIDE: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
    PT: tl.constexpr, PL: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a program's part of BM output channels by BN of a block's taps and channels, from blocks of BK pixels that are all apart."""
    begin(OVERLAP)
    DEPTH: tl.constexpr = KH * KW * WIDE
    ACROSS: tl.constexpr = (DEPTH + BN - 1) // BN
    HIGH: tl.constexpr = (WIDE + BM - 1) // BM
    place = tl.program_id(0)
    block = place // (ACROSS * HIGH)
    rm = (place // ACROSS % HIGH) * BM + tl.arange(0, BM)
    k = (place % ACROSS) * BN + tl.arange(0, BN)
    tap = k // WIDE
    c = k % WIDE
    down = (tap // KW) * DH - PT
    right = (tap % KW) * DW - PL
    part = tl.program_id(1)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(part * BK, rows, tl.num_programs(1) * BK, num_stages=STAGES):
        row = first + tl.arange(0, BK)
        there = row < rows
        line = row // out_width
        y = (line % out_height) * SH
        left = (row % out_width) * SW
        start = ((line // out_height) * height + y) * width + left
        g = tl.load(
            gradient + (row[:, None] * (g_units * V) + (block * WIDE + rm)[None, :]), mask=there[:, None] & (rm < WIDE)[None, :], other=0.0
        )  # fmt: skip
        high = y[:, None] + down[None, :]
        far = left[:, None] + right[None, :]
        seen = (high >= 0) & (high < height) & (far >= 0) & (far < width) & there[:, None] & (k < DEPTH)[None, :]
        at = (start[:, None] + (down * width + right)[None, :]) * (x_units * V) + (block * WIDE + c)[None, :]
        acc = product(tl.trans(g), tl.load(x + at, mask=seen, other=0.0), acc, "ieee")
    to = partials + (part * channels + block * WIDE + rm[:, None]) * (EACH * KH * KW) + ((c % EACH) * (KH * KW) + tap)[None, :]
    own = (rm // EACH)[:, None] == (c // EACH)[None, :]
    tl.store(to, acc, mask=own & (rm < WIDE)[:, None] & (k < DEPTH)[None, :])


@of(reference)
def configs(gradient, x, groups, kernel, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: a tile's channels and places, pixels at a time, warps, stages, programs an SM."""
    wide = _wide(x, groups)
    high = max(16, min(64, triton.next_power_of_2(wide)))
    depth = max(16, triton.next_power_of_2(math.prod(kernel) * wide))
    if x.dtype == torch.float32:
        wanted = [(min(32, high), min(64, depth), 16, 4, 2, 4), (16, min(32, depth), 32, 4, 2, 4)]
    else:
        wanted = [(high, min(128, depth), 64, 4, 3, 3), (high, min(256, depth), 64, 8, 3, 2), (high, min(64, depth), 64, 4, 3, 4)]
        wanted += [(high, min(128, depth), 32, 4, 4, 4), (high, min(128, depth), 128, 8, 2, 2), (high, min(64, depth), 128, 4, 3, 3)]
    return named("BM BN BK warps stages blocks", wanted)


def _wide(x: Tensor, groups: int) -> int:
    each = x.shape[1] // groups
    return each * grouped.together(each)


@launches(reference, configs, tuned=True)
def launch(gradient, x, groups, kernel, stride, padding, dilation, config, out: Tensor | None = None) -> Tensor:
    """Run the kernels; see `reference`. `out` is contiguous, of any floating dtype."""
    (n, c, oh, ow), (h, w), (kh, kw) = gradient.shape, x.shape[2:], kernel
    each, wide = c // groups, _wide(x, groups)
    out = torch.empty((c, each, kh, kw), dtype=torch.float32, device=x.device) if out is None else out
    if gradient.numel() == 0:
        return out.zero_()
    vector, _, *steps = units(16, gradient, x)
    rows = n * oh * ow
    tiles = c // wide * triton.cdiv(wide, config["BM"]) * triton.cdiv(kh * kw * wide, config["BN"])
    parts = max(1, min(triton.cdiv(rows, config["BK"]), SMS * config["blocks"] // tiles))
    partials = torch.empty((parts, out.numel()), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        _weight[(tiles, parts)](
            gradient, x, partials, rows, c, h, w, oh, ow, *steps, V=vector, EACH=each, WIDE=wide, KH=kh, KW=kw, SH=stride[0],
            SW=stride[1], PT=padding[0], PL=padding[1], DH=dilation[0], DW=dilation[1], BM=config["BM"], BN=config["BN"],
            BK=config["BK"], STAGES=config["stages"], num_warps=config["warps"], **overlap(x),
        )  # fmt: skip
    return add(partials, out)


@of(reference)
def cost(gradient, x, groups, kernel, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    weights = x.shape[1] // groups * math.prod(kernel)
    return 2 * gradient.numel() * weights, sum(m.numel() * m.element_size() for m in (gradient, x)) + 4 * x.shape[1] * weights


def _case(name: str, x: tuple[int, int, int, int], groups: int, kernel: int = 3, **options: Any) -> dict[str, Any]:
    return {"name": name, "x": x, "groups": groups, "kernel": (kernel, kernel), "padding": (kernel // 2,) * 2, **options}


CASES: list[dict[str, Any]] = [
    _case("twenty-fours", (2, 72, 5, 4), 3),
    _case("fours, stride 2", (1, 32, 7, 6), 8, stride=(2, 2)),
    _case("fifty-sixes", (1, 112, 4, 3), 2),
    _case("one hundred and twelves", (1, 224, 3, 3), 2),
    _case("sixteens, dilated", (1, 32, 6, 7), 2, padding=(2, 2), dilation=(2, 2)),
    _case("one pixel", (2, 32, 1, 1), 2),
    _case("slice", (1, 32, 4, 5), 4, wide=80),
    _case("five taps", (1, 32, 5, 6), 4, 5),
    _case("many programs", (2, 16, 24, 20), 2),
    _case("no image", (0, 32, 4, 4), 8),
]
"""`x` (N, C, H, W) of the convolution; `wide`: the maps are slices of maps this wide."""

LARGE_CASES: list[dict[str, Any]] = [
    _case(f"{case['name']}", (case["n"], case["c"], *case["size"]), case["groups"], stride=case.get("stride", (1, 1)))
    for case in grouped.LARGE_CASES
    if case["n"] > 1
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, kernel = Drawing(*how), case["kernel"]
    window = {name: case.get(name, usual) for name, usual in (("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)))}
    steps = zip(case["x"][2:], kernel, *window.values(), strict=True)
    size = [out_size(s, k, t, p, p, d) for s, k, t, p, d in steps]
    x, gradient = (draw.map(shape, case.get("wide", 0)) for shape in (case["x"], (*case["x"][:2], *size)))
    return {"gradient": gradient, "x": x, "groups": case["groups"], "kernel": kernel, **window}
