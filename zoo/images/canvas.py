"""What charts are drawn with: Pillow, which the project has anyway, in layout pixels; `lettering` writes the text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from weights.whole import whole
from zoo.images import lettering

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

SCALE = 2
"""Pixels of the file to one of the layout: screens are dense."""
PAGE, GRID, INK, FAINT = "#ffffff", "#e6e9ec", "#1b1f23", "#59636e"


def blank(width: float, height: float) -> tuple[Image, ImageDraw]:
    """Return an empty picture of so many layout pixels, and what draws on it."""
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (math.ceil(width * SCALE), math.ceil(height * SCALE)), PAGE)
    return page, ImageDraw.Draw(page)


def write(draw: ImageDraw, x: float, y: float, text: str, size: int, ink: str, anchor: str = "l") -> None:
    """Write a line at a layout pixel: its left edge, middle or right edge, "l", "m" or "r", and half of its height lie there."""
    lettering.write(draw, SCALE * x, SCALE * y, text, SCALE * size, ink, anchor)


def length(text: str, size: int) -> float:
    """Return how many layout pixels a line takes in a size of the layout."""
    return lettering.length(text, SCALE * size) / SCALE


def shortened(text: str, size: int, room: float) -> str:
    """Return as much of a line as fits into so many layout pixels, with an ellipsis where some is left out."""
    return lettering.shortened(text, SCALE * size, SCALE * room)


def save(page: Image, path: Path) -> Path:
    """Save a picture as a PNG, whole or not at all.

    Raises:
        OSError: the PNG can't be written.
    """
    with whole(path) as unfinished:
        page.save(unfinished, "PNG", optimize=True)
    return path
