"""The way back through a sum and the layer norm of it: both addends' gradients, those of what scaled one, and the norm's, in one pass.

A transformer's stream is ``total = x + branch * scale * share``, of which ``layer_norm(total)`` feeds the next branch. The total's gradient
comes from the stream behind it and through the norm; here they are added where they are read.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
WIDEST = 8192
"""Channels that a program holds at once."""


def reference(
    gradient: Tensor,
    total: Tensor,
    mean: Tensor,
    inverse: Tensor,
    factor: Tensor | None = None,
    beside: Tensor | None = None,
    branch: Tensor | None = None,
    scale: Tensor | None = None,
    share: Tensor | None = None,
    *,
    branch_dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``total = x + branch * scale * share`` and of ``layer_norm(total) * factor + bias``.

    Args:
        gradient: of the norm's result, a map (N, C, H, W), channels_last, of any floating dtype.
        total: what was normalised, of its shape.
        mean: float32 (N * H * W,), of each pixel's channels.
        inverse: float32 (N * H * W,), one over their standard deviation.
        factor: float32 (C,), the norm's factor for each channel.
        beside: the total's own gradient, which is added; of the shape and dtype of `total`.
        branch: the second addend before it is scaled; wanted where `scale` is.
        scale: float32 (C,), a factor for each channel.
        share: float32 (N,), a factor for each image.
        branch_dtype: dtype of the branch's gradient; None where there was no second addend.

    Returns:
        Sums over all pixels, in float32 (rows, C): of the weight's gradient and of the bias's; with a branch also of the total's times
        `share`, which times `scale` is the gradient of a bias before the scale; with a scale its gradient. Then the total's gradient, in
        the dtype of `total`, and with a branch the branch's.
    """
    wide = torch.promote_types(torch.promote_types(gradient.dtype, total.dtype), torch.float32)
    n, _, h, w = total.shape
    m, i = (v.to(wide).view(n, 1, h, w) for v in (mean, inverse))
    z = (total.to(wide) - m) * i
    g = gradient.to(wide)
    sums = [(g * z).sum((0, 2, 3)), g.sum((0, 2, 3))]
    g = g if factor is None else g * factor.to(wide)[:, None, None]
    of_total = (g - g.mean(1, keepdim=True) - z * (g * z).mean(1, keepdim=True)) * i
    of_total = of_total if beside is None else of_total + beside.to(wide)
    if branch_dtype is None:
        return torch.stack(sums), of_total.to(total.dtype)
    of_branch = of_total if share is None else of_total * share.to(wide)[:, None, None, None]
    sums.append(of_branch.sum((0, 2, 3)))
    if scale is not None and branch is not None:
        sums.append((of_branch * branch.to(wide)).sum((0, 2, 3)))
        of_branch = of_branch * scale.to(wide)[:, None, None]
    return torch.stack(sums), of_total.to(total.dtype), of_branch.to(branch_dtype)


@of(reference)
def rival(gradient, total, mean, inverse, factor, beside, branch_dtype, **_) -> tuple[Tensor, ...]:
    """Compute the total's and the norm's gradients by PyTorch's own operators, for a comparison of times."""
    n, c, h, w = total.shape
    rows = [t.permute(0, 2, 3, 1).reshape(-1, c) for t in (gradient.to(total.dtype), total)]
    stats = [v.view(-1, 1).to(total.dtype) for v in (mean, inverse)]
    taken = None if factor is None else factor.to(total.dtype)
    of_total, *sums = torch.ops.aten.native_layer_norm_backward(rows[0], rows[1], [c], *stats, taken, taken, [True, True, True])
    of_total = of_total.view(n, h, w, c).permute(0, 3, 1, 2)
    of_total = of_total if beside is None else of_total + beside
    return *sums, of_total, *(() if branch_dtype is None else (of_total.to(branch_dtype), of_total.sum((0, 2, 3))))


@of(reference)
def supports(gradient, total, mean, inverse, factor, beside, branch, scale, share, branch_dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    maps = [m for m in (gradient, total, beside, branch) if m is not None]
    if any(m.dim() != 4 or m.dtype not in DTYPES or m.shape != total.shape for m in maps):
        return "no maps of one shape, of float32, bfloat16 or float16"
    if not 0 < total.shape[1] <= WIDEST:
        return f"not 1 to {WIDEST} channels"
    pixels = total.numel() // total.shape[1]
    if any(v.shape != (pixels,) or v.dtype != torch.float32 or not v.is_contiguous() for v in (mean, inverse)):
        return "statistics that are not float32, one for each pixel"
    if not per_channel(total, factor, scale):
        return "factor and scale are not float32, one for each channel"
    if share is not None and (share.shape != total.shape[:1] or share.dtype != torch.float32 or not share.is_contiguous()):
        return "a share that is not float32, one for each image"
    if branch_dtype is None and (scale is not None or share is not None):
        return "factors of no branch"
    if branch_dtype is not None and branch_dtype not in DTYPES:
        return f"a branch of {branch_dtype}"
    if (scale is None) != (branch is None):
        return "a scale without the branch that it scaled, or the other way round"
    return unreadable(*maps)


@triton.jit
def _back(
    gradient, total, mean, inverse, factor, beside, branch, scale, share, of_total, of_branch, partials, rows, pixels, groups,
    gradient_step, total_step, beside_step, branch_step, of_total_step, of_branch_step,
    V: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, SUMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Go back through ROWS pixels at a time, all channels of each in BLOCK; then write a program's sums."""
    begin(OVERLAP)
    c = tl.arange(0, BLOCK)[None, :]
    lane = tl.arange(0, ROWS)[:, None]
    channels = groups * V
    live = c < channels
    held = 1.0 if factor is None else tl.load(factor + c, mask=live, other=0.0)
    scales = 1.0 if scale is None else tl.load(scale + c, mask=live, other=0.0)
    of_factor = tl.zeros([ROWS, BLOCK], tl.float32)
    of_bias = tl.zeros([ROWS, BLOCK], tl.float32)
    through = tl.zeros([ROWS, BLOCK], tl.float32)
    of_scale = tl.zeros([ROWS, BLOCK], tl.float32)
    p = tl.program_id(0) * ROWS + lane
    there = (p < rows) & live
    next_g = tl.load(gradient + (p * (gradient_step * V) + c), mask=there, other=0.0)
    next_z = tl.load(total + (p * (total_step * V) + c), mask=there, other=0.0)
    next_added = tl.load(beside + (p * (beside_step * V) + c), mask=there, other=0.0) if beside is not None else next_z
    next_b = tl.load(branch + (p * (branch_step * V) + c), mask=there, other=0.0) if branch is not None else next_z
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        p = first + lane
        there = (p < rows) & live
        g = next_g.to(tl.float32)
        z = next_z.to(tl.float32)
        added = next_added.to(tl.float32)
        b = next_b.to(tl.float32)
        # What comes next is on its way while this is computed.
        q = p + tl.num_programs(0) * ROWS
        then = (q < rows) & live
        next_g = tl.load(gradient + (q * (gradient_step * V) + c), mask=then, other=0.0)
        next_z = tl.load(total + (q * (total_step * V) + c), mask=then, other=0.0)
        next_added = tl.load(beside + (q * (beside_step * V) + c), mask=then, other=0.0) if beside is not None else next_z
        next_b = tl.load(branch + (q * (branch_step * V) + c), mask=then, other=0.0) if branch is not None else next_z
        i = tl.load(inverse + p, mask=p < rows, other=0.0)
        z = (z - tl.load(mean + p, mask=p < rows, other=0.0)) * i
        of_factor += g * z
        of_bias += g
        g = g * held
        level = tl.sum(g, axis=1, keep_dims=True) / channels
        tilt = tl.sum(g * z, axis=1, keep_dims=True) / channels
        d = (g - level - z * tilt) * i
        if beside is not None:
            d += added
        tl.store(of_total + (p * (of_total_step * V) + c), d.to(of_total.dtype.element_ty), mask=there)
        if of_branch is not None:
            if share is not None:
                d = d * tl.load(share + p // pixels, mask=p < rows, other=0.0)
            through += d
            if scale is not None:
                of_scale += d * b
                d = d * scales
            tl.store(of_branch + (p * (of_branch_step * V) + c), d.to(of_branch.dtype.element_ty), mask=there)
    to = partials + tl.program_id(0) * (SUMS * channels) + c
    tl.store(to, tl.sum(of_factor, axis=0, keep_dims=True), mask=live)
    tl.store(to + channels, tl.sum(of_bias, axis=0, keep_dims=True), mask=live)
    if of_branch is not None:
        tl.store(to + 2 * channels, tl.sum(through, axis=0, keep_dims=True), mask=live)
        if scale is not None:
            tl.store(to + 3 * channels, tl.sum(of_scale, axis=0, keep_dims=True), mask=live)


@of(reference)
def configs(total, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: pixels of a program at a time, its warps, and programs."""
    block = triton.next_power_of_2(total.shape[1])
    wanted = [(1024, 2, 792), (1024, 4, 528), (1024, 2, 1056), (2048, 4, 396), (512, 2, 1056), (1024, 8, 528)]
    if block > 512:
        wanted = [wanted[1], wanted[-1], *wanted[2:-1]]
    return named("pixels warps programs", ((max(1, values // block), max(warps, min(16, block // 512)), n) for values, warps, n in wanted))


@launches(reference, configs, tuned=True)
def launch(
    gradient, total, mean, inverse, factor, beside, branch, scale, share, branch_dtype, config, out: tuple[Tensor, ...] | None = None
) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`. Maps of `out` may be channel slices."""
    n, c, h, w = total.shape
    rows = 2 if branch_dtype is None else 3 if scale is None else 4
    if out is None:
        out = torch.empty((rows, c), dtype=torch.float32, device=total.device), empty_map(n, c, h, w, total)
        out += () if branch_dtype is None else (empty_map(n, c, h, w, total, branch_dtype),)
    sums, of_total, *more = out
    if total.numel() == 0:
        sums.zero_()
        return out
    of_branch = more[0] if more else None
    v, *sizes = units(8, gradient, total, beside, branch, of_total, of_branch)
    pixels = n * h * w
    programs = min(config["programs"], triton.cdiv(pixels, config["pixels"]))
    partials = torch.empty((programs, rows * c), dtype=torch.float32, device=total.device)
    with followed_by_ours(True):
        _back[(programs,)](
            gradient, total, mean, inverse, factor, beside, branch, scale, share, of_total, of_branch, partials, pixels, h * w, *sizes,
            V=v, ROWS=config["pixels"], BLOCK=triton.next_power_of_2(c), SUMS=rows, num_warps=config["warps"], **overlap(total),
        )  # fmt: skip
    add(partials, sums)
    return out


@of(reference)
def cost(gradient, total, beside, branch, scale, branch_dtype, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    maps = [m for m in (gradient, total, total, beside, branch) if m is not None]
    moved = sum(m.numel() * m.element_size() for m in maps) + (0 if branch_dtype is None else total.numel() * branch_dtype.itemsize)
    rows = 2 if branch_dtype is None else 3 if scale is None else 4
    return total.numel() * 14, moved + 4 * rows * total.shape[1]


CASES: list[dict[str, Any]] = [
    {"name": "norm alone", "shape": (2, 40, 7, 7), "given": "factor"},
    {"name": "no factor", "shape": (2, 16, 3, 3), "given": "beside"},
    {"name": "tokens, stream and branch", "shape": (2, 24, 17, 1), "given": "factor beside", "branch": True},
    {"name": "scale", "shape": (3, 24, 5, 1), "given": "factor beside scale", "branch": True},
    {"name": "share", "shape": (3, 16, 5, 3), "given": "factor beside share", "branch": True},
    {"name": "all", "shape": (3, 20, 5, 3), "given": "factor beside scale share", "branch": True},
    {"name": "odd channels", "shape": (1, 13, 5, 3), "given": "factor beside", "branch": True},
    {"name": "one channel", "shape": (2, 1, 3, 3), "given": "beside"},
    {"name": "slice", "shape": (2, 24, 7, 5), "given": "factor beside", "wide": 40, "branch": True},
    {"name": "far from zero", "shape": (2, 32, 4, 4), "given": "factor", "far": 50.0},
    {"name": "more channels than a warp's share", "shape": (1, 2056, 2, 1), "given": "factor beside", "branch": True},
    {"name": "many pixels", "shape": (2, 8, 43, 40), "given": "factor beside", "branch": True},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "given": "factor"},
]
"""`shape` (N, C, H, W); `given`: which optional tensors; `branch`: the total was a sum; `wide`: maps are slices of maps this wide."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": "ViT-B 64x768@197", "shape": (64, 768, 197, 1), "given": "factor beside", "branch": True, "stream": "float32"},
    {"name": "DINOv2-S 16x384@1370", "shape": (16, 384, 1370, 1), "given": "factor beside scale", "branch": True, "stream": "float32"},
    {"name": "Swin-T 64x96@56", "shape": (64, 96, 56, 56), "given": "factor beside share", "branch": True, "stream": "float32"},
    {"name": "ConvNeXt 64x384@14", "shape": (64, 384, 14, 14), "given": "factor"},
]
"""`stream`: dtype of the total and its gradient, whatever that of the norm's."""


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, shape, wide, given = Drawing(*how), case["shape"], case.get("wide", 0), case.get("given", "").split()
    n, c, h, w = shape
    stream = getattr(torch, case["stream"]) if "stream" in case else draw.dtype
    flow = Drawing(stream, *how[1:])
    total = flow.map(shape, wide).add_(case.get("far", 0.0))
    seen = total.float().permute(0, 2, 3, 1).reshape(n * h * w, c)
    mean = seen.mean(1)
    inverse = ((seen - mean[:, None]).square().mean(1) + 1e-6).rsqrt()
    args: dict[str, Any] = {"gradient": draw.map(shape, wide), "total": total, "mean": mean, "inverse": inverse}
    args |= {name: draw.normal(c) for name in ("factor", "scale") if name in given}
    if "scale" in given:
        args["branch"] = draw.map(shape, wide)
    if "beside" in given:
        args["beside"] = flow.map(shape, wide)
    if "share" in given:
        args["share"] = draw.normal(n)
    return args | {"branch_dtype": draw.dtype if case.get("branch") else None}
