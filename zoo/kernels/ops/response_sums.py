"""What the way back through global response normalisation sums over each image: its gradient, and that times what it scaled."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, activate
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap
from zoo.kernels.ops._response import tiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}


def reference(gradient: Tensor, before: Tensor, *, act: str = "gelu") -> Tensor:
    """Compute the sums over each image's pixels of ``gradient * act(before)`` and of ``gradient``.

    Args:
        gradient: map (N, C, H, W), channels_last.
        before: of its shape, what the activation reads.
        act: a name of `ACTIVATIONS`.

    Returns:
        (2, N, C), float32 (float64 of float64), added in the same.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    g = gradient.to(wide)
    return torch.stack([(g * ACTIVATIONS[act](before.to(wide))).sum((2, 3)), g.sum((2, 3))])


@of(reference)
def supports(gradient, before, act) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES or before.dtype not in DTYPES or before.shape != gradient.shape:
        return "no maps of one shape, of float32, bfloat16 or float16"
    if act not in ACTIVATIONS:
        return f"activation {act}"
    if gradient.shape[1] * gradient.shape[2] * gradient.shape[3] == 0:
        return "no pixels"
    return unreadable(gradient, before)


@triton.jit
def _sums(
    gradient, before, out, blocks, channels, pixels, pixels_per_part, parts, images, gradient_step, before_step,
    ACT: tl.constexpr, V: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Sum one part of an image's pixels for BLOCK channels into row (part, what, image) of `out`."""
    begin(OVERLAP)
    image = tl.program_id(0) // blocks
    part = tl.program_id(1)
    c = (tl.program_id(0) - image * blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = c < channels * V
    end = tl.minimum((part + 1) * pixels_per_part, pixels)
    products = tl.zeros([PIXELS, BLOCK], tl.float32)
    sums = tl.zeros([PIXELS, BLOCK], tl.float32)
    for first in range(part * pixels_per_part, end, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < end) & there
        row = image * pixels + p
        g = tl.load(gradient + row * (gradient_step * V) + c, mask=inside, other=0.0).to(tl.float32)
        y = activate(tl.load(before + row * (before_step * V) + c, mask=inside, other=0.0).to(tl.float32), ACT)
        products += g * y
        sums += g
    to = out + (part * 2 * images + image) * (channels * V) + c
    tl.store(to, tl.sum(products, axis=0, keep_dims=True), mask=there)
    tl.store(to + images * (channels * V), tl.sum(sums, axis=0, keep_dims=True), mask=there)


@of(reference)
def configs(gradient, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels and channels of a tile, parts an image is cut into, and warps."""
    return tiles(gradient, ((16, 64, 2), (32, 64, 4), (16, 128, 4), (8, 256, 4)))


@launches(reference, configs, tuned=True)
def launch(gradient, before, act, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`."""
    n, c, h, w = gradient.shape
    out = torch.empty((2, n, c), dtype=torch.float32, device=gradient.device) if out is None else out
    if out.numel() == 0:
        return out
    v, channels, *steps = units(8, gradient, before)
    parts, blocks = config["parts"], triton.cdiv(c, config["block"])
    partials = out if parts == 1 else torch.empty((parts, *out.shape), dtype=torch.float32, device=gradient.device)
    _sums[(n * blocks, parts)](
        gradient, before, partials, blocks, channels, h * w, triton.cdiv(h * w, parts), parts, n, *steps,
        ACT=act, V=v, PIXELS=config["pixels"], BLOCK=config["block"], num_warps=config["warps"], **overlap(gradient),
    )  # fmt: skip
    return out if parts == 1 else torch.sum(partials, 0, out=out)


@of(reference)
def cost(gradient, before, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    moved = sum(m.numel() * m.element_size() for m in (gradient, before))
    return 14 * gradient.numel(), moved + 8 * gradient.shape[0] * gradient.shape[1]


CASES: list[dict[str, Any]] = [
    {"name": "gelu", "shape": (2, 40, 7, 7)},
    {"name": "no activation", "shape": (2, 16, 3, 5), "act": "none"},
    {"name": "gelu by tanh", "shape": (2, 16, 3, 5), "act": "gelu_tanh"},
    {"name": "one pixel", "shape": (2, 16, 1, 1)},
    {"name": "odd channels", "shape": (3, 13, 5, 3)},
    {"name": "one channel", "shape": (2, 1, 3, 3)},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 40},
    {"name": "several parts", "shape": (1, 24, 19, 13)},
    {"name": "more channels than a block", "shape": (1, 520, 3, 2)},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, beginning at channel 8."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": "ConvNeXt V2-T 64x384@56", "shape": (64, 384, 56, 56)},
    {"name": "ConvNeXt V2-T 64x1536@14", "shape": (64, 1536, 14, 14)},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    gradient, before = (draw.map(case["shape"], case.get("wide", 0)) for _ in range(2))
    return {"gradient": gradient, "before": before, "act": case.get("act", "gelu")}
