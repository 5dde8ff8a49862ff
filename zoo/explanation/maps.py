"""A map that keeps its scale, and the way back onto the whole photograph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.explanation.geometry import Axis, View
from zoo.images.preprocess import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

CELLS = 28
"""A map of pixels is averaged to so many cells a side before its hottest region is looked for."""


@dataclass(frozen=True, slots=True)
class Region:
    """The hottest part of a map: the cells around its maximum that reach half of it.

    Attributes:
        box: left, top, right and bottom in the photograph's pixels.
        share: of all positive evidence, 0..1.
    """

    box: tuple[int, int, int, int]
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """Why a network gives one answer to one image: everything but the drawing of it, see `Explanation`.

    `Explanation` says what each attribute is.
    """

    raw: np.ndarray
    label: str
    wnid: str | None
    probability: float | None
    score: float
    method: str
    at: str
    error: float | None
    error_of: str
    note: str
    signed: bool
    slope: bool
    network: str
    name: str
    view: View
    rows: Axis
    columns: Axis
    image: Any

    @property
    def map(self) -> np.ndarray:
        """The map on the whole photograph, float32 (height, width), NaN outside of what the network saw; computed at each access."""
        return self.view.spread(self.raw, self.rows, self.columns)

    @property
    def seen(self) -> tuple[int, int, int, int]:
        """What the network saw: left, top, right and bottom in the photograph's pixels."""
        return self.view.seen

    @property
    def strength(self) -> np.ndarray:
        """What speaks for the label, float32 (h, w): the map's positive values, of slopes their sizes."""
        return np.abs(self.raw) if self.slope else self.raw.clip(0)

    @property
    def empty(self) -> bool:
        """Whether there is no evidence for the label: no value above zero."""
        return not bool((self.strength > 0).any())

    @property
    def peak(self) -> tuple[float, float]:
        """The place (x, y) of the map's maximum in the photograph's pixels."""
        row, column = np.unravel_index(int((self.strength if self.slope else self.raw).argmax()), self.raw.shape)
        return self.view.point(float(row), float(column), self.rows, self.columns)

    @property
    def region(self) -> Region | None:
        """The hottest region; None where there is no evidence."""
        if self.empty:
            return None
        cells, rows, columns = coarse(self.strength, self.rows, self.columns)
        found = around_peak(cells >= cells.max() / 2, np.unravel_index(int(cells.argmax()), cells.shape))
        places = np.argwhere(found)
        (top, left), (bottom, right) = places.min(0) - 0.5, places.max(0) + 0.5
        width, height = self.view.size
        ends = self.view.point(top, left, rows, columns), self.view.point(bottom, right, rows, columns)
        edges = [min(max(round(value), 0), side) for end in ends for value, side in zip(end, (width, height), strict=True)]
        return Region((edges[0], edges[1], edges[2], edges[3]), float(cells[found].sum() / cells.sum()))

    def photograph(self) -> Image:
        """Return the upright photograph, read anew."""
        return open_image(self.image, "RGB", self.name)

    def numbers(self) -> dict[str, Any]:
        """Return what can be said without a picture, for JSON."""
        region = self.region
        return {
            "image": self.name,
            "network": self.network,
            "label": self.label,
            "wnid": self.wnid,
            "probability": self.probability,
            "score": self.score,
            "method": self.method,
            "at": self.at,
            "error": self.error,
            "note": self.note,
            "seen": list(self.seen),
            "evidence": not self.empty,
            "box": list(region.box) if region else None,
            "share": region.share if region else None,
            "least": float(self.raw.min()),
            "most": float(self.raw.max()),
        }


def coarse(cells: np.ndarray, rows: Axis, columns: Axis) -> tuple[np.ndarray, Axis, Axis]:
    """Average a fine map to `CELLS` a side; a coarse one stays."""
    step = -(-max(cells.shape) // CELLS)
    if step <= 1:
        return cells, rows, columns
    height, width = cells.shape[0] // step, cells.shape[1] // step
    small = cells[: height * step, : width * step].reshape(height, step, width, step).mean((1, 3))
    middle = (step - 1) / 2
    found = [Axis(axis.first + axis.step * middle, axis.step * step) for axis in (rows, columns)]
    return small, found[0], found[1]


def around_peak(mask: np.ndarray, start: Any) -> np.ndarray:
    """Return the cells of a mask that are connected with one of them by edges."""
    found, todo = np.zeros_like(mask), [(int(start[0]), int(start[1]))]
    while todo:
        row, column = todo.pop()
        if 0 <= row < mask.shape[0] and 0 <= column < mask.shape[1] and mask[row, column] and not found[row, column]:
            found[row, column] = True
            todo += [(row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)]
    return found
