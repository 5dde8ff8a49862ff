"""The way back through a gated linear unit, SwiGLU for one: the gradients of both halves and of their biases in one pass."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT, SLOPES, activate, slope
from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._fold import cut, shares, tile_rows
from zoo.kernels.ops._layout import DTYPES, empty_map, unreadable
from zoo.kernels.ops._norm import channel_of, inside, whole_rows
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(gradient: Tensor, gate: Tensor, value: Tensor, *, act: str = "silu", again: bool = False) -> tuple[Tensor, ...]:
    """Compute the gradients of ``act(gate) * value``.

    Args:
        gradient: of the output, a map (N, C, H, W).
        gate: of its shape; a channel slice, as `value` may be.
        value: of its shape.
        act: a name of `SLOPES` whose gradient its input tells: "silu" for SwiGLU, "gelu" for GEGLU.
        again: whether the output is made once more.

    Returns:
        The sums over all pixels of both gradients, float32 (2, C) (float64 for float64), added in the same, which biases of the gate and
        the value get; the gradients of gate and value in the dtype of `gradient`; and if asked for `again` the output, in the same dtype.

    Source:
        Shazeer 2020, https://arxiv.org/abs/2002.05202, equation 6.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    g, z, v = (t.to(wide) for t in (gradient, gate, value))
    y = ACTIVATIONS[act](z)
    of_gate, of_value = SLOPES[act](g * v, z), g * y
    made = (torch.stack([of_gate.sum((0, 2, 3)), of_value.sum((0, 2, 3))]), of_gate.to(gradient.dtype), of_value.to(gradient.dtype))
    return (*made, (y * v).to(gradient.dtype)) if again else made


@of(reference)
def rival(gradient, gate, value, act, again) -> tuple[Tensor, ...]:
    """Compute the same by PyTorch's own operators, for a comparison of times."""
    y = ACTIVATIONS[act](gate)
    of_gate = torch.ops.aten.silu_backward(gradient * value, gate)  # of any activation: its time hardly depends on the numbers
    of_value = gradient * y
    made = (torch.stack([of_gate.sum((0, 2, 3)), of_value.sum((0, 2, 3))]), of_gate, of_value)
    return (*made, y * value) if again else made


@of(reference)
def supports(gradient, gate, value, act, again) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if act not in SLOPES or act in BY_OUTPUT:
        return f"activation {act}"
    if any(half.shape != gradient.shape or half.dtype not in DTYPES for half in (gate, value)):
        return "halves of another shape, or not of float32, bfloat16 or float16"
    return unreadable(gradient, gate, value, small=2 * gradient.numel() < 2**31 - 2**22)


@triton.jit
def _halves(g, z, v, ACT: tl.constexpr):
    """Return the gradients of gate and value, and the output, of float32 blocks."""
    y = activate(z, ACT)
    return slope(z, g * v, ACT), g * y, y * v


@triton.jit
def _back(
    gradient, gate, value, partials, to_gate, to_value, made, full, rows, total, channel_units, pixels, width_units,
    gradient_units, gate_units, value_units, to_gate_units, to_value_units, made_units,
    ACT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the gradients of both halves, and a program's sums of them; to `made` the output."""
    begin(OVERLAP)
    channels = channel_units * W
    width = width_units * V
    part = tl.program_id(1)
    col = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    gate_sums = tl.zeros([BR, BC], tl.float32)
    value_sums = tl.zeros([BR, BC], tl.float32)
    for tile in range(part, full, tl.num_programs(1)):
        first = tile * (BR * U) + lane
        gs = whole_rows(gradient, first, col, gradient_units * V, width, RAGGED, BR, U)
        zs = whole_rows(gate, first, col, gate_units * V, width, RAGGED, BR, U)
        vs = whole_rows(value, first, col, value_units * V, width, RAGGED, BR, U)
        for u in tl.static_range(U):
            row = first + u * BR
            of_gate, of_value, y = _halves(gs[u].to(tl.float32), zs[u].to(tl.float32), vs[u].to(tl.float32), ACT)
            if RAGGED:
                tl.store(to_gate + (row * (to_gate_units * V) + col), of_gate.to(to_gate.dtype.element_ty), mask=col < width)
                tl.store(to_value + (row * (to_value_units * V) + col), of_value.to(to_value.dtype.element_ty), mask=col < width)
            else:
                tl.store(to_gate + (row * (to_gate_units * V) + col), of_gate.to(to_gate.dtype.element_ty))
                tl.store(to_value + (row * (to_value_units * V) + col), of_value.to(to_value.dtype.element_ty))
            if made is not None:
                if RAGGED:
                    tl.store(made + (row * (made_units * V) + col), y.to(made.dtype.element_ty), mask=col < width)
                else:
                    tl.store(made + (row * (made_units * V) + col), y.to(made.dtype.element_ty))
            gate_sums += of_gate
            value_sums += of_value
    if (full % tl.num_programs(1) == part) & (full * (BR * U) < rows):
        for u in tl.static_range(U):
            row = full * (BR * U) + u * BR + lane
            there = inside(row, col, rows, total, width, RAGGED, FOLD)
            g = tl.load(gradient + (row * (gradient_units * V) + col), mask=there, other=0.0).to(tl.float32)
            z = tl.load(gate + (row * (gate_units * V) + col), mask=there, other=0.0).to(tl.float32)
            v = tl.load(value + (row * (value_units * V) + col), mask=there, other=0.0).to(tl.float32)
            of_gate, of_value, y = _halves(g, z, v, ACT)
            tl.store(to_gate + (row * (to_gate_units * V) + col), of_gate.to(to_gate.dtype.element_ty), mask=there)
            tl.store(to_value + (row * (to_value_units * V) + col), of_value.to(to_value.dtype.element_ty), mask=there)
            if made is not None:
                tl.store(made + (row * (made_units * V) + col), y.to(made.dtype.element_ty), mask=there)
            gate_sums += of_gate
            value_sums += of_value
    to = partials + ((part * pixels + col // channels) * (2 * channels) + channel_of(col, channels, W))
    tl.store(to, tl.sum(gate_sums, axis=0, keep_dims=True), mask=col < width)
    tl.store(to + channels, tl.sum(value_sums, axis=0, keep_dims=True), mask=col < width)


@of(reference)
def configs(gradient, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: columns of a tile, warps, tiles in flight, and programs."""
    sizes = [(64, 4, 1, 792), (64, 8, 2, 396), (64, 4, 2, 792), (128, 8, 1, 396), (64, 8, 1, 528), (32, 8, 2, 396)]
    if gradient.numel() * gradient.element_size() <= 8_000_000:
        sizes = [(64, 8, 1, 264), (64, 4, 1, 396), (32, 8, 1, 264), (64, 8, 2, 132), (32, 4, 2, 264)]
    return named("columns warps unroll programs", sizes)


@launches(reference, configs, tuned=True)
def launch(gradient, gate, value, act, again, config, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`. The maps of `out` may be channel slices, halves of one map for one."""
    n, channels, h, w = gradient.shape
    if out is None:
        sums = torch.empty((2, channels), dtype=torch.float32, device=gradient.device)
        out = (sums, *(empty_map(n, channels, h, w, gradient) for _ in range(2 + again)))
    sums, to_gate, to_value, *more = out
    if gradient.numel() == 0:
        sums.zero_()
        return out
    made = more[0] if again else None
    maps = (gradient, gate, value, to_gate, to_value, to_value if made is None else made)
    c = cut(config["columns"], *maps)
    rows, unroll = tile_rows(c, config["warps"], gradient.element_size(), config["unroll"])
    parts = shares(c, rows * unroll, config["programs"])
    partials = torch.empty((parts * c.pixels, 2 * channels), dtype=torch.float32, device=gradient.device)
    with followed_by_ours(True):
        _back[(c.blocks, parts)](
            gradient, gate, value, partials, to_gate, to_value, made, c.whole // (rows * unroll), c.rows, c.total, channels // c.run,
            c.pixels, c.width // c.vector, *c.steps, ACT=act, W=c.run, **c.constants(rows, unroll), num_warps=config["warps"],
            **overlap(gradient),
        )  # fmt: skip
    add(partials, sums)
    return out


@of(reference)
def cost(gradient, again, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    return 8 * gradient.numel(), gradient.numel() * gradient.element_size() * (5 + again) + 8 * gradient.shape[1]


CASES: list[dict[str, Any]] = [
    {"name": "tokens", "shape": (2, 32, 17, 1)},
    {"name": "tokens, again", "shape": (2, 32, 17, 1), "again": True},
    {"name": "gelu, odd channels, folded", "shape": (3, 7, 5, 3), "act": "gelu", "again": True},
    {"name": "20 channels, folded", "shape": (2, 20, 5, 7)},
    {"name": "slice", "shape": (2, 24, 3, 5), "wide": 48, "again": True},
    {"name": "slice at odd channels", "shape": (2, 9, 3, 5), "wide": 21},
    {"name": "gelu by tanh", "shape": (2, 16, 5, 1), "act": "gelu_tanh"},
    {"name": "quick gelu", "shape": (2, 16, 5, 1), "act": "quick_gelu", "again": True},
    {"name": "one pixel", "shape": (1, 40, 1, 1)},
    {"name": "many pixels", "shape": (2, 3, 20, 17)},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "again": True},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, from channel 8 on."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"DINOv2-G 16x4096@257{' again' * again}", "shape": (16, 4096, 257, 1), "again": again} for again in (False, True)
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, shape, wide = Drawing(*how), case["shape"], case.get("wide", 0)
    gradient, gate, value = (draw.map(shape, wide) for _ in range(3))
    return {"gradient": gradient, "gate": gate, "value": value, "act": case.get("act", "silu"), "again": case.get("again", False)}
