"""Curves and the confusion matrix as pictures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zoo.images.canvas import FAINT, GRID, INK, PAGE, SCALE, blank, font, length, write

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

COLOURS = ("#1a7f4b", "#4f8fcb", "#e08e2b", "#8d6bb8", "#b3261e")
WIDE, HIGH, LEFT, TOP, BOTTOM, RIGHT = 760, 300, 70, 46, 44, 24
CELL, MOST = 34, 40
"""Layout pixels of a cell of the confusion matrix, and classes up to which it has names and numbers."""


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
        x_name: what the axis is.
        log_x: whether it is logarithmic.
        mark: an x at which an upright line stands.

    Raises:
        ValueError: there is no point at all.
    """
    points = [p for curve in curves for p in curve.points if math.isfinite(p[1])]
    if not points:
        raise ValueError(f"there is nothing to draw for {title!r}")
    page, draw = blank(WIDE, HIGH)
    along = math.log10 if log_x else float
    low_x, high_x = min(along(x) for x, _ in points), max(along(x) for x, _ in points)
    ticks = _ticks(min(y for _, y in points), max(y for _, y in points))
    low, high = ticks[0], ticks[-1]

    def place(x: float, y: float) -> tuple[float, float]:
        share = (along(x) - low_x) / (high_x - low_x or 1)
        return LEFT + share * (WIDE - LEFT - RIGHT), HIGH - BOTTOM - (y - low) / (high - low) * (HIGH - TOP - BOTTOM)

    write(draw, 16, 20, title, 15, INK)
    for tick in ticks:
        y = place(points[0][0], tick)[1]
        _line(draw, [(LEFT, y), (WIDE - RIGHT, y)], GRID, 1)
        write(draw, LEFT - 8, y, f"{tick:g}", 11, FAINT, "rm")
    decades = range(math.ceil(low_x), math.floor(high_x) + 1)
    for tick in [10.0**d for d in decades] if log_x else [t for t in _ticks(low_x, high_x) if low_x <= t <= high_x]:
        write(draw, place(tick, low)[0], HIGH - BOTTOM + 14, f"{tick:g}", 11, FAINT, "mm")
    write(draw, (LEFT + WIDE - RIGHT) / 2, HIGH - 12, x_name, 11, FAINT, "mm")
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
        write(draw, right, 20, curve.name, 12, colour, "rm")
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
    margin = 40 + (max(length(_short(name), 11) for name in classes) if named else 0)
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
                write(draw, left + cell / 2, top + cell / 2, number, 11 if len(number) < 5 else 9, PAGE if part > 0.6 else INK, "mm")
    for index, name in enumerate(classes if named else ()):
        middle = margin + index * cell + cell / 2
        write(draw, margin - 6, middle, _short(name), 11, INK, "rm")
        _upright(page, middle, margin - 6, _short(name))
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


def _ticks(low: float, high: float) -> list[float]:
    """Choose round numbers around a range, three to nine of them."""
    if high - low < 1e-12:
        low, high = low - abs(low) * 0.5 - 1e-6, high + abs(high) * 0.5 + 1e-6
    unit = 10.0 ** math.floor(math.log10(high - low))
    step = next(s for s in (unit / 5, unit / 2, unit, 2 * unit) if (high - low) / s <= 7)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(step * i, 12) for i in range(first, last + 1)]


def _short(name: str) -> str:
    return name if len(name) <= 18 else f"{name[:17]}…"


def _line(draw: ImageDraw, points: Sequence[tuple[float, float]], colour: str, width: int) -> None:
    draw.line([(round(SCALE * x), round(SCALE * y)) for x, y in points], fill=colour, width=width * SCALE, joint="curve")


def _upright(page: Image, x: float, bottom: float, text: str) -> None:
    """Write upwards, for the names of columns."""
    from PIL import Image, ImageDraw

    width = math.ceil(font(11 * SCALE).getlength(text)) + 4
    strip = Image.new("RGB", (width, 14 * SCALE), PAGE)
    ImageDraw.Draw(strip).text((0, 7 * SCALE), text, INK, font(11 * SCALE), anchor="lm")
    page.paste(strip.rotate(90, expand=True), (round(SCALE * (x - 7)), round(SCALE * bottom) - width))
