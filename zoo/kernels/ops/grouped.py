"""Grouped convolution (ResNeXt's and RegNet's 3x3): groups side by side as the blocks of a block-diagonal weight, each of dense tiles.

A group of 2 to 8 channels is too narrow for tensor cores, so `PACK` puts as many groups as fit into a block of at least 16
channels and writes zeros between them. The zeros cost arithmetic that the kernel has to spare: it waits for memory. A group whose
width no tile has, as RegNet's of 24 or 56, is a block whose last tile is partly empty.
Source: Xie et al., Aggregated Residual Transformations for Deep Neural Networks, 2017 (the layers; arXiv:1611.05431); Radosavovic
et al., Designing Network Design Spaces, 2020 (the widths; arXiv:2003.13678).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import conv as dense
from ._activation import ACTIVATIONS
from ._arguments import launches, of
from ._layout import DTYPES, LARGEST, out_sizes, pixel_stride, reachable
from ._tiles import tiled

Config = dict[str, Any]
TOLERANCE = dense.TOLERANCE
WIDEST = 264
"""Channels of a group at most: RegNetY-128GF's."""
NARROW = (2, 4)
"""Channels of a group that are no multiple of 8, which is what a load of 16 bytes holds, and still pack to blocks of 16."""


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    groups: int,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0, 0, 0),
    dilation: Sequence[int] = (1, 1),
    act: str = "none",
    tf32: bool = False,
) -> Tensor:
    """Return ``act(conv(x) + bias + residual)`` of a convolution in groups.

    Args:
        x: (N, C, H, W), channels_last or a channel slice of such a map.
        weight: (K, C / groups, kernel height, kernel width).
        bias: (K,), float32.
        residual: (N, K, output height, output width).
        groups: how many groups the channels fall into.
        stride: vertical, horizontal, pixels.
        padding: top, bottom, left, right, pixels.
        dilation: vertical, horizontal, pixels.
        act: what is applied last, a name of `ACTIVATIONS`.
        tf32: whether a GPU may round float32 factors to TF32.

    Returns:
        (N, K, output height, output width); products accumulate in float32.
    """
    top, bottom, left, right = padding
    if top or bottom or left or right:
        x = F.pad(x, (left, right, top, bottom))
    y = F.conv2d(x, weight, None, tuple(stride), 0, tuple(dilation), groups)
    if bias is not None:
        y = y + bias[:, None, None].to(y.dtype)
    if residual is not None:
        y = y + residual
    return ACTIVATIONS[act](y).contiguous(memory_format=torch.channels_last)


def together(each: int) -> int:
    """Return how many groups of `each` channels make a block: the power of two that fills 16 channels."""
    count = 1
    while each * count < 16:
        count *= 2
    return count


def pack(weight: Tensor) -> Tensor:
    """Lay a grouped weight out as block-diagonal: (C, C / groups * together, height, width), channels_last, zeros between groups.

    Args:
        weight: (C, C / groups, height, width), as many output as input channels.
    """
    k, each, kh, kw = weight.shape
    count = together(each)
    if count == 1:
        return weight.contiguous(memory_format=torch.channels_last)
    row = torch.arange(k, device=weight.device)
    packed = weight.new_zeros((k, count, each, kh, kw))
    packed[row, row // each % count] = weight
    return packed.reshape(k, count * each, kh, kw).contiguous(memory_format=torch.channels_last)


PACK = {"weight": pack}


def narrow(x: Tensor, weight: Tensor, groups: int) -> str:
    """Return "" where a convolution has groups of a width that blocks are made of, else the reason why not."""
    c, (k, each) = x.shape[1], weight.shape[:2]
    if groups < 2 or c % groups or each != c // groups:
        return "no grouped convolution"
    if k != c:
        return f"{c} input and {k} output channels"
    if (each % 8 and each not in NARROW) or each > WIDEST or groups % together(each):
        return f"{groups} groups of {each} channels"
    return ""


@of(reference)
def supports(x, weight, bias, residual, groups, stride, padding, dilation, act, **_) -> str:
    """Return "" where the kernel takes these arguments (see `reference`), else the reason why not."""
    n = x.shape[0]
    k, _, kh, kw = weight.shape
    if reason := narrow(x, weight, groups):
        return reason
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    reasons = (
        (x.dtype not in DTYPES or weight.dtype != x.dtype, f"types {x.dtype} and {weight.dtype}"),
        (act not in ACTIVATIONS, f"activation {act}"),
        (ho < 1 or wo < 1, "window larger than the padded image"),
        (kh > 31 or kw > 31, "a kernel of more than 31 pixels"),
        (bias is not None and (bias.dtype != torch.float32 or not bias.is_contiguous()), "bias that is no contiguous float32 vector"),
        (residual is not None and tuple(residual.shape) != (n, k, ho, wo), "a residual of another shape"),
        (pixel_stride(x) is None or (residual is not None and pixel_stride(residual) is None), "maps that are not channels_last"),
        (not reachable(x, residual) or n * max(ho, 0) * max(wo, 0) * k > LARGEST, "maps beyond 32-bit reach"),
    )  # fmt: skip
    return next((reason for wrong, reason in reasons if wrong), "")


@of(reference)
def configs(x, weight, residual, groups, stride, padding, dilation, tf32, **_) -> list[Config]:
    """Return launch parameters to try, the most promising first by a model of the machine."""
    k, _, kh, kw = weight.shape
    ho, wo = out_sizes(x, weight.shape[2:], stride, padding, dilation)
    wide = x.shape[1] // groups * together(x.shape[1] // groups)
    how = {"fold": kh * kw > 1, "residual": residual is not None, "exact": x.dtype == torch.float32 and not tf32}
    return tiled(max(x.shape[0] * ho * wo, 1), k, wide, kh * kw, x.element_size(), **how, block=wide)[:16]


def workspace(config: Config) -> int:
    """Return the bytes of workspace that a launch needs, as `conv.workspace` does."""
    return dense.workspace(config)


@launches(reference, configs)
def launch(x, weight, groups, config, out: Tensor | None = None, workspace: Tensor | None = None, **rest) -> Tensor:
    """Run the kernel; see `reference` for the arguments and `supports` for what it takes.

    Args:
        weight: as `pack` lays it out.
        residual: may be a channel slice.
        out: where to write, maybe a channel slice, or `residual` itself; made if None.
        config: one of `configs`.
        workspace: as `conv.launch` takes it.

    Returns:
        `out`. Products accumulate in float32; split sums are added in a fixed order, so equal launches give equal bits.

    Raises:
        ValueError: where the maps are not channels_last, the weight is not packed, or the workspace is too small.
    """
    each, wide = x.shape[1] // groups, weight.shape[1]
    if wide != each * together(each) or pixel_stride(weight) != wide:
        raise ValueError("grouped needs its weight packed")
    return dense.launch(x, weight, config=config, out=out, workspace=workspace, diagonal=wide, **rest)


@of(reference)
def cost(x, weight, residual, stride, padding, dilation, **_) -> tuple[int, int]:
    """Return floating-point operations, zeros between groups not counted, and bytes: each map once."""
    return dense.work(x, weight, residual, out_sizes(x, weight.shape[2:], stride, padding, dilation))


def _case(name: str, n: int, c: int, groups: int, size: tuple[int, int], kernel: int = 3, **options: Any) -> Config:
    side = kernel // 2
    base = {"name": name, "n": n, "c": c, "k": c, "groups": groups, "size": size, "kernel": (kernel, kernel), "bias": True}
    return {**base, "padding": (side,) * 4, "act": "relu", **options}


CASES: list[Config] = [
    _case("fours", 2, 32, 8, (5, 6)),
    _case("fours_stride2_even", 1, 32, 8, (6, 8), stride=(2, 2)),
    _case("eights_stride2_odd", 1, 64, 8, (7, 5), stride=(2, 2), residual=True),
    _case("sixteens_of_one_pixel", 2, 32, 2, (1, 1), act="none"),
    _case("thirty_twos", 1, 64, 2, (4, 4), act="hardswish"),
    _case("sixty_fours", 1, 128, 2, (3, 4), bias=False, act="silu"),
    _case("twenty_fours", 1, 72, 3, (5, 4)),
    _case("forties_stride2_residual", 1, 80, 2, (6, 5), stride=(2, 2), residual=True),
    _case("fifty_sixes_of_one_pixel", 2, 112, 2, (1, 1), act="none"),
    _case("one_hundred_and_twelves", 1, 224, 2, (3, 3), bias=False),
    _case("empty", 0, 32, 8, (4, 4)),
    _case("slice_in", 2, 32, 8, (4, 5), wide=(80, 16)),
    _case("twos", 1, 16, 8, (4, 5)),
    _case("pointwise", 1, 32, 4, (4, 5), 1),
    _case("five_dilated", 1, 32, 4, (6, 5), 5, padding=(4, 4, 4, 4), dilation=(2, 2), act="relu6"),
]
"""Awkward shapes, small enough for the interpreter."""

REGNETS = (
    ("y_3_2gf", 24, (72, 216, 576, 1512)), ("y_8gf", 56, (224, 448, 896, 2016)), ("y_16gf", 112, (224, 448, 1232, 3024)),
    ("x_3_2gf", 48, (96, 192, 432, 1008)),
)  # fmt: skip
"""Channels of a group and widths of the four stages: torchvision's RegNets."""

LARGE_CASES: list[Config] = [
    _case(f"{name}_{c}_{size}_stride{stride}_b{n}", n, c, groups, (size, size), stride=(stride, stride))
    for n in (256, 1)
    for name, groups, first in (("32x4d", 32, 128), ("64x4d", 64, 256), ("32x8d", 32, 256))
    for factor, size, stride in ((1, 56, 1), (2, 56, 2), (2, 28, 1), (4, 14, 1), (8, 7, 1))
    for c in (first * factor,)
] + [
    _case(f"{name}_{c}_{size}_b64", 64, c, c // each, (size, size))
    for name, each, widths in REGNETS
    for c, size in zip(widths, (56, 28, 14, 7), strict=True)
]
"""ResNeXt's layers at batch 256 and 1, and RegNets' at 64, for timing on a GPU."""


def make(case: Config, *how: Any) -> dict[str, Any]:
    """Return the arguments of a case: random maps and weights scaled so that outputs are near 1."""
    args = dense.make(case, *how)
    each = case["c"] // case["groups"]
    args["weight"] = (args["weight"][:, :each] * case["groups"] ** 0.5).contiguous(memory_format=torch.channels_last)
    return {**args, "groups": case["groups"]}
