"""The mean of every channel over all pixels, with an affine and an activation of the input on the way in.

Where images are few and large, programs sum parts of the pixels and a second launch adds the parts, always in the same order.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, activate, affine
from zoo.kernels.ops._arguments import Drawing, given, launches, of
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, pixel_stride, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    pre_act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Average ``pre_act(x * scale + shift)`` over the pixels of each image.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        scale: float32 (C,), a factor for each channel.
        shift: float32 (C,), added for each channel.
        pre_act: activation of the input, a name of `ACTIVATIONS`.
        out_dtype: dtype of the result; that of `x` by default.

    Returns:
        Map (N, C, 1, 1). Summed in float32 (float64 for float64) and rounded once.

    Raises:
        KeyError: the activation has no such name.
    """
    y = affine(x.to(torch.promote_types(x.dtype, torch.float32)), scale, shift)
    return ACTIVATIONS[pre_act](y).mean((2, 3), keepdim=True).to(out_dtype or x.dtype)


@of(reference)
def supports(x, scale, shift, pre_act, out_dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES or (out_dtype or x.dtype) not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if pre_act not in ACTIVATIONS:
        return "unknown activation"
    if not per_channel(x, scale, shift):
        return "scale and shift are not float32, one for each channel"
    if x.shape[2] * x.shape[3] == 0:
        return "no pixels to average"
    return unreadable(x)


@triton.jit
def _sum(
    x,
    scale,
    shift,
    out,
    blocks,
    groups_per_pixel,
    pixels,
    pixels_per_part,
    parts,
    x_step,
    out_step,
    factor,
    PRE: tl.constexpr,
    V: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the pixels of one part of an image for BLOCK channels; the row of `out` is the image's number times `parts` plus the part's."""
    begin(OVERLAP)
    image = tl.program_id(0) // blocks
    part = tl.program_id(1)
    c = (tl.program_id(0) - image * blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = c < groups_per_pixel * V
    if scale is not None:
        scale = tl.load(scale + c, mask=there, other=0.0)
    if shift is not None:
        shift = tl.load(shift + c, mask=there, other=0.0)
    end = tl.minimum((part + 1) * pixels_per_part, pixels)
    total = tl.zeros([PIXELS, BLOCK], tl.float32)
    for first in range(part * pixels_per_part, end, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        y = tl.load(x + (image * pixels + p) * (x_step * V) + c, mask=(p < end) & there, other=0.0).to(tl.float32)
        if scale is not None:
            y = y * scale
        if shift is not None:
            y = y + shift
        y = activate(y, PRE)
        if shift is not None or PRE != "none":
            y = tl.where(p < end, y, 0.0)
        total += y
    mean = tl.sum(total, axis=0, keep_dims=True) * factor
    tl.store(out + (image * parts + part) * (out_step * V) + c, mean.to(out.dtype.element_ty), mask=there)


@triton.jit
def _add(parts, bias, out, count, size, out_step, factor, PARTS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Add `count` rows of `size` sums of an image, times `factor`, and the bias."""
    begin(OVERLAP)
    image = tl.program_id(1)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([PARTS, BLOCK], tl.float32)
    for first in range(0, count, PARTS):
        s = first + tl.arange(0, PARTS)[:, None]
        total += tl.load(parts + (image * count + s) * size + c, mask=(s < count) & (c < size), other=0.0)
    y = tl.sum(total, axis=0, keep_dims=True) * factor
    if bias is not None:
        y += tl.load(bias + c, mask=c < size, other=0.0)
    tl.store(out + image * out_step + c, y.to(out.dtype.element_ty), mask=c < size)


def add_parts(parts: Tensor, out: Tensor, out_step: int, factor: float = 1.0, bias: Tensor | None = None) -> None:
    """Write the sums over axis 1 of float32 `parts` (N, S, C), times `factor`, plus the bias (C,), to rows of `out`, `out_step` apart."""
    n, count, size = parts.shape
    block = 64 if n * size < 132 * 256 else 256
    rows = min(16, triton.next_power_of_2(count))
    grid = (triton.cdiv(size, block), n)
    _add[grid](parts, bias, out, count, size, out_step, factor, PARTS=rows, BLOCK=block, num_warps=4, **overlap(parts))


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels and channels of a tile, parts an image is summed in, and warps."""
    n, c, h, w = x.shape
    sizes = [(16, 64, 4), (32, 64, 4), (64, 32, 4), (16, 128, 4), (32, 128, 8)]
    if n * triton.cdiv(c, 64) < 264:
        sizes = [(64, 16, 4), (64, 32, 4), (128, 16, 4), (32, 64, 4), (64, 64, 8)]
    found = []
    for pixels, block, warps in sizes:
        programs = max(n * triton.cdiv(c, block), 1)
        # A second launch costs about as much as eight tiles one after the other.
        parts = 1 if h * w <= 8 * pixels else min(triton.cdiv(264, programs), triton.cdiv(h * w, 2 * pixels))
        found.append({"pixels": pixels, "block": block, "parts": parts, "warps": warps})
    return found


def partial_sums(
    x: Tensor, scale: Any, shift: Any, pre_act: str, config: dict[str, int], out: Tensor | None = None, factor: float = 1.0
) -> Tensor:
    """Return the float32 sums (N, parts, C) of ``pre_act(x * scale + shift)`` over parts of the pixels, as squeeze_excite takes them."""
    n, c, h, w = x.shape
    parts = config["parts"]
    v, groups, x_step, *step = units(8, x) if out is None else units(8, x, out)
    out = torch.empty((n, parts, c), dtype=torch.float32, device=x.device) if out is None else out
    blocks = triton.cdiv(c, config["block"])
    constants: dict[str, Any] = {"PRE": pre_act, "V": v, "PIXELS": config["pixels"], "BLOCK": config["block"], "num_warps": config["warps"]}
    sizes = (blocks, groups, h * w, triton.cdiv(h * w, parts), parts, x_step, *(step or [groups]))
    _sum[(blocks * n, parts)](x, scale, shift, out, *sizes, factor, **constants, **overlap(x))
    return out


@launches(reference, configs)
def launch(x, scale, shift, pre_act, out_dtype, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel, and a second one where `config` has several parts; see `reference`. `out` may be a channel slice."""
    n, c, h, w = x.shape
    out = empty_map(n, c, 1, 1, x, out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    if config["parts"] == 1:
        return partial_sums(x, scale, shift, pre_act, config, out, 1 / (h * w))
    parts = partial_sums(x, scale, shift, pre_act, config)
    add_parts(parts, out, pixel_stride(out) or c, 1 / (h * w))
    return out


@of(reference)
def cost(x, scale, shift, out_dtype, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    parts = (scale is not None) + (shift is not None)
    pooled = x.shape[0] * x.shape[1] * (out_dtype or x.dtype).itemsize
    return x.numel() * (1 + parts), x.numel() * x.element_size() + pooled + 4 * parts * x.shape[1]


# `wide`: x is a slice of a map this wide, beginning at channel 8; `affine`: scale and shift are given.
CASES: list[dict[str, Any]] = [
    {"name": "plain", "shape": (2, 40, 7, 7)},
    {"name": "one pixel", "shape": (2, 16, 1, 1)},
    {"name": "odd channels", "shape": (1, 13, 5, 3), "affine": True, "pre_act": "relu"},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 40, "pre_act": "hardswish"},
    {"name": "parts", "shape": (1, 16, 33, 34), "affine": True, "pre_act": "silu"},
    {"name": "to float32", "shape": (3, 8, 4, 4), "out_dtype": "float32", "pre_act": "relu6"},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "256x2048@7", "shape": (256, 2048, 7, 7)},
    {"name": "densenet 256x1024@7", "shape": (256, 1024, 7, 7), "affine": True, "pre_act": "relu"},
    {"name": "256x96@56", "shape": (256, 96, 56, 56)},
    {"name": "1x2048@7", "shape": (1, 2048, 7, 7)},
    {"name": "1x32@112", "shape": (1, 32, 112, 112)},
    {"name": "1x672@14", "shape": (1, 672, 14, 14)},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    args: dict[str, Any] = {"x": draw.map(case["shape"], case.get("wide", 0)), **given(case, "pre_act", "out_dtype")}
    if case.get("affine"):
        args["scale"], args["shift"] = draw.normal(2, case["shape"][1])
    return args
