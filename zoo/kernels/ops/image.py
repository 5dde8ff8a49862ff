"""The user's images, cast and packed for the first convolution: four channels to a pixel and borders of zeros already there.

A row of a kernel window is then one contiguous run of memory that needs no mask, whatever layout and dtype the images came in.
It is also the step that copies the images into a plan's buffer, so it takes any strides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from ._arguments import Drawing, launches, of
from ._layout import reachable
from ._overlap import begin, overlap

CHANNELS = 4
"""Channels of a packed pixel: 8 bytes in bfloat16, so that two pixels are one 16-byte load."""

OUT = torch.contiguous_format
"""Packed pixels (N, H, W, 4) are no map."""
TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""One rounding of a float32 image; no error where nothing is cast. Triton's interpreter cuts bfloat16 where a GPU rounds: 2**-8."""


def reference(x: Tensor, *, padding: tuple[int, int, int, int] = (0, 0, 0, 0), dtype: torch.dtype | None = None) -> Tensor:
    """Return images with their channels filled up to four and a border of zeros, pixel after pixel.

    Args:
        x: images (N, C, H, W), C at most 4, floating, any strides.
        padding: pixels of zeros (top, bottom, left, right).
        dtype: floating type of the result; that of `x` if None.

    Returns:
        (N, top + H + bottom, left + W + right, 4), contiguous: the channels are last in shape too. Nothing is accumulated; rounding
        to `dtype` is the only error, and the kernel rounds alike.
    """
    top, bottom, left, right = padding
    cast = x.to(dtype or x.dtype)
    return F.pad(cast, (left, right, top, bottom, 0, CHANNELS - x.shape[1])).permute(0, 2, 3, 1).contiguous()


@of(reference)
def supports(x, padding, dtype) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if x.dim() != 4 or not 1 <= x.shape[1] <= CHANNELS:
        return f"takes images (N, C, H, W) of at most {CHANNELS} channels"
    if x.dtype not in TOLERANCE or (dtype or x.dtype) not in TOLERANCE:
        return f"{x.dtype} to {dtype or x.dtype}"
    if min(padding) < 0:
        return "negative padding"
    n, height, width = _size(x, padding)
    if not reachable(x) or n * height * width * CHANNELS > 2**31 - 1:
        return "more than 32-bit indices reach"
    return ""


@of(reference)
def configs(x, padding, **_) -> list[dict[str, int]]:
    """Return launch parameters to try, the best guess first: pixels and warps of a program."""
    n, height, width = _size(x, padding)
    many = [{"block": 512, "warps": 4}, {"block": 256, "warps": 4}, {"block": 1024, "warps": 4}, {"block": 1024, "warps": 8}]
    few = [{"block": 128, "warps": 4}, {"block": 256, "warps": 4}, {"block": 64, "warps": 2}]
    return few if n * height * width < 132 * 2048 else many


@launches(reference, configs)
def launch(x, padding, dtype, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel.

    Args:
        x: images (N, C, H, W), C at most 4, floating, any strides.
        padding: pixels of zeros (top, bottom, left, right).
        dtype: floating type of the result; `out`'s, or else that of `x`, if None.
        out: a contiguous (N, top + H + bottom, left + W + right, 4) to write into; allocated if None.
        config: one of `configs`.

    Returns:
        The packed images: `out`.

    Raises:
        ValueError: `out` is not contiguous or has another shape.
    """
    n, height, width = _size(x, padding)
    if out is None:
        out = torch.empty((n, height, width, CHANNELS), dtype=dtype or x.dtype, device=x.device)
    elif out.shape != (n, height, width, CHANNELS) or not out.is_contiguous():
        raise ValueError(f"out: {tuple(out.shape)} with strides {out.stride()} instead of contiguous {(n, height, width, CHANNELS)}")
    pixels = n * height * width
    if pixels == 0:
        return out
    step_n, step_c, step_h, step_w = x.stride()
    options: dict[str, Any] = {
        "C": x.shape[1], "H": x.shape[2], "W": x.shape[3], "HP": height, "WP": width, "TOP": padding[0],
        "LEFT": padding[2], "BLOCK": config["block"],
        "num_warps": config["warps"], **overlap(x),
    }  # fmt: skip
    _pack[(triton.cdiv(pixels, config["block"]),)](x, out, pixels, step_n, step_c, step_h, step_w, **options)
    return out


@of(reference)
def cost(x, padding, dtype) -> tuple[int, int]:
    """Return (0, bytes): the images read once, the packed images written once."""
    n, height, width = _size(x, padding)
    return 0, x.numel() * x.element_size() + n * height * width * CHANNELS * (dtype or x.dtype).itemsize


def _size(x: Tensor, padding: tuple[int, int, int, int]) -> tuple[int, int, int]:
    top, bottom, left, right = padding
    return x.shape[0], top + x.shape[2] + bottom, left + x.shape[3] + right


@triton.jit
def _pack(
    x, out, pixels, stride_n, stride_c, stride_h, stride_w,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, HP: tl.constexpr, WP: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    pixel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = pixel % WP - LEFT
    row = pixel // WP
    h = row % HP - TOP
    written = pixel < pixels
    inside = written & (h >= 0) & (h < H) & (w >= 0) & (w < W)
    source = x + (row // HP) * stride_n + h * stride_h + w * stride_w
    # All loads stand before the first use, so that a thread has several under way.
    c0 = tl.load(source, mask=inside, other=0.0).to(out.dtype.element_ty)
    zero = tl.zeros_like(c0)
    c1 = tl.load(source + stride_c, mask=inside, other=0.0).to(out.dtype.element_ty) if C > 1 else zero
    c2 = tl.load(source + 2 * stride_c, mask=inside, other=0.0).to(out.dtype.element_ty) if C > 2 else zero
    c3 = tl.load(source + 3 * stride_c, mask=inside, other=0.0).to(out.dtype.element_ty) if C > 3 else zero
    # Joined, a pixel's channels lie in one thread: an 8-byte store with no exchange between threads.
    packed = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), (BLOCK, 4))
    tl.store(out + pixel[:, None] * 4 + tl.arange(0, 4)[None, :], packed, mask=written[:, None])


CASES: list[dict[str, Any]] = [
    {"name": "three channels, planes", "shape": (2, 3, 9, 7), "padding": (3, 3, 3, 4)},
    {"name": "three channels, pixels", "shape": (2, 3, 9, 7), "padding": (1, 2, 0, 3), "layout": "channels_last"},
    {"name": "every second pixel of planes", "shape": (1, 3, 12, 10), "padding": (0, 1, 1, 0), "layout": "strided"},
    {"name": "one image for all", "shape": (3, 3, 4, 5), "padding": (1, 1, 1, 1), "layout": "expanded"},
    {"name": "grey", "shape": (2, 1, 5, 8), "padding": (1, 0, 0, 0)},
    {"name": "two channels", "shape": (1, 2, 5, 5), "padding": (0, 0, 0, 1), "layout": "channels_last"},
    {"name": "four channels, no border", "shape": (2, 4, 3, 4), "padding": (0, 0, 0, 0), "layout": "channels_last"},
    {"name": "one pixel", "shape": (1, 3, 1, 1), "padding": (1, 1, 1, 1)},
    {"name": "no image", "shape": (0, 3, 4, 4), "padding": (1, 1, 1, 1)},
    {"name": "cast from float32", "shape": (2, 3, 6, 5), "padding": (1, 2, 1, 2), "source": "float32"},
    {"name": "cast from float16", "shape": (1, 3, 6, 5), "padding": (1, 2, 1, 2), "source": "float16", "layout": "channels_last"},
    {"name": "a row longer than a program", "shape": (1, 3, 2, 700), "padding": (0, 0, 3, 1)},
]

LARGE_CASES: list[dict[str, Any]] = [
    {"name": f"{source} {layout}, batch {n}", "shape": (n, 3, 224, 224), "padding": (3, 3, 3, 5), "source": source, "layout": layout}
    for n in (256, 1)
    for source, layout in (("float32", "planes"), ("bfloat16", "channels_last"), ("bfloat16", "planes"), ("float32", "channels_last"))
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case; the packed images have the drawn dtype, and the given ones too unless the case names another."""
    draw, (n, c, h, w), layout = Drawing(*how), case["shape"], case.get("layout", "planes")
    if layout == "strided":
        x = draw.normal(n, c, h, 2 * w)[:, :, :, ::2]
    else:
        x = draw.normal(1, c, h, w).expand(n, c, h, w) if layout == "expanded" else draw.normal(n, c, h, w)
    x = x.to(getattr(torch, case["source"]) if "source" in case else draw.dtype)
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    return {"x": x, "padding": case["padding"], "dtype": draw.dtype}
