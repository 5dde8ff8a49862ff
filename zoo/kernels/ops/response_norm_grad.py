"""The way back through global response normalisation and the activation before it, in one pass, its sums being known.

GRN (Woo et al. 2023, "ConvNeXt V2", section 3.2) computes ``y * gate + shift`` of ``y = act(before)``, where the gate of an image's channel
hangs on all of its pixels. So a pixel's gradient is that through the product, and a share of the pixel itself: ``tilt``, one for each image
and channel, which follows from the sums that `response_sums` takes.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT, SLOPES, activate, slope
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap
from zoo.kernels.ops._response import tiles

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    gradient: Tensor, before: Tensor, gate: Tensor, tilt: Tensor, shift: Tensor, *, act: str = "gelu", again: bool = False
) -> tuple[Tensor, ...]:
    """Compute the gradient of ``before``, of which ``y * gate + shift`` was made, y being ``act(before)``.

    Args:
        gradient: of the output, a map (N, C, H, W), channels_last.
        before: of its shape, what the activation reads.
        gate: float32 (N, C).
        tilt: float32 (N, C), by which each pixel's y adds to the gradient of that y.
        shift: float32 (C,).
        act: a name of `SLOPES` whose gradient its input tells.
        again: whether the output is made once more.

    Returns:
        The sums over all pixels of that gradient, float32 (C,) (float64 of float64); the gradient in the dtype of `gradient`; and if
        asked for `again` the output, in the same dtype.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    g, z, a, k = (t.to(wide) for t in (gradient, before, gate[:, :, None, None], tilt[:, :, None, None]))
    y = ACTIVATIONS[act](z)
    d = SLOPES[act](g * a + y * k, z)
    made = (d.sum((0, 2, 3)), d.to(gradient.dtype))
    return (*made, (y * a + shift.to(wide)[:, None, None]).to(gradient.dtype)) if again else made


@of(reference)
def supports(gradient, before, gate, tilt, shift, act, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES or before.dtype not in DTYPES or before.shape != gradient.shape:
        return "no maps of one shape, of float32, bfloat16 or float16"
    if act not in SLOPES or act in BY_OUTPUT:
        return f"activation {act}"
    if any(v.shape != gradient.shape[:2] or v.dtype != torch.float32 or not v.is_contiguous() for v in (gate, tilt)):
        return "gate and tilt are not float32, one for each image and channel"
    if not per_channel(gradient, shift):
        return "the shift is not float32, one for each channel"
    if gradient.shape[1] * gradient.shape[2] * gradient.shape[3] == 0:
        return "no pixels"
    return unreadable(gradient, before)


@triton.jit
def _back(
    gradient, before, gate, tilt, shift, partials, out, made, blocks, channels, pixels, pixels_per_part, parts,
    gradient_step, before_step, out_step, made_step,
    ACT: tl.constexpr, V: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one part of an image's pixels for BLOCK channels, and its sums; to `made` the output."""
    begin(OVERLAP)
    image = tl.program_id(0) // blocks
    part = tl.program_id(1)
    c = (tl.program_id(0) - image * blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = c < channels * V
    end = tl.minimum((part + 1) * pixels_per_part, pixels)
    a = tl.load(gate + image * (channels * V) + c, mask=there, other=0.0)
    k = tl.load(tilt + image * (channels * V) + c, mask=there, other=0.0)
    level = tl.load(shift + c, mask=there, other=0.0)
    sums = tl.zeros([PIXELS, BLOCK], tl.float32)
    for first in range(part * pixels_per_part, end, PIXELS):
        p = first + tl.arange(0, PIXELS)[:, None]
        inside = (p < end) & there
        row = image * pixels + p
        g = tl.load(gradient + row * (gradient_step * V) + c, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(before + row * (before_step * V) + c, mask=inside, other=0.0).to(tl.float32)
        y = activate(z, ACT)
        d = slope(z, g * a + y * k, ACT)
        tl.store(out + row * (out_step * V) + c, d.to(out.dtype.element_ty), mask=inside)
        if made is not None:
            tl.store(made + row * (made_step * V) + c, (y * a + level).to(made.dtype.element_ty), mask=inside)
        sums += tl.where(inside, d, 0.0)
    tl.store(partials + (image * parts + part) * (channels * V) + c, tl.sum(sums, axis=0, keep_dims=True), mask=there)


@of(reference)
def configs(gradient, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels and channels of a tile, parts an image is cut into, and warps."""
    return tiles(gradient, ((32, 64, 4), (16, 64, 2), (16, 128, 4), (8, 256, 4)))


@launches(reference, configs, tuned=True)
def launch(gradient, before, gate, tilt, shift, act, again, config, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`. The maps of `out` may be channel slices."""
    n, c, h, w = gradient.shape
    if out is None:
        sums = torch.empty(c, dtype=torch.float32, device=gradient.device)
        out = (sums, *(empty_map(n, c, h, w, gradient) for _ in range(1 + again)))
    sums, to, *more = out
    if gradient.numel() == 0:
        sums.zero_()
        return out
    made = more[0] if again else None
    v, channels, *steps = units(8, gradient, before, to, made)
    parts, blocks = config["parts"], triton.cdiv(c, config["block"])
    partials = torch.empty((n * parts, c), dtype=torch.float32, device=gradient.device)
    with followed_by_ours(True):
        _back[(n * blocks, parts)](
            gradient, before, gate, tilt, shift, partials, to, made, blocks, channels, h * w, triton.cdiv(h * w, parts), parts, *steps,
            ACT=act, V=v, PIXELS=config["pixels"], BLOCK=config["block"], num_warps=config["warps"], **overlap(gradient),
        )  # fmt: skip
    add(partials, sums)
    return out


@of(reference)
def cost(gradient, before, again, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    moved = gradient.numel() * gradient.element_size() * (2 + again) + before.numel() * before.element_size()
    return 24 * gradient.numel(), moved + 8 * gradient.shape[0] * gradient.shape[1] + 8 * gradient.shape[1]


CASES: list[dict[str, Any]] = [
    {"name": "gelu", "shape": (2, 40, 7, 7)},
    {"name": "gelu, again", "shape": (2, 40, 7, 7), "again": True},
    {"name": "gelu by tanh", "shape": (2, 16, 3, 5), "act": "gelu_tanh"},
    {"name": "quick gelu, again", "shape": (2, 16, 3, 5), "act": "quick_gelu", "again": True},
    {"name": "one pixel", "shape": (2, 16, 1, 1), "again": True},
    {"name": "odd channels", "shape": (3, 13, 5, 3), "again": True},
    {"name": "one channel", "shape": (2, 1, 3, 3)},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 40, "again": True},
    {"name": "several parts", "shape": (1, 24, 19, 13), "again": True},
    {"name": "more channels than a block", "shape": (1, 520, 3, 2)},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "again": True},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, beginning at channel 8."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": "ConvNeXt V2-T 64x384@56", "shape": (64, 384, 56, 56), "again": True},
    {"name": "ConvNeXt V2-T 64x1536@14", "shape": (64, 1536, 14, 14), "again": True},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    n, c, *_ = case["shape"]
    gradient, before = (draw.map(case["shape"], case.get("wide", 0)) for _ in range(2))
    rows = {"gate": 1 + draw.normal(n, c), "tilt": draw.normal(n, c), "shift": draw.normal(c)}
    return {"gradient": gradient, "before": before, **rows, "act": case.get("act", "gelu"), "again": case.get("again", False)}
