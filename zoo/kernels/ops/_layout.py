"""Where the elements of a map lie: pixels in rows, channels beside each other, maybe a channel slice of a wider map."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of the maps that kernels take."""

NARROW = (torch.int8, torch.float8_e4m3fn)
"""Of maps of 8 bits, that few kernels take."""

LARGEST = 2**31 - 1
"""Kernels index with 32 bits: an op refuses maps whose last element lies further than this."""


def pixel_stride(x: Tensor) -> int | None:
    """Return how many elements lie between neighbouring pixels of (N, C, H, W), or None where pixels are no such rows.

    Element (n, c, h, w) is then at ``((n * H + h) * W + w) * stride + c``. A channel slice ``x[:, a:b]`` of a channels_last map
    has the wider map's stride. Axes of size 1 say nothing, whatever strides PyTorch reports for them.
    """
    n, c, h, w = x.shape
    strides = x.stride()
    if c > 1 and strides[1] != 1:
        return None
    stride: int | None = None
    for size, inner, step in ((w, 1, strides[3]), (h, w, strides[2]), (n, h * w, strides[0])):
        if size <= 1:
            continue
        if step % inner:
            return None
        if stride is None:
            stride = step // inner
        elif step != stride * inner:
            return None
    if stride is None:
        return c
    return stride if stride >= c else None


def vector_width(*sizes: int) -> int:
    """Return the largest of 8, 4, 2 and 1 that divides all sizes: 8 values of 16 bits are one 16-byte access."""
    return next(v for v in (8, 4, 2, 1) if all(s % v == 0 for s in sizes))


def units(most: int, *maps: Tensor | None) -> tuple[int, ...]:
    """Return how many elements of maps of as many channels are a vector that every pixel begins on, and sizes in such vectors.

    Args:
        most: elements of a vector, a power of two.
        maps: (N, C, H, W); for None the first.

    Returns:
        The elements, the channels in vectors, and each map's pixel stride in vectors.
    """
    first = maps[0]
    assert first is not None
    c = first.shape[1]
    strides = [pixel_stride(first if m is None else m) or c for m in maps]
    v = math.gcd(most, c, *strides)
    return v, c // v, *(stride // v for stride in strides)


def empty_map(n: int, c: int, h: int, w: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised channels_last map on the device of `like`, in its dtype unless another is given."""
    return torch.empty((n, c, h, w), dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last)


def reachable(*maps: Tensor | None) -> bool:
    """Tell whether every element of every map lies within 32-bit reach."""
    return all(m is None or m.numel() == 0 or sum((s - 1) * t for s, t in zip(m.shape, m.stride(), strict=True)) <= LARGEST for m in maps)


def unreadable(*maps: Tensor | None, small: bool = True) -> str:
    """Return why kernels can't read or write maps, "" where they can; `small` says whether what else they index is."""
    if any(m is not None and pixel_stride(m) is None for m in maps):
        return "not in channels_last memory"
    return "" if small and reachable(*maps) else "larger than 32-bit indices reach"


def per_channel(x: Tensor, *vectors: Tensor | None, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> bool:
    """Tell whether vectors, those that are given, are contiguous, of one of these types and have a number for each channel of `x`."""
    return all(v is None or (v.shape == x.shape[1:2] and v.dtype in dtypes and v.is_contiguous()) for v in vectors)


def out_size(size: int, kernel: int, stride: int, before: int, after: int, dilation: int = 1) -> int:
    """Return the pixels that a window leaves of `size` pixels padded by `before` and `after`."""
    return (size + before + after - dilation * (kernel - 1) - 1) // stride + 1


def out_sizes(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int] = (1, 1)
) -> tuple[int, int]:
    """Return (OH, OW) that windows (KH, KW) leave of a map padded at (top, bottom, left, right)."""
    (_, _, h, w), (top, bottom, left, right) = x.shape, padding
    return out_size(h, kernel[0], stride[0], top, bottom, dilation[0]), out_size(w, kernel[1], stride[1], left, right, dilation[1])
