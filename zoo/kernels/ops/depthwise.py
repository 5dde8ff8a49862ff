"""Depthwise convolution with bias and activation, and per-channel sums of its output for squeeze-and-excitation.

A lane owns a few channels of a patch of output pixels and slides down it: every input row is loaded and converted once and added to
the ceil(KH / stride) output rows that are open, which are rotating registers. Patches of one row are the direct method. Lanes count
channels first, then patches along a row, strips of rows and images, so none is spent on padding of channels or of small images, and
a warp's accesses are contiguous. Instructions are as much the limit as memory, hence one conversion an input pixel of a patch, masks
only where a patch can leave the image, and taps that always fall outside are left out.
"""

# pyright: reportCallIssue=false

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._depthwise import depthwise_kernel, kernel_size, out_sizes, pack
from zoo.kernels.ops._layout import empty_map, pixel_stride, reachable
from zoo.kernels.ops._overlap import overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error by dtype; sums are added in float32 before the output is rounded and lie far below it."""

_SPAN = 1 << 20  # further than any row or column counts


PACK: dict[str, Callable[[Tensor], Tensor]] = {"weight": pack}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    act: str = "none",
    sums: bool = False,
) -> Any:
    """Convolve each channel with its own kernel, add a bias and activate.

    Args:
        x: maps (N, C, H, W).
        weight: kernels (C, 1, KH, KW).
        bias: float32 (C,), or None.
        stride: down and right, in pixels.
        padding: zeros above, below, left and right, in pixels.
        dilation: distance between taps, down and right.
        act: a name of `ACTIVATIONS`.
        sums: whether the sums over pixels are wanted too.

    Returns:
        The maps (N, C, OH, OW) in the dtype of `x`, accumulated in float32; with `sums` also a float32 (N, S, C) that adds up over S to
        the sum of the maps' pixels. Here S is 1; `launch` returns one row a patch.
    """
    top, bottom, left, right = padding
    wide, pad = x.float(), (top, left)
    if (top, left) != (bottom, right):
        wide, pad = F.pad(wide, (left, right, top, bottom)), (0, 0)
    shift = None if bias is None else bias.float()
    y = ACTIVATIONS[act](F.conv2d(wide, weight.float(), shift, stride=stride, padding=pad, dilation=dilation, groups=x.shape[1]))
    return (y.to(x.dtype), y.sum((2, 3)).unsqueeze(1)) if sums else y.to(x.dtype)


LARGE, LONGEST = 25, 200
"""Taps from which on what a program writes out counts, and how much of it, by `effort`, may come first: more takes half a minute to
compile, and who doesn't tune takes the first."""


def _vector(x: Tensor, *pitches: int) -> int:
    """Return the widest vector of channels that every pixel's start is aligned to, at most 16 bytes."""
    return math.gcd(16 // x.element_size(), x.shape[1], *pitches)


def _repeats(stride: tuple[int, int], dilation: tuple[int, int]) -> tuple[int, int]:
    """Return how far apart outputs are whose taps fall on the same rows and columns."""
    return dilation[0] // math.gcd(stride[0], dilation[0]), dilation[1] // math.gcd(stride[1], dilation[1])


def _patches(size: int, repeat: int, length: int) -> int:
    return repeat * triton.cdiv(triton.cdiv(size, repeat), length)


@of(reference)
def supports(x, weight, stride, padding, dilation, act, **_) -> str:
    """Return "" where the kernel takes these arguments, else why not; arguments as in `reference`, the weight packed or not."""
    if x.dtype not in TOLERANCE or weight.dtype != x.dtype:
        return f"{x.dtype} maps with a {weight.dtype} weight"
    if weight.dim() == 4 and (weight.shape[1] != 1 or weight.shape[0] != x.shape[1]):
        return f"a weight {tuple(weight.shape)} is no depthwise one of {x.shape[1]} channels"
    if math.prod(kernel_size(weight)) > 49:
        return "a kernel of more than 49 taps"
    if act not in ACTIVATIONS:
        return f"activation {act}"
    if pixel_stride(x) is None:
        return "maps whose channels are not beside each other"
    out_height, out_width = out_sizes(x, weight, stride, padding, dilation)
    if out_height < 1 or out_width < 1:
        return "a kernel larger than the padded map"
    if not reachable(x) or x.shape[0] * x.shape[1] * out_height * out_width >= 1 << 31:
        return "maps beyond the reach of 32-bit indices"
    return ""


@of(reference)
def configs(x, weight, stride, padding, dilation, **_) -> list[dict[str, int]]:
    """Return patch shapes to try, sorted by a model of the time on an H200: instructions issued, latency in waves, memory.

    Args: as in `reference`, the weight packed or not.

    Returns:
        Dicts of `vector` channels a lane, a patch of `cols` x `rows` pixels, `steps` rows an unrolled loop body, input rows loaded
        `ahead` of their use in steps, and `warps`.
    """
    n, channels, height, width = x.shape
    (kh, kw), (out_height, out_width) = kernel_size(weight), out_sizes(x, weight, stride, padding, dilation)
    repeat, itemsize = _repeats(stride, dilation), x.element_size()
    sh, sw = stride[0] * repeat[0] // dilation[0], stride[1] * repeat[1] // dilation[1]
    widest = _vector(x, pixel_stride(x) or 1)
    long, wide = triton.cdiv(out_height, repeat[0]), triton.cdiv(out_width, repeat[1])
    vectors = sorted({min(widest, v) for v in (2, 4, 8)})
    found: list[tuple[float, dict[str, int]]] = []
    for vector, cols, rows, ahead in itertools.product(
        vectors, sorted({min(c, wide) for c in (1, 2, 4, 7, 8, 14)}), sorted({min(r, long) for r in (1, 2, 4, 7, 8, 14, 28)}), (1, 2)
    ):
        columns, fresh, live = (cols - 1) * sw + kw, min(sh, kh), triton.cdiv(kh, sh)
        seen = min(columns, width) if cols >= wide else columns
        inputs = (rows - 1) * sh + kh
        longest = 2600 if cols >= wide and rows >= long else 2000  # of a whole image, taps outside it are left out
        steps = rows if rows <= 2 or (rows <= 8 and rows * cols * vector * kh * kw <= longest) else ahead
        registers = 44 + vector * (kh * kw + 3 + live * cols) + (ahead + (steps < rows)) * fresh * seen * vector * itemsize // 4
        if (registers > 208 or ahead > rows or rows % steps) and (vector, cols, ahead) != (vectors[0], 1, 1):
            continue
        lanes = n * channels // vector * _patches(out_height, repeat[0], rows) * _patches(out_width, repeat[1], cols)
        warps = 4 if lanes > 64 * 132 * 4 else 2 if lanes > 32 * 132 * 4 else 1
        taps = kh * kw * seen / columns
        per_lane = 150 + kh * kw * (vector + 4) + inputs * seen * (1.5 * vector + 6) + rows * cols * (vector * (taps + 4) + 6)
        issue = lanes * per_lane / (128 * 1.7e9) / min(132.0, max(1.0, lanes / (32 * warps))) / 0.7
        resident = 132 * min(2048, 65536 // min(255, registers))
        latency = max(1.0, lanes / resident) * (1.2e-6 + 0.6e-6 * max(0, rows - 1) / ahead + per_lane * 1.5e-9)
        halo = inputs / (rows * sh) * columns / (cols * sw)
        memory = itemsize * n * channels * (height * width * (0.8 + 0.2 * max(1.0, halo)) + out_height * out_width) / 4.3e12
        times = sorted((issue, latency, memory))
        config = {"vector": vector, "cols": cols, "rows": rows, "steps": steps, "ahead": ahead, "warps": warps}
        found.append((times[2] + 0.3 * times[1] + 0.1 * times[0], config))
    chosen: list[dict[str, int]] = []
    while found and len(chosen) < 32:  # different ones early, so that a short search sees them
        _, config = best = min(
            found,
            key=lambda pair: (
                pair[0]
                * (1.0 + sum(0.02 + 0.05 * (c["vector"] == pair[1]["vector"]) + 0.05 * (c["cols"] == pair[1]["cols"]) for c in chosen))
            ),
        )
        found.remove(best)
        chosen.append(config)
    return sorted(chosen, key=lambda config: effort(config, x, weight, stride) > LONGEST) if kh * kw > LARGE else chosen


def effort(config: dict[str, int], x: Tensor, weight: Tensor, stride: tuple[int, int] = (1, 1), **rest: Any) -> int:
    """Return the loads and multiplications that a program writes out: forty make a second of compiling, a thousand a minute."""
    kh, kw = kernel_size(weight)
    fresh = min(stride[0], kh)
    rows = kh - fresh + (config["ahead"] + config["steps"]) * fresh
    return rows * ((config["cols"] - 1) * stride[1] + kw) + config["steps"] * config["cols"] * kh * kw


@launches(reference, configs)
def launch(x, weight, bias, stride, padding, dilation, act, sums, config, out: Tensor | None = None) -> Any:
    """Run the kernel; arguments as in `reference`, but the weight packed (KH, KW, C).

    Args:
        out: where to write, channels_last or a channel slice of such a map; allocated if None.
        config: one of `configs`; the first if None.

    Returns:
        `out`; with `sums` also float32 (N, S, C), the sum of every patch of an image, always added in the same order.

    Raises:
        ValueError: a map is not in channels_last memory.
    """
    c = config
    n, channels, height, width = x.shape
    (kh, kw), (out_height, out_width) = kernel_size(weight), out_sizes(x, weight, stride, padding, dilation)
    out = empty_map(n, channels, out_height, out_width, x) if out is None else out
    pitch, out_pitch = pixel_stride(x), pixel_stride(out)
    if pitch is None or out_pitch is None:
        raise ValueError("depthwise: a map's channels are not beside each other")
    vector = math.gcd(c["vector"], _vector(x, pitch, out_pitch, x.data_ptr() // x.element_size()))
    words = vector // 2 if x.dtype == torch.bfloat16 and vector > 1 else vector
    repeat, cols, rows, steps = _repeats(stride, dilation), c["cols"], c["rows"], c["steps"]
    blocks = triton.cdiv(rows, steps)
    rows = blocks * steps
    sh, sw = stride[0] * repeat[0] // dilation[0], stride[1] * repeat[1] // dilation[1]
    tiles, strips, groups = _patches(out_width, repeat[1], cols), _patches(out_height, repeat[0], rows), channels // vector
    top, left, columns = padding[0], padding[2], (cols - 1) * sw + kw
    if tiles == 1:
        present = _between(-(-left // dilation[1]), -(-(width + left) // dilation[1]), columns)
        always = present
    else:
        last = (repeat[1] - 1 + repeat[1] * cols * (tiles // repeat[1] - 1)) * stride[1] - left
        present = (0, columns)
        always = _between(-(-left // dilation[1]), -(-(width - last) // dilation[1]), columns)
    needed = (rows - 1) * sh + kh
    seen = (-_SPAN, _SPAN, False) if blocks > 1 else (0, needed, False)
    if blocks == 1 and strips == 1:
        seen = (*_between(-(-top // dilation[0]), -(-(height + top) // dilation[0]), needed), True)
    partial = torch.empty((n, strips * tiles, channels), dtype=torch.float32, device=x.device) if sums else None
    total, lanes = n * strips * tiles * groups, 32 * c["warps"]
    if total:
        depthwise_kernel[(triton.cdiv(total, lanes),)](
            x, weight, bias, out, partial, total, groups, tiles, strips, height, width, out_height, out_width,
            pitch // vector, out_pitch // vector, top, left, LANES=lanes, VECTOR=vector, COLS=cols, STEPS=steps, BLOCKS=blocks,
            AHEAD=c["ahead"], STRIDE=tuple(stride), REPEAT=repeat, KERNEL=(kh, kw, sh, sw), SHAPE=(words, columns, *dilation),
            COLUMNS=(*present, *always), ROWS=seen, EVEN=(out_width % (repeat[1] * cols) == 0, out_height % (repeat[0] * rows) == 0),
            ACT=act, BIAS=bias is not None, SUMS=sums, num_warps=c["warps"], **overlap(x),
        )  # fmt: skip
    return out if partial is None else (out, partial)


def _between(low: int, high: int, size: int) -> tuple[int, int]:
    """Return the range cut to 0..size."""
    low = min(max(low, 0), size)
    return low, min(max(high, low), size)


@of(reference)
def cost(x, weight, bias, stride, padding, dilation, sums, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); arguments as in `reference`, the weight packed or not."""
    kh, kw = kernel_size(weight)
    outputs = x.shape[0] * x.shape[1] * math.prod(out_sizes(x, weight, stride, padding, dilation))
    moved = x.element_size() * (x.numel() + outputs + weight.numel())
    return 2 * kh * kw * outputs, moved + 4 * (0 if bias is None else bias.numel()) + 4 * math.prod(x.shape[:2]) * sums


CASES: list[dict[str, Any]] = [
    {"name": "3x3", "shape": (2, 8, 5, 7)},
    {"name": "batch 0", "shape": (0, 8, 5, 7)},
    {"name": "batch 1, bare", "shape": (1, 8, 5, 5), "bias": False, "act": "none"},
    {"name": "1x1 image", "shape": (2, 24, 1, 1), "act": "hardswish"},
    {"name": "odd channels", "shape": (2, 7, 6, 5), "act": "relu"},
    {"name": "12 channels", "shape": (2, 12, 6, 5), "act": "silu"},
    {"name": "stride 2, even", "shape": (2, 16, 4, 6), "stride": (2, 2)},
    {"name": "stride 2, odd", "shape": (2, 8, 7, 5), "stride": (2, 2), "act": "hardsigmoid"},
    {"name": "stride 2, same as TensorFlow", "shape": (2, 8, 6, 8), "stride": (2, 2), "padding": (0, 1, 0, 1)},
    {"name": "stride 3, 2", "shape": (1, 8, 11, 9), "stride": (3, 2), "act": "sigmoid"},
    {"name": "stride past a 2x2 kernel", "shape": (1, 8, 11, 9), "kernel": (2, 2), "stride": (3, 3), "padding": (0, 0, 0, 0)},
    {"name": "5x5", "shape": (2, 8, 6, 7), "kernel": (5, 5), "act": "hardswish"},
    {"name": "5x5, stride 2", "shape": (1, 8, 9, 10), "kernel": (5, 5), "stride": (2, 2), "act": "leaky_relu_0.1"},
    {"name": "7x7", "shape": (1, 8, 5, 8), "kernel": (7, 7), "act": "gelu"},
    {"name": "1x3", "shape": (2, 8, 5, 6), "kernel": (1, 3), "padding": (0, 0, 1, 1), "act": "leaky_relu_0.01"},
    {"name": "dilation 2", "shape": (1, 8, 9, 10), "dilation": (2, 2)},
    {"name": "dilation 3, stride 2", "shape": (1, 8, 13, 12), "dilation": (3, 2), "stride": (2, 2), "padding": (3, 3, 2, 2)},
    {"name": "slice to slice", "shape": (2, 8, 5, 7), "wider": (8, 16), "out_wider": (8, 8)},
    {"name": "slice at an odd channel", "shape": (2, 6, 5, 7), "wider": (3, 2), "out_wider": (1, 0)},
]
"""`shape` (N, C, H, W); `padding` half the kernel and `act` relu6 unless given; `wider`: channels beside `x` in its buffer."""

_REAL = (
    (32, 112, 1, 3), (96, 112, 2, 3), (144, 56, 1, 3), (144, 56, 2, 3), (192, 28, 1, 3), (384, 14, 1, 3), (576, 14, 1, 3), (960, 7, 1, 3),
    (72, 56, 2, 5), (120, 28, 1, 5), (672, 14, 1, 5), (672, 14, 2, 5), (960, 7, 1, 5), (144, 56, 2, 5), (240, 28, 1, 5), (1152, 7, 1, 5),
)  # fmt: skip
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{c} channels, {px} px, {k}x{k}, stride {s}, batch {n}", "shape": (n, c, px, px), "kernel": (k, k), "stride": (s, s)}
    for n in (256, 1)
    for c, px, s, k in _REAL
]


def window_of(case: dict[str, Any]) -> dict[str, Any]:
    """Return a case's stride, padding on all sides and dilation."""
    kernel, dilation = case.get("kernel", (3, 3)), case.get("dilation", (1, 1))
    half = (dilation[0] * (kernel[0] - 1) // 2, dilation[1] * (kernel[1] - 1) // 2)
    around = case.get("padding", (half[0], half[0], half[1], half[1]))
    return {"stride": case.get("stride", (1, 1)), "padding": around, "dilation": dilation}


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case, random, with the weight in PyTorch's layout."""
    draw, c, kernel = Drawing(*how), case["shape"][1], case.get("kernel", (3, 3))
    args = {"x": draw.between(case["shape"], *case.get("wider", (0, 0)))}
    args["weight"] = (draw.normal(c, 1, *kernel) / math.prod(kernel) ** 0.5).to(draw.dtype)
    bias = draw.normal(c) if case.get("bias", True) else None
    return {**args, "bias": bias, **window_of(case), "act": case.get("act", "relu6")}
