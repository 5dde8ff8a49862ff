"""How maps and sizes come into the ops that train: in rows of pixels, and for both axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.ops._layout import pixel_stride

Size = int | Sequence[int]
"""Pixels down and right, or one number for both."""


def rows(x: Tensor) -> Tensor:
    """Return a map whose pixels lie in rows, as kernels read it."""
    return x if pixel_stride(x) else x.contiguous(memory_format=torch.channels_last)


def as_map(tokens: Tensor) -> Tensor:
    """Return tokens (N, ..., C) as a map (N, C, L, 1) in channels_last memory."""
    n, *between, c = tokens.shape
    return tokens.reshape(n, math.prod(between), 1, c).contiguous().permute(0, 3, 1, 2)


def kept(x: Tensor | None) -> Tensor | None:
    """Return a map that was saved, if there is one, as kernels read it: a hook may have laid it out anew."""
    return None if x is None else rows(x)


def of_affine(sums: Tensor, affine: tuple[Tensor | None, Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of a BatchNorm's weight and bias, where there is one and it is needed, of sums for bias and weight."""
    return tuple(s.to(p.dtype) if p is not None and n else None for s, p, n in zip((sums[1], sums[0]), affine, needed, strict=True))


def pooled_from(size: Sequence[int], pool: dict[str, Any]) -> dict[str, Any]:
    """Return what the way back through a max pool needs to know of its window, and of the map of `size` that was pooled."""
    return {"size": size, **{name: pool[name] for name in ("kernel", "stride", "padding")}}


def around(padding: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return padding of both axes as that of all four sides."""
    return padding[0], padding[0], padding[1], padding[1]


def outline(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a channels_last map without data."""
    return torch.empty([*shape], dtype=dtype, device="meta").contiguous(memory_format=torch.channels_last)


def pair(value: Size) -> tuple[int, int]:
    """Return a size for both axes."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
