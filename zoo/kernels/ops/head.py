"""The end of a network in one launch: the mean over all pixels and the linear layer behind it.

A program owns some classes and some input channels, and averages the pixels of those channels itself: a batch-1 map is small and lies
in the L2 cache. With several parts of the channels a second launch adds the parts, always in the same order.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS, activate, affine
from zoo.kernels.ops._arguments import Drawing, given, launches, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._layout import DTYPES, per_channel, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap
from zoo.kernels.ops.global_pool import add_parts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error by dtype: where images share a tensor-core product, means are rounded to the weight's dtype."""

PACK: dict[str, Any] = {"weight": Tensor.contiguous}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    *,
    pre_act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``mean(pre_act(x * scale + shift)) @ weight.T + bias``, the mean over the pixels.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        weight: (classes, C).
        bias: float32 (classes,).
        scale: float32 (C,), a factor for each channel.
        shift: float32 (C,), added for each channel.
        pre_act: activation of the input, a name of `ACTIVATIONS`.
        out_dtype: dtype of the result; that of `x` by default.

    Returns:
        (N, classes). Sums are float32 (float64 for float64); the result is rounded once.

    Raises:
        KeyError: the activation has no such name.
    """
    y = affine(x.to(torch.promote_types(x.dtype, torch.float32)), scale, shift)
    return F.linear(ACTIVATIONS[pre_act](y).mean((2, 3)), weight.to(y.dtype), bias.to(y.dtype)).to(out_dtype or x.dtype)


@of(reference)
def supports(x, weight, bias, scale, shift, pre_act, out_dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or not {x.dtype, weight.dtype, out_dtype or x.dtype} <= {*DTYPES}:
        return "map or weight not of float32, bfloat16 or float16"
    if pre_act not in ACTIVATIONS:
        return "unknown activation"
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or bias.shape != weight.shape[:1] or bias.dtype != torch.float32:
        return "weight or bias don't fit the channels, or the bias is not float32"
    if not per_channel(x, scale, shift):
        return "scale and shift are not float32, one for each channel"
    if x.shape[2] * x.shape[3] == 0:
        return "no pixels to average"
    return unreadable(x, small=x.shape[0] < 65536)


@triton.jit
def _head(
    x,
    weight,
    bias,
    scale,
    shift,
    out,
    batch,
    groups,
    pixels,
    x_step,
    classes,
    depth,
    factor,
    PRE: tl.constexpr,
    V: tl.constexpr,
    IMAGES: tl.constexpr,
    PIXELS: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Add the bias and write logits where SPLIT is 1, else float32 sums over `depth` blocks of channels, a row an image and part."""
    begin(OVERLAP)
    size = groups * V
    part = tl.program_id(1)
    o = tl.program_id(0) * BO + tl.arange(0, BO)
    n = tl.program_id(2) * IMAGES + tl.arange(0, IMAGES)
    products = tl.zeros([BO, BK], tl.float32)
    y = tl.zeros([IMAGES, BO], tl.float32)
    # Blocks are counted, not channels: times the constant BK their beginnings are known to be aligned.
    for block in range(part * depth, tl.minimum((part + 1) * depth, (size + BK - 1) // BK)):
        k = block * BK + tl.arange(0, BK)
        w = tl.load(weight + o[:, None] * size + k[None, :], mask=(o[:, None] < classes) & (k[None, :] < size), other=0.0)
        c = k[None, None, :]
        if scale is not None:
            factors = tl.load(scale + c, mask=c < size, other=0.0)
        if shift is not None:
            shifts = tl.load(shift + c, mask=c < size, other=0.0)
        total = tl.zeros([IMAGES, PIXELS, BK], tl.float32)
        for start in range(0, pixels, PIXELS):
            p = start + tl.arange(0, PIXELS)[None, :, None]
            here = (n[:, None, None] < batch) & (p < pixels) & (c < size)
            v = tl.load(x + (n[:, None, None] * pixels + p) * (x_step * V) + c, mask=here, other=0.0).to(tl.float32)
            if scale is not None:
                v = v * factors
            if shift is not None:
                v = v + shifts
            v = activate(v, PRE)
            if shift is not None or PRE != "none":
                v = tl.where(here, v, 0.0)
            total += v
        if IMAGES == 1:
            # The axis of one image goes first: a mean that kept it would make every thread hold all classes, and spill.
            mean = tl.sum(tl.sum(total, axis=0), axis=0) * factor
            products += w.to(tl.float32) * mean[None, :]
        else:
            y = product((tl.sum(total, axis=1) * factor).to(w.dtype), tl.trans(w), y, "ieee")
    if IMAGES == 1:
        y = tl.sum(products, axis=1)[None, :]
    if SPLIT == 1:
        y += tl.load(bias + o, mask=o < classes, other=0.0)[None, :]
    at = out + (n[:, None] * SPLIT + part) * classes + o[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=(n[:, None] < batch) & (o[None, :] < classes))


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: images, classes and channels of a program's tile, pixels at once, and parts."""
    if x.shape[0] <= 4:
        sizes = [(1, 8, 256, 16, 1, 8), (1, 32, 128, 16, 4, 4), (1, 16, 256, 16, 2, 8), (1, 64, 128, 16, 8, 8)]
        sizes += [(1, 8, 128, 32, 1, 4), (1, 64, 64, 64, 16, 8), (1, 8, 512, 8, 1, 8)]
    else:
        sizes = [(16, 64, 64, 4, 8, 8), (16, 128, 64, 4, 16, 8), (16, 64, 32, 8, 8, 8), (16, 32, 64, 4, 4, 8)]
    names = ("images", "classes", "channels", "pixels", "parts", "warps")
    return [dict(zip(names, (*size[:4], min(size[4], triton.cdiv(x.shape[1], size[2])), size[5]), strict=True)) for size in sizes]


@launches(reference, configs)
def launch(x, weight, bias, scale, shift, pre_act, out_dtype, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel, and a second one where `config` has several parts; see `reference`. `out` is contiguous."""
    n, c, h, w = x.shape
    classes = weight.shape[0]
    out = torch.empty((n, classes), dtype=out_dtype or x.dtype, device=x.device) if out is None else out
    if out.numel() == 0:
        return out
    split = config["parts"]
    to = out if split == 1 else torch.empty((n, split, classes), dtype=torch.float32, device=x.device)
    v, groups, x_step = units(8, x)
    depth = triton.cdiv(triton.cdiv(c, config["channels"]), split)
    constants: dict[str, Any] = {"PRE": pre_act, "V": v, "SPLIT": split, "num_warps": config["warps"]}
    constants |= {"IMAGES": config["images"], "PIXELS": config["pixels"], "BO": config["classes"], "BK": config["channels"]}
    grid = (triton.cdiv(classes, config["classes"]), split, triton.cdiv(n, config["images"]))
    sizes = (n, groups, h * w, x_step, classes, depth, 1 / (h * w))
    _head[grid](x, weight, bias, scale, shift, to, *sizes, **constants, **overlap(x))
    if split > 1:
        add_parts(to, out, classes, bias=bias)
    return out


@of(reference)
def cost(x, weight, bias, scale, shift, out_dtype, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    n = x.shape[0]
    inputs = [t for t in (x, weight, bias, scale, shift) if t is not None]
    moved = sum(t.numel() * t.element_size() for t in inputs) + n * weight.shape[0] * (out_dtype or x.dtype).itemsize
    return x.numel() * (1 + (scale is not None) + (shift is not None)) + 2 * n * weight.numel(), moved


# `wide`: x is a slice of a map this wide, beginning at channel 8; `affine`: scale and shift are given.
CASES: list[dict[str, Any]] = [
    {"name": "plain", "shape": (1, 64, 3, 3), "classes": 10},
    {"name": "odd", "shape": (2, 13, 3, 5), "classes": 7, "affine": True, "pre_act": "relu"},
    {"name": "slice", "shape": (1, 24, 4, 3), "classes": 33, "wide": 40, "pre_act": "hardswish"},
    {"name": "many images", "shape": (18, 72, 2, 3), "classes": 20, "affine": True, "pre_act": "silu"},
    {"name": "one pixel", "shape": (5, 32, 1, 1), "classes": 9, "out_dtype": "float32"},
    {"name": "batch 0", "shape": (0, 16, 2, 2), "classes": 4},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@7", "shape": (n, c, 7, 7), "classes": 1000} for n in (1, 4, 32) for c in (2048, 1280, 512)
] + [{"name": "densenet 1x1024@7", "shape": (1, 1024, 7, 7), "classes": 1000, "affine": True, "pre_act": "relu"}]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, c, classes = Drawing(*how), case["shape"][1], case["classes"]
    args: dict[str, Any] = {"x": draw.map(case["shape"], case.get("wide", 0)), **given(case, "pre_act", "out_dtype")}
    args |= {"weight": (draw.normal(classes, c) / c**0.5).to(draw.dtype), "bias": draw.normal(classes)}
    if case.get("affine"):
        args["scale"], args["shift"] = draw.normal(2, c)
    return args
