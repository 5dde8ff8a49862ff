"""Attention inside windows of a map, as Swin (Liu et al. 2021, 2022) and MaxViT (Tu et al. 2022) have it, without moving a pixel.

All tokens may be one window, to whose logits a constant is added, as in BEiT (Bao et al. 2021) and CoAtNet (Dai et al. 2021).

A window's pixels are read where they lie in the map of queries, keys and values, and its answers are written where they belong: what
partitions, shifts and joins windows is arithmetic of addresses. MaxViT's grid is a window whose pixels are far apart.
"""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._layout import DTYPES, empty_map, pixel_stride, unreadable
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
MOST_TOKENS, MOST_CHANNELS = 256, 128
"""Pixels of a window, and channels of a head, up to which a program holds them."""
APART = -100.0
"""Added to the logits of two pixels that only the shift made neighbours."""

Two = tuple[int, int]


def pixels_of(size: Two, window: Two, step: Two, stride: Two, roll: Two, device: torch.device | str = "cpu") -> Tensor:
    """Return the number of each window's pixels in its map, int64 (windows, pixels of a window), row by row.

    Args: as of `reference`; `size` is the map's height and width, and numbers lie on `device`.
    """
    along = []
    for side, count, apart, between, shift in zip(size, window, step, stride, roll, strict=True):
        many = side // count
        first = torch.arange(many, device=device)[:, None] * between + torch.arange(count, device=device)[None, :] * apart
        along.append((first - shift) % side)
    (rows, columns) = along
    grid = rows[:, None, :, None] * size[1] + columns[None, :, None, :]
    return grid.reshape(rows.shape[0] * columns.shape[0], -1)


def reference(
    x: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
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
    cosine: bool = False,
    tf32: bool = False,
) -> Tensor:
    """Compute ``softmax(q @ k.T * factor * scale + bias + mask) @ v`` for each window and head.

    Args:
        x: map (N, C, H, W), channels_last, that holds queries, keys and values of all heads beside each other.
        bias: float32 (heads, T, T), added to the logits of a window's T pixels; Swin's relative positions.
        scale: float32 (heads,), a factor of the logits.
        region: float32 (windows, T), whole numbers: pixels of different regions get `APART` added.
        mask: float32 (windows, T, T), added to the logits of a window's pixels, of all heads.
        heads: how many; each has E = (channels of the queries) / heads channels.
        window: pixels of a window, rows and columns; they divide H and W.
        step: pixels of the map from one pixel of a window to the next, down and along: 1 for windows, H / rows for MaxViT's grid.
        stride: from one window to the next: rows and columns for windows, 1 for a grid.
        roll: by how many pixels the map is shifted before, down and along, cyclically.
        first: channel of the first query, key and value.
        pitch: channels from a head's first query to the next head's, where a head's keys and values lie between; 0 is E.
        factor: of all logits.
        cosine: divides queries and keys by their norms, as Swin V2 does.
        tf32: lets the kernel multiply float32 in TF32.

    Returns:
        Map (N, heads E, H, W): what each pixel gets, where the pixel is.
    """
    del tf32  # of the kernel
    n, _, h, w = x.shape
    width = width_of(x.shape[1], first, heads, pitch)
    where = pixels_of((h, w), window, step, stride, roll, x.device)
    tokens = x.permute(0, 2, 3, 1).flatten(1, 2)[:, where]  # (N, windows, T, C)
    step_by = pitch or width
    q, k, v = (tokens[..., begin:].unfold(-1, width, step_by)[..., :heads, :].transpose(2, 3) for begin in first)
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    logits = (q * factor) @ k.transpose(-2, -1)
    if scale is not None:
        logits = logits * scale.to(x.dtype)[:, None, None]
    if bias is not None:
        logits = logits + bias.to(x.dtype)
    if region is not None:
        logits = logits + ((region[:, :, None] != region[:, None, :]) * APART).to(x.dtype)[:, None]
    if mask is not None:
        logits = logits + mask.to(x.dtype)[:, None]
    y = (logits.softmax(-1) @ v).transpose(2, 3).reshape(n, h * w, heads * width)
    made = torch.empty_like(y)
    made[:, where.flatten()] = y
    return made.view(n, h, w, heads * width).permute(0, 3, 1, 2)


def width_of(channels: int, first: tuple[int, int, int], heads: int, pitch: int) -> int:
    """Return the channels of a head: queries, keys and values lie one behind the other, whatever their order, of all heads or of one."""
    edges = sorted((*first, min(first) + pitch if pitch else channels))
    return min(after - before for before, after in pairwise(edges)) // (1 if pitch else heads)


@of(reference)
def supports(x, bias, scale, region, mask, heads, window, first, pitch, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or x.dtype not in DTYPES:
        return "not a map of float32, bfloat16 or float16"
    if x.shape[2] % window[0] or x.shape[3] % window[1]:
        return "the windows don't divide the map"
    if window[0] * window[1] > MOST_TOKENS or width_of(x.shape[1], first, heads, pitch) > MOST_CHANNELS:
        return f"more than {MOST_TOKENS} pixels a window or {MOST_CHANNELS} channels a head"
    if any(part is not None and part.dtype != torch.float32 for part in (bias, scale, region, mask)):
        return "bias, scale, region or mask is not float32"
    return unreadable(x)


@triton.jit
def pixel_of(
    token, one, across, height, width, COLS: tl.constexpr, STEP_Y: tl.constexpr, STEP_X: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr, ROLL_Y: tl.constexpr, ROLL_X: tl.constexpr,
):  # fmt: skip
    """Return the number of a window's pixels in their image: `token` of the window `one`, of which `across` lie beside each other."""
    row = (one // across * STRIDE_Y + (token // COLS) * STEP_Y - ROLL_Y + height) % height
    col = (one % across * STRIDE_X + (token % COLS) * STEP_X - ROLL_X + width) % width
    return row * width + col


@triton.jit
def _window_attention(
    x,
    bias,
    scale,
    region,
    mask,
    out,
    height,
    width,
    across,
    windows,
    x_pixel,
    out_pixel,
    factor,
    HEADS: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    STEP_Y: tl.constexpr,
    STEP_X: tl.constexpr,
    STRIDE_Y: tl.constexpr,
    STRIDE_X: tl.constexpr,
    ROLL_Y: tl.constexpr,
    ROLL_X: tl.constexpr,
    Q: tl.constexpr,
    K: tl.constexpr,
    VALUE: tl.constexpr,
    PITCH: tl.constexpr,
    COSINE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    QUERIES: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    APART_BY: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Answer QUERIES pixels of one head of one window; logits, softmax and sums in float32."""
    begin(OVERLAP)
    head = tl.program_id(0) % HEADS
    part = tl.program_id(0) // HEADS % PARTS
    number = (tl.program_id(0) // (HEADS * PARTS)).to(tl.int64)
    image = number // windows
    one = (number % windows).to(tl.int32)
    token = tl.arange(0, BLOCK)
    inside = token < ROWS * COLS
    pixel = pixel_of(token, one, across, height, width, COLS, STEP_Y, STEP_X, STRIDE_Y, STRIDE_X, ROLL_Y, ROLL_X)
    pixel = image * height * width + pixel
    asking = part * QUERIES + tl.arange(0, QUERIES)
    asks = asking < ROWS * COLS
    mine = pixel_of(asking, one, across, height, width, COLS, STEP_Y, STEP_X, STRIDE_Y, STRIDE_X, ROLL_Y, ROLL_X)
    mine = image * height * width + mine
    e = tl.arange(0, WIDE)
    there, here = inside[:, None] & (e < E)[None, :], asks[:, None] & (e < E)[None, :]
    q = tl.load(x + mine[:, None] * x_pixel + Q + head * PITCH + e[None, :], mask=here, other=0.0)
    k = tl.load(x + pixel[:, None] * x_pixel + K + head * PITCH + e[None, :], mask=there, other=0.0)
    v = tl.load(x + pixel[:, None] * x_pixel + VALUE + head * PITCH + e[None, :], mask=there, other=0.0)
    logits = product(q, tl.trans(k), tl.zeros((QUERIES, BLOCK), tl.float32), PRECISION)
    if COSINE:  # the products of what was divided by its norm, without rounding that
        a, b = q.to(tl.float32), k.to(tl.float32)
        a = 1 / tl.maximum(tl.sqrt(tl.sum(a * a, axis=1)), 1e-12)
        b = 1 / tl.maximum(tl.sqrt(tl.sum(b * b, axis=1)), 1e-12)
        logits = logits * a[:, None] * b[None, :]
    logits = logits * factor
    if scale is not None:
        logits = logits * tl.load(scale + head)
    if bias is not None:
        at = (head * (ROWS * COLS) + asking[:, None]) * (ROWS * COLS) + token[None, :]
        logits += tl.load(bias + at, mask=asks[:, None] & inside[None, :], other=0.0)
    if region is not None:
        of_queries = tl.load(region + one * (ROWS * COLS) + asking, mask=asks, other=0.0)
        of_keys = tl.load(region + one * (ROWS * COLS) + token, mask=inside, other=0.0)
        logits += tl.where(of_queries[:, None] != of_keys[None, :], APART_BY, 0.0)
    if mask is not None:
        at = (one * (ROWS * COLS) + asking[:, None]) * (ROWS * COLS) + token[None, :]
        logits += tl.load(mask + at, mask=asks[:, None] & inside[None, :], other=0.0)
    logits = tl.where(inside[None, :], logits, float("-inf"))
    weight = tl.exp(logits - tl.max(logits, axis=1)[:, None])
    weight = weight / tl.sum(weight, axis=1)[:, None]
    y = product(weight.to(v.dtype), v, tl.zeros((QUERIES, WIDE), tl.float32), PRECISION)
    tl.store(out + mine[:, None] * out_pixel + head * E + e[None, :], y.to(out.dtype.element_ty), mask=here)


def geometry(x: Tensor, heads: int, window: Two, step: Two, stride: Two, roll: Two, first: Any, pitch: int) -> dict[str, Any]:
    """Return where pixels and channels lie, as kernels take it."""
    each, tokens = width_of(x.shape[1], first, heads, pitch), window[0] * window[1]
    return {
        "HEADS": heads, "E": each, "ROWS": window[0], "COLS": window[1], "STEP_Y": step[0], "STEP_X": step[1],
        "STRIDE_Y": stride[0], "STRIDE_X": stride[1], "ROLL_Y": roll[0] % x.shape[2], "ROLL_X": roll[1] % x.shape[3],
        "Q": first[0], "K": first[1], "VALUE": first[2], "PITCH": pitch or each,
        "BLOCK": max(16, triton.next_power_of_2(tokens)), "WIDE": max(16, triton.next_power_of_2(each)),
    }  # fmt: skip


@of(reference)
def configs(window, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: queries of a program, and its warps."""
    block = max(16, triton.next_power_of_2(window[0] * window[1]))
    wanted = [(min(block, 64), 4), (min(block, 64), 2), (min(block, 32), 2), (min(block, 128), 4), (min(block, 16), 1), (min(block, 64), 8)]
    return named("queries warps", list(dict.fromkeys(wanted)))


@launches(reference, configs)
def launch(
    x, bias, scale, region, mask, heads, window, step, stride, roll, first, pitch, factor, cosine, tf32, config, out: Tensor | None = None
) -> Tensor:
    """Run the kernel; see `reference`. `out` may be a channel slice."""
    n, channels, h, w = x.shape
    each = width_of(channels, first, heads, pitch)
    out = empty_map(n, heads * each, h, w, x) if out is None else out
    if out.numel() == 0:
        return out
    rows, cols = window
    across, tokens = w // cols, rows * cols
    windows = (h // rows) * across
    constants: dict[str, Any] = {
        **geometry(x, heads, window, step, stride, roll, first, pitch), "COSINE": cosine, "QUERIES": config["queries"], "APART_BY": APART,
        "PRECISION": "tf32" if tf32 else "ieee", "num_warps": config["warps"],
    }  # fmt: skip
    constants["PARTS"] = triton.cdiv(tokens, config["queries"])
    grid = (heads * constants["PARTS"] * n * windows,)  # one axis: the others of a grid end at 65535
    given = [None if part is None else part.contiguous() for part in (bias, scale, region, mask)]
    _window_attention[grid](x, *given, out, h, w, across, windows, pixel_stride(x), pixel_stride(out), factor, **constants, **overlap(x))
    return out


@of(reference)
def cost(x, window, heads, first, pitch, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    n, channels, h, w = x.shape
    each = heads * width_of(channels, first, heads, pitch)
    return 4 * n * h * w * window[0] * window[1] * each, (x.numel() + n * h * w * each) * x.element_size()


# `kind`: windows or a grid of `window` pixels; `parts`: which of bias, scale, region and mask; `wide`: x is a slice of a map this wide.
CASES: list[dict[str, Any]] = [
    {"name": "one window", "shape": (1, 48, 4, 4), "heads": 1, "window": (4, 4)},
    {"name": "Swin", "shape": (2, 96, 6, 9), "heads": 2, "window": (3, 3), "parts": "bias", "factor": 0.25},
    {"name": "Swin, shifted", "shape": (2, 96, 6, 9), "heads": 2, "window": (3, 3), "roll": (-1, -2), "parts": "bias region"},
    {
        "name": "Swin V2",
        "shape": (1, 48, 8, 8),
        "heads": 1,
        "window": (4, 4),
        "roll": (-2, -2),
        "parts": "bias scale region",
        "cosine": True,
    },
    {"name": "grid", "shape": (1, 96, 6, 8), "heads": 2, "window": (2, 4), "kind": "grid", "parts": "bias"},
    {"name": "odd channels", "shape": (1, 39, 3, 6), "heads": 1, "window": (3, 3), "parts": "bias"},
    {"name": "values first, more pixels than queries", "shape": (1, 60, 5, 7), "heads": 2, "window": (5, 7), "first": (20, 40, 0)},
    {
        "name": "CoAtNet: a head's queries, keys and values",
        "shape": (2, 36, 3, 4),
        "heads": 3,
        "window": (3, 4),
        "first": (0, 4, 8),
        "pitch": 12,
        "parts": "bias",
    },
    {"name": "a mask", "shape": (2, 96, 18, 1), "heads": 2, "window": (9, 1), "parts": "bias mask"},
    {"name": "BEiT: tokens", "shape": (2, 48, 17, 1), "heads": 2, "window": (17, 1), "parts": "bias"},
    {"name": "slice", "shape": (1, 48, 4, 4), "heads": 1, "window": (2, 2), "wide": 64},
    {"name": "batch 0", "shape": (0, 48, 4, 4), "heads": 1, "window": (2, 2)},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": "Swin-T 64x96@56", "shape": (64, 288, 56, 56), "heads": 3, "window": (7, 7), "roll": (-3, -3), "parts": "bias region"},
    {"name": "Swin-T 64x384@14", "shape": (64, 1152, 14, 14), "heads": 12, "window": (7, 7), "parts": "bias"},
    {"name": "Swin V2-T 64x192@32", "shape": (64, 576, 32, 32), "heads": 6, "window": (8, 8), "parts": "bias scale", "cosine": True},
    {"name": "BEiT-B 32x197", "shape": (32, 2304, 197, 1), "heads": 12, "window": (197, 1), "parts": "bias", "factor": 0.125},
    {
        "name": "CoAtNet-0 32x384@14",
        "shape": (32, 1152, 14, 14),
        "heads": 12,
        "window": (14, 14),
        "first": (0, 32, 64),
        "pitch": 96,
        "parts": "bias",
    },
    {"name": "MaxViT-T 32x64@56 grid", "shape": (32, 192, 56, 56), "heads": 2, "window": (7, 7), "kind": "grid", "parts": "bias"},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, heads, window = Drawing(*how), case["heads"], case["window"]
    _, c, h, w = case["shape"]
    tokens, windows, grid = window[0] * window[1], (h // window[0]) * (w // window[1]), case.get("kind") == "grid"
    across = (h // window[0], w // window[1])
    parts = case.get("parts", "").split()
    args: dict[str, Any] = {
        "x": draw.map(case["shape"], case.get("wide", 0)),
        "heads": heads,
        "window": window,
        "step": across if grid else (1, 1),
        "stride": (1, 1) if grid else window,
        "roll": case.get("roll", (0, 0)),
        "first": case.get("first", (0, c // 3, 2 * c // 3)),
        "pitch": case.get("pitch", 0),
        "factor": case.get("factor", 1.0),
        "cosine": case.get("cosine", False),
    }
    if "bias" in parts:
        args["bias"] = draw.normal(heads * tokens * tokens).view(heads, tokens, tokens)
    if "scale" in parts:
        args["scale"] = draw.normal(heads).abs() + 1
    if "mask" in parts:
        args["mask"] = draw.normal(windows * tokens * tokens).view(windows, tokens, tokens)
    if "region" in parts:
        args["region"] = (draw.normal(windows * tokens) > 0).float().view(windows, tokens)
    return args
