"""The weight's gradient of a network's first convolution, from the packed images that its way there has read: see `stem` and `image`.

What an output pixel has seen is KH runs of contiguous memory, so the gradient is one matrix product over all output pixels, which
programs share out; their parts are added in a fixed order. Behind an activation the gradient is multiplied by its slope where it is
read, and the bias's gradient is added there: nobody needs that map, for images have no gradient. Without one it is added in a pass of its
own: where something else reads what is loaded for the product too, the product was wrong (Triton 3.6 on an H200: 8 warps, 224 places).
"""

# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.grad import conv2d_weight

from zoo.kernels.ops import bias_act_grad, image, stem
from zoo.kernels.ops._activation import ACTIVATIONS, SLOPES, slope
from zoo.kernels.ops._arguments import Drawing, launches, named, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._fold import SMS
from zoo.kernels.ops._layout import DTYPES, reachable, units, unreadable
from zoo.kernels.ops._norm_grad import add
from zoo.kernels.ops._overlap import begin, followed_by_ours, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float16: 1e-5}
"""The gradient is float32 and nothing before it is rounded."""


STEPS = ("none", "relu", "relu6")
"""Activations whose slope is 0 or 1, so that nothing is rounded."""


def reference(
    gradient: Tensor,
    x: Tensor,
    kept: Tensor | None = None,
    *,
    kernel: tuple[int, int, int],
    stride: tuple[int, int] = (1, 1),
    act: str = "none",
    biased: bool = False,
) -> tuple[Tensor, ...]:
    """Compute the gradients of the weight and the bias of `stem`.

    Args:
        gradient: of the output, a map (N, Cout, OH, OW).
        x: images that `image` packed as `stem.packing` says: (N, Hp, Wp, 4), borders of zeros included.
        kept: the output, which tells the activation's slope; None without one.
        kernel: (C, KH, KW), the weight's shape without its first axis; C at most 4.
        stride: (vertical, horizontal), in pixels.
        act: a name of `STEPS`.
        biased: there is a bias.

    Returns:
        The weight's, float32 (Cout, C, KH * KW) (float64 for float64), accumulated in the same; and with a bias its own, (Cout,).
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    (c, kh, kw), (n, cout, oh, ow) = kernel, gradient.shape
    g = gradient.to(wide)
    if kept is not None:
        g = SLOPES[act](g, kept.to(wide))
    sums = (g.sum((0, 2, 3)),) if biased else ()
    if not n:
        return (x.new_zeros((cout, c, kh * kw), dtype=wide), *sums)
    seen = x[:, : (oh - 1) * stride[0] + kh, : (ow - 1) * stride[1] + kw, :c].permute(0, 3, 1, 2)
    steps: Any = stride  # conv2d_weight is typed for one number, and takes two
    return (conv2d_weight(seen.to(wide), (cout, c, kh, kw), g, steps).flatten(2), *sums)


@of(reference)
def rival(gradient, x, kept, kernel, stride, act, biased) -> tuple[Tensor, ...]:
    """Compute the same by PyTorch's own operators and its convolution of C channels, for a comparison of times; of ReLU only."""
    (c, kh, kw), (_, cout, oh, ow) = kernel, gradient.shape
    g = gradient if kept is None or act == "none" else torch.ops.aten.threshold_backward(gradient, kept, 0)
    seen = x[:, : (oh - 1) * stride[0] + kh, : (ow - 1) * stride[1] + kw, :c].permute(0, 3, 1, 2)
    steps: Any = tuple(stride)
    weight = conv2d_weight(seen.contiguous(memory_format=torch.channels_last), (cout, c, kh, kw), g, steps)
    return (weight, *((g.sum((0, 2, 3)),) if biased else ()))


@of(reference)
def supports(gradient, x, kept, kernel, stride, act, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if gradient.dim() != 4 or gradient.dtype not in DTYPES or x.dtype != gradient.dtype:
        return "not maps of one type, float32, bfloat16 or float16"
    if act not in STEPS:
        return f"activation {act}, whose slope is not a step"
    if (kept is None) != (act == "none"):
        return "an activation with nothing kept, or something kept without one"
    if kept is not None and (kept.shape != gradient.shape or kept.dtype != gradient.dtype):
        return "what is kept has another shape or type"
    if x.dim() != 4 or x.shape[0] != gradient.shape[0] or x.shape[3] != image.CHANNELS or not x.is_contiguous():
        return "no packed images"
    if not 1 <= kernel[0] <= image.CHANNELS:
        return f"images of {kernel[0]} channels"
    (_, _, oh, ow), (_, kh, kw) = gradient.shape, kernel
    if (oh - 1) * stride[0] + kh > x.shape[1] or (ow - 1) * stride[1] + stem.run_pixels(kw, stride[1], 1) > x.shape[2]:
        return "windows that reach beyond the packed images"
    return unreadable(gradient, kept, small=reachable(x))


@triton.jit
def _weight(
    gradient, x, kept, partials, sums, rows, cout, g_units, kept_units,
    ACT: tl.constexpr, VO: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr,
    SH: tl.constexpr, SW: tl.constexpr, C: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, RUN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a program's part of BM output channels by BN places of the window, from blocks of BK pixels that are all programs apart.

    The programs of the first places also write their part of the bias's.
    """
    begin(OVERLAP)
    DEPTH: tl.constexpr = KH * RUN
    TILES: tl.constexpr = (DEPTH + BN - 1) // BN
    rm = (tl.program_id(0) // TILES) * BM + tl.arange(0, BM)
    k = (tl.program_id(0) % TILES) * BN + tl.arange(0, BN)
    place = (k // RUN) * (WP * 4) + k % RUN
    part = tl.program_id(1)
    acc = tl.zeros([BM, BN], tl.float32)
    added = tl.zeros([BK, BM], tl.float32)
    for first in tl.range(part * BK, rows, tl.num_programs(1) * BK, num_stages=STAGES):
        row = first + tl.arange(0, BK)
        there = (row < rows)[:, None]
        line = row // OW
        start = ((line // OH) * HP + (line % OH) * SH) * (WP * 4) + (row % OW) * (SW * 4)
        g = tl.load(gradient + (row[:, None] * (g_units * VO) + rm[None, :]), mask=there & (rm < cout)[None, :], other=0.0)
        if ACT != "none":
            z = tl.load(kept + (row[:, None] * (kept_units * VO) + rm[None, :]), mask=there & (rm < cout)[None, :], other=0.0)
            g = slope(z.to(tl.float32), g.to(tl.float32), ACT).to(gradient.dtype.element_ty)
        if sums is not None:
            added += g.to(tl.float32)
        seen = tl.load(x + (start[:, None] + place[None, :]), mask=there & (k < DEPTH)[None, :], other=0.0)
        acc = product(tl.trans(g), seen, acc, "ieee")
    pixel = (k % RUN) // 4
    c = k % 4
    at = (c * KH + k // RUN) * KW + pixel
    to = partials + ((part * cout + rm[:, None]) * (C * KH * KW) + at[None, :])
    tl.store(to, acc, mask=(rm < cout)[:, None] & ((k < DEPTH) & (pixel < KW) & (c < C))[None, :])
    if sums is not None:  # noqa: SIM102  a constant, which decides what is compiled
        if tl.program_id(0) % TILES == 0:
            tl.store(sums + (part * cout + rm), tl.sum(added, axis=0), mask=rm < cout)


@of(reference)
def configs(gradient, x, kernel, stride, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: a tile's channels and places, pixels at a time, warps, stages, programs an SM."""
    high = triton.next_power_of_2(gradient.shape[1])
    depth = triton.next_power_of_2(kernel[1] * 4 * stem.run_pixels(kernel[2], stride[1], 1))
    if x.dtype == torch.float32:
        wanted = [(min(64, high), min(64, depth), 32, 8, 2, 2), (min(32, high), min(64, depth), 16, 4, 2, 4)]
    else:
        wanted = [(min(128, high), min(256, depth), 64, 8, 3, 1), (min(64, high), min(256, depth), 32, 8, 4, 2)]
        wanted += [(min(64, high), min(256, depth), 64, 4, 3, 1), (min(64, high), min(128, depth), 64, 4, 3, 2)]
        wanted += [(min(64, high), min(128, depth), 128, 4, 3, 1), (min(64, high), min(256, depth), 128, 8, 2, 1)]
        wanted += [(min(64, high), min(64, depth), 64, 4, 4, 4)]
        if depth <= 64:
            wanted = [wanted[-1], (min(64, high), depth, 128, 4, 3, 3), *wanted[:-1]]
    return named("BM BN BK warps stages blocks", ((max(16, m), max(16, n), *rest) for m, n, *rest in wanted))


@launches(reference, configs, tuned=True)
def launch(gradient, x, kept, kernel, stride, act, biased, config, out: Tensor | tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
    """Run the kernels; see `reference`. What is in `out` is contiguous, of any floating dtype."""
    (n, cout, oh, ow), (c, kh, kw) = gradient.shape, kernel
    if out is None:
        out = (torch.empty((cout, c, kh * kw), dtype=torch.float32, device=x.device),)
        out += (torch.empty(cout, dtype=torch.float32, device=x.device),) if biased else ()
    results = (out,) if isinstance(out, Tensor) else tuple(out)
    if gradient.numel() == 0:
        return tuple(result.zero_() for result in results)
    vector, _, *steps = units(16, gradient, kept)
    run, rows = 4 * stem.run_pixels(kw, stride[1], 1), n * oh * ow
    tiles = triton.cdiv(cout, config["BM"]) * triton.cdiv(kh * run, config["BN"])
    parts = max(1, min(triton.cdiv(rows, config["BK"]), SMS * config["blocks"] // tiles))
    partials = torch.empty((parts, cout * c * kh * kw), dtype=torch.float32, device=x.device)
    sums = torch.empty((parts, cout), dtype=torch.float32, device=x.device) if biased and act != "none" else None
    with followed_by_ours(True):
        _weight[(tiles, parts)](
            gradient, x, kept, partials, sums, rows, cout, *steps, ACT=act, VO=vector, OH=oh, OW=ow,
            HP=x.shape[1], WP=x.shape[2], SH=stride[0], SW=stride[1], C=c, KH=kh, KW=kw, RUN=run, BM=config["BM"], BN=config["BN"],
            BK=config["BK"], STAGES=config["stages"], num_warps=config["warps"], **overlap(x),
        )  # fmt: skip
    with followed_by_ours(sums is not None):
        add(partials, results[0])
    if sums is not None:
        add(sums, results[1])
    elif biased:
        bias_act_grad.launch(gradient, out=results[1])
    return results


@of(reference)
def cost(gradient, x, kept, kernel, biased, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    moved = sum(m.numel() * m.element_size() for m in (gradient, x, kept) if m is not None)
    return 2 * gradient.numel() * (math.prod(kernel) + biased), moved + 4 * gradient.shape[1] * (math.prod(kernel) + biased)


CASES: list[dict[str, Any]] = [
    {"name": "ResNet", "x": (2, 3, 13, 11), "weight": (24, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3)},
    {"name": "VGG", "x": (2, 3, 5, 6), "weight": (16, 3, 3), "padding": (1, 1, 1, 1), "act": "relu", "biased": True},
    {"name": "odd width, odd channels", "x": (2, 3, 6, 7), "weight": (9, 3, 3), "padding": (1, 1, 1, 1)},
    {"name": "AlexNet", "x": (1, 3, 23, 19), "weight": (16, 11, 11), "stride": (4, 4), "padding": (2, 2, 2, 2), "biased": True},
    {"name": "SAME", "x": (2, 3, 8, 9), "weight": (24, 3, 3), "stride": (2, 2), "padding": (0, 1, 0, 1)},
    {"name": "grey", "x": (2, 1, 8, 8), "weight": (6, 5, 5)},
    {"name": "two channels, of a slice", "x": (1, 2, 11, 14), "weight": (20, 3, 3), "stride": (3, 3), "wide": 36, "act": "relu6"},
    {"name": "four channels, kernel 1", "x": (1, 4, 5, 5), "weight": (8, 1, 1)},
    {"name": "uneven kernel and strides", "x": (1, 3, 9, 12), "weight": (8, 2, 5), "stride": (1, 2), "padding": (1, 0, 2, 1)},
    {"name": "one pixel", "x": (1, 3, 1, 1), "weight": (8, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)},
    {"name": "many programs", "x": (2, 3, 40, 33), "weight": (20, 3, 3), "padding": (1, 1, 1, 1), "act": "relu6", "biased": True},
    {"name": "no image", "x": (0, 3, 8, 8), "weight": (8, 3, 3), "padding": (1, 1, 1, 1), "act": "relu", "biased": True},
]
"""`x` (N, C, H, W) and `weight` (Cout, KH, KW) of the convolution; `wide`: the maps are slices of maps this wide."""

LARGE_CASES: list[dict[str, Any]] = [
    *(case | ({"biased": True} if case.get("act") in STEPS else {"act": "none"}) for case in stem.LARGE_CASES),
    {"name": "PVT v2", "x": (64, 3, 224, 224), "weight": (64, 7, 7), "stride": (4, 4), "padding": (3, 3, 3, 3), "biased": True},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw, (cout, kh, kw), (n, c, *_), stride = Drawing(*how), case["weight"], case["x"], case.get("stride", (1, 1))
    images = draw.normal(*case["x"]).to(draw.dtype)
    shape, padding = (cout, c, kh, kw), case.get("padding", stem.NOTHING)
    weight = torch.empty(shape, device="meta")
    size = stem.map_size(images, weight, stride, padding)
    x = image.reference(images, padding=stem.packing(shape, stride, padding, images.shape)["padding"])
    args = {"gradient": draw.map((n, cout, *size), case.get("wide", 0)), "x": x}
    act = case.get("act", "none")
    if act != "none":  # an output: relu's no less than 0, relu6's no more than 6
        kept = args["kept"] = draw.map((n, cout, *size), case.get("wide", 0))
        kept.copy_(ACTIVATIONS[act](4 * kept))
    return args | {"kernel": (c, kh, kw), "stride": stride, "act": act, "biased": case.get("biased", False)}
