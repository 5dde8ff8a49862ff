"""Layer normalisation over the channels of every pixel (Ba et al., "Layer Normalization", 2016), as ConvNeXt and transformers have it."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._dense import narrowed
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
WIDEST = 8192
"""Channels that a program holds at once."""
PROGRAMS = 264
"""Two for each of an H100's multiprocessors: fewer leave some idle."""


def reference(x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, *, eps: float) -> Tensor:
    """Compute ``(x - mean) / sqrt(variance + eps) * scale + shift``, mean and biased variance of the channels of each pixel.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        scale: float32 (C,), a factor for each channel.
        shift: float32 (C,), added for each channel.
        eps: added to the variance.

    Returns:
        Map of the shape of `x`. By PyTorch's own operator, whose weights have the type of `x`.
    """
    weight, bias = (None if v is None else v.to(x.dtype) for v in (scale, shift))
    return F.layer_norm(x.permute(0, 2, 3, 1), (x.shape[1],), weight, bias, eps).permute(0, 3, 1, 2)


@of(reference)
def supports(x, scale, shift, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if not per_channel(x, scale, shift):
        return "scale and shift are not float32, one for each channel"
    if not 0 < x.shape[1] <= WIDEST:
        return f"not 1 to {WIDEST} channels"
    return unreadable(x)


@triton.jit
def _layer_norm(
    x,
    scale,
    shift,
    out,
    pixels,
    groups,
    x_step,
    out_step,
    eps,
    V: tl.constexpr,
    PIXELS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise PIXELS pixels, all channels of each in BLOCK; the variance is that of differences, so that large means cancel nothing."""
    begin(OVERLAP)
    p = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)[:, None]
    c = tl.arange(0, BLOCK)[None, :]
    channels = groups * V
    there = (p < pixels) & (c < channels)
    y = tl.load(x + p * (x_step * V) + c, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(y, axis=1, keep_dims=True) / channels
    y = tl.where(there, y - mean, 0.0)
    variance = tl.sum(y * y, axis=1, keep_dims=True) / channels
    y = y * (1 / tl.sqrt(variance + eps))
    if scale is not None:
        y = y * tl.load(scale + c, mask=c < channels, other=0.0)
    if shift is not None:
        y = y + tl.load(shift + c, mask=c < channels, other=0.0)
    tl.store(out + p * (out_step * V) + c, narrowed(y, out.dtype.element_ty), mask=there)


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels of a program, and its warps."""
    pixels, block = x.shape[0] * x.shape[2] * x.shape[3], triton.next_power_of_2(x.shape[1])
    wanted = ((2048, 4), (1024, 4), (1024, 2), (4096, 4), (4096, 8), (512, 1))
    found = named("pixels warps", ((max(1, values // block), max(warps, min(16, block // 1024))) for values, warps in wanted))
    return sorted(found, key=lambda config: config["pixels"] > 1 and pixels < PROGRAMS * config["pixels"])


@launches(reference, configs)
def launch(x, scale, shift, eps, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice, or `x`; of 8 bits it is rounded as `quantize` does."""
    n, c, h, w = x.shape
    out = empty_map(n, c, h, w, x) if out is None else out
    if out.numel() == 0:
        return out
    v, *sizes = units(8, x, out)
    pixels = n * h * w
    constants: dict[str, Any] = {"V": v, "PIXELS": config["pixels"], "BLOCK": triton.next_power_of_2(c), "num_warps": config["warps"]}
    _layer_norm[(triton.cdiv(pixels, config["pixels"]),)](x, scale, shift, out, pixels, *sizes, eps, **constants, **overlap(x))
    return out


@of(reference)
def cost(x, scale, shift, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    parts = (scale is not None) + (shift is not None)
    return x.numel() * (6 + parts), 2 * x.numel() * x.element_size() + 4 * parts * x.shape[1]


# `wide`: x is a slice of a map this wide, beginning at channel 8; `affine`: which of scale and shift are given; `mean`: of x.
CASES: list[dict[str, Any]] = [
    {"name": "plain", "shape": (2, 40, 7, 7), "affine": "scale shift"},
    {"name": "one pixel", "shape": (2, 16, 1, 1)},
    {"name": "tokens", "shape": (2, 24, 17, 1), "affine": "scale shift"},
    {"name": "odd channels", "shape": (1, 13, 5, 3), "affine": "scale shift"},
    {"name": "one channel", "shape": (2, 1, 3, 3), "affine": "shift"},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 40, "affine": "scale"},
    {"name": "far from zero", "shape": (2, 32, 4, 4), "mean": 50.0, "affine": "scale shift"},
    {"name": "more channels than a warp's share", "shape": (1, 2056, 2, 1), "affine": "scale shift"},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "ConvNeXt 16x96@56", "shape": (16, 96, 56, 56), "affine": "scale shift"},
    {"name": "ConvNeXt 16x384@14", "shape": (16, 384, 14, 14), "affine": "scale shift"},
    {"name": "ConvNeXt 1x768@7", "shape": (1, 768, 7, 7), "affine": "scale shift"},
    {"name": "ViT-B 64x768@197", "shape": (64, 768, 197, 1), "affine": "scale shift"},
    {"name": "ViT-L 256x1024@197", "shape": (256, 1024, 197, 1), "affine": "scale shift"},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    args: dict[str, Any] = {"x": draw.map(case["shape"], case.get("wide", 0)).add_(case.get("mean", 0.0)), "eps": 1e-6}
    return args | {name: draw.normal(case["shape"][1]) for name in case.get("affine", "").split()}
