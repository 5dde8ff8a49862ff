"""Curves and the confusion matrix as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zoo.images import lettering
from zoo.images.canvas import FAINT, GRID, INK, PAGE, SCALE, blank, length, shortened, write

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

COLOURS = ("#1a7f4b", "#4f8fcb", "#e08e2b", "#8d6bb8", "#b3261e")
WIDE, HIGH, LEFT, TOP, BOTTOM, RIGHT = 760, 300, 70, 46, 44, 24
CELL, MOST = 34, 40
"""Layout pixels of a cell of the confusion matrix, and classes up to which it has names and numbers."""
NAME, SMALL = 110, 11
"""Layout pixels that a class's name may take, and the size of the font that it is written in."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: what the legend calls it.
        points: (x, y) in order.
    """

    name: str
    points: Sequence[tuple[float, float]]


def chart(title: str, curves: Sequence[Curve], x_name: str, log_x: bool = False, mark: float | None = None) -> Image:
    """Draw lines over one axis.

    Args:
        title: its heading.
        curves: the lines; one without points only stands in the legend.
        x_name: what the axis counts, epochs or GPUs for example: its ticks are whole numbers.
        log_x: whether it is logarithmic instead, of any positive numbers.
        mark: an x at which an upright line stands.

    Raises:
        ValueError: there is no point at all.
    """
    points = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not points:
        raise ValueError(f"there is nothing to draw for {title!r}")
    page, draw = blank(WIDE, HIGH)
    along = math.log10 if log_x else float
    low_x, high_x = _ends([along(x) for x, _ in points], whole=not log_x)
    ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        share = (along(x) - low_x) / (high_x - low_x)
        return LEFT + share * (WIDE - LEFT - RIGHT), HIGH - BOTTOM - (y - low) / (high - low) * (HIGH - TOP - BOTTOM)

    write(draw, 16, 20, title, 15, INK)
    for tick in ticks:
        y = place(points[0][0], tick)[1]
        _line(draw, [(LEFT, y), (WIDE - RIGHT, y)], GRID, 1)
        write(draw, LEFT - 8, y, f"{tick:,.10g}", 11, FAINT, "r")
    for tick in _log_ticks(low_x, high_x) if log_x else [t for t in _ticks(low_x, high_x, least=1) if low_x <= t <= high_x]:
        write(draw, place(tick, low)[0], HIGH - BOTTOM + 14, f"{tick:g}" if log_x else f"{tick:,.0f}", 11, FAINT, "m")
    write(draw, (LEFT + WIDE - RIGHT) / 2, HIGH - 12, x_name, 11, FAINT, "m")
    if mark is not None:
        _line(draw, [place(mark, low), place(mark, high)], FAINT, 1)
        write(draw, place(mark, high)[0] + 4, TOP + 6, f"{mark:.3g}", 11, FAINT)
    right = WIDE - RIGHT
    for curve, colour in reversed(list(zip(curves, COLOURS, strict=False))):
        line = [place(x, y) for x, y in curve.points if math.isfinite(y)]
        if len(line) > 1:
            _line(draw, line, colour, 2)
        for x, y in line if len(line) <= 60 else ():
            draw.ellipse([round(SCALE * v) for v in (x - 2.5, y - 2.5, x + 2.5, y + 2.5)], fill=colour)
        write(draw, right, 20, curve.name, 12, colour, "r")
        right -= length(curve.name, 12) + 18
    return page


def matrix(confusion: np.ndarray, classes: Sequence[str]) -> Image:
    """Draw a confusion matrix: a row a class, darker where more of the row's images are.

    Args:
        confusion: int (classes, classes), row the truth, column the decision.
        classes: their names.
    """
    count, cell = len(classes), CELL if len(classes) <= MOST else max(1.0, 900 / len(classes))
    named = count <= MOST
    names = [shortened(name, SMALL, NAME) for name in classes if named]
    margin = 40 + (max(length(name, SMALL) for name in names) if named else 0)
    page, draw = blank(margin + count * cell + 24, margin + count * cell + 24)
    write(draw, 16, 18, "truth: rows; decision: columns", 12, FAINT)
    share = confusion / np.maximum(1, confusion.sum(1, keepdims=True))
    for row in range(count):
        for column in range(count):
            left, top = margin + column * cell, margin + row * cell
            part = float(share[row, column])
            colour = (26, 127, 75) if row == column else (179, 38, 30)
            fill = tuple(round(255 - (255 - c) * part**0.7) for c in colour) if part else (250, 250, 250)
            draw.rectangle([round(SCALE * v) for v in (left, top, left + cell - 1, top + cell - 1)], fill=fill)
            if named and confusion[row, column]:
                number = str(confusion[row, column])
                write(draw, left + cell / 2, top + cell / 2, number, 11 if len(number) < 5 else 9, PAGE if part > 0.6 else INK, "m")
    for index, name in enumerate(names):
        middle = margin + index * cell + cell / 2
        write(draw, margin - 6, middle, name, SMALL, INK, "r")
        _upright(page, middle, margin - 6, name)
    return page


def stacked(panels: Sequence[Image]) -> Image:
    """Put pictures of one width under each other."""
    from PIL import Image

    page = Image.new("RGB", (panels[0].width, sum(panel.height for panel in panels)), PAGE)
    top = 0
    for panel in panels:
        page.paste(panel, (0, top))
        top += panel.height
    return page


def _ends(values: Sequence[float], whole: bool) -> tuple[float, float]:
    """Return where an axis begins and ends. Counts get whole numbers, and the ends always differ."""
    low, high = (math.floor(min(values)), math.ceil(max(values))) if whole else (min(values), max(values))
    return (low, high) if low < high else (low - 1, high) if whole else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Choose round numbers around a range, three to nine of them; fewer where they lie no less than `least` apart."""
    if high - low < 1e-12:
        low, high = low - abs(low) * 0.5 - 1e-6, high + abs(high) * 0.5 + 1e-6
    unit = 10.0 ** math.floor(math.log10(high - low))
    step = max(least, next(s for s in (unit / 5, unit / 2, unit, 2 * unit) if (high - low) / s <= 7))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    """Choose powers of ten between two exponents, with their doubles and halves where there are fewer than three."""
    powers = [10.0**d for d in range(math.floor(low), math.ceil(high) + 1)]
    many = sum(low <= math.log10(p) <= high for p in powers) >= 3
    return [t for p in powers for t in ((p,) if many else (p, 2 * p, 5 * p)) if low - 1e-9 <= math.log10(t) <= high + 1e-9]


def _line(draw: ImageDraw, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
    draw.line([(round(SCALE * x), round(SCALE * y)) for x, y in points], fill=colour, width=width * SCALE, joint="curve")


def _upright(page: Image, x: float, bottom: float, text: str) -> None:
    """Write upwards, for the names of columns."""
    from PIL import Image, ImageDraw

    size = SMALL * SCALE
    width = math.ceil(lettering.length(text, size)) + 4
    strip = Image.new("RGB", (width, 14 * SCALE), PAGE)
    lettering.write(ImageDraw.Draw(strip), 0, 7 * SCALE, text, size, INK)
    page.paste(strip.rotate(90, expand=True), (round(SCALE * (x - 7)), round(SCALE * bottom) - width))
