"""Everything that is done to each element by itself: affine, activation, gate, residual, cast, and the copy into a slice."""

# pyright: reportCallIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, activate, affine
from zoo.kernels.ops._arguments import Drawing, given, launches, named, of
from zoo.kernels.ops._layout import DTYPES, empty_map, per_channel, pixel_stride, unreadable, vector_width
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    x: Tensor,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    pre_act: str = "none",
    act: str = "none",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute ``act(pre_act(x * scale + shift) * gate + residual)``, every part optional.

    Args:
        x: map (N, C, H, W), channels_last, maybe a channel slice.
        scale: float32 (C,), a factor for each channel.
        shift: float32 (C,), added for each channel.
        gate: (N, C), any floating dtype, a factor for each image and channel.
        residual: map of the shape of `x`, added before `act`.
        pre_act: activation before the gate, a name of `ACTIVATIONS`.
        act: activation of the sum, a name of `ACTIVATIONS`.
        out_dtype: dtype of the result; that of `x` by default.

    Returns:
        Map (N, C, H, W). Computed in float32 (float64 for float64) and rounded once, so within `TOLERANCE` of any order of the operations.

    Raises:
        KeyError: an activation has no such name.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    y = ACTIVATIONS[pre_act](affine(x.to(wide), scale, shift))
    if gate is not None:
        y = y * gate.to(wide)[:, :, None, None]
    if residual is not None:
        y = y + residual.to(wide)
    return ACTIVATIONS[act](y).to(out_dtype or x.dtype)


@of(reference)
def supports(x, scale, shift, gate, residual, pre_act, act, out_dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES or (out_dtype or x.dtype) not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if pre_act not in ACTIVATIONS or act not in ACTIVATIONS:
        return "unknown activation"
    if residual is not None and (residual.shape != x.shape or residual.dtype not in DTYPES or pixel_stride(residual) is None):
        return "the residual is no map of the same shape in channels_last memory"
    if not per_channel(x, scale, shift):
        return "scale and shift are not float32, one for each channel"
    if gate is not None and (gate.shape != x.shape[:2] or not gate.is_contiguous() or not gate.is_floating_point()):
        return "the gate is not one for each image and channel"
    return unreadable(x, residual)


@triton.jit
def _pointwise(
    x,
    scale,
    shift,
    gate,
    residual,
    out,
    groups,
    groups_per_pixel,
    pixels,
    x_step,
    residual_step,
    out_step,
    PRE: tl.constexpr,
    ACT: tl.constexpr,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    EVEN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    # Groups of V channels are numbered through, so that no lane idles whatever C is. Steps count groups too:
    # times the constant V they are known to be aligned, where an argument is only when it divides by 16.
    g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    pixel = g // groups_per_pixel
    c = (g - pixel * groups_per_pixel) * V + tl.arange(0, V)[None, :]
    live = None if EVEN else g < groups
    y = tl.load(x + pixel * (x_step * V) + c, mask=live).to(tl.float32)
    # Asked for before it is needed, so that both loads are in flight together.
    more = 0.0 if residual is None else tl.load(residual + pixel * (residual_step * V) + c, mask=live).to(tl.float32)
    if scale is not None:
        y = y * tl.load(scale + c, mask=live)
    if shift is not None:
        y = y + tl.load(shift + c, mask=live)
    y = activate(y, PRE)
    if gate is not None:
        y = y * tl.load(gate + (pixel // pixels) * (groups_per_pixel * V) + c, mask=live).to(tl.float32)
    if residual is not None:
        y = y + more
    y = activate(y, ACT)
    tl.store(out + pixel * (out_step * V) + c, y.to(out.dtype.element_ty), mask=live)


@of(reference)
def configs(x, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: vectors a program handles, and its warps."""
    vectors = x.numel() // vector_width(x.shape[1])
    # Below four blocks for each multiprocessor, more and smaller programs hide latency better than vectors in flight do.
    full = vectors > 132 * 4 * 512
    sizes = [(512, 4), (256, 4), (1024, 8), (512, 8), (256, 2), (1024, 4)] if full else [(128, 4), (64, 2), (256, 8), (256, 4)]
    return named("block warps", sizes)


@launches(reference, configs)
def launch(x, scale, shift, gate, residual, pre_act, act, out_dtype, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice, and may be `x` itself."""
    n, c, h, w = x.shape
    out = empty_map(n, c, h, w, x, out_dtype) if out is None else out
    if x.numel() == 0:
        return out
    steps = [pixel_stride(m) or c for m in (x, out if residual is None else residual, out)]
    pixels = n * h * w
    if scale is None and shift is None and gate is None and all(s == c for s in steps):
        # Nothing depends on the channel: one long pixel has no remainder at its end, however few the channels.
        c, pixels, steps = c * pixels, 1, [c * pixels] * 3
    v = vector_width(c, *steps)
    groups, block = pixels * (c // v), config["block"]
    _pointwise[(triton.cdiv(groups, block),)](
        x, scale, shift, gate, residual, out, groups, c // v, h * w, *(step // v for step in steps), PRE=pre_act, ACT=act, V=v,
        BLOCK=block, EVEN=groups % block == 0, num_warps=config["warps"], **overlap(x),
    )  # fmt: skip
    return out


@of(reference)
def cost(x, scale, shift, gate, residual, pre_act, act, out_dtype) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    parts = [p for p in (scale, shift, gate, residual) if p is not None]
    moved = x.numel() * (x.element_size() + (out_dtype or x.dtype).itemsize) + sum(p.numel() * p.element_size() for p in parts)
    return x.numel() * (len(parts) + (pre_act != "none") + (act != "none")), moved


# name, shape (N, C, H, W), parts that are there, activations; `wide`: x is a slice of a map this wide, beginning at channel 8.
CASES: list[dict[str, Any]] = [
    {"name": "copy", "shape": (2, 16, 5, 3)},
    {"name": "three channels", "shape": (1, 3, 7, 5)},
    {"name": "slice", "shape": (2, 24, 3, 5), "wide": 48},
    {"name": "affine relu", "shape": (2, 24, 5, 5), "parts": "scale shift", "pre_act": "relu"},
    {"name": "scale", "shape": (1, 7, 1, 1), "parts": "scale", "act": "sigmoid"},
    {"name": "shift", "shape": (3, 12, 1, 1), "parts": "shift", "act": "hardswish"},
    {"name": "gate", "shape": (3, 40, 3, 3), "parts": "gate", "pre_act": "silu"},
    {"name": "residual", "shape": (2, 8, 9, 7), "parts": "residual", "act": "relu6"},
    {"name": "residual of slices", "shape": (2, 20, 5, 7), "parts": "residual", "act": "leaky_relu_0.1", "wide": 36},
    {"name": "all", "shape": (2, 24, 5, 3), "parts": "scale shift gate residual", "pre_act": "hardsigmoid", "act": "gelu", "wide": 40},
    {"name": "leaky", "shape": (1, 5, 4, 4), "parts": "scale shift gate residual", "pre_act": "leaky_relu_0.01", "act": "relu"},
    {"name": "to float32", "shape": (1, 24, 5, 3), "out_dtype": "float32"},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "parts": "scale shift"},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "copy 256x256@56", "shape": (256, 256, 56, 56)},
    {"name": "affine relu 256x256@56", "shape": (256, 256, 56, 56), "parts": "scale shift", "pre_act": "relu"},
    {"name": "copy into a slice", "shape": (256, 128, 56, 56), "wide": 256},
    {"name": "gate 256x672@14", "shape": (256, 672, 14, 14), "parts": "gate"},
    {"name": "add relu 256x256@56", "shape": (256, 256, 56, 56), "parts": "residual", "act": "relu"},
    {"name": "three channels", "shape": (256, 3, 224, 224), "parts": "scale shift"},
    {"name": "add relu 1x256@56", "shape": (1, 256, 56, 56), "parts": "residual", "act": "relu"},
    {"name": "gate 1x96@56", "shape": (1, 96, 56, 56), "parts": "gate"},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, (n, c, *_), wide = Drawing(*how), case["shape"], case.get("wide", 0)
    args: dict[str, Any] = {"x": draw.map(case["shape"], wide), **given(case, "pre_act", "act", "out_dtype")}
    for part in case.get("parts", "").split():
        args[part] = draw.map(case["shape"], wide) if part == "residual" else draw.normal(*((n, c) if part == "gate" else (c,)))
    return args
