"""The way back through a factor for each image and channel: the map's gradient and the factor's in one pass over both maps."""

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

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(gradient: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x * gate``.

    Args:
        gradient: of the product, a map (N, C, H, W).
        x: map of the same shape.
        gate: (N, C), a factor for each image and channel, any floating dtype.

    Returns:
        The gradient of x in the dtype of `x`; float32 (N, C) (float64 for float64) with the gate's, added in the same.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    g = gradient.to(wide)
    return (g * gate.to(wide)[:, :, None, None]).to(x.dtype), (g * x.to(wide)).sum((2, 3))


@of(reference)
def rival(gradient, x, gate) -> tuple[Tensor, Tensor]:
    """Compute the same as PyTorch's autograd does, for a comparison of times."""
    return gradient * gate.to(x.dtype)[:, :, None, None], (gradient * x).sum((2, 3))


@of(reference)
def supports(gradient, x, gate) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES or gradient.dtype not in DTYPES:
        return "not maps of float32, bfloat16 or float16"
    if gradient.shape != x.shape or gate.shape != x.shape[:2] or gate.dtype not in DTYPES or not gate.is_contiguous():
        return "shapes that don't belong together"
    return unreadable(gradient, x)


@triton.jit
def _scale_back(
    gradient, x, gate, out, gate_out, pixels, channel_units, g_step, x_step, out_step,
    V: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    channels = channel_units * V
    c = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    image = tl.program_id(1)
    live = c < channels
    factor = tl.load(gate + (image * channels + c), mask=live, other=0.0).to(tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    for first in range(0, pixels, BR * U):
        gs = ()
        xs = ()
        for u in tl.static_range(U):
            row = first + u * BR + lane
            at = image * pixels + row
            there = (row < pixels) & live
            gs = gs + (tl.load(gradient + (at * (g_step * V) + c), mask=there, other=0.0),)  # noqa: RUF005
            xs = xs + (tl.load(x + (at * (x_step * V) + c), mask=there, other=0.0),)  # noqa: RUF005
        for u in tl.static_range(U):
            row = first + u * BR + lane
            g = gs[u].to(tl.float32)
            sums += g * xs[u].to(tl.float32)
            to = out + ((image * pixels + row) * (out_step * V) + c)
            tl.store(to, (g * factor).to(out.dtype.element_ty), mask=(row < pixels) & live)
    tl.store(gate_out + (image * channels + c), tl.sum(sums, axis=0, keep_dims=True), mask=live)


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: columns of a tile, warps, and tiles in flight."""
    sizes = [(64, 4, 2), (32, 4, 2), (64, 8, 2), (64, 4, 4), (128, 8, 2), (32, 8, 1), (64, 2, 2)]
    if x.shape[0] * x.shape[1] < 132 * 128:
        sizes = [(32, 4, 2), (16, 4, 2), (16, 8, 2), (32, 8, 2), (64, 8, 2)]
    return named("columns warps unroll", sizes)


@launches(reference, configs)
def launch(gradient, x, gate, config, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Run the kernel; see `reference`. The map of `out` may be a channel slice."""
    n, c, h, w = x.shape
    of_x, of_gate = out or (empty_map(n, c, h, w, x), torch.empty((n, c), dtype=torch.float32, device=x.device))
    if x.numel() == 0:
        return of_x, of_gate.zero_()
    v, *sizes = units(16 // x.element_size(), gradient, x, of_x)
    columns = min(config["columns"], triton.next_power_of_2(c))
    rows = max(1, min(32 * config["warps"] * (16 // x.element_size()) // columns, triton.next_power_of_2(h * w)))
    unroll = max(1, min(config["unroll"], triton.next_power_of_2(h * w) // rows))
    _scale_back[(triton.cdiv(c, columns), n)](
        gradient, x, gate, of_x, of_gate, h * w, *sizes, V=v, BR=rows, BC=columns, U=unroll,
        num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    return of_x, of_gate


@of(reference)
def cost(gradient, x, gate) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return 3 * x.numel(), x.numel() * (2 * x.element_size() + gradient.element_size()) + gate.numel() * (gate.element_size() + 4)


CASES: list[dict[str, Any]] = [
    {"name": "squeeze-excite", "shape": (3, 40, 5, 3)},
    {"name": "odd channels", "shape": (2, 7, 5, 5)},
    {"name": "slice", "shape": (2, 24, 4, 5), "wide": 48},
    {"name": "1x1 image", "shape": (1, 72, 1, 1)},
    {"name": "many pixels", "shape": (1, 16, 20, 17)},
    {"name": "batch 0", "shape": (0, 16, 4, 4)},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, from channel 8 on."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px}", "shape": (n, c, px, px)} for n in (256, 32) for c, px in ((72, 28), (120, 28), (480, 14), (672, 14), (960, 7))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    gradient, x = (draw.map(case["shape"], case.get("wide", 0)) for _ in range(2))
    return {"gradient": gradient, "x": x, "gate": draw.normal(*case["shape"][:2]).sigmoid().to(draw.dtype)}
