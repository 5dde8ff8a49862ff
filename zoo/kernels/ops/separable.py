"""Depthwise convolution followed by a 1x1 convolution, in one kernel: the map between them never goes to memory.

A program owns COLS neighbouring pixels in each of BG places, and BN output channels. It computes BK channels of the depthwise result
in registers, each input pixel of a row once for all COLS, and multiplies them on tensor cores with one product per column.
Wider outputs than BN compute the depthwise part again for every tile of channels; tuning says whether that pays.
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

from zoo.kernels.ops import depthwise
from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._arguments import Drawing, given, launches, of
from zoo.kernels.ops._depthwise import kernel_size, out_sizes, pack
from zoo.kernels.ops._layout import empty_map, pixel_stride, reachable
from zoo.kernels.ops._overlap import overlap
from zoo.kernels.ops._separable import separable_kernel

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Relative error by dtype; the depthwise result is rounded to the maps' dtype, as it would be between two kernels."""


def pack_pointwise(weight: Tensor) -> Tensor:
    """Return the weight (K, C, 1, 1) as (C, K), the output channels of an input channel beside each other."""
    return weight.flatten(1).t().contiguous()


PACK: dict[str, Callable[[Tensor], Tensor]] = {"dw_weight": pack, "weight": pack_pointwise}


def reference(
    x: Tensor,
    dw_weight: Tensor,
    dw_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int, int, int] = (0, 0, 0, 0),
    dilation: tuple[int, int] = (1, 1),
    dw_act: str = "none",
    act: str = "none",
    pre_act: str = "none",
) -> Tensor:
    """Compute ``act(conv1x1(dw_act(depthwise(pre_act(x)) + dw_bias)) + bias + residual)``.

    Args:
        x: maps (N, C, H, W).
        dw_weight: kernels (C, 1, KH, KW).
        dw_bias: float32 (C,), or None.
        weight: (K, C, 1, 1).
        bias: float32 (K,), or None.
        residual: maps (N, K, OH, OW), or None.
        stride: of the depthwise convolution, down and right, in pixels.
        padding: zeros above, below, left and right, in pixels; they are put around ``pre_act(x)``.
        dilation: distance between taps, down and right.
        dw_act: a name of `ACTIVATIONS`, between the convolutions.
        act: a name of `ACTIVATIONS`, at the end.
        pre_act: a name of `ACTIVATIONS`, before the depthwise convolution.

    Returns:
        The maps (N, K, OH, OW) in the dtype of `x`, accumulated in float32. The kernel rounds the depthwise result to that dtype.

    Source: Howard et al., MobileNets, 2017 (arXiv:1704.04861); Chollet, Xception, 2017 (arXiv:1610.02357).
    """
    top, bottom, left, right = padding
    wide = F.pad(ACTIVATIONS[pre_act](x.float()), (left, right, top, bottom))
    shift, dw_shift = (None if b is None else b.float() for b in (bias, dw_bias))
    y = ACTIVATIONS[dw_act](F.conv2d(wide, dw_weight.float(), dw_shift, stride=stride, dilation=dilation, groups=x.shape[1]))
    y = F.conv2d(y, weight.float(), shift)
    return ACTIVATIONS[act](y if residual is None else y + residual.float()).to(x.dtype)


def _outputs(weight: Tensor) -> int:
    return weight.shape[0] if weight.dim() == 4 else weight.shape[1]


@of(reference)
def supports(x, dw_weight, weight, residual, stride, padding, dilation, dw_act, act, pre_act, **_) -> str:
    """Return "" where the kernel takes these arguments, else why not; arguments as in `reference`, weights packed or not."""
    if x.dtype not in TOLERANCE or {dw_weight.dtype, weight.dtype} != {x.dtype}:
        return "maps and weights are not all float32, all bfloat16 or all float16"
    if dw_weight.dim() == 4 and (dw_weight.shape[1] != 1 or dw_weight.shape[0] != x.shape[1]):
        return f"a weight {tuple(dw_weight.shape)} is no depthwise one of {x.shape[1]} channels"
    if weight.dim() == 4 and weight.shape[1:] != (x.shape[1], 1, 1):
        return f"a weight {tuple(weight.shape)} is no 1x1 convolution of {x.shape[1]} channels"
    if math.prod(kernel_size(dw_weight)) > 49:
        return "a kernel of more than 49 taps"
    unknown = {dw_act, act, pre_act} - set(ACTIVATIONS)
    if unknown:
        return f"activation {min(unknown)}"
    sizes = out_sizes(x, dw_weight, stride, padding, dilation)
    if min(sizes) < 1:
        return "a kernel larger than the padded map"
    shape = (x.shape[0], _outputs(weight), *sizes)
    if residual is not None and (residual.shape != shape or residual.dtype != x.dtype or pixel_stride(residual) is None):
        return "the residual is no map of the output's shape and dtype in channels_last memory"
    if pixel_stride(x) is None:
        return "maps whose channels are not beside each other"
    if not reachable(x, residual) or math.prod(shape) >= 1 << 31:
        return "maps beyond the reach of 32-bit indices"
    return ""


@of(reference)
def configs(x, dw_weight, weight, stride, padding, dilation, **_) -> list[dict[str, int]]:
    """Return tiles to try, sorted by a model of the time on an H200: instructions of the depthwise part, latency in waves.

    Args: as in `reference`, weights packed or not.

    Returns:
        Dicts of `BG` places, `COLS` pixels at each, `BN` output channels, `BK` channels at once, `warps` and pipeline `stages`.
    """
    (kh, kw), (out_height, out_width) = kernel_size(dw_weight), out_sizes(x, dw_weight, stride, padding, dilation)
    n, channels, cout = x.shape[0], x.shape[1], _outputs(weight)
    whole = max(16, triton.next_power_of_2(cout))
    deepest = max(16, triton.next_power_of_2(channels))
    half = x.element_size() == 2
    found: list[tuple[float, dict[str, int]]] = []
    for places, cols, wide, deep, warps in itertools.product(
        (16, 32, 64, 128), (1, 2, 4), sorted({min(whole, w) for w in (16, 32, 64, 128, 256)}), (16, 32, 64, 128), (4, 8)
    ):
        threads = 32 * warps
        middle, sums = cols * places * deep // threads, cols * places * wide // threads
        if deep > deepest or (cols > 1 and (dilation[1] > 1 or cols > out_width)) or sums > 96 or middle + sums > 104:
            continue
        # More than a vector a thread would load the depthwise weights again for each, fewer would leave lanes idle.
        if (
            places * deep != (16 // x.element_size()) * threads
            or (places < 64 and warps > 4)
            or (not half and sums > 32)
            or (wide < min(64, whole) and n > 8)
        ):
            continue
        tiles = triton.cdiv(cout, wide)
        if places < 64 and n * out_height * out_width * tiles > 132 * 128 * cols:  # enough for wgmma on all multiprocessors
            continue
        programs = triton.cdiv(n * out_height * triton.cdiv(out_width, cols), places) * tiles
        inputs = kh * ((cols - 1) * stride[1] + kw)
        chunks = triton.cdiv(channels, deep)
        per_program = chunks * (
            places * deep * (2.2 * inputs + 2.0 * kh * kw + cols * (kh * kw + 5)) + places * cols * wide * (deep / 64 + 1.0) + 4000
        )
        issue = programs * per_program / (128 * 1.7e9) / min(132, max(1, programs)) / 0.6
        registers = 80 + middle + sums + 8 * (kw + 2)
        resident = 132 * max(1, min(65536 // (threads * min(255, registers)), 64 // warps))
        latency = max(1.0, programs / resident) * (2e-6 + chunks * (0.7e-6 + per_program / chunks / threads * 1.0e-9))
        penalty = 1.0 + 0.4 * (registers > 230)
        stages = 1 if n * out_height * out_width > 20000 else 2
        config = {"BG": places, "COLS": cols, "BN": wide, "BK": deep, "warps": warps, "stages": stages}
        found.append((penalty * (max(issue, latency) + 0.3 * min(issue, latency)), config))
    chosen: list[dict[str, int]] = []
    while found and len(chosen) < 16:  # different ones early, so that a short search sees them
        names = ("BG", "COLS", "BN", "BK")
        _, config = best = min(
            found, key=lambda pair: pair[0] * (1.0 + sum(0.02 * sum(c[name] == pair[1][name] for name in names) for c in chosen))
        )
        found.remove(best)
        chosen.append(config)
    if len(chosen) > 3:
        chosen.insert(3, chosen[0] | {"stages": 3 - chosen[0]["stages"]})
    return chosen


@launches(reference, configs)
def launch(
    x, dw_weight, dw_bias, weight, bias, residual, stride, padding, dilation, dw_act, act, pre_act, config, out: Tensor | None = None
) -> Tensor:
    """Run the kernel; arguments as in `reference`, but the weights packed: (KH, KW, C) and (C, K).

    Args:
        out: where to write, channels_last or a channel slice of such a map; allocated if None. It may be `residual` itself.
        config: one of `configs`; the first if None.

    Raises:
        ValueError: a map is not in channels_last memory, or a config's COLS is given with a dilation it can't have.
    """
    c, (n, channels, height, width), cout = config, x.shape, weight.shape[1]
    (kh, kw), (out_height, out_width) = kernel_size(dw_weight), out_sizes(x, dw_weight, stride, padding, dilation)
    out = empty_map(n, cout, out_height, out_width, x) if out is None else out
    ldx, ldo, ldr = pixel_stride(x), pixel_stride(out), cout if residual is None else pixel_stride(residual)
    if ldx is None or ldo is None or ldr is None:
        raise ValueError("separable: a map's channels are not beside each other")
    if c["COLS"] > 1 and dilation[1] > 1:
        raise ValueError("separable: neighbouring pixels share no column of a dilated kernel")
    if not out.numel():
        return out
    x_unit, out_unit = math.gcd(channels, ldx, 16), math.gcd(cout, ldo, ldr, 16)
    blocks = triton.cdiv(out_width, c["COLS"])
    groups = n * out_height * blocks
    separable_kernel[(triton.cdiv(groups, c["BG"]) * triton.cdiv(cout, c["BN"]),)](
        x, dw_weight, dw_bias, weight, bias, residual, out, groups, blocks, height, width, out_height, out_width, padding[0], padding[2],
        channels // x_unit, ldx // x_unit, cout // out_unit, ldo // out_unit, ldr // out_unit, X_UNIT=x_unit, OUT_UNIT=out_unit,
        BG=c["BG"], COLS=c["COLS"], BN=c["BN"], BK=c["BK"], KH=kh, KW=kw, SH=stride[0], SW=stride[1], DH=dilation[0], DW=dilation[1],
        EVEN_K=channels % c["BK"] == 0, EVEN_N=cout % c["BN"] == 0, DW_ACT=dw_act, ACT=act, PRE_ACT=pre_act,
        num_warps=c["warps"], num_stages=c["stages"], **overlap(x),
    )  # fmt: skip
    return out


@of(reference)
def cost(x, dw_weight, dw_bias, weight, bias, residual, stride, padding, dilation, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); arguments as in `reference`, weights packed or not."""
    (kh, kw), channels, cout = kernel_size(dw_weight), x.shape[1], _outputs(weight)
    pixels = x.shape[0] * math.prod(out_sizes(x, dw_weight, stride, padding, dilation))
    moved = x.numel() + pixels * cout * (1 if residual is None else 2) + dw_weight.numel() + weight.numel()
    return 2 * pixels * channels * (kh * kw + cout), moved * x.element_size() + 4 * sum(b.numel() for b in (bias, dw_bias) if b is not None)


CASES: list[dict[str, Any]] = [
    {"name": "3x3", "shape": (2, 16, 9, 11), "outputs": 24},
    {"name": "batch 0", "shape": (0, 16, 9, 11), "outputs": 8},
    {"name": "batch 1, bare", "shape": (1, 8, 5, 5), "outputs": 16, "bias": False, "dw_act": "none"},
    {"name": "1x1 image", "shape": (2, 24, 1, 1), "outputs": 8, "act": "hardswish"},
    {"name": "odd channels", "shape": (2, 7, 6, 5), "outputs": 5, "act": "relu"},
    {"name": "stride 2, even, residual", "shape": (2, 20, 8, 10), "outputs": 36, "stride": (2, 2), "residual": True},
    {"name": "stride 2, odd", "shape": (2, 40, 9, 7), "outputs": 16, "stride": (2, 2), "dw_act": "hardsigmoid"},
    {"name": "stride 2, same as TensorFlow", "shape": (1, 16, 8, 8), "outputs": 8, "stride": (2, 2), "padding": (0, 1, 0, 1)},
    {"name": "5x5", "shape": (1, 16, 7, 9), "outputs": 130, "kernel": (5, 5), "dw_act": "silu"},
    {"name": "1x3", "shape": (2, 8, 5, 6), "outputs": 8, "kernel": (1, 3), "dw_act": "gelu", "pre_act": "sigmoid"},
    {"name": "dilation 2", "shape": (1, 8, 9, 10), "outputs": 16, "dilation": (2, 2), "act": "leaky_relu_0.01"},
    {"name": "as in Xception", "shape": (1, 24, 10, 10), "outputs": 24, "pre_act": "relu", "dw_act": "none", "residual": True},
    {"name": "slices, residual", "shape": (2, 16, 6, 7), "outputs": 24, "wider": (8, 16), "residual": True, "act": "leaky_relu_0.1"},
    {"name": "slice at an odd channel", "shape": (2, 6, 5, 7), "outputs": 9, "wider": (3, 2), "residual": True, "act": "sigmoid"},
]
"""`shape` (N, C, H, W); `padding` half the kernel and `dw_act` relu6 unless given; `wider`: channels beside `x` and the residual."""

_REAL = (
    (32, 64, 112, 1, "relu"), (512, 512, 14, 1, "relu"), (1024, 1024, 7, 1, "relu"), (96, 24, 112, 2, "none"), (144, 24, 56, 1, "none"),
    (192, 32, 28, 1, "none"), (384, 64, 14, 1, "none"), (576, 96, 14, 1, "none"), (960, 160, 7, 1, "none"), (728, 728, 19, 1, "none"),
)  # fmt: skip
LARGE_CASES: list[dict[str, Any]] = [
    {
        "name": f"{c} to {k}, {px} px, stride {s}, batch {n}", "shape": (n, c, px, px), "outputs": k, "stride": (s, s), "act": act,
        "pre_act": "relu" if c == 728 else "none", "dw_act": "none" if c == 728 else "relu6",
    }
    for n in (256, 32, 1)
    for c, k, px, s, act in _REAL
]  # fmt: skip


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case, random, with the weights in PyTorch's layout."""
    draw, c, k = Drawing(*how), case["shape"][1], case["outputs"]
    args = depthwise.make(case | {"act": "none"}, *how)
    args |= {"dw_weight": args.pop("weight"), "dw_bias": args.pop("bias"), "weight": (draw.normal(k, c, 1, 1) / c**0.5).to(draw.dtype)}
    args |= {"bias": draw.normal(k) if case.get("bias", True) else None, "dw_act": "relu6", **given(case, "dw_act", "act", "pre_act")}
    if case.get("residual"):
        sizes = out_sizes(args["x"], args["dw_weight"], args["stride"], args["padding"], args["dilation"])
        args["residual"] = draw.between((case["shape"][0], k, *sizes), *case.get("wider", (0, 0)))
    return args
