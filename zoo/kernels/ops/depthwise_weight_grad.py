"""The weight's gradient of a depthwise convolution: sums of products over all pixels, added in an order that doesn't change."""

# pyright: reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.grad import conv2d_weight

from zoo.kernels.ops import depthwise_input_grad
from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._depthwise_grad import weight_kernel
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import DTYPES, out_size, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import followed_by_ours, overlap
from zoo.kernels.ops.depthwise_input_grad import channels_of_tile, window_of

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""The gradient is float32 and nothing before it is rounded."""


MOST_TAPS = 25
"""Sums that a lane holds: kernels of more taps are done by some of their rows at a time."""


def reference(
    gradient: Tensor,
    x: Tensor,
    *,
    kernel: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Compute the gradient of a depthwise convolution's weight.

    Args:
        gradient: of the output, a map (N, C, OH, OW).
        x: the input, a map (N, C, H, W).
        kernel: (KH, KW), in taps.
        stride: down and right, in pixels.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps, down and right.

    Returns:
        float32 (C, KH, KW) (float64 for float64), accumulated in the same.
    """
    c, wide = x.shape[1], torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.new_zeros((c, *kernel), dtype=wide)
    window: Any = (stride, padding, dilation)  # conv2d_weight is typed for one number, and takes two
    return conv2d_weight(x.to(wide), (c, 1, *kernel), gradient.to(wide), *window, groups=c)[:, 0]


@of(reference)
def rival(gradient, x, kernel, stride, padding, dilation) -> Tensor:
    """Compute the same by PyTorch's own kernel in the dtype of the maps, for a comparison of times."""
    return conv2d_weight(x, (x.shape[1], 1, *kernel), gradient, stride, padding, dilation, groups=x.shape[1])


@of(reference)
def supports(gradient, x, kernel, stride, padding, dilation) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES or gradient.dtype not in DTYPES:
        return "not maps of float32, bfloat16 or float16"
    if math.prod(kernel) > 49 or kernel[1] > MOST_TAPS:
        return f"a kernel of more than 49 taps, or of more than {MOST_TAPS} in a row"
    if tuple(dilation) != (1, 1):
        return "taps that are not beside each other"
    if stride[0] >= min(count for _, count in rows_at_once(kernel)):
        return "windows that share no rows"
    sizes = [out_size(s, k, t, p, p) for s, k, t, p in zip(x.shape[2:], kernel, stride, padding, strict=True)]
    if gradient.shape != (*x.shape[:2], *sizes):
        return f"a gradient {tuple(gradient.shape)} of an output {(*x.shape[:2], *sizes)}"
    return unreadable(gradient, x)


def rows_at_once(kernel: Sequence[int]) -> list[tuple[int, int]]:
    """Divide a kernel's rows into runs of no more than `MOST_TAPS` taps, as even as they can be: the first row of each, and how many."""
    kh, kw = kernel
    runs = math.ceil(kh / max(1, MOST_TAPS // kw))
    ends = [round(kh * run / runs) for run in range(runs + 1)]
    return [(first, end - first) for first, end in itertools.pairwise(ends)]


@of(reference)
def configs(gradient, kernel, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: of a tile, and programs."""
    n, c, oh, ow = gradient.shape
    wanted = (4, 2, 7) if max(count for _, count in rows_at_once(kernel)) * kernel[1] <= 9 else (2, 1, 4)
    if n * c * oh * ow < 1_000_000:  # many small strips, or most processors idle
        wanted = (2, 1)
    columns = sorted({min(cols, ow) for cols in wanted}, key=lambda cols: (triton.cdiv(ow, cols) * cols, -cols))
    widths = (channels_of_tile(c, 64), channels_of_tile(c, 32))
    rows = min(oh, 28 if n * c * oh * ow > 20_000_000 else 14)
    tried = itertools.product(columns, ((4, 2, 4), (4, 2, 8), (8, 2, 3), (4, 4, 3)), widths)
    sizes = ((width, cols, rows, warps, vector, SMS * blocks) for cols, (warps, vector, blocks), width in tried)
    return named("channels cols rows warps vector programs", sizes)[:12]


@launches(reference, configs, tuned=True)
def launch(gradient, x, kernel, stride, padding, config, out: Tensor | None = None, **_) -> Tensor:
    """Run the kernels; see `reference`. `out` is contiguous, of any floating dtype."""
    n, c, oh, ow = gradient.shape
    (kh, kw), (sh, sw), (top, left) = kernel, stride, padding
    out = torch.empty((c, kh, kw), dtype=torch.float32, device=x.device) if out is None else out
    if x.numel() == 0:
        return out.zero_()
    vector, groups, *steps = units(16 // x.element_size(), gradient, x)
    cols, bc, length = config["cols"], config["channels"], config["rows"]
    places = max(1, 32 * config["warps"] * config["vector"] // bc)
    down, across = triton.cdiv(oh, length), triton.cdiv(ow, cols)
    strips = n * down * across
    blocks = triton.cdiv(c, bc)
    parts = max(1, min(triton.cdiv(strips, places), config["programs"] // blocks))
    partials = torch.empty((parts, kh * kw * c), dtype=torch.float32, device=x.device)
    with followed_by_ours(True):
        for first, count in rows_at_once(kernel):
            weight_kernel[(blocks, parts)](
                gradient, x, partials, strips, across, down, groups, x.shape[2], x.shape[3], oh, ow, *steps, top - first, left, length,
                first * kw, KH=count, KW=kw, TAPS=kh * kw, SH=sh, SW=sw, COLS=cols, V=vector, BP=places, BC=bc,
                num_warps=config["warps"], **overlap(x),
            )  # fmt: skip
    add(partials, out, turned=kh * kw)
    return out


@of(reference)
def cost(gradient, x, kernel, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    moved = gradient.numel() * gradient.element_size() + x.numel() * x.element_size()
    return 2 * math.prod(kernel) * gradient.numel(), moved + 4 * x.shape[1] * math.prod(kernel)


CASES: list[dict[str, Any]] = [
    {"name": "batch 1", "shape": (1, 24, 3, 5)},
    {"name": "1x1 image", "shape": (2, 24, 1, 1)},
    {"name": "stride 2, even", "shape": (2, 16, 4, 6), "stride": (2, 2)},
    {"name": "stride 2, odd by even, odd channels", "shape": (1, 9, 7, 6), "stride": (2, 2)},
    {"name": "strips, no padding", "padding": (0, 0), "shape": (1, 4, 18, 4)},
    {"name": "5x5", "shape": (1, 16, 3, 3), "kernel": (5, 5)},
    {"name": "5x5, stride 2", "shape": (1, 8, 4, 3), "kernel": (5, 5), "stride": (2, 2)},
    {"name": "stride 1, 2", "shape": (1, 8, 6, 9), "stride": (1, 2)},
    {"name": "7x7, by three runs of rows", "shape": (2, 8, 5, 6), "kernel": (7, 7)},
    {"name": "7x5 by two, beside the padding", "shape": (1, 16, 9, 4), "kernel": (7, 5), "padding": (1, 2)},
    {"name": "slice", "shape": (2, 16, 5, 7), "wide": 40, "stride": (2, 2)},
    {"name": "batch 0", "shape": (0, 8, 5, 7)},
]
"""As those of `depthwise_input_grad`."""

LARGE_CASES = [
    *depthwise_input_grad.LARGE_CASES,
    *({"name": f"{c} channels, {px} px, 7x7, batch 64", "shape": (64, c, px, px), "kernel": (7, 7)} for c, px in ((96, 56), (384, 14))),
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    n, c, h, w = case["shape"]
    draw, wide, kernel, window = Drawing(*how), case.get("wide", 0), case.get("kernel", (3, 3)), window_of(case)
    oh, ow = (out_size(s, k, t, p, p) for s, k, t, p in zip((h, w), kernel, window["stride"], window["padding"], strict=True))
    return {"gradient": draw.map((n, c, oh, ow), wide), "x": draw.map((n, c, h, w), wide), "kernel": kernel, **window}
