"""How a map is cut into tiles for what is summed or applied by channel.

Tiles are rows of pixels by columns of channels, columns a power of two. Where the channels are none and the map is dense, several
pixels lie side by side in one wide row, so that no lane idles and every access begins on a 16-byte border: 100 channels are 16 pixels
of 100 channels, 25 times 64 columns. A column then always belongs to one channel, its remainder by the number of channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
from torch import Tensor

from zoo.kernels.ops._layout import pixel_stride

MOST_PIXELS = 64
"""Pixels in one wide row: more would leave rows too few to share out."""

MOST_PARTIALS = 1024
"""Rows of partial sums, which a second kernel adds: as many as it holds in registers."""

SMS = 132
"""Streaming multiprocessors of an H100 or H200, which launches are made to fill."""


@dataclass(frozen=True)
class Cut:
    """Rows and columns of maps of one shape.

    Attributes:
        pixels: pixels in one row.
        width: columns, `pixels` times the channels.
        rows: rows, the last one maybe not whole.
        whole: rows that are whole.
        total: elements where rows are dense, else 0.
        columns: columns of a tile, a power of two.
        vector: elements that every row's start is aligned to.
        run: columns side by side that are always channels side by side, if the first one divides by it.
        steps: how far apart a map's rows are, in vectors; one a map.
    """

    pixels: int
    width: int
    rows: int
    whole: int
    total: int
    columns: int
    vector: int
    run: int
    steps: tuple[int, ...]

    @property
    def blocks(self) -> int:
        """Tiles beside each other."""
        return triton.cdiv(self.width, self.columns)

    @property
    def ragged(self) -> bool:
        """Whether the last tile reaches beyond the columns."""
        return self.width % self.columns != 0

    def constants(self, rows: int, unroll: int) -> dict[str, int | bool]:
        """Return the compile-time constants of a kernel that loads `unroll` tiles of `rows` rows at once."""
        shape = {"V": self.vector, "RAGGED": self.ragged, "FOLD": self.total > 0}
        return shape | {"BR": rows, "BC": self.columns, "U": unroll}


def cut(columns: int, *maps: Tensor) -> Cut:
    """Cut maps of one shape, at most the wanted columns wide.

    Args:
        columns: columns of a tile, a power of two.
        maps: (N, C, H, W), channels_last or channel slices of such maps.

    Returns:
        The cut.
    """
    n, c, h, w = maps[0].shape
    count, strides = n * h * w, [pixel_stride(m) or c for m in maps]
    widest = 16 // max(m.element_size() for m in maps)
    while columns > 16 and columns > triton.next_power_of_2(c * count):
        columns //= 2
    pixels = math.lcm(c, columns) // c
    if all(s == c for s in strides) and pixels <= min(MOST_PIXELS, max(1, count // 2)):
        width = pixels * c
        vector = math.gcd(widest, width)
        rows, whole, steps = triton.cdiv(count, pixels), count // pixels, (width // vector,) * len(maps)
        return Cut(pixels, width, rows, whole, count * c, columns, vector, math.gcd(vector, c), steps)
    columns = min(columns, triton.next_power_of_2(c))
    vector = math.gcd(widest, c, *strides)
    return Cut(1, c, count, count, 0, columns, vector, vector, tuple(s // vector for s in strides))


def tile_rows(cut: Cut, warps: int, itemsize: int, unroll: int) -> tuple[int, int]:
    """Return the rows of a tile in which each thread has 16 bytes, and how many of them are loaded at once."""
    most = triton.next_power_of_2(cut.rows)
    rows = max(1, min(32 * warps * (16 // itemsize) // cut.columns, most))
    return rows, max(1, min(unroll, most // rows))


def shares(cut: Cut, rows: int, programs: int) -> int:
    """Return how many programs share the rows of a column block, each with `rows` of them at a time.

    All blocks together have no more than are wanted: as many as the device holds at once, and a few more would come when they are done.
    """
    return max(1, min(triton.cdiv(cut.rows, rows), programs // cut.blocks, MOST_PARTIALS // cut.pixels))


def second_reading(*maps: Tensor | None) -> int:
    """Return the bytes of maps that don't stay in a 50 MB L2 cache between two readings."""
    moved = sum(m.numel() * m.element_size() for m in maps if m is not None)
    return max(0, moved - 50_000_000)
