"""The input's gradient of a depthwise convolution: with stride 1 the convolution by the turned kernel, else a kernel of its own."""

# pyright: reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.grad import conv2d_input

from zoo.kernels.ops import depthwise
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._depthwise import kernel_size, out_sizes, pack
from zoo.kernels.ops._depthwise_grad import input_kernel
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._overlap import overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK: dict[str, Any] = {"weight": pack}


def reference(
    gradient: Tensor,
    weight: Tensor,
    *,
    size: Sequence[int],
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
) -> Tensor:
    """Compute the gradient of a depthwise convolution's input.

    Args:
        gradient: of the output, a map (N, C, OH, OW).
        weight: kernels (C, 1, KH, KW).
        size: (H, W) of the input, in pixels.
        stride: down and right, in pixels.
        padding: zeros above and below, left and right, in pixels.
        dilation: distance between taps, down and right.

    Returns:
        Map (N, C, H, W) in the dtype of `gradient`, accumulated in float32 (float64 for float64) and rounded once.
    """
    n, c = gradient.shape[:2]
    wide = torch.promote_types(gradient.dtype, torch.float32)
    window: Any = (stride, padding, dilation)  # conv2d_input is typed for one number, and takes two
    return conv2d_input((n, c, *size), weight.to(wide), gradient.to(wide), *window, groups=c).to(gradient.dtype)


@of(reference)
def rival(gradient, weight, size, stride, padding, dilation) -> Tensor:
    """Compute the same by PyTorch's own kernel in the dtype of the maps, for a comparison of times."""
    n, c = gradient.shape[:2]
    return conv2d_input((n, c, *size), weight, gradient, stride, padding, dilation, groups=c)


@of(reference)
def supports(gradient, weight, size, stride, padding, dilation) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not; the weight packed or not."""
    kernel = kernel_size(weight)
    if gradient.dim() != 4 or gradient.dtype not in DTYPES or weight.dtype != gradient.dtype:
        return "not a map of float32, bfloat16 or float16 with a weight of the same type"
    if weight.dim() == 4 and (weight.shape[1] != 1 or weight.shape[0] != gradient.shape[1]):
        return f"a weight {tuple(weight.shape)} is no depthwise one of {gradient.shape[1]} channels"
    if math.prod(kernel) > 49:
        return "a kernel of more than 49 taps"
    if tuple(stride) != (1, 1) and tuple(dilation) != (1, 1):
        return "strides and dilations together"
    if any(p > d * (k - 1) for p, k, d in zip(padding, kernel, dilation, strict=True)):
        return "more padding than the kernel reaches over"
    return unreadable(gradient, small=math.prod(gradient.shape[:2]) * math.prod(size) < 2**31 - 2**22)


def _as_convolution(gradient: Tensor, weight: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of `depthwise` for a stride of 1, the weight packed."""
    around = [d * (k - 1) - p for p, k, d in zip(padding, kernel_size(weight), dilation, strict=True)]
    window = {"padding": (around[0], around[0], around[1], around[1]), "dilation": tuple(dilation)}
    return {"x": gradient, "weight": weight.flip(0, 1), "bias": None, **window}


@of(reference)
def configs(gradient, weight, stride, padding, dilation, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: those of `depthwise` for a stride of 1, else a tile's."""
    if tuple(stride) == (1, 1):
        return depthwise.configs(**_as_convolution(gradient, weight, padding, dilation))
    c = gradient.shape[1]
    widths = sorted({channels_of_tile(c, most) for most in (64, 32, 128)}, key=lambda width: (abs(width - 64), width))
    sizes = itertools.product(widths, ((2, 4, 4), (1, 4, 4), (2, 4, 2), (4, 4, 2), (2, 8, 4), (1, 4, 8)))
    return [{"channels": width, "cols": cols, "warps": warps, "vector": vector} for width, (cols, warps, vector) in sizes]


def channels_of_tile(channels: int, most: int) -> int:
    """Return a power of two, at most `most` and no less than 16, whose multiple is hardly more than the channels."""
    widths = [w for w in (128, 64, 32, 16) if w <= most and (w == 16 or w < 2 * channels)]
    return next((w for w in widths if triton.cdiv(channels, w) * w <= 1.13 * channels), min(widths))


@launches(reference, configs, tuned=True)
def launch(gradient, weight, size, stride, padding, dilation, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; arguments as in `reference`, but the weight packed (KH, KW, C). `out` may be a channel slice."""
    n, c, oh, ow = gradient.shape
    out = empty_map(n, c, *size, like=gradient) if out is None else out
    if out.numel() == 0:
        return out
    if tuple(stride) == (1, 1):
        return depthwise.launch(**_as_convolution(gradient, weight, padding, dilation), out=out, config=config)
    (kh, kw), (sh, sw), (top, left), (h, w) = kernel_size(weight), stride, padding, size
    vector, groups, *steps = units(16 // out.element_size(), gradient, out)
    cols, bc = config["cols"], config["channels"]
    places = max(1, 32 * config["warps"] * min(config["vector"], 16 // out.element_size()) // bc)
    down, across = (top + h - 1) // sh - top // sh + 1, triton.cdiv((left + w - 1) // sw - left // sw + 1, cols)
    strips = n * down * across
    input_kernel[(triton.cdiv(c, bc) * triton.cdiv(strips, places),)](
        gradient, weight, out, strips, across, down, groups, h, w, oh, ow, *steps, top, left,
        KH=kh, KW=kw, SH=sh, SW=sw, COLS=cols, V=vector, BP=places, BC=bc, num_warps=config["warps"], **overlap(gradient),
    )  # fmt: skip
    return out


@of(reference)
def cost(gradient, weight, size, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); the weight packed or not."""
    written = gradient.shape[0] * gradient.shape[1] * math.prod(size)
    moved = gradient.element_size() * (gradient.numel() + written + weight.numel())
    return 2 * math.prod(kernel_size(weight)) * gradient.numel(), moved


CASES: list[dict[str, Any]] = [
    {"name": "odd channels", "shape": (1, 7, 3, 2)},
    {"name": "1x1 image", "shape": (1, 24, 1, 1)},
    {"name": "stride 2, even", "shape": (2, 16, 8, 10), "stride": (2, 2)},
    {"name": "stride 2, odd", "shape": (2, 20, 9, 7), "stride": (2, 2)},
    {"name": "stride 2, odd by even, odd channels", "shape": (1, 9, 7, 6), "stride": (2, 2)},
    {"name": "stride 2, 1x1 image", "shape": (3, 16, 1, 1), "stride": (2, 2)},
    {"name": "5x5, stride 2", "shape": (1, 8, 5, 6), "kernel": (5, 5), "stride": (2, 2)},
    {"name": "stride 3, 2", "shape": (1, 8, 7, 5), "stride": (3, 2)},
    {"name": "no padding, stride 2", "shape": (1, 8, 8, 9), "stride": (2, 2), "padding": (0, 0)},
    {"name": "stride 2 past a 1x1 kernel", "shape": (1, 8, 6, 5), "kernel": (1, 1), "stride": (2, 2), "padding": (0, 0)},
    {"name": "dilation 2", "shape": (1, 4, 4, 3), "dilation": (2, 2)},
    {"name": "slice", "shape": (2, 16, 9, 7), "wide": 40, "stride": (2, 2)},
    {"name": "batch 0", "shape": (0, 8, 5, 7), "stride": (2, 2)},
]
"""`shape` (N, C, H, W) of the input; `padding` half the kernel unless given; `wide`: maps are slices of maps this wide."""

REAL = (
    (32, 112, 1, 3), (96, 112, 2, 3), (144, 56, 1, 3), (144, 56, 2, 3), (192, 28, 1, 3), (192, 28, 2, 3), (384, 14, 1, 3), (576, 14, 1, 3),
    (576, 14, 2, 3), (960, 7, 1, 3), (72, 56, 2, 5), (120, 28, 1, 5), (672, 14, 1, 5), (672, 14, 2, 5), (960, 7, 1, 5),
)  # fmt: skip
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{c} channels, {px} px, {k}x{k}, stride {s}, batch {n}", "shape": (n, c, px, px), "kernel": (k, k), "stride": (s, s)}
    for n in (256, 32)
    for c, px, s, k in REAL
]


def window_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case's stride, padding and dilation."""
    window = depthwise.window_of(case)
    return window | {"padding": case.get("padding", window["padding"][::2])}


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case, random, with the weight in PyTorch's layout."""
    n, c, h, w = case["shape"]
    draw, kernel, window = Drawing(*how), case.get("kernel", (3, 3)), window_of(case)
    weight = draw.normal(c, 1, *kernel).to(draw.dtype) / math.prod(kernel) ** 0.5
    up, left = window["padding"]
    oh, ow = out_sizes(torch.empty((n, c, h, w), device="meta"), weight, window["stride"], (up, up, left, left), window["dilation"])
    return {"gradient": draw.map((n, c, oh, ow), case.get("wide", 0)), "weight": weight, "size": (h, w), **window}
