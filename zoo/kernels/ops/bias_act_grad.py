"""The way back through a bias for each channel and an activation: the gradient before them, and the bias's, in one pass."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops._activation import ACTIVATIONS, BY_OUTPUT, SLOPES, activate, slope
from zoo.kernels.ops._arguments import Drawing, as_output, launches, named, of
from zoo.kernels.ops._fold import cut, shares, tile_rows
from zoo.kernels.ops._layout import DTYPES, empty_map, unreadable
from zoo.kernels.ops._norm import channel_of, inside, whole_rows
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def reference(
    gradient: Tensor, kept: Tensor | None = None, bias: Tensor | None = None, *, act: str = "none", again: bool = False
) -> tuple[Tensor, ...]:
    """Compute the gradients of ``act(x + bias)``.

    Args:
        gradient: of the output, a map (N, C, H, W).
        kept: the output if `act` is one of `BY_OUTPUT`, else x; None without an activation.
        bias: (C,), any floating dtype, where `kept` is x; None where it is the output.
        act: a name of `SLOPES`.
        again: whether the output is made once more, of an activation that keeps x.

    Returns:
        The gradient of the bias, float32 (C,) (float64 for float64), added in the same; with an activation the gradient of x in the
        dtype of `gradient`, which without one is `gradient` itself; and if asked for `again` the output, in the same dtype.
    """
    wide = torch.promote_types(gradient.dtype, torch.float32)
    g = gradient.to(wide)
    if act == "none" or kept is None:
        return (g.sum((0, 2, 3)),)
    z = kept.to(wide) if bias is None else kept.to(wide) + bias.to(wide)[:, None, None]
    g = SLOPES[act](g, z)
    made = (g.sum((0, 2, 3)), g.to(gradient.dtype))
    return (*made, ACTIVATIONS[act](z).to(gradient.dtype)) if again else made


@of(reference)
def rival(gradient, kept, act, **_) -> tuple[Tensor, ...]:
    """Compute the same by PyTorch's own operators, for a comparison of times."""
    if act == "none" or kept is None:
        return (gradient.sum((0, 2, 3)),)
    g = torch.ops.aten.threshold_backward(gradient, kept, 0)  # of any activation: its time doesn't depend on the numbers
    return g.sum((0, 2, 3)), g


@of(reference)
def supports(gradient, kept, bias, act, again) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if act not in SLOPES:
        return f"activation {act}"
    if (kept is None) != (act == "none"):
        return "an activation with nothing kept, or something kept without one"
    if kept is not None and (kept.shape != gradient.shape or kept.dtype not in DTYPES):
        return "what is kept has another shape, or is not of float32, bfloat16 or float16"
    if bias is not None and (act in BY_OUTPUT or bias.shape != gradient.shape[1:2] or bias.dtype not in DTYPES or not bias.is_contiguous()):
        return "a bias that is not one for each channel, or beside an output"
    if again and (kept is None or act in BY_OUTPUT):
        return "an output that is kept is not made again"
    return unreadable(gradient, kept, small=gradient.numel() < 2**31 - 2**22)


@triton.jit
def _back(
    gradient, kept, bias, partials, out, made, full, rows, total, channel_units, pixels, width_units, gradient_units, kept_units, out_units,
    made_units,
    ACT: tl.constexpr, V: tl.constexpr, W: tl.constexpr, RAGGED: tl.constexpr, FOLD: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    U: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the gradient before the activation, and a program's sums of it; to `made` what is activated."""
    begin(OVERLAP)
    channels = channel_units * W
    width = width_units * V
    part = tl.program_id(1)
    col = (tl.program_id(0) * BC + tl.arange(0, BC))[None, :]
    lane = tl.arange(0, BR)[:, None]
    level = 0.0 if bias is None else tl.load(bias + channel_of(col, channels, W), mask=col < width, other=0.0).to(tl.float32)
    sums = tl.zeros([BR, BC], tl.float32)
    for tile in range(part, full, tl.num_programs(1)):
        row = tile * (BR * U) + lane
        gs = whole_rows(gradient, row, col, gradient_units * V, width, RAGGED, BR, U)
        ks = whole_rows(kept, row, col, kept_units * V, width, RAGGED, BR, U) if ACT != "none" else gs
        for u in tl.static_range(U):
            g = gs[u].to(tl.float32)
            if ACT != "none":
                z = ks[u].to(tl.float32) + level
                g = slope(z, g, ACT)
                at = out + ((row + u * BR) * (out_units * V) + col)
                if RAGGED:
                    tl.store(at, g.to(out.dtype.element_ty), mask=col < width)
                else:
                    tl.store(at, g.to(out.dtype.element_ty))
                if made is not None:
                    at = made + ((row + u * BR) * (made_units * V) + col)
                    y = activate(z, ACT).to(made.dtype.element_ty)
                    if RAGGED:
                        tl.store(at, y, mask=col < width)
                    else:
                        tl.store(at, y)
            sums += g
    if (full % tl.num_programs(1) == part) & (full * (BR * U) < rows):
        for u in tl.static_range(U):
            row = full * (BR * U) + u * BR + lane
            there = inside(row, col, rows, total, width, RAGGED, FOLD)
            g = tl.load(gradient + (row * (gradient_units * V) + col), mask=there, other=0.0).to(tl.float32)
            if ACT != "none":
                z = tl.load(kept + (row * (kept_units * V) + col), mask=there, other=0.0).to(tl.float32) + level
                g = slope(z, g, ACT)
                tl.store(out + (row * (out_units * V) + col), g.to(out.dtype.element_ty), mask=there)
                if made is not None:
                    y = activate(z, ACT).to(made.dtype.element_ty)
                    tl.store(made + (row * (made_units * V) + col), y, mask=there)
            sums += g
    to = partials + ((part * pixels + col // channels) * channels + col % channels)
    tl.store(to, tl.sum(sums, axis=0, keep_dims=True), mask=col < width)


@of(reference)
def configs(gradient, act, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: columns of a tile, warps, tiles in flight, and programs."""
    sizes = [(64, 8, 2, 396), (64, 4, 2, 792), (128, 8, 2, 396), (64, 8, 4, 264), (64, 8, 1, 528), (32, 8, 2, 396), (64, 4, 4, 528)]
    if gradient.numel() * gradient.element_size() <= 8_000_000:
        sizes = [(64, 8, 1, 264), (64, 4, 1, 396), (32, 8, 1, 264), (64, 8, 2, 132), (32, 4, 2, 264)]
    elif "gelu" in act:  # of which computing takes longer than reading
        sizes = [sizes[2], sizes[1], *sizes[3:], sizes[0]]
    return named("columns warps unroll programs", sizes)


@launches(reference, configs, tuned=True)
def launch(gradient, kept, bias, act, again, config, out: Tensor | tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`. The map of `out` may be a channel slice, but not `gradient`, which others may read."""
    n, channels, h, w = gradient.shape
    if out is None:
        out = (torch.empty(channels, dtype=torch.float32, device=gradient.device),)
        out += tuple(empty_map(n, channels, h, w, gradient) for _ in range(0 if kept is None else 1 + again))
    sums, *of_x = results = (out,) if isinstance(out, Tensor) else tuple(out)
    if gradient.numel() == 0:
        sums.zero_()
        return results
    to, made = (*of_x, None, None)[:2]
    c = cut(config["columns"], *(gradient if m is None else m for m in (gradient, kept, to, made)))
    rows, unroll = tile_rows(c, config["warps"], gradient.element_size(), config["unroll"])
    parts = shares(c, rows * unroll, config["programs"])
    partials = torch.empty((parts * c.pixels, channels), dtype=torch.float32, device=gradient.device)
    with followed_by_ours(True):
        _back[(c.blocks, parts)](
            gradient, kept, bias, partials, to, made, c.whole // (rows * unroll), c.rows, c.total, channels // c.run, c.pixels,
            c.width // c.vector, *c.steps, ACT=act, W=c.run, **c.constants(rows, unroll), num_warps=config["warps"], **overlap(gradient),
        )  # fmt: skip
    add(partials, sums)
    return results


@of(reference)
def cost(gradient, kept, again, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    maps = 1 if kept is None else 3 + again
    return gradient.numel() * (1 if kept is None else 2), gradient.numel() * gradient.element_size() * maps + 4 * gradient.shape[1]


CASES: list[dict[str, Any]] = [
    {"name": "relu", "shape": (2, 16, 5, 7), "act": "relu"},
    {"name": "no activation", "shape": (2, 16, 5, 7)},
    {"name": "no activation, odd channels", "shape": (3, 7, 4, 3)},
    {"name": "odd channels, folded", "shape": (3, 7, 5, 3), "act": "relu6"},
    {"name": "20 channels, folded", "shape": (2, 20, 5, 7), "act": "hardswish"},
    {"name": "slice", "shape": (2, 24, 3, 5), "wide": 48, "act": "silu"},
    {"name": "slice at odd channels", "shape": (2, 9, 3, 5), "wide": 21, "act": "relu"},
    {"name": "gelu of tokens", "shape": (2, 32, 17, 1), "act": "gelu"},
    {"name": "gelu of tokens, again", "shape": (2, 32, 17, 1), "act": "gelu", "again": True},
    {"name": "gelu again, odd channels, slice", "shape": (2, 9, 3, 5), "wide": 21, "act": "gelu", "again": True},
    {"name": "gelu by tanh, again", "shape": (2, 32, 17, 1), "act": "gelu_tanh", "again": True},
    {"name": "quick gelu, again", "shape": (2, 32, 17, 1), "act": "quick_gelu", "again": True},
    {"name": "quick gelu", "shape": (3, 7, 5, 3), "act": "quick_gelu"},
    {"name": "leaky, one pixel each", "shape": (3, 40, 1, 1), "act": "leaky_relu_0.1"},
    {"name": "batch 1, three pixels", "shape": (1, 8, 1, 3), "act": "leaky_relu_0.01"},
    {"name": "many pixels", "shape": (2, 3, 20, 17), "act": "relu"},
    {"name": "batch 0", "shape": (0, 16, 4, 4), "act": "relu"},
]
"""`shape` (N, C, H, W); `wide`: maps are slices of maps this wide, from channel 8 on."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}@{px} {act}", "shape": (n, c, px, px), "act": act}
    for n in (256, 32)
    for c, px, act in ((64, 224, "relu"), (128, 112, "relu"), (256, 56, "relu"), (512, 28, "relu"), (512, 14, "relu"), (96, 54, "none"))
] + [
    {"name": f"ViT-B 64x3072@197 gelu{' again' * again}", "shape": (64, 3072, 197, 1), "act": "gelu", "again": again}
    for again in (False, True)
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, shape, wide, act = Drawing(*how), case["shape"], case.get("wide", 0), case.get("act", "none")
    args: dict[str, Any] = {"gradient": draw.map(shape, wide), "act": act, "again": case.get("again", False)}
    if act != "none":
        args["kept"] = as_output(draw.map(shape, wide), act)
    if act not in BY_OUTPUT:
        args["bias"] = draw.normal(shape[1])
    return args
