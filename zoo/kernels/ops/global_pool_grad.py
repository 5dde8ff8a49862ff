"""The way back through the mean of every channel, added to another gradient of the same map: squeeze-and-excite reads its map twice.

Autograd spreads the mean's gradient over a map of its own and adds the two in another pass. Here it is one, which may write where it reads.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._layout import DTYPES, empty_map, units, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(beside: Tensor, gradient: Tensor) -> Tensor:
    """Compute ``beside + gradient / pixels``.

    Args:
        beside: map (N, C, H, W), what the gradient of the map is already.
        gradient: of the map's means, (N, C), any floating dtype.

    Returns:
        Map (N, C, H, W) in the dtype of `beside`, added in float32 (float64 for float64) and rounded once.
    """
    wide = torch.promote_types(beside.dtype, torch.float32)
    pixels = beside.shape[2] * beside.shape[3]
    return (beside.to(wide) + (gradient.to(wide) / max(pixels, 1))[:, :, None, None]).to(beside.dtype)


@of(reference)
def rival(beside, gradient) -> Tensor:
    """Compute the same as PyTorch's autograd does, for a comparison of times."""
    pixels = beside.shape[2] * beside.shape[3]
    return beside + gradient.to(beside.dtype)[:, :, None, None].expand(beside.shape) / pixels


@of(reference)
def supports(beside, gradient) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if beside.dim() != 4 or beside.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if gradient.shape != beside.shape[:2] or gradient.dtype not in DTYPES or not gradient.is_contiguous():
        return "shapes that don't belong together"
    return unreadable(beside)


@triton.jit
def _spread(
    beside, gradient, out, pixels, channel_units, b_step, out_step, columns, parts, factor,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add to U x BR pixels of BC channels of an image; there are `columns` such of channels, and `parts` of pixels."""
    begin(OVERLAP)
    channels = channel_units * V
    number = tl.program_id(0)
    c = (number % columns * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    image = (number // columns // parts).to(tl.int64)
    live = c < channels
    first = number // columns % parts * (BR * U)
    mean = tl.load(gradient + (image * channels + c), mask=live, other=0.0).to(tl.float32) * factor
    read = ()
    for u in tl.static_range(U):
        row = first + u * BR + lane
        at = image * pixels + row
        read = read + (tl.load(beside + (at * (b_step * V) + c), mask=(row < pixels) & live, other=0.0),)  # noqa: RUF005
    for u in tl.static_range(U):
        row = first + u * BR + lane
        at = image * pixels + row
        y = read[u].to(tl.float32) + mean
        tl.store(out + (at * (out_step * V) + c), y.to(out.dtype.element_ty), mask=(row < pixels) & live)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: columns of a tile, warps, and tiles in flight."""
    return named("columns warps unroll", ((64, 4, 4), (64, 4, 2), (32, 4, 4), (128, 4, 4), (64, 8, 2), (64, 2, 4)))


@launches(reference, configs)
def launch(beside, gradient, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be `beside`, or a channel slice."""
    n, c, h, w = beside.shape
    out = empty_map(n, c, h, w, beside) if out is None else out
    if out.numel() == 0:
        return out
    v, *sizes = units(16 // beside.element_size(), beside, out)
    columns = min(config["columns"], triton.next_power_of_2(c))
    rows = max(1, min(32 * config["warps"] * (16 // beside.element_size()) // columns, triton.next_power_of_2(h * w)))
    unroll = max(1, min(config["unroll"], triton.next_power_of_2(h * w) // rows))
    blocks, parts = triton.cdiv(c, columns), triton.cdiv(h * w, rows * unroll)
    _spread[(blocks * parts * n,)](  # one axis: the others of a grid end at 65535
        beside, gradient, out, h * w, *sizes, blocks, parts, 1 / (h * w), V=v, BR=rows, BC=columns, U=unroll,
        num_warps=config["warps"], **overlap(beside),
    )  # fmt: skip
    return out


@of(reference)
def cost(beside, gradient) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return beside.numel() + gradient.numel(), 2 * beside.numel() * beside.element_size() + gradient.numel() * gradient.element_size()


CASES: list[dict[str, Any]] = [
    {"name": "squeeze-excite", "shape": (3, 40, 5, 3)},
    {"name": "odd channels", "shape": (2, 7, 5, 5)},
    {"name": "slice", "shape": (2, 24, 4, 5), "wide": 48},
    {"name": "1x1 image", "shape": (1, 72, 1, 1)},
    {"name": "many pixels", "shape": (1, 16, 20, 17)},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
"""`shape` (N, C, H, W); `wide`: the map is a slice of a map this wide, from channel 8 on."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px}", "shape": (n, c, px, px)} for n, c, px in ((64, 256, 24), (64, 960, 24), (64, 1536, 12), (32, 72, 28))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    return {"beside": draw.map(case["shape"], case.get("wide", 0)), "gradient": draw.normal(*case["shape"][:2]).to(draw.dtype)}
