"""The way back through max pooling: every input pixel asks the few windows that it is in whether it won, so nothing is added twice."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops import max_pool
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
CASES, LARGE_CASES = max_pool.CASES, max_pool.LARGE_CASES


def reference(
    gradient: Tensor,
    index: Tensor,
    *,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] = (0, 0),
) -> Tensor:
    """Compute the gradient of max pooling's input.

    Args:
        gradient: of the output, a map (N, C, OH, OW).
        index: uint8 of the same shape, which tap won.
        size: (H, W) of the input, in pixels.
        kernel: (KH, KW) of a window in pixels.
        stride: (down, right), pixels from window to window.
        padding: pixels above and below, left and right.

    Returns:
        Map (N, C, H, W) in the dtype of `gradient`, added in float32 (float64 for float64) and rounded once.
    """
    (n, c, oh, ow), (h, w), (kh, kw), (sh, sw), (top, left) = gradient.shape, size, kernel, stride, padding
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    total = wide.new_zeros(n, c, max(top + h, (oh - 1) * sh + kh), max(left + w, (ow - 1) * sw + kw))
    for tap in range(kh * kw):
        row, col = divmod(tap, kw)
        total[:, :, row : row + (oh - 1) * sh + 1 : sh, col : col + (ow - 1) * sw + 1 : sw] += torch.where(index == tap, wide, 0)
    return total[:, :, top : top + h, left : left + w].to(gradient.dtype)


@of(reference)
def rival(gradient, index, size, kernel, stride, padding) -> Tensor:
    """Compute the same by PyTorch's own kernel with indices of eight bytes, for a comparison of times."""
    places, x = _eight_bytes(index, tuple(size), tuple(kernel), tuple(stride), tuple(padding), gradient.dtype)
    return torch.ops.aten.max_pool2d_with_indices_backward(gradient, x, [*kernel], [*stride], [*padding], [1, 1], False, places)


@functools.lru_cache(maxsize=1)
def _eight_bytes(index: Tensor, size: Any, kernel: Any, stride: Any, padding: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the indices that PyTorch would have kept, and a map of the input's shape."""
    n, c, oh, ow = index.shape
    rows = torch.arange(oh, device=index.device)[:, None] * stride[0] - padding[0] + index.long() // kernel[1]
    columns = torch.arange(ow, device=index.device) * stride[1] - padding[1] + index.long() % kernel[1]
    return (rows * size[1] + columns).contiguous(memory_format=torch.channels_last), empty_map(n, c, *size, like=index, dtype=dtype)


@of(reference)
def supports(gradient, index, size, kernel, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if index.shape != gradient.shape or index.dtype != torch.uint8:
        return "no byte for each gradient"
    if kernel[0] * kernel[1] > max_pool.MOST_TAPS:
        return f"windows of more than {max_pool.MOST_TAPS} taps"
    return unreadable(gradient, index, small=gradient.shape[0] * gradient.shape[1] * size[0] * size[1] < 2**31 - 2**22)


@triton.jit
def _backward(
    gradient, index, out, lanes, groups, across, down, height, width, out_height, out_width, g_step, index_step, out_step,
    WINDOW: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A lane writes SH x SW pixels, which the same windows may cover."""
    begin(OVERLAP)
    KH: tl.constexpr = WINDOW[0]
    KW: tl.constexpr = WINDOW[1]
    SH: tl.constexpr = WINDOW[2]
    SW: tl.constexpr = WINDOW[3]
    JH: tl.constexpr = (KH + SH - 1) // SH
    JW: tl.constexpr = (KW + SW - 1) // SW
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    block = g // groups
    c = (g - block * groups) * V + tl.arange(0, V)[None, :]
    image = block // (across * down)
    a = (block // across) % down + WINDOW[4] // SH
    b = block % across + WINDOW[5] // SW
    alive = g < lanes
    values = ()
    winners = ()
    for k in tl.static_range(JH * JW):
        row = a - k // JW
        col = b - k % JW
        there = alive & (row >= 0) & (row < out_height) & (col >= 0) & (col < out_width)
        pixel = (image * out_height + row) * out_width + col
        values = values + (tl.load(gradient + (pixel * (g_step * V) + c), mask=there, other=0.0),)  # noqa: RUF005
        winners = winners + (tl.load(index + (pixel * (index_step * V) + c), mask=there, other=255).to(tl.int32),)  # noqa: RUF005
    for phase in tl.static_range(SH * SW):
        total = tl.zeros([BLOCK, V], tl.float32)
        for k in tl.static_range(JH * JW):
            if phase // SW + (k // JW) * SH < KH and phase % SW + (k % JW) * SW < KW:
                tap = (phase // SW + (k // JW) * SH) * KW + phase % SW + (k % JW) * SW
                total += tl.where(winners[k] == tap, values[k].to(tl.float32), 0.0)
        row = a * SH + phase // SW - WINDOW[4]
        col = b * SW + phase % SW - WINDOW[5]
        there = alive & (row >= 0) & (row < height) & (col >= 0) & (col < width)
        tl.store(out + (((image * height + row) * width + col) * (out_step * V) + c), total.to(out.dtype.element_ty), mask=there)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors a program handles, and its warps."""
    return [{"block": block, "warps": warps} for block, warps in ((128, 4), (64, 2), (256, 4), (256, 8), (64, 1), (512, 8))]


@launches(reference, configs)
def launch(gradient, index, size, kernel, stride, padding, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice."""
    (n, c, oh, ow), (h, w), (sh, sw), (top, left) = gradient.shape, size, stride, padding
    out = empty_map(n, c, h, w, gradient) if out is None else out
    if out.numel() == 0:
        return out
    v, groups, *steps = units(min(8, 16 // gradient.element_size()), gradient, index, out)
    down, across = (top + h - 1) // sh - top // sh + 1, (left + w - 1) // sw - left // sw + 1
    lanes = n * down * across * groups
    _backward[(triton.cdiv(lanes, config["block"]),)](
        gradient, index, out, lanes, groups, across, down, h, w, oh, ow, *steps, WINDOW=(*kernel, *stride, *padding), V=v,
        BLOCK=config["block"], num_warps=config["warps"], **overlap(gradient),
    )  # fmt: skip
    return out


@of(reference)
def cost(gradient, size, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    written = gradient.shape[0] * gradient.shape[1] * size[0] * size[1]
    return gradient.numel(), gradient.numel() * (gradient.element_size() + 1) + written * gradient.element_size()


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    there = max_pool.make(case, *how)
    x = there.pop("x")
    n, c, *size = x.shape
    oh, ow = max_pool.out_sizes(x, there["kernel"], there["stride"], there["padding"], there.get("ceil_mode", False))
    if x.is_meta or not x.numel():
        index = empty_map(n, c, oh, ow, x, torch.uint8)
    else:
        index = max_pool.reference(x, **there)[1].contiguous(memory_format=torch.channels_last)
    there.pop("ceil_mode", None)
    return {"gradient": Drawing(*how).map((n, c, oh, ow), case.get("wide", 0)), "index": index, "size": tuple(size), **there}
