"""Max pooling that remembers in one byte which tap of a window won, where PyTorch keeps eight; ties go to the first, NaN wins."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._arguments import Drawing, given, launches, named, of
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap
from zoo.kernels.ops.pool import pooled_size

TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
"""Values are copied, and the winner is the same one."""

MOST_TAPS = 64


def out_sizes(x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool) -> tuple[int, int]:
    """Return (OH, OW)."""
    oh, ow = (pooled_size(s, k, t, p, p, ceil_mode) for s, k, t, p in zip(x.shape[2:], kernel, stride, padding, strict=True))
    return oh, ow


def reference(
    x: Tensor, *, kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int] = (0, 0), ceil_mode: bool = False
) -> tuple[Tensor, Tensor]:
    """Pool the maximum of windows.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        kernel: (KH, KW) of a window in pixels, at most 64 taps.
        stride: (down, right), pixels from window to window.
        padding: pixels above and below, left and right, at most half the kernel; they never win.
        ceil_mode: also keep a last window that reaches beyond the padding, if it begins within the image or the padding before it.

    Returns:
        The map (N, C, OH, OW) in the dtype of `x`, and uint8 of the same shape: which tap won, row * KW + column. Of equal ones it is
        the first, as in PyTorch, of NaN the last.
    """
    # Of windows of -inf alone PyTorch's kernel for channels_last maps on GPUs names the image's first pixel, be it inside or not.
    x = x.contiguous() if x.is_cuda else x
    y, at = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode, return_indices=True)
    rows = at // x.shape[3] - torch.arange(y.shape[2], device=x.device)[:, None] * stride[0] + padding[0]
    columns = at % x.shape[3] - torch.arange(y.shape[3], device=x.device) * stride[1] + padding[1]
    return y, (rows * kernel[1] + columns).to(torch.uint8)


@of(reference)
def rival(x, kernel, **window) -> Any:
    """Compute the same with indices of eight bytes, for a comparison of times."""
    return F.max_pool2d(x, kernel, **window, return_indices=True)


@of(reference)
def supports(x, kernel, stride, padding, ceil_mode) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if min(*kernel, *stride) < 1 or kernel[0] * kernel[1] > MOST_TAPS:
        return f"windows of more than {MOST_TAPS} taps or none"
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        return "padding of more than half the kernel"
    if min(out_sizes(x, kernel, stride, padding, ceil_mode)) < 1:
        return "the window is larger than the image"
    return unreadable(x)


@triton.jit
def _forward(
    x, out, index, lanes, groups, height, width, out_height, out_width, x_step, out_step, index_step, WINDOW: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    KW: tl.constexpr = WINDOW[1]
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pixel = g // groups
    c = (g - pixel * groups) * V + tl.arange(0, V)[None, :]
    row = (pixel // out_width) % out_height * WINDOW[2] - WINDOW[4]
    col = pixel % out_width * WINDOW[3] - WINDOW[5]
    first = (pixel // (out_width * out_height) * height + row) * width + col
    alive = g < lanes
    values = ()
    for k in tl.static_range(WINDOW[0] * KW):
        there = alive & (row + k // KW >= 0) & (row + k // KW < height) & (col + k % KW >= 0) & (col + k % KW < width)
        at = x + ((first + (k // KW) * width + k % KW) * (x_step * V) + c)
        values = values + (tl.load(at, mask=there, other=float("-inf")),)  # noqa: RUF005
    best = tl.full([BLOCK, V], float("-inf"), tl.float32)
    # What lies in the padding can't be the first winner, even if all that follows is -inf.
    won = tl.zeros([BLOCK, V], tl.int32) + tl.maximum(-row, 0) * KW + tl.maximum(-col, 0)
    for k in tl.static_range(WINDOW[0] * KW):
        value = values[k].to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        won = tl.where(better, k, won)
    tl.store(out + (pixel * (out_step * V) + c), best.to(out.dtype.element_ty), mask=alive)
    tl.store(index + (pixel * (index_step * V) + c), won.to(tl.uint8), mask=alive)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors a program handles, and its warps."""
    return named("block warps", ((128, 4), (64, 2), (256, 4), (256, 8), (64, 1), (512, 8)))


@launches(reference, configs)
def launch(x, kernel, stride, padding, ceil_mode, config, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel; see `reference`. `out` may be channel slices."""
    n, c, h, w = x.shape
    oh, ow = out_sizes(x, kernel, stride, padding, ceil_mode)
    y, index = out or (empty_map(n, c, oh, ow, x), empty_map(n, c, oh, ow, x, torch.uint8))
    if y.numel() == 0:
        return y, index
    v, groups, *steps = units(min(8, 16 // x.element_size()), x, y, index)
    lanes = n * oh * ow * groups
    _forward[(triton.cdiv(lanes, config["block"]),)](
        x, y, index, lanes, groups, h, w, oh, ow, *steps, WINDOW=(*kernel, *stride, *padding), V=v,
        BLOCK=config["block"], num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    return y, index


@of(reference)
def cost(x, kernel, stride, padding, ceil_mode) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    pooled = x.shape[0] * x.shape[1] * math.prod(out_sizes(x, kernel, stride, padding, ceil_mode))
    return pooled * kernel[0] * kernel[1], x.numel() * x.element_size() + pooled * (x.element_size() + 1)


def _case(name: str, shape: tuple[int, ...], kernel: int, stride: int, pad: int = 0, **more: Any) -> dict[str, Any]:
    return {"name": name, "shape": shape, "kernel": (kernel,) * 2, "stride": (stride,) * 2, "padding": (pad,) * 2, **more}


CASES: list[dict[str, Any]] = [
    _case("stem", (2, 16, 9, 12), 3, 2, 1),
    _case("stem, ceil", (1, 24, 7, 8), 3, 2, ceil_mode=True),
    _case("vgg", (2, 8, 6, 7), 2, 2),
    _case("branch of a slice", (1, 24, 7, 5), 3, 1, 1, wide=40),
    _case("odd channels", (2, 7, 5, 5), 3, 2, 1),
    _case("one pixel", (3, 16, 1, 1), 3, 2, 1),
    _case("gaps", (1, 8, 8, 9), 2, 3),
    _case("equal ones", (2, 8, 6, 7), 3, 2, 1, levels=2),
    _case("batch 0", (0, 16, 8, 8), 2, 2),
]
"""`shape` (N, C, H, W) of the input; `levels`: values are so few different ones; `wide`: maps are slices of maps this wide."""

LARGE_CASES: list[dict[str, Any]] = [
    _case(f"{what}, batch {n}", (n, c, px, px), kernel, 2, pad)
    for n in (256, 32)
    for what, c, px, kernel, pad in (("resnet stem", 64, 112, 3, 1), ("vgg 1", 64, 224, 2, 0), ("vgg 3", 256, 56, 2, 0))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    x = Drawing(*how).map(case["shape"], case.get("wide", 0))
    if "levels" in case:
        x = x.clamp_(0, case["levels"] - 1).round_()
    return {"x": x, **given(case, "kernel", "stride", "padding", "ceil_mode")}
