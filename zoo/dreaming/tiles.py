"""How a large picture is cut: tiles with a halo, whose gradients together are those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """What a cut network needs of a picture.

    Attributes:
        step: pixels between neighbours of the coarsest map; tiles begin at its multiples, so that maps of tiles are parts of the map.
        before, after: pixels that an element at pixel 0 depends on: from ``-before`` to ``after``.
        exact: whether an element depends on these alone. With squeeze-and-excitation, attention or a norm over places it depends on the
            whole picture, and tiles are only like it.
        multiple: both sides of what the network takes are multiples of it.
        side: the one side that it takes, of a network for one size of images; else None.
        least: the smallest side that it takes.
    """

    step: int
    before: int
    after: int
    exact: bool
    multiple: int = 1
    side: int | None = None
    least: int = 1


@dataclass(frozen=True, slots=True)
class Span:
    """A tile on one axis: the network sees pixels `start` to `stop`; the tile answers for those from `first` to `last`."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of a picture.

    Attributes:
        rows, columns: of the picture.
        exact: whether the objective is masked to the tile's own elements, and all of the gradient counts; else all elements count, and
            the gradient of the tile's own pixels.
    """

    rows: Span
    columns: Span
    exact: bool


def padded(length: int, multiple: int) -> int:
    """Return the least multiple that is at least `length`."""
    return -(-length // multiple) * multiple


def tiles(height: int, width: int, core: int | None, reading: Reading) -> list[Tile]:
    """Cut a picture, whose sides are multiples of what the network asks for.

    Args:
        height: of the picture.
        width: of the picture.
        core: side of what a tile answers for; None keeps the picture whole where the network takes it.
        reading: what the network needs.
    """
    rows, columns = (list(_spans(length, core, reading)) for length in (height, width))
    exact = reading.exact and reading.side is None
    return [Tile(row, column, exact) for row in rows for column in columns]


def _spans(length: int, core: int | None, reading: Reading) -> Iterator[Span]:
    if reading.side is not None:  # windows of the network's own size; the last one is moved back into the picture
        for first in range(0, length, reading.side):
            start = min(first, length - reading.side)
            yield Span(start, start + reading.side, first, start + reading.side)
        return
    if core is None or core >= length:
        yield Span(0, length, 0, length)
        return
    core, step, first = padded(core, reading.step), reading.step, 0
    while first < length:
        start = max(0, (first - reading.before - step) // step * step)
        stop = min(length, padded(min(first + core, length) + reading.after + step, step))
        last = length if stop == length else first + core  # nothing more has to be read for the rest
        yield Span(start, stop, first, last)
        first = last
