"""From a map's cells to the pixels of the photograph: receptive fields, then the crop and the resizing undone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels, from the upper left corner."""


@dataclass(frozen=True, slots=True)
class Axis:
    """Where the cells of one axis lie in the network's image.

    Attributes:
        first: pixel of the middle of cell 0; pixel i reaches from i - 0.5 to i + 0.5.
        step: pixels between neighbours.
    """

    first: float
    step: float

    @classmethod
    def even(cls, cells: int, pixels: int) -> Axis:
        """Divide the image into equal cells."""
        step = pixels / cells
        return cls((step - 1) / 2, step)

    def weights(self, cells: int, pixels: np.ndarray) -> np.ndarray:
        """Return what each cell contributes to each pixel: (pixels, cells), linear between the cells' middles, constant outside."""
        place = np.clip((pixels - self.first) / self.step, 0, cells - 1)
        low = np.minimum(place.astype(np.int64), max(cells - 2, 0))
        share = (place - low).astype(np.float32)
        found = np.zeros((len(pixels), cells), np.float32)
        rows = np.arange(len(pixels))
        found[rows, low] = 1 - share
        if cells > 1:
            found[rows, low + 1] += share
        return found


@dataclass(frozen=True, slots=True)
class View:
    """What a network saw of a photograph.

    Attributes:
        size: of the upright photograph, (width, height) in pixels.
        box: the part that became the network's image; it may reach beyond a photograph that the crop padded.
        image: (width, height) of the network's image in pixels.
    """

    size: tuple[int, int]
    box: Box
    image: tuple[int, int]

    @property
    def seen(self) -> tuple[int, int, int, int]:
        """The part of the photograph that was seen, in whole pixels: those whose middle lies in the box."""
        left, top, right, bottom = self.box
        width, height = self.size
        return max(0, round(left)), max(0, round(top)), min(width, round(right)), min(height, round(bottom))

    def pixels(self, axis: int) -> np.ndarray:
        """Tell where the seen columns (axis 0) or rows (1) lie in the network's image, in its pixels."""
        low, high = self.box[axis], self.box[axis + 2]
        middles = np.arange(self.seen[axis], self.seen[axis + 2]) + 0.5
        return (middles - low) / (high - low) * self.image[axis] - 0.5

    def spread(self, cells: np.ndarray, rows: Axis, columns: Axis) -> np.ndarray:
        """Lay a map's cells on the photograph: float32 (height, width), NaN where the network saw nothing."""
        width, height = self.size
        left, top, right, bottom = self.seen
        whole = np.full((height, width), np.nan, np.float32)
        down = rows.weights(cells.shape[0], self.pixels(1))
        across = columns.weights(cells.shape[1], self.pixels(0))
        whole[top:bottom, left:right] = down @ cells.astype(np.float32) @ across.T
        return whole

    def point(self, row: float, column: float, rows: Axis, columns: Axis) -> tuple[float, float]:
        """Return the place (x, y) of a cell's middle in the photograph's pixels."""
        across, down = columns.first + columns.step * column, rows.first + rows.step * row
        left, top, right, bottom = self.box
        return left + (across + 0.5) / self.image[0] * (right - left), top + (down + 0.5) / self.image[1] * (bottom - top)
