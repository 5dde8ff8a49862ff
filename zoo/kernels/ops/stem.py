"""The first convolution of a network: images of at most four channels, bias and activation, one pass.

Libraries fill three channels up to eight or gather them one by one. Here `image` packs the images once, four channels to a pixel
within zero borders, so that a row of a kernel window is one contiguous, 16-byte aligned run: the convolution is a matrix product
whose rows are read as KH runs, without masks. At an odd stride two neighbouring outputs share a run, which keeps runs aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from . import image
from ._activation import ACTIVATIONS, activate
from ._arguments import Drawing, given, launches, named, of, partly
from ._dense import narrowed, product
from ._layout import empty_map, out_size, out_sizes, pixel_stride, reachable
from ._overlap import begin, overlap

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}

NOTHING = (0, 0, 0, 0)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *,
    stride: tuple[int, int] = (1, 1), padding: tuple[int, int, int, int] = NOTHING, act: str = "none", tf32: bool = False,
) -> Tensor:  # fmt: skip
    """Return act(convolution of x with weight, plus bias).

    Args:
        x: images (N, C, H, W), C at most 4.
        weight: (Cout, C, KH, KW).
        bias: (Cout,), or None.
        stride: (vertical, horizontal).
        padding: pixels of zeros (top, bottom, left, right).
        act: a name of `ACTIVATIONS`.
        tf32: let the kernel multiply float32 in TF32.

    Returns:
        (N, Cout, OH, OW). The kernel accumulates in float32, rounds once, and writes channels_last; tolerances as in `TOLERANCE`.
        A pixel that is not finite also reaches outputs whose run holds it, a few pixels beyond their window.
    """
    top, bottom, left, right = padding
    bias = None if bias is None else bias.to(x.dtype)
    return ACTIVATIONS[act](F.conv2d(F.pad(x, (left, right, top, bottom)), weight.to(x.dtype), bias, stride))


def outputs_of_run(stride: tuple[int, int]) -> int:
    """Return how many neighbouring outputs share a run, so that every run starts at an even pixel: 16 bytes in bfloat16."""
    return 1 if stride[1] % 2 == 0 else 2


def run_pixels(kernel_width: int, stride_w: int, outputs: int) -> int:
    """Return the pixels of a run, zeros that fill it up to 16 elements included."""
    return 4 * math.ceil((stride_w * (outputs - 1) + kernel_width) / 4)


def packing(
    weight_shape: Sequence[int], stride: tuple[int, int], padding: tuple[int, int, int, int], image_shape: Sequence[int]
) -> dict[str, tuple[int, int, int, int]]:
    """Return the arguments with which `image.launch` packs images (N, C, H, W) for `launch`: the borders that its runs need."""
    height, width = image_shape[2:]
    _, _, kh, kw = weight_shape
    top, bottom, left, right = padding
    outputs = outputs_of_run(stride)
    oh, ow = out_size(height, kh, stride[0], top, bottom), out_size(width, kw, stride[1], left, right)
    rows = stride[0] * (oh - 1) + kh
    # `stem_pool` reads a run for every output, which may end further right than a run for two.
    columns = max(stride[1] * many * (math.ceil(ow / many) - 1) + run_pixels(kw, stride[1], many) for many in (outputs, 1))
    columns = 4 * math.ceil(max(columns, left + width) / 4)
    return {"padding": (top, max(0, rows - top - height), left, columns - left - width)}


def pack_weight(weight: Tensor, stride: tuple[int, int], outputs: int | None = None) -> Tensor:
    """Return weights (Cout, C, KH, KW) as (outputs * Cout, KH, run pixels * 4): for each output of a run, what it takes of the run."""
    cout, cin, kh, kw = weight.shape
    outputs = outputs or outputs_of_run(stride)
    packed = weight.new_zeros((outputs, cout, kh, run_pixels(kw, stride[1], outputs), image.CHANNELS))
    for index in range(outputs):
        packed[index, :, :, index * stride[1] : index * stride[1] + kw, :cin] = weight.permute(0, 2, 3, 1)
    return packed.reshape(outputs * cout, kh, -1)


@of(reference)
def prepare(x, weight, bias, stride, padding, **how) -> dict[str, Any]:
    """Return the arguments of `launch` for those of `reference`: packed images and weights, and the size of the result."""
    packed = image.launch(x, **packing(weight.shape, stride, padding, x.shape))
    arrays = {"x": packed, "weight": pack_weight(weight.to(x.dtype), stride), "bias": None if bias is None else bias.float()}
    return {**arrays, "stride": stride, "size": map_size(x, weight, stride, padding), **how}


def map_size(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int, int, int]) -> tuple[int, int]:
    """Return (OH, OW) of plain images and weights."""
    return out_sizes(x, weight.shape[2:], stride, padding)


def _shape(x: Tensor, weight: Tensor, stride: tuple[int, int], padding: Any, size: tuple[int, int] | None) -> tuple[int, int, int, int]:
    """Return N, Cout, OH, OW from plain arguments, or from packed ones, whose weights have three axes."""
    if weight.dim() == 3:
        assert size is not None
        return x.shape[0], weight.shape[0] // outputs_of_run(stride), *size
    return x.shape[0], weight.shape[0], *map_size(x, weight, stride, padding or NOTHING)


@of(reference)
def supports(x, weight, stride, padding, act, **_) -> str:
    """Return "" where the kernel takes these arguments of `reference`, else the reason why not."""
    if x.dtype not in TOLERANCE:
        return f"{x.dtype}"
    if x.dim() != 4 or weight.dim() != 4 or weight.shape[1] != x.shape[1]:
        return "grouped, or no images"
    if act not in ACTIVATIONS:
        return f"activation {act}"
    n, cout, oh, ow = _shape(x, weight, stride, padding, None)
    if oh < 1 or ow < 1:
        return "no output"
    if n * cout * oh * ow > 2**31 - 1:
        return "more than 32-bit indices reach"
    if min(padding) < 0:
        return "negative padding"
    if not configs(x, weight, stride=stride, padding=padding, tf32=False):
        return "windows whose weights shared memory has no room for"
    return image.supports(x, padding=packing(weight.shape, stride, padding, x.shape)["padding"])


@partly(reference)
def configs(x, weight, stride, padding, tf32, size: tuple[int, int] | None = None, **_) -> list[dict[str, int]]:
    """Return launch parameters to try, the best guess first, for the arguments of `reference` or of `launch`.

    bm and bn are the rows and columns of a tile, bk the depth of one product, tiles what a program does in turn with the same weights,
    stages the tiles whose rows are under way at once (1: read through L1, which neighbouring runs share; more: copied past it).
    """
    n, cout, oh, ow = _shape(x, weight, stride, padding, size)
    outputs = outputs_of_run(stride)
    rows = n * oh * math.ceil(ow / outputs)
    bn = min(128, max(16, triton.next_power_of_2(outputs * cout)))
    packed = weight.dim() == 3
    depth = weight.shape[1] * weight.shape[2] if packed else 4 * weight.shape[2] * run_pixels(weight.shape[3], stride[1], outputs)
    whole = triton.next_power_of_2(depth)
    few = rows * outputs * cout < 132 * 4 * 64 * 64
    if x.dtype == torch.float32 and not tf32:
        # Products in full float32 keep both operands in registers.
        tried = [(64, min(bn, 64), 16, 1, 4, 1), (64, min(bn, 32), 32, 1, 4, 1)]
        tried += [(32, min(bn, 32), 16, 1, 4, 1), (128, min(bn, 64), 16, 1, 8, 1)]
    elif few:
        chunk = min(256, whole)
        tried = [
            (64, bn, chunk, 1, 4, 1), (64, min(bn, 32), chunk, 1, 4, 1), (64, bn, 32, 1, 4, 1), (32, min(bn, 32), chunk, 1, 4, 1),
            (16, min(bn, 32), chunk, 1, 2, 1), (128, bn, 64, 1, 8, 1),
        ]  # fmt: skip
    elif whole <= 64:
        tried = [
            (128, bn, whole, 8, 8, 1), (64, bn, whole, 8, 4, 1), (128, bn, whole, 8, 8, 2), (128, bn, 16, 8, 8, 1),
            (128, bn, whole, 2, 4, 1), (64, bn, whole, 16, 4, 3), (256, bn, whole, 4, 8, 1), (128, bn, whole, 16, 8, 3),
            (64, bn, 16, 8, 4, 1), (64, bn, whole, 1, 4, 1),
        ]  # fmt: skip
    else:
        tried = [
            (128, bn, 64, 8, 8, 1), (64, bn, 32, 8, 4, 2), (128, bn, 32, 8, 4, 1), (64, bn, 256, 8, 4, 1), (128, bn, 32, 8, 8, 1),
            (64, bn, 32, 8, 4, 1), (128, bn, 256, 8, 8, 1), (128, bn, 32, 16, 8, 2), (128, bn, 64, 4, 4, 1), (64, bn, 64, 16, 4, 1),
            (128, bn, 32, 2, 8, 1), (256, bn, 32, 4, 8, 1),
        ]  # fmt: skip
    # Weights are shared among tiles only as far as three programs are left for each multiprocessor.
    spread = [(m, b, k, max(1, min(t, rows * math.ceil(outputs * cout / b) // (m * 132 * 3))), w, s) for m, b, k, t, w, s in tried]
    return named("bm bn bk tiles warps stages", (config for config in spread if fits(config, depth, x.element_size())))


def fits(config: tuple[int, int, int, int, int, int], depth: int, item: int) -> bool:
    """Tell whether the weights, and the rows under way, of (bm, bn, bk, tiles, warps, stages) fit into shared memory."""
    bm, bn, bk, _, _, stages = config
    chunks = math.ceil(depth / bk)
    rows = bm * bk * (1 if stages == 1 else chunks * stages)
    return bk <= triton.next_power_of_2(depth) and (bn * bk * chunks + rows) * item + 8192 <= 227 * 1024


@launches(reference, configs)
def launch(x, weight, bias, stride, act, tf32, config, size: tuple[int, int], out: Tensor | None = None, **_) -> Tensor:
    """Run the kernel.

    Args:
        x: images that `image.launch` packed as `packing` says: (N, Hp, Wp, 4), contiguous, 16-byte aligned.
        weight: what `pack_weight` returned, in the dtype of `x`.
        bias: (Cout,) in float32, or None.
        size: (OH, OW).
        out: (N, Cout, OH, OW) in channels_last memory or a channel slice of such; allocated if None.
        config: one of `configs`.

    Returns:
        (N, Cout, OH, OW), channels_last: `out`.

    Raises:
        ValueError: `out` has another shape, or channels that don't lie beside each other.
    """
    n, cout, oh, ow = _shape(x, weight, stride, None, size)
    out = empty_map(n, cout, oh, ow, x) if out is None else out
    ld = pixel_stride(out)
    if ld is None or out.shape != (n, cout, oh, ow) or not reachable(out):
        raise ValueError(f"out: {tuple(out.shape)} with strides {out.stride()} instead of channels_last {(n, cout, oh, ow)}")
    if out.numel() == 0:
        return out
    outputs = outputs_of_run(stride)
    columns = math.ceil(ow / outputs)
    rows = n * oh * columns
    options: dict[str, Any] = {
        "OH": oh, "OW": ow, "COLUMNS": columns, "OUTPUTS": outputs, "COUT": cout, "KH": weight.shape[1],
        "RUN": weight.shape[2], "HP": x.shape[1], "WP": x.shape[2], "STRIDE_H": stride[0], "STRIDE_W": stride[1], "ACT": act,
        "PRECISION": "tf32" if tf32 else "ieee", "BM": config["bm"], "BN": config["bn"], "BK": config["bk"],
        "TILES": config["tiles"], "EVEN": rows % (config["bm"] * config["tiles"]) == 0, "STAGES": config["stages"],
        "num_warps": config["warps"], **overlap(x),
    }  # fmt: skip
    _stem[(triton.cdiv(rows, config["bm"] * config["tiles"]) * triton.cdiv(outputs * cout, config["bn"]),)](
        x, weight, bias, out, rows, ld, **options
    )
    return out


@of(reference)
def cost(x, weight, stride, padding, **_) -> tuple[int, int]:
    """Return (operations, bytes) for the arguments of `reference`: plain images and weights read once, the result written once."""
    n, cout, oh, ow = _shape(x, weight, stride, padding, None)
    return 2 * n * oh * ow * weight.numel(), (x.numel() + weight.numel() + n * cout * oh * ow) * x.element_size()


@triton.jit
def _stem(
    x, weight, bias, out, rows, ld,
    OH: tl.constexpr, OW: tl.constexpr, COLUMNS: tl.constexpr, OUTPUTS: tl.constexpr, COUT: tl.constexpr,
    KH: tl.constexpr, RUN: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr,
    ACT: tl.constexpr, PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TILES: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    DEPTH: tl.constexpr = KH * RUN
    N: tl.constexpr = OUTPUTS * COUT
    NB: tl.constexpr = (N + BN - 1) // BN
    EXACT: tl.constexpr = BN * NB == N and DEPTH % BK == 0
    first = (tl.program_id(0) // NB) * TILES
    j = (tl.program_id(0) % NB) * BN + tl.arange(0, BN)
    channel = j % COUT
    output = j // COUT
    # The weights are loaded once for all tiles of a program; held in a tuple, each chunk stays in shared memory.
    chunks = ()
    for base in tl.static_range(0, DEPTH, BK):  # pyright: ignore[reportGeneralTypeIssues]
        k = base + tl.arange(0, BK)
        at = weight + j[None, :] * DEPTH + k[:, None]
        chunk = tl.load(at) if EXACT else tl.load(at, mask=(j < N)[None, :] & (k < DEPTH)[:, None], other=0.0)
        chunks = chunks + (chunk,)  # noqa: RUF005 (Triton doesn't unpack)
    shift = tl.zeros((BN,), tl.float32)
    if bias is not None:
        shift = tl.load(bias + channel, mask=j < N, other=0.0).to(tl.float32)
    for tile in tl.range(0, TILES, num_stages=STAGES):  # pyright: ignore[reportGeneralTypeIssues]
        m = (first + tile) * BM + tl.arange(0, BM)
        there = m if EVEN else tl.minimum(m, rows - 1)
        line = there // COLUMNS
        start = ((line // OH) * HP + (line % OH) * STRIDE_H) * (WP * 4) + (there % COLUMNS) * (STRIDE_W * OUTPUTS * 4)
        acc = tl.zeros((BM, BN), tl.float32)
        for base in tl.static_range(0, DEPTH, BK):  # pyright: ignore[reportGeneralTypeIssues]
            depth = base + tl.arange(0, BK)
            runs = x + start[:, None] + ((depth // RUN) * (WP * 4) + depth % RUN)[None, :]
            a = tl.load(runs) if base + BK <= DEPTH else tl.load(runs, mask=(depth < DEPTH)[None, :], other=0.0)
            acc = product(a, chunks[base // BK], acc, PRECISION)
        y = narrowed(activate(acc + shift[None, :], ACT), out.dtype.element_ty)
        if OW % OUTPUTS == 0 and OUTPUTS > 1:
            to = out + m[:, None] * (ld * OUTPUTS) + (output * ld + channel)[None, :]
        elif OUTPUTS > 1:
            to = out + (line * OW + (there % COLUMNS) * OUTPUTS)[:, None] * ld + (output * ld + channel)[None, :]
        else:
            to = out + m[:, None] * ld + j[None, :]
        if EVEN and BN * NB == N and OW % OUTPUTS == 0:
            tl.store(to, y)
        else:
            inside = (m < rows)[:, None] & (j < N)[None, :]
            if OW % OUTPUTS != 0:
                inside = inside & ((there % COLUMNS)[:, None] * OUTPUTS + output[None, :] < OW)
            tl.store(to, y, mask=inside)


CASES: list[dict[str, Any]] = [
    {"name": "ResNet", "x": (2, 3, 19, 17), "weight": (64, 7, 7), "stride": (2, 2), "padding": (3, 3, 3, 3), "act": "relu"},
    {"name": "VGG", "x": (2, 3, 9, 10), "weight": (32, 3, 3), "padding": (1, 1, 1, 1), "act": "relu"},
    {"name": "odd width at stride 1", "x": (2, 3, 6, 7), "weight": (16, 3, 3), "padding": (1, 1, 1, 1), "bias": False},
    {"name": "AlexNet", "x": (1, 3, 35, 33), "weight": (64, 11, 11), "stride": (4, 4), "padding": (2, 2, 2, 2), "act": "gelu"},
    {"name": "SqueezeNet", "x": (1, 3, 20, 22), "weight": (96, 7, 7), "stride": (2, 2), "act": "sigmoid"},
    {"name": "SAME", "x": (2, 3, 12, 13), "weight": (24, 3, 3), "stride": (2, 2), "padding": (0, 1, 0, 1), "act": "silu"},
    {"name": "MobileNetV3", "x": (2, 3, 10, 10), "weight": (16, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1), "act": "hardswish"},
    {"name": "Xception", "x": (1, 3, 13, 13), "weight": (32, 3, 3), "stride": (2, 2), "act": "relu6"},
    {"name": "grey, few channels", "x": (2, 1, 8, 8), "weight": (6, 5, 5), "act": "leaky_relu_0.1"},
    {"name": "two channels, stride 3", "x": (1, 2, 11, 14), "weight": (20, 3, 3), "stride": (3, 3), "act": "leaky_relu_0.01"},
    {"name": "four channels, kernel 1", "x": (1, 4, 5, 5), "weight": (8, 1, 1), "act": "hardsigmoid"},
    {"name": "uneven kernel and strides", "x": (1, 3, 9, 12), "weight": (8, 2, 5), "stride": (1, 2), "padding": (1, 0, 2, 1)},
    {"name": "one pixel", "x": (1, 3, 1, 1), "weight": (8, 3, 3), "stride": (2, 2), "padding": (1, 1, 1, 1)},
    {"name": "no image", "x": (0, 3, 8, 8), "weight": (8, 3, 3), "padding": (1, 1, 1, 1)},
]

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{name}, batch {n}", "x": (n, 3, px, px), "weight": weight, "stride": (s, s), "padding": (p, p, p, p), "act": act}
    for n in (256, 1)
    for name, px, weight, s, p, act in (
        ("ResNet", 224, (64, 7, 7), 2, 3, "relu"),
        ("MobileNetV2", 224, (32, 3, 3), 2, 1, "relu6"),
        ("MobileNetV3", 224, (16, 3, 3), 2, 1, "hardswish"),
        ("VGG", 224, (64, 3, 3), 1, 1, "relu"),
        ("AlexNet", 224, (64, 11, 11), 4, 2, "relu"),
        ("SqueezeNet", 224, (96, 7, 7), 2, 0, "relu"),
        ("Xception", 299, (32, 3, 3), 2, 0, "relu"),
        ("CIFAR", 32, (16, 3, 3), 1, 1, "relu"),
    )
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of `reference` for a case."""
    draw, (cout, kh, kw), cin = Drawing(*how), case["weight"], case["x"][1]
    weight = (draw.normal(cout, cin, kh, kw) / math.sqrt(cin * kh * kw)).to(draw.dtype)
    args = {"x": draw.normal(*case["x"]).to(draw.dtype), "weight": weight, **given(case, "stride", "padding", "act")}
    return args | {"bias": draw.normal(cout) if case.get("bias", True) else None}
