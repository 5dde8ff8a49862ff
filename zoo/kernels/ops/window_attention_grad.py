"""The way back through attention inside windows: queries', keys' and values' gradients in one pass, and the bias's.

Logits are computed once more from what the map holds, so that nothing of a window's size squared is kept. A program stays with one head of
one window and takes it of many images. It adds up the bias's gradient in registers, and writes that once.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels.ops import window_attention
from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._layout import empty_map, pixel_stride, unreadable
from zoo.kernels.ops._overlap import begin, overlap
from zoo.kernels.ops.window_attention import APART, geometry, pixel_of, pixels_of, width_of

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
MOST_TOKENS = 64
"""Pixels of a window up to which a program holds all pairs of them three times over."""


def reference(
    gradient: Tensor,
    x: Tensor,
    bias: Tensor | None = None,
    region: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    heads: int,
    window: tuple[int, int],
    step: tuple[int, int],
    stride: tuple[int, int],
    roll: tuple[int, int] = (0, 0),
    first: tuple[int, int, int],
    pitch: int = 0,
    factor: float = 1.0,
    learns: bool = True,
    tf32: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the gradients of ``softmax(q @ k.T * factor + bias + mask) @ v`` for each window and head.

    Args:
        gradient: of the result, a map (N, heads E, H, W).
        x: map (N, 3 heads E, H, W), channels_last, that holds queries, keys and values of all heads beside each other, and nothing else.
        bias: as of `window_attention`.
        region: as of `window_attention`.
        mask: as of `window_attention`.
        heads: as of `window_attention`, as all that follows.
        window: rows and columns.
        step: from one pixel of a window to the next.
        stride: from one window to the next.
        roll: by how many pixels the map is shifted before.
        first: channel of the first query, key and value.
        pitch: channels from a head's first query to the next head's.
        factor: of all logits.
        learns: whether the bias's gradient is wanted, where there is a bias.
        tf32: lets the kernel multiply float32 in TF32.

    Returns:
        The gradient of x in its dtype; where a bias learns, a pair with its gradient, float32 (float64 for float64) (heads, T, T).
    """
    del tf32  # of the kernel
    n, channels, h, w = x.shape
    width = width_of(channels, first, heads, pitch)
    wide = torch.promote_types(x.dtype, torch.float32)
    where = pixels_of((h, w), window, step, stride, roll, x.device)
    tokens = x.to(wide).permute(0, 2, 3, 1).flatten(1, 2)[:, where]  # (N, windows, T, C)
    q, k, v = (tokens[..., at:].unfold(-1, width, pitch or width)[..., :heads, :].transpose(2, 3) for at in first)
    logits = (q * factor) @ k.transpose(-2, -1)
    if bias is not None:
        logits = logits + bias.to(wide)
    if region is not None:
        logits = logits + ((region[:, :, None] != region[:, None, :]) * APART).to(wide)[:, None]
    if mask is not None:
        logits = logits + mask.to(wide)[:, None]
    share = logits.softmax(-1)
    of_y = gradient.to(wide).permute(0, 2, 3, 1).flatten(1, 2)[:, where].unflatten(-1, (heads, width)).transpose(2, 3)
    of_share = of_y @ v.transpose(-2, -1)
    of_logits = share * (of_share - (share * of_share).sum(-1, keepdim=True))
    parts = (of_logits @ k * factor, of_logits.transpose(-2, -1) @ q * factor, share.transpose(-2, -1) @ of_y)
    made = torch.zeros_like(tokens)
    for where_first, part in zip(first, parts, strict=True):
        at = [where_first + head * (pitch or width) + e for head in range(heads) for e in range(width)]
        made[..., at] = part.transpose(2, 3).flatten(3)
    of_x = torch.empty((n, h * w, channels), dtype=x.dtype, device=x.device)
    of_x[:, where.flatten()] = made.flatten(1, 2).to(x.dtype)
    of_x = of_x.view(n, h, w, channels).permute(0, 3, 1, 2)
    return (of_x, of_logits.sum((0, 1))) if learns and bias is not None else of_x


@of(reference)
def supports(gradient, x, bias, region, mask, heads, window, first, pitch, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    given = {"heads": heads, "window": window, "step": (1, 1), "stride": window, "first": first, "pitch": pitch}
    if refused := window_attention.supports(x, bias, None, region, mask, **given):
        return refused
    if window[0] * window[1] > MOST_TOKENS:
        return f"more than {MOST_TOKENS} pixels a window"
    each = width_of(x.shape[1], first, heads, pitch)
    if x.shape[1] != 3 * heads * each or gradient.shape != (x.shape[0], heads * each, *x.shape[2:]) or gradient.dtype != x.dtype:
        return "shapes or dtypes that don't belong together"
    return unreadable(gradient, x)


@triton.jit
def _window_attention_back(
    gradient, x, bias, region, mask, out, sums, images, height, width, across, windows, g_pixel, x_pixel, out_pixel, factor, groups,
    HEADS: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, STEP_Y: tl.constexpr, STEP_X: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, ROLL_Y: tl.constexpr, ROLL_X: tl.constexpr,
    Q: tl.constexpr, K: tl.constexpr, VALUE: tl.constexpr, PITCH: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr, APART_BY: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Go back through one head of one window, of every `groups`-th image."""
    begin(OVERLAP)
    head = tl.program_id(0) % HEADS
    one = tl.program_id(0) // HEADS % windows
    group = tl.program_id(0) // (HEADS * windows)
    token = tl.arange(0, BLOCK)
    inside = token < ROWS * COLS
    pixel = pixel_of(token, one, across, height, width, COLS, STEP_Y, STEP_X, STRIDE_Y, STRIDE_X, ROLL_Y, ROLL_X).to(tl.int64)
    e = tl.arange(0, WIDE)
    there = inside[:, None] & (e < E)[None, :]
    pairs = inside[:, None] & inside[None, :]
    at = token[:, None] * (ROWS * COLS) + token[None, :]
    added = tl.zeros((BLOCK, BLOCK), tl.float32)
    if bias is not None:
        added += tl.load(bias + head * (ROWS * COLS * ROWS * COLS) + at, mask=pairs, other=0.0)
    if mask is not None:
        added += tl.load(mask + one * (ROWS * COLS * ROWS * COLS) + at, mask=pairs, other=0.0)
    if region is not None:
        part = tl.load(region + one * (ROWS * COLS) + token, mask=inside, other=0.0)
        added += tl.where(part[:, None] != part[None, :], APART_BY, 0.0)
    added = tl.where(inside[None, :], added, float("-inf"))
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for image in tl.range(group, images, groups, num_stages=STAGES):
        mine = image * (height * width) + pixel
        from_x = x + mine[:, None] * x_pixel + head * PITCH + e[None, :]
        q = tl.load(from_x + Q, mask=there, other=0.0)
        k = tl.load(from_x + K, mask=there, other=0.0)
        v = tl.load(from_x + VALUE, mask=there, other=0.0)
        g = tl.load(gradient + mine[:, None] * g_pixel + head * E + e[None, :], mask=there, other=0.0)
        zeros = tl.zeros((BLOCK, BLOCK), tl.float32)
        flat = tl.zeros((BLOCK, WIDE), tl.float32)
        logits = product(q, tl.trans(k), zeros, PRECISION) * factor + added
        share = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        share = share / tl.sum(share, axis=1)[:, None]
        of_v = product(tl.trans(share.to(x.dtype.element_ty)), g, flat, PRECISION)
        of_share = product(g, tl.trans(v), zeros, PRECISION)
        of_logits = share * (of_share - tl.sum(share * of_share, axis=1)[:, None])  # zero where no pixel asks: its gradient is
        if sums is not None:
            total += of_logits
        less = of_logits.to(x.dtype.element_ty)
        of_q = product(less, k, flat, PRECISION) * factor
        of_k = product(tl.trans(less), q, flat, PRECISION) * factor
        to = out + mine[:, None] * out_pixel + head * PITCH + e[None, :]
        tl.store(to + Q, of_q.to(out.dtype.element_ty), mask=there)
        tl.store(to + K, of_k.to(out.dtype.element_ty), mask=there)
        tl.store(to + VALUE, of_v.to(out.dtype.element_ty), mask=there)
    if sums is not None:
        tl.store(sums + tl.program_id(0).to(tl.int64) * (ROWS * COLS * ROWS * COLS) + at, total, mask=pairs)


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: warps of a program, programs at least, and loads that are begun ahead."""
    sizes = ((4, 528, 3), (4, 1056, 2), (4, 528, 2), (4, 264, 3), (4, 2112, 2), (8, 264, 2))
    return named("warps programs stages", sizes)


@launches(reference, configs)
def launch(
    gradient, x, bias, region, mask, heads, window, step, stride, roll, first, pitch, factor, learns, tf32, config,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel, and add up what its programs have for the bias; see `reference`. The map of `out` may be a channel slice."""
    n, channels, h, w = x.shape
    if out is None:
        of_x, of_bias = empty_map(n, channels, h, w, x), None
        if learns and bias is not None:
            of_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)  # dense, however the bias lies
    else:
        of_x, of_bias = out if isinstance(out, tuple) else (out, None)
    rows, cols = window
    tokens, windows = rows * cols, (h // rows) * (w // cols)
    if of_x.numel() == 0:
        return of_x if of_bias is None else (of_x, of_bias.zero_())
    groups = min(n, triton.cdiv(config["programs"], heads * windows))
    programs = heads * windows * groups
    sums = None if of_bias is None else torch.empty((groups * windows, heads, tokens, tokens), dtype=torch.float32, device=x.device)
    constants: dict[str, Any] = {
        **geometry(x, heads, window, step, stride, roll, first, pitch), "APART_BY": APART, "STAGES": config["stages"],
        "PRECISION": "tf32" if tf32 else "ieee", "num_warps": config["warps"],
    }  # fmt: skip
    given = [None if part is None else part.contiguous() for part in (bias, region, mask)]
    pitches = (pixel_stride(gradient), pixel_stride(x), pixel_stride(of_x))
    _window_attention_back[(programs,)](
        gradient, x, *given, of_x, sums, n, h, w, w // cols, windows, *pitches, factor, groups, **constants, **overlap(x)
    )
    return of_x if sums is None else (of_x, torch.sum(sums, 0, out=of_bias))


@of(reference)
def cost(gradient, x, bias, window, learns, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    moved = (gradient.numel() + 2 * x.numel()) * x.element_size() + (0 if bias is None else 4 * (1 + learns) * bias.numel())
    return 10 * gradient.numel() * window[0] * window[1], moved


# `kind`: windows or a grid of `window` pixels; `parts`: what is given of bias, region and mask; `wide`: x is a slice of a map this wide.
CASES: list[dict[str, Any]] = [
    {"name": "one window", "shape": (1, 48, 4, 4), "heads": 1, "window": (4, 4)},
    {"name": "Swin", "shape": (3, 96, 6, 9), "heads": 2, "window": (3, 3), "parts": "bias", "factor": 0.25},
    {"name": "Swin, shifted", "shape": (2, 96, 6, 9), "heads": 2, "window": (3, 3), "roll": (-1, -2), "parts": "bias region"},
    {"name": "a mask", "shape": (2, 96, 18, 1), "heads": 2, "window": (9, 1), "parts": "bias mask"},
    {"name": "a bias that is still", "shape": (2, 96, 6, 9), "heads": 2, "window": (3, 3), "parts": "bias", "learns": False},
    {"name": "one pixel, one channel", "shape": (2, 3, 2, 3), "heads": 1, "window": (1, 1), "parts": "bias"},
    {"name": "a mask alone", "shape": (2, 48, 14, 1), "heads": 1, "window": (7, 1), "parts": "mask"},
    {"name": "grid", "shape": (1, 96, 6, 8), "heads": 2, "window": (2, 4), "kind": "grid", "parts": "bias"},
    {"name": "odd channels", "shape": (1, 39, 3, 6), "heads": 1, "window": (3, 3), "parts": "bias"},
    {"name": "values first", "shape": (1, 60, 5, 7), "heads": 2, "window": (5, 7), "first": (20, 40, 0)},
    {"name": "a head's beside each other", "shape": (2, 36, 3, 4), "heads": 3, "window": (3, 4), "first": (0, 4, 8), "pitch": 12,
     "parts": "bias"},
    {"name": "slice", "shape": (1, 48, 4, 4), "heads": 1, "window": (2, 2), "wide": 64},
    {"name": "batch 0", "shape": (0, 48, 4, 4), "heads": 1, "window": (2, 2), "parts": "bias"},
]  # fmt: skip
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "Swin-T 64x96@56", "shape": (64, 288, 56, 56), "heads": 3, "window": (7, 7), "roll": (-3, -3), "parts": "bias region"},
    {"name": "Swin-T tokens 64x96@56", "shape": (64, 288, 3136, 1), "heads": 3, "window": (49, 1), "parts": "bias mask", "factor": 0.177},
    {"name": "Swin-T tokens 4096x96, not shifted", "shape": (4096, 288, 49, 1), "heads": 3, "window": (49, 1), "parts": "bias"},
    {"name": "Swin-T 64x384@14", "shape": (64, 1152, 14, 14), "heads": 12, "window": (7, 7), "parts": "bias"},
    {"name": "Swin-T 64x768@7", "shape": (64, 2304, 49, 1), "heads": 24, "window": (49, 1), "parts": "bias"},
    {"name": "8x8 windows", "shape": (64, 576, 32, 32), "heads": 6, "window": (8, 8), "parts": "bias"},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    args = window_attention.make(case, *how)
    n, _, h, w = args["x"].shape
    each = width_of(args["x"].shape[1], args["first"], args["heads"], args["pitch"])
    del args["cosine"]
    args["learns"] = case.get("learns", True)
    return {"gradient": Drawing(*how).map((n, args["heads"] * each, h, w)), **args}
