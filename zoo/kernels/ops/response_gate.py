"""Global response normalisation (Woo et al. 2023, "ConvNeXt V2", section 3.2) as a gate: one reading of the map.

GRN scales each channel by how strong it is beside the others, ``x * n * weight + bias + x``, n being the channel's norm over the pixels
by the mean norm of all channels. The factor ``1 + n * weight`` is a number for each image and channel, which the 1x1 convolution behind it
takes as a gate, as it does squeeze-and-excite's; the bias goes into that convolution's own.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._layout import DTYPES, per_channel, pixel_stride, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
WIDEST = 16384
"""Channels that a program holds at once."""
PROGRAMS = 528
"""Four for each of an H100's multiprocessors."""


def reference(x: Tensor, scale: Tensor, *, eps: float) -> Tensor:
    """Compute ``1 + scale * norm / (mean(norm) + eps)``, the norm of each channel over an image's pixels, its mean over the channels.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        scale: float32 (C,), the paper's gamma.
        eps: added to the mean.

    Returns:
        Map (N, C, 1, 1), float32 (float64 of float64), whatever `x` is.
    """
    norm = x.to(torch.promote_types(x.dtype, torch.float32)).square().sum((2, 3), keepdim=True).sqrt()
    return 1 + scale.to(norm.dtype).view(1, -1, 1, 1) * norm / (norm.mean(1, keepdim=True) + eps)


@of(reference)
def supports(x, scale, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if scale is None or not per_channel(x, scale):
        return "the scale is not float32, one for each channel"
    if not 0 < x.shape[1] <= WIDEST:
        return f"not 1 to {WIDEST} channels"
    if x.shape[2] * x.shape[3] == 0:
        return "no pixels"
    return unreadable(x)


@triton.jit
def _squares(
    x,
    out,
    blocks,
    channels,
    pixels,
    pixels_per_part,
    parts,
    x_step,
    V: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Sum the squares of one part of an image's pixels for BLOCK channels, into row (image, part) of `out`."""
    begin(OVERLAP)
    image = tl.program_id(0) // blocks
    part = tl.program_id(1)
    c = (tl.program_id(0) - image * blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = c < channels * V
    end = tl.minimum((part + 1) * pixels_per_part, pixels)
    total = tl.zeros([PIXELS, BLOCK], tl.float32)
    for first in range(part * pixels_per_part, end, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        y = tl.load(x + (image * pixels + p) * (x_step * V) + c, mask=(p < end) & there, other=0.0).to(tl.float32)
        total += y * y
    tl.store(out + (image * parts + part) * (channels * V) + c, tl.sum(total, axis=0, keep_dims=True), mask=there)


@triton.jit
def _gate(squares, scale, out, channels, parts, out_step, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Make the gate of one image of its parts' sums."""
    begin(OVERLAP)
    image = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    there = c < channels
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, parts):
        total += tl.load(squares + (image * parts + part) * channels + c, mask=there, other=0.0)
    norm = tl.sqrt(total)
    mean = tl.sum(norm, axis=0) / channels
    y = 1 + tl.load(scale + c, mask=there, other=0.0) * (norm / (mean + eps))
    tl.store(out + image * out_step + c, y, mask=there)


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels and channels of a tile, parts an image is summed in, and warps."""
    n, c, h, w = x.shape
    pixels, found = h * w, []
    for rows, width, warps in ((32, 64, 4), (16, 128, 4), (64, 64, 8), (8, 256, 4), (16, 64, 2)):
        block = min(width, max(16, triton.next_power_of_2(c)))
        programs = max(1, n * triton.cdiv(c, block))
        parts = max(1, min(triton.cdiv(PROGRAMS, programs), triton.cdiv(pixels, rows), 64))
        found.append((rows, block, parts, warps))
    return named("pixels block parts warps", found)


@launches(reference, configs)
def launch(x, scale, eps, config, out: Tensor | None = None) -> Tensor:
    """Run the kernels; see `reference`. `out`, (N, C, 1, 1) in float32, may be a channel slice."""
    n, c, h, w = x.shape
    out = torch.empty((n, c, 1, 1), dtype=torch.float32, device=x.device, memory_format=torch.channels_last) if out is None else out
    if out.numel() == 0:
        return out
    v, channels, step = units(8, x)
    parts, block = config["parts"], config["block"]
    blocks = triton.cdiv(c, block)
    squares = torch.empty((n, parts, c), dtype=torch.float32, device=x.device)
    _squares[(n * blocks, parts)](
        x, squares, blocks, channels, h * w, triton.cdiv(h * w, parts), parts, step,
        V=v, PIXELS=config["pixels"], BLOCK=block, num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    wide = triton.next_power_of_2(c)
    _gate[(n,)](
        squares, scale, out, c, parts, pixel_stride(out) or c, eps, BLOCK=wide, num_warps=min(16, max(1, wide // 256)), **overlap(x)
    )
    return out


@of(reference)
def cost(x, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return 2 * x.numel(), x.numel() * x.element_size() + 4 * x.shape[0] * x.shape[1]


# `wide`: x is a slice of a map this wide, beginning at channel 8; `small`: of the numbers, which vanish beside eps.
CASES: list[dict[str, Any]] = [
    {"name": "plain", "shape": (2, 40, 7, 7)},
    {"name": "one pixel", "shape": (2, 16, 1, 1)},
    {"name": "odd channels", "shape": (1, 13, 5, 3)},
    {"name": "one channel", "shape": (2, 1, 3, 3)},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 40},
    {"name": "several parts", "shape": (1, 24, 19, 13)},
    {"name": "small numbers", "shape": (1, 32, 4, 4), "factor": 1e-4},
    {"name": "more channels than a block", "shape": (1, 520, 3, 2)},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "ConvNeXt V2-T 64x384@56", "shape": (64, 384, 56, 56)},
    {"name": "ConvNeXt V2-T 64x1536@14", "shape": (64, 1536, 14, 14)},
    {"name": "ConvNeXt V2-T 1x3072@7", "shape": (1, 3072, 7, 7)},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    x = draw.map(case["shape"], case.get("wide", 0)).mul_(case.get("factor", 1.0))
    return {"x": x, "scale": draw.normal(case["shape"][1]), "eps": 1e-6}
