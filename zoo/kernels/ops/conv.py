"""Dense convolution as an implicit matrix product: affine map, activation or gate before; bias, residual, activation after."""

# pyright: reportCallIssue=false
from __future__ import annotations

import math
from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn import functional as F

from ._activation import ACTIVATIONS
from ._arguments import Drawing, given, launches, of
from ._dense import COUNTERS, conv_kernel, row_kernel
from ._layout import DTYPES, LARGEST, empty_map, out_sizes, pixel_stride, reachable
from ._overlap import overlap
from ._tiles import by_image, rowwise, tiled

Config = dict[str, Any]
Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
PACK = {"weight": lambda weight: weight.contiguous(memory_format=torch.channels_last)}


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    act: str = "none",
    pre_act: str = "none",
    tf32: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``act(conv(gate * pre_act(x * scale + shift)) + bias + residual)``; padding is zero after the affine map.

    Args:
        x: (N, C, H, W), channels_last or a channel slice of such a map.
        weight: (K, C, kernel height, kernel width).
        bias: (K,), float32.
        residual: (N, K, output height, output width).
        scale: (C,), float32, of a BatchNorm before the convolution; comes with `shift`.
        shift: (C,), float32.
        gate: (N, C), by which channels of each image are scaled; 1x1 kernels without padding only.
        stride: vertical, horizontal, pixels.
        padding: top, bottom, left, right, pixels.
        dilation: vertical, horizontal, pixels.
        act: what is applied last, a name of `ACTIVATIONS`.
        pre_act: what is applied to the input.
        tf32: whether a GPU may round float32 factors to TF32.
        out_dtype: the output's type if not `x`'s.

    Returns:
        (N, K, output height, output width); products accumulate in float32.
    """
    out_dtype = out_dtype or x.dtype
    if scale is not None and shift is not None:
        x = (x.to(scale.dtype) * scale[None, :, None, None] + shift[None, :, None, None]).to(x.dtype)
    x = ACTIVATIONS[pre_act](x)
    if gate is not None:
        x = (x * gate[:, :, None, None]).to(x.dtype)
    y = convolved(x, weight, None, stride, padding, dilation)
    if bias is not None:
        y = y + bias[:, None, None].to(y.dtype)
    if residual is not None:
        y = y + residual
    return ACTIVATIONS[act](y).to(out_dtype).contiguous(memory_format=torch.channels_last)


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int = 1
) -> Tensor:
    """Convolve in PyTorch, whose padding of opposite sides is the same: another is a pass of its own."""
    top, bottom, left, right = padding
    even = (top, left) == (bottom, right)
    x = x if even else F.pad(x, (left, right, top, bottom))
    return F.conv2d(x, weight, bias, tuple(stride), (top, left) if even else (0, 0), tuple(dilation), groups)


@of(reference)
def supports(x, weight, bias, residual, scale, shift, gate, stride, padding, dilation, act, pre_act, out_dtype, **_) -> str:
    """Return "" where the kernel takes these arguments (see `reference`), else the reason why not."""
    n, c, _, _ = x.shape
    k, wc, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    vectors = ((bias, k), (scale, c), (shift, c))
    reasons = (
        (x.dtype not in DTYPES or weight.dtype != x.dtype, f"types {x.dtype} and {weight.dtype}"),
        (out_dtype is not None and out_dtype not in DTYPES, f"output type {out_dtype}"),
        (wc != c, "grouped convolution"),
        (act not in ACTIVATIONS or pre_act not in ACTIVATIONS, f"activation {act} or {pre_act}"),
        (ho < 1 or wo < 1, "window larger than the padded image"),
        (kh > 31 or kw > 31, "a kernel of more than 31 pixels"),
        ((scale is None) != (shift is None), "scale without shift"),
        (any(v is not None and (v.dtype != torch.float32 or tuple(v.shape) != (s,) or not v.is_contiguous()) for v, s in vectors),
         "bias, scale or shift that is no contiguous float32 vector"),
        (gate is not None and (kh * kw != 1 or any(padding) or tuple(gate.shape) != (n, c) or not gate.is_contiguous()),
         "a gate needs a 1x1 kernel without padding and (N, C) in rows"),
        (residual is not None and tuple(residual.shape) != (n, k, ho, wo), "a residual of another shape"),
        (pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None), "maps that are not channels_last"),
        (not reachable(x, residual) or max(weight.numel(), n * max(ho, 0) * max(wo, 0) * k) > LARGEST, "maps beyond 32-bit reach"),
    )  # fmt: skip
    return next((reason for wrong, reason in reasons if wrong), "")


@of(reference)
def configs(x, weight, residual, scale, gate, stride, padding, dilation, tf32, **_) -> list[Config]:
    """Return launch parameters to try, the most promising first by a model of the machine."""
    k, c, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    m = x.shape[0] * ho * wo
    exact = x.dtype == torch.float32 and not tf32
    fold = kh * kw > 1 and _folds(scale, c, 64)
    pixels = ho * wo if gate is not None else 0
    found = tiled(max(m, 1), k, c, kh * kw, x.element_size(), fold=fold, residual=residual is not None, exact=exact, pixels=pixels)
    if kh * kw == 1 and m <= 16 and (ho, wo) == tuple(x.shape[2:]) == (1, 1):
        rows = rowwise(k, c)
        found = rows + found if m <= 4 else found[:4] + rows[:3] + found[4:]
    return found[:20]


def _folds(scale: Tensor | None, channels: int, block: int) -> bool:
    return channels % block != 0 and scale is None


def workspace(config: Config) -> int:
    """Return the bytes of workspace that a launch needs: its arrival counters, 0 unless it splits k.

    A workspace is a uint8 tensor of at least so many bytes which were zero when it was made; every launch leaves them zero. Launches
    one after the other on a stream may share one; launches that run at once may not. The partial sums are no part of it: they are not
    needed after the launch, and a plan lays other maps over them.
    """
    return 4 * COUNTERS if config.get("SPLIT", 1) > 1 else 0


def borrow(workspace: Tensor | None, config: Config, tiles: int, rows: int, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the arrival counters of a split launch, out of a workspace where there is one, and memory for its partial sums.

    Args:
        workspace: see `workspace`, or None.
        config: the launch parameters.
        tiles: tiles of the output.
        rows: output pixels, of an image where tiles keep to one; a tile that is higher has sums of so many.
        x: a map on the launch's device.
    """
    split = config["SPLIT"]
    if split == 1:
        return None, None
    if tiles > COUNTERS:
        raise ValueError(f"{tiles} tiles are too many to split")
    if workspace is None:
        counters = torch.zeros(COUNTERS, dtype=torch.int32, device=x.device)
    elif workspace.numel() < 4 * COUNTERS or workspace.dtype != torch.uint8:
        raise ValueError(f"the workspace has {workspace.numel()} bytes of {4 * COUNTERS}")
    else:
        counters = workspace[: 4 * COUNTERS].view(torch.int32)
    return counters, torch.empty(split * tiles * min(rows, config["BM"]) * config["BN"], dtype=torch.float32, device=x.device)


@launches(reference, configs)
def launch(
    x, weight, bias, residual, scale, shift, gate, stride, padding, dilation, act, pre_act, tf32, out_dtype, config,
    out: Tensor | None = None, workspace: Tensor | None = None, diagonal: int = 0, factors: Factors = (None, None, None),
) -> Tensor:  # fmt: skip
    """Run the kernel; see `reference` for the arguments and `supports` for what it takes.

    Args:
        weight: in channels_last memory, as `PACK` lays it out.
        residual: may be a channel slice.
        out: where to write, maybe a channel slice, or `residual` itself; made if None.
        config: one of `configs`.
        workspace: for configs that split k, see the function of that name; without one, every launch zeroes a fresh one.
        diagonal: input channels of a block of a block-diagonal weight, as `grouped` has it; 0 for a dense one.
        factors: of products, residual and output, as `narrow_conv` has them.

    Returns:
        `out`. Products accumulate in float32; split sums are added in a fixed order, so equal launches give equal bits.

    Raises:
        ValueError: where the arguments are none that `supports` takes, or the workspace is too small.
    """
    n, _, h, w = x.shape
    k, c, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    out = empty_map(n, k, ho, wo, x, out_dtype) if out is None else out
    rows = n * ho * wo
    if rows == 0:
        return out
    ldx, ldo = pixel_stride(x), pixel_stride(out)
    ldr = ldo if residual is None else pixel_stride(residual)
    if ldx is None or ldo is None or ldr is None:
        raise ValueError("a convolution needs channels_last maps or channel slices of such")
    if pixel_stride(weight) != c:
        raise ValueError("conv needs its weight in channels_last memory: pack it first")
    x_unit = gcd(c, ldx, 16)
    if config["kind"] == "row":
        row_kernel[(rows, triton.cdiv(k, config["BN"]))](
            x, weight, bias, residual, scale, shift, gate, out, c // x_unit, ldx // x_unit, k, ldr, ldo,
            X_UNIT=x_unit, EVEN=c % config["BK"] == 0, PRE_ACT=pre_act, ACT=act,
            BN=config["BN"], BK=config["BK"], num_warps=config["warps"], **overlap(x),
        )  # fmt: skip
        return out

    bm, bn, bk, split = config["BM"], config["BN"], config["BK"], config["SPLIT"]
    alone = gate is not None and by_image(ho * wo, bm)
    columns = k // diagonal * triton.cdiv(diagonal, bn) if diagonal else triton.cdiv(k, bn)
    tiles = (n * triton.cdiv(ho * wo, bm) if alone else triton.cdiv(rows, bm)) * columns
    span = ho * wo if alone else rows
    counters, partials = borrow(workspace, config, tiles, span, x)
    top, bottom, left, right = padding
    flat = kh == kw == 1 and tuple(stride) == (1, 1) and not any(padding)
    fold = c if kh * kw > 1 and _folds(scale, c, bk) else 0
    out_unit = gcd(k, ldo, ldr, 16)
    conv_kernel[(tiles, split)](
        x, weight, bias, residual, scale, shift, gate, *factors, out, counters, partials,
        rows, h, w, ho, wo, c // x_unit, ldx // x_unit, k // out_unit, ldr // out_unit, ldo // out_unit,
        X_UNIT=x_unit, OUT_UNIT=out_unit, FLAT=flat, MASKED=bool(top or bottom or left or right),
        EVEN=(kh * kw * c if fold else c) % bk == 0, FOLD=fold, BY_IMAGE=alone,
        DIAGONAL=diagonal, FEW=split > 1 and span < bm,
        KH=kh, KW=kw, SH=stride[0], SW=stride[1], PT=top, PL=left, DH=dilation[0], DW=dilation[1], PRE_ACT=pre_act, ACT=act,
        PRECISION="tf32" if tf32 else "ieee", BM=bm, BN=bn, BK=bk, GROUP=config["GROUP"], SPLIT=split,
        EARLY=config["EARLY"] and residual is not None, num_warps=config["warps"], num_stages=config["stages"], **overlap(x),
    )  # fmt: skip
    return out


@of(reference)
def cost(x, weight, residual, stride, padding, dilation, out_dtype, **_) -> tuple[int, int]:
    """Return floating-point operations and bytes: each map and weight read once, the output written once."""
    return work(x, weight, residual, out_sizes(x, weight.shape[2:], stride, padding, dilation), out_dtype)


def work(
    x: Tensor, weight: Tensor, residual: Tensor | None, sizes: tuple[int, int], out_dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Return the cost of a convolution, maybe in groups, whose output has these sizes."""
    (n, c, h, w), taps = x.shape, weight.shape[2:].numel()
    pixels = n * math.prod(sizes)
    outputs = pixels * weight.shape[0]
    # A strided 1x1 kernel never sees the pixels between.
    seen = c * (pixels if taps == 1 else n * h * w)
    read = (seen + weight.numel()) * x.element_size() + (0 if residual is None else outputs * residual.element_size())
    return 2 * outputs * weight.shape[1] * taps, read + outputs * (out_dtype or x.dtype).itemsize


def case(name: str, n: int, c: int, k: int, size: int | tuple[int, int], kernel: int | tuple[int, int] = 1, **options: Any) -> Config:
    """Return a case of a convolution from c to k channels."""
    sizes = (size, size) if isinstance(size, int) else size
    kernels = (kernel, kernel) if isinstance(kernel, int) else kernel
    return {"name": name, "n": n, "c": c, "k": k, "size": sizes, "kernel": kernels, **options}


CASES: list[Config] = [
    case("pointwise", 2, 32, 16, (5, 7), bias=True, act="relu"),
    case("pointwise_narrow", 1, 24, 144, 5, bias=True, act="relu6"),
    case("pointwise_odd_channels", 2, 13, 7, (3, 5), residual=True, act="none"),
    case("pointwise_stride2_even", 2, 16, 24, 6, stride=(2, 2), bias=True),
    case("pointwise_stride2_odd", 1, 16, 24, (7, 5), stride=(2, 2), residual=True, act="relu"),
    case("pointwise_padded", 1, 8, 8, 3, padding=(1, 1, 1, 1), bias=True, act="sigmoid"),
    case("linear_one_row", 1, 96, 40, 1, bias=True, act="hardswish"),
    case("linear_one_row_odd", 1, 37, 11, 1, bias=True, residual=True, act="gelu"),
    case("linear_rows", 5, 48, 10, 1, bias=True, out_dtype="float32"),
    case("empty", 0, 16, 16, 4, 3, padding=(1, 1, 1, 1), bias=True),
    case("three", 2, 32, 16, (6, 5), 3, padding=(1, 1, 1, 1), bias=True, act="relu"),
    case("three_of_one_pixel", 2, 16, 16, 1, 3, padding=(1, 1, 1, 1), bias=True, act="silu"),
    case("three_stride2_even", 1, 16, 24, 6, 3, stride=(2, 2), padding=(0, 1, 0, 1), bias=True, act="relu"),
    case("three_stride2_odd", 1, 16, 24, (7, 9), 3, stride=(2, 2), padding=(1, 1, 1, 1), residual=True, act="relu"),
    case("three_unpadded", 2, 24, 8, 5, 3, bias=True, act="leaky_relu_0.1"),
    case("three_of_three_channels", 1, 3, 8, (8, 7), 3, padding=(1, 1, 1, 1), bias=True, act="leaky_relu_0.01"),
    case("three_dilated", 1, 16, 8, 7, 3, padding=(2, 2, 2, 2), dilation=(2, 2), act="hardsigmoid"),
    case("three_long_k", 1, 64, 32, 4, 3, padding=(1, 1, 1, 1), bias=True, residual=True, act="relu"),
    case("five", 1, 24, 16, 6, 5, padding=(2, 2, 2, 2), bias=True, act="relu"),
    case("seven_stride2", 1, 8, 8, 9, 7, stride=(2, 2), padding=(3, 3, 3, 3), bias=True, act="relu"),
    case("one_by_seven", 1, 16, 16, (5, 9), (1, 7), padding=(0, 0, 3, 3), bias=True, act="relu"),
    case("seven_by_one", 1, 16, 16, (9, 5), (7, 1), padding=(3, 3, 0, 0), bias=True, act="relu"),
    case("slice_in", 2, 32, 16, 4, 3, padding=(1, 1, 1, 1), wide=(64, 16), bias=True, act="relu"),
    case("slice_in_pointwise", 2, 32, 16, 4, wide=(96, 32), bias=True),
    case("affine", 2, 48, 16, 4, affine=True, pre_act="relu", wide=(80, 0), bias=True, act="relu"),
    case("affine_padded", 1, 16, 8, 5, 3, padding=(1, 1, 1, 1), affine=True, pre_act="relu"),
    case("affine_narrow_padded", 1, 12, 8, 5, 3, padding=(1, 1, 1, 1), affine=True, pre_act="sigmoid"),
    case("gate", 3, 40, 24, (3, 5), gate=True, bias=True, residual=True),
    case("gate_stride2", 2, 16, 8, 4, gate=True, stride=(2, 2)),
    case("gate_of_images_apart", 3, 40, 24, (9, 11), gate=True, bias=True, residual=True, act="relu"),
    case("gate_of_images_apart_even", 2, 64, 40, 13, gate=True, stride=(2, 2)),
    case("gate_of_tiny_images", 20, 24, 16, (2, 3), gate=True, bias=True),
    case("gate_one_row", 1, 40, 24, 1, gate=True, bias=True),
    case("affine_one_row", 1, 40, 24, 1, affine=True, pre_act="relu", bias=True),
]  # fmt: skip
"""Awkward shapes, small enough for the interpreter."""

_SAME = {"padding": (1, 1, 1, 1), "bias": True, "act": "relu"}
LARGE_CASES: list[Config] = [
    case(f"{name}_b{n}", n, c, k, size, kernel, **options)
    for n in (256, 1)
    for name, c, k, size, kernel, options in (
        ("reduce_256_64_56", 256, 64, 56, 1, {"bias": True, "act": "relu"}),
        ("expand_64_256_56", 64, 256, 56, 1, {"bias": True, "residual": True, "act": "relu"}),
        ("reduce_512_128_28", 512, 128, 28, 1, {"bias": True, "act": "relu"}),
        ("expand_256_1024_14", 256, 1024, 14, 1, {"bias": True, "residual": True, "act": "relu"}),
        ("expand_512_2048_7", 512, 2048, 7, 1, {"bias": True, "residual": True, "act": "relu"}),
        ("stride2_256_512_56", 256, 512, 56, 1, {"bias": True, "stride": (2, 2)}),
        ("three_64_56", 64, 64, 56, 3, _SAME),
        ("three_128_28", 128, 128, 28, 3, _SAME),
        ("three_256_14", 256, 256, 14, 3, _SAME),
        ("three_512_7", 512, 512, 7, 3, _SAME),
        ("three_512_28", 512, 512, 28, 3, _SAME),
        ("mobile_32_16_112", 32, 16, 112, 1, {"bias": True}),
        ("mobile_16_96_112", 16, 96, 112, 1, {"bias": True, "act": "relu6"}),
        ("mobile_24_144_56", 24, 144, 56, 1, {"bias": True, "act": "relu6"}),
        ("mobile_144_24_56", 144, 24, 56, 1, {"bias": True, "residual": True}),
        ("mobile_32_192_28", 32, 192, 28, 1, {"bias": True, "act": "relu6"}),
        ("mobile_64_384_14", 64, 384, 14, 1, {"bias": True, "act": "relu6"}),
        ("mobile_384_64_14", 384, 64, 14, 1, {"bias": True, "residual": True}),
        ("mobile_960_160_7", 960, 160, 7, 1, {"bias": True}),
        ("mobile_320_1280_7", 320, 1280, 7, 1, {"bias": True, "act": "relu6"}),
        ("gate_672_112_14", 672, 112, 14, 1, {"bias": True, "gate": True}),
        ("gate_144_24_56", 144, 24, 56, 1, {"bias": True, "gate": True, "residual": True}),
        ("gate_1152_192_7", 1152, 192, 7, 1, {"bias": True, "gate": True, "residual": True}),
        ("dense_affine_256_128_28", 256, 128, 28, 1, {"affine": True, "pre_act": "relu", "wide": (512, 0), "bias": True, "act": "relu"}),
        ("dense_affine_64_128_56", 64, 128, 56, 1, {"affine": True, "pre_act": "relu", "wide": (256, 0), "bias": True, "act": "relu"}),
        ("dense_grow_128_32_28", 128, 32, 28, 3, {"padding": (1, 1, 1, 1)}),
        ("dense_grow_128_32_56", 128, 32, 56, 3, {"padding": (1, 1, 1, 1)}),
        ("linear_25088_4096", 25088, 4096, 1, 1, {"bias": True, "act": "relu"}),
        ("linear_2048_1000", 2048, 1000, 1, 1, {"bias": True, "out_dtype": "float32"}),
    )
]  # fmt: skip
"""Layers of real networks at batch 256 and 1, for timing on a GPU."""


def make(case: Config, *how: Any) -> dict[str, Any]:
    """Return the arguments of a case: random maps and weights scaled so that outputs are near 1."""
    n, c, k, kernel, draw = case["n"], case["c"], case["k"], case["kernel"], Drawing(*how)
    width, start = case.get("wide", (c, 0))
    options = given(case, "stride", "padding", "dilation", "act", "pre_act", "out_dtype")
    options["x"] = draw.map((n, width, *case["size"]))[:, start : start + c]
    weight = (draw.normal(k, c, *kernel) * (c * math.prod(kernel)) ** -0.5).to(draw.dtype)
    options["weight"] = weight.contiguous(memory_format=torch.channels_last)
    if case.get("bias"):
        options["bias"] = draw.normal(k)
    if case.get("affine"):
        options |= {"scale": draw.normal(c) * 0.3 + 1, "shift": draw.normal(c) * 0.5}
    if case.get("gate"):
        options["gate"] = draw.normal(n, c).sigmoid()
    if case.get("residual"):
        window = (options.get(name, usual) for name, usual in (("stride", (1, 1)), ("padding", (0,) * 4), ("dilation", (1, 1))))
        options["residual"] = draw.map((n, k, *out_sizes(options["x"], kernel, *window)))
    return options
