"""How maps and sizes come into the ops that train: in rows of pixels, and for both axes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.kernels.ops._layout import pixel_stride


def rows(x: Tensor) -> Tensor:
    """Return a map whose pixels lie in rows, as kernels read it."""
    return x if pixel_stride(x) else x.contiguous(memory_format=torch.channels_last)


def kept(x: Tensor | None) -> Tensor | None:
    """Return a map that was saved, if there is one, as kernels read it: a hook may have laid it out anew."""
    return None if x is None else rows(x)


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Return a size for both axes."""
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
