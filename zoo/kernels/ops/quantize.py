"""Rounding of a map to 8 bits, int8 or fp8 (e4m3), by one factor: how a value reaches the layers that compute in these types."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._activation import ACTIVATIONS, activate
from ._arguments import Drawing, given, launches, named, of
from ._dense import narrowed as narrowed_block
from ._layout import DTYPES, NARROW, empty_map, units, unreadable
from ._narrow import narrowed
from ._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.int8: 3e-2, torch.float8_e4m3fn: 4e-2}


def reference(x: Tensor, out_factor: Tensor, *, act: str = "none", out_dtype: torch.dtype) -> Tensor:
    """Return ``act(x) * out_factor`` in a narrow type.

    Args:
        x: map (N, C, H, W) in channels_last memory, maybe a channel slice.
        out_factor: (1,), float32: one over the scale.
        act: a name of `ACTIVATIONS`.
        out_dtype: int8 or float8_e4m3fn.

    Returns:
        Map of the shape of `x`, rounded to the nearest, ties to even; what lies beyond the type's range is the end of that. NaN and
        infinity are NaN in fp8; int8 has none.
    """
    return narrowed(ACTIVATIONS[act](x.to(torch.promote_types(out_factor.dtype, torch.float32))) * out_factor, out_dtype)


@of(reference)
def supports(x, out_factor, act, out_dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if act not in ACTIVATIONS:
        return f"activation {act}"
    if out_dtype not in (*NARROW, torch.float32):
        return f"output type {out_dtype}"
    if out_factor.dtype != torch.float32 or tuple(out_factor.shape) != (1,):
        return "a factor that is no float32 vector of one number"
    return unreadable(x)


@triton.jit(do_not_specialize=["lanes"])
def _quantize(
    x, out_factor, out, lanes, groups_per_pixel, x_step, out_step,
    ACT: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pixel = g // groups_per_pixel
    group = g - pixel * groups_per_pixel
    lane = tl.arange(0, V)[None, :]
    y = tl.load(x + (pixel * x_step + group) * V + lane, mask=g < lanes, other=0.0).to(tl.float32)
    y = activate(y, ACT) * tl.load(out_factor)
    tl.store(out + (pixel * out_step + group) * V + lane, narrowed_block(y, out.dtype.element_ty), mask=g < lanes)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors of a program, and its warps."""
    return named("block warps", ((256, 4), (512, 4), (512, 8), (128, 4)))


@launches(reference, configs)
def launch(x, out_factor, act, out_dtype, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice."""
    out = empty_map(*x.shape, like=x, dtype=out_dtype) if out is None else out
    if out.numel() == 0:
        return out
    v, groups, *steps = units(16, x, out)
    lanes = x.numel() // v
    _quantize[(triton.cdiv(lanes, config["block"]),)](
        x, out_factor, out, lanes, groups, *steps, ACT=act, V=v, BLOCK=config["block"], num_warps=config["warps"], **overlap(x)
    )
    return out


@of(reference)
def cost(x, out_dtype, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return x.numel(), x.numel() * (x.element_size() + out_dtype.itemsize)


CASES: list[dict[str, Any]] = [
    {"name": "int8", "shape": (2, 40, 5, 7), "kind": "int8"},
    {"name": "fp8", "shape": (2, 40, 5, 7), "kind": "float8_e4m3fn"},
    {"name": "odd channels", "shape": (1, 13, 5, 3), "kind": "int8"},
    {"name": "activated", "shape": (2, 32, 5, 3), "kind": "float8_e4m3fn", "act": "gelu"},
    {"name": "slice", "shape": (2, 24, 7, 5), "wide": 48, "kind": "int8"},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "kind": "float8_e4m3fn"},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"256x{c}@{size}, {kind}", "shape": (256, c, size, size), "kind": kind}
    for c, size, kind in ((64, 56, "int8"), (768, 14, "float8_e4m3fn"))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, kind = Drawing(*how), getattr(torch, case["kind"])
    x = draw.map(case["shape"], case.get("wide", 0))
    return {"x": x, "out_factor": torch.full((1,), 25.0, device=draw.device), "out_dtype": kind, **given(case, "act")}
