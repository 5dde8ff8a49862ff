"""How the ops of the way back through response normalisation cut maps: each program takes some pixels and channels of one image."""

from __future__ import annotations

from collections.abc import Iterable

import triton
from torch import Tensor

from zoo.kernels.ops._arguments import named

PROGRAMS = 792
"""Six for each of an H100's multiprocessors: GELU is computed again, and more warps hide its exponential."""
MANY = 1024
"""Pixels of an image from which on larger tiles were faster on an H200: 56 x 56 for one, 14 x 14 is less."""


def tiles(like: Tensor, sizes: Iterable[tuple[int, int, int]]) -> list[dict[str, int]]:
    """Return launch parameters: pixels and channels of a tile, parts that an image is cut into, and warps.

    Args:
        like: map (N, C, H, W).
        sizes: pixels, channels and warps, the best guess first; (64, 64, 8) comes before them where images are large.
    """
    n, c, h, w = like.shape
    large, found = (64, 64, 8), []
    for rows, width, warps in dict.fromkeys([large, *sizes] if h * w >= MANY else [*sizes, large]):
        block = min(width, max(16, triton.next_power_of_2(c)))
        parts = max(1, min(triton.cdiv(PROGRAMS, max(1, n * triton.cdiv(c, block))), triton.cdiv(h * w, rows), 64))
        found.append((rows, block, parts, warps))
    return named("pixels block parts warps", found)
