"""Squeeze-and-excitation's two small linear layers: from each channel's mean to each channel's gate.

One launch keeps the squeezed values of 16 images in registers: right for large batches of small weights. Two launches, one for each
layer, spread the weights over many multiprocessors: right at batch 1, where a single one would take long to read them. A third one before
them adds up partial means, which few programs, each with many images, would wait for.

Source: Hu, Shen, Sun, "Squeeze-and-Excitation Networks", CVPR 2018, section 3.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.ops._activation import ACTIVATIONS, activate
from zoo.kernels.ops._arguments import Drawing, given, launches, of
from zoo.kernels.ops._dense import product
from zoo.kernels.ops._layout import DTYPES, vector_width
from zoo.kernels.ops._overlap import begin, overlap
from zoo.kernels.ops.global_pool import add_parts

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error by dtype of the weights: where images share a tensor-core product, means and squeezed values are rounded to it."""

ALIGN = 16


def _pad_rows(values: Tensor) -> Tensor:
    return F.pad(values, (0, 0) * (values.dim() - 1) + (0, -values.shape[0] % ALIGN)).contiguous()


def _pad_columns(weight: Tensor) -> Tensor:
    return F.pad(weight, (0, -weight.shape[1] % ALIGN)).contiguous()


PACK: dict[str, Any] = {"weight1": _pad_rows, "bias1": _pad_rows, "weight2": _pad_columns}
"""The squeezed channels are padded with zeros to a multiple of 16, so that rows of `weight2` are aligned."""


def reference(
    pooled: Tensor, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor, *, act: str, gate_act: str, scale: float = 1.0
) -> Tensor:
    """Compute ``gate_act(weight2 @ act(weight1 @ mean + bias1) + bias2)``, with `mean` the sum of `pooled` over its parts, times `scale`.

    Args:
        pooled: float32 (N, S, C), contiguous: S partial sums or means of each image's channels.
        weight1: (R, C), squeezes.
        bias1: float32 (R,).
        weight2: (C, R), excites.
        bias2: float32 (C,).
        act: activation of the squeezed values, a name of `ACTIVATIONS`.
        gate_act: activation of the gate, a name of `ACTIVATIONS`.
        scale: factor of the sum, such as 1 / pixels.

    Returns:
        float32 (N, C) (float64 for float64). Sums are float32.

    Raises:
        KeyError: an activation has no such name.
    """
    wide = torch.promote_types(pooled.dtype, torch.float32)
    mean = pooled.to(wide).sum(1) * scale
    squeezed = ACTIVATIONS[act](F.linear(mean, weight1.to(wide), bias1.to(wide)))
    return ACTIVATIONS[gate_act](F.linear(squeezed, weight2.to(wide), bias2.to(wide)))


@of(reference)
def supports(pooled, weight1, bias1, weight2, bias2, act, gate_act, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if pooled.dim() != 3 or pooled.dtype != torch.float32 or not pooled.is_contiguous():
        return "the sums are not contiguous float32 (N, S, C)"
    if act not in ACTIVATIONS or gate_act not in ACTIVATIONS:
        return "unknown activation"
    if weight1.dtype not in DTYPES or weight1.dtype != weight2.dtype or bias1.dtype != torch.float32 or bias2.dtype != torch.float32:
        return "weights not in one of float32, bfloat16 and float16, or biases not in float32"
    if weight1.dim() != 2 or weight1.shape[1] != pooled.shape[2] or weight2.dim() != 2 or weight2.shape[0] != pooled.shape[2]:
        return "weights don't fit the channels"
    return "" if pooled.numel() < 2**31 and pooled.shape[0] < 65536 else "larger than 32-bit indices reach"


@triton.jit
def _mean(x, n, k, batch, size, parts, scale, PARTS: tl.constexpr):
    """Load the sums of images `n` (rows) and channels `k` (columns) over their parts, PARTS at once, times `scale`."""
    here = (n < batch) & (k < size)
    at = x + n * (parts * size) + k
    total = tl.load(at, mask=here, other=0.0)
    for first in range(1, parts, PARTS):
        for s in tl.static_range(PARTS):
            total += tl.load(at + (first + s) * size, mask=here & (0 * k + first + s < parts), other=0.0)
    return total * scale


@triton.jit
def _layer(
    x,
    weight,
    bias,
    out,
    batch,
    groups,
    parts,
    outputs,
    scale,
    ACT: tl.constexpr,
    V: tl.constexpr,
    IMAGES: tl.constexpr,
    BO: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute BO outputs of one linear layer for IMAGES images: by a dot from 16 images on, element by element for one."""
    begin(OVERLAP)
    size = groups * V
    o = tl.program_id(0) * BO + tl.arange(0, BO)[:, None]
    n = tl.program_id(1) * IMAGES + tl.arange(0, IMAGES)[:, None]
    ks = tl.arange(0, BK)[None, :]
    if IMAGES == 1:
        products = tl.zeros([BO, BK], tl.float32)
        for first in range(0, size, BK):
            k = first + ks
            w = tl.load(weight + o * size + k, mask=(o < outputs) & (k < size), other=0.0).to(tl.float32)
            products += w * _mean(x, n, k, batch, size, parts, scale, PARTS)
        y = tl.trans(tl.sum(products, axis=1, keep_dims=True))
    else:
        y = tl.zeros([IMAGES, BO], tl.float32)
        for first in range(0, size, BK):
            k = first + ks
            w = tl.load(weight + o * size + k, mask=(o < outputs) & (k < size), other=0.0)
            m = _mean(x, n, k, batch, size, parts, scale, PARTS)
            y = product(m.to(w.dtype), tl.trans(w), y, "ieee")
    to = tl.trans(o)
    y = activate(y + tl.load(bias + to, mask=to < outputs, other=0.0), ACT)
    tl.store(out + n * outputs + to, y, mask=(n < batch) & (to < outputs))


@triton.jit
def _both(
    x,
    weight1,
    bias1,
    weight2,
    bias2,
    out,
    batch,
    groups,
    parts,
    squeezed_groups,
    scale,
    ACT: tl.constexpr,
    GATE: tl.constexpr,
    V: tl.constexpr,
    IMAGES: tl.constexpr,
    SQUEEZED: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    size = groups * V
    squeezed = squeezed_groups * 16
    n = tl.program_id(0) * IMAGES + tl.arange(0, IMAGES)[:, None]
    r = tl.arange(0, SQUEEZED)
    ks = tl.arange(0, BK)
    h = tl.zeros([IMAGES, SQUEEZED], tl.float32)
    for first in range(0, size, BK):
        k = first + ks[None, :]
        w = tl.load(weight1 + r[:, None] * size + k, mask=(r[:, None] < squeezed) & (k < size), other=0.0)
        h = product(_mean(x, n, k, batch, size, parts, scale, PARTS).to(w.dtype), tl.trans(w), h, "ieee")
    h = activate(h + tl.load(bias1 + r, mask=r < squeezed, other=0.0)[None, :], ACT).to(weight2.dtype.element_ty)
    for first in range(0, size, BK):
        c = first + ks
        w = tl.load(weight2 + c[:, None] * squeezed + r[None, :], mask=(c[:, None] < size) & (r[None, :] < squeezed), other=0.0)
        y = product(h, tl.trans(w), tl.zeros([IMAGES, BK], tl.float32), "ieee") + tl.load(bias2 + c, mask=c < size, other=0.0)[None, :]
        tl.store(out + n * size + c[None, :], activate(y, GATE), mask=(n < batch) & (c[None, :] < size))


@of(reference)
def configs(pooled, weight1, **_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: launches, images a program handles, outputs and inputs of a tile, and warps.

    The first of three launches adds up the parts that the mean comes in, which a depthwise convolution leaves.
    """
    n = pooled.shape[0]
    # Beyond 64 squeezed channels a program's tiles don't fit its registers.
    depths = [(64, 4), (128, 4)] if weight1.shape[0] <= 32 else [(64, 8), (32, 8)] if weight1.shape[0] <= 64 else []
    one = [{"launches": 1, "images": 16, "block": 16, "depth": depth, "warps": warps} for depth, warps in depths]
    dots = [{"launches": 2, "images": 16, "block": block, "depth": depth, "warps": 4} for block, depth in ((16, 128), (32, 128), (32, 64))]
    single = [(4, 512, 4), (8, 256, 4), (4, 256, 2), (2, 1024, 4), (8, 512, 8), (16, 128, 4)]
    ones = [{"launches": 2, "images": 1, "block": block, "depth": depth, "warps": warps} for block, depth, warps in single]
    if n <= 8:
        return ones + dots[:1]
    # One program reads all the weights for its images: beyond 128 KB that takes longer than another launch.
    small = 2 * weight1.numel() * weight1.element_size() <= 2**17
    together = one + dots if small else dots + one
    spread = [{"launches": 2, "images": 1, "block": 8, "depth": 512, "warps": 4}]
    if pooled.shape[1] == 1:
        return spread + together if n <= 64 else together[:1] + spread + together[1:]
    added = [{**dots[0], "launches": 3}]
    return spread + added + together if n <= 64 else added + spread + together


@launches(reference, configs)
def launch(pooled, weight1, bias1, weight2, bias2, act, gate_act, scale, config, out: Tensor | None = None) -> Tensor:
    """Run one to three kernels on packed weights, as `config` says; see `reference`. `out` is contiguous."""
    n, parts, c = pooled.shape
    out = torch.empty((n, c), dtype=torch.float32, device=pooled.device) if out is None else out
    if out.numel() == 0:
        return out
    r = weight1.shape[0]
    v = vector_width(c)
    images, block, depth = config["images"], config["block"], config["depth"]
    options: dict[str, Any] = {"num_warps": config["warps"], **overlap(pooled)}
    if config["launches"] == 3 and parts > 1:
        means = torch.empty((n, 1, c), dtype=torch.float32, device=pooled.device)
        add_parts(pooled, means, c, scale)
        pooled, parts, scale = means, 1, 1.0
    options["PARTS"] = 1 if parts == 1 else 8 if images == 1 else 4
    if config["launches"] == 1:
        arrays = (pooled, weight1, bias1, weight2, bias2, out)
        constants = {"ACT": act, "GATE": gate_act, "V": v, "IMAGES": images, "SQUEEZED": triton.next_power_of_2(r), "BK": depth}
        _both[(triton.cdiv(n, images),)](*arrays, n, c // v, parts, r // ALIGN, scale, **constants, **options)
        return out
    squeezed = torch.empty((n, r), dtype=torch.float32, device=pooled.device)
    groups = triton.cdiv(n, images)
    shape = {"IMAGES": images, "BO": block, "BK": depth, **options}
    _layer[(triton.cdiv(r, block), groups)](pooled, weight1, bias1, squeezed, n, c // v, parts, r, scale, ACT=act, V=v, **shape)
    # The second layer's inputs are few: as many products a program, so more outputs.
    inner = min(depth, max(triton.next_power_of_2(r), 16))
    shape |= {"BO": min(block * depth // inner, 128) if images == 1 else block, "BK": inner, "PARTS": 1}
    _layer[(triton.cdiv(c, shape["BO"]), groups)](squeezed, weight2, bias2, out, n, r // ALIGN, 1, c, 1.0, ACT=gate_act, V=ALIGN, **shape)
    return out


@of(reference)
def cost(pooled, weight1, bias1, weight2, bias2, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move)."""
    n, _, c = pooled.shape
    moved = sum(t.numel() * t.element_size() for t in (pooled, weight1, bias1, weight2, bias2)) + 4 * n * c
    return pooled.numel() + 2 * n * (weight1.numel() + weight2.numel()), moved


CASES: list[dict[str, Any]] = [
    {"name": "mobilenet", "sizes": (2, 1, 72, 24), "act": "relu", "gate_act": "hardsigmoid"},
    {"name": "partial sums", "sizes": (1, 5, 96, 4), "act": "silu", "gate_act": "sigmoid", "scale": 0.2},
    {"name": "odd", "sizes": (3, 2, 13, 5), "act": "relu", "gate_act": "sigmoid", "scale": 0.5},
    {"name": "many images", "sizes": (19, 1, 40, 10), "act": "relu", "gate_act": "hardsigmoid"},
    {"name": "many parts", "sizes": (17, 3, 33, 16), "act": "silu", "gate_act": "sigmoid"},
    {"name": "more parts than at once", "sizes": (9, 21, 40, 8), "act": "silu", "gate_act": "sigmoid", "scale": 1 / 21},
    {"name": "batch 0", "sizes": (0, 1, 16, 4), "act": "relu", "gate_act": "sigmoid"},
]
LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{n}x{c}", "sizes": (n, 1, c, r), "act": "silu", "gate_act": "sigmoid"}
    for n in (256, 1)
    for c, r in ((96, 4), (672, 28), (960, 240), (3840, 160))
] + [{"name": "1x32 of 49 parts", "sizes": (1, 49, 32, 8), "act": "silu", "gate_act": "sigmoid", "scale": 1 / 49}]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case; `sizes` are images, parts, channels and squeezed channels."""
    draw, (n, s, c, r) = Drawing(*how), case["sizes"]
    args = {"pooled": draw.normal(n, s, c), "weight1": (draw.normal(r, c) / c**0.5).to(draw.dtype), "bias1": draw.normal(r)}
    args |= {"weight2": (draw.normal(c, r) / r**0.5).to(draw.dtype), "bias2": draw.normal(c)}
    return args | given(case, "act", "gate_act", "scale")
