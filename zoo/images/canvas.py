"""What the project's pictures are drawn with: Pillow, which it has anyway, and the font that Pillow bundles; the same file everywhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from weights.whole import whole

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont

SCALE = 2
"""Pixels of the file to one of the layout: screens are dense."""
PAGE, GRID, INK, FAINT = "#ffffff", "#e6e9ec", "#1b1f23", "#59636e"


def blank(width: float, height: float) -> tuple[Image, ImageDraw]:
    """Return an empty picture of so many layout pixels, and what draws on it."""
    from PIL import Image, ImageDraw

    page = Image.new("RGB", (math.ceil(width * SCALE), math.ceil(height * SCALE)), PAGE)
    return page, ImageDraw.Draw(page)


def write(draw: ImageDraw, x: float, y: float, text: str, size: int, ink: str, anchor: str = "lm") -> None:
    """Write a line at a layout pixel; `anchor` is Pillow's, "lm" for the middle of the left edge."""
    draw.text((SCALE * x, SCALE * y), text, ink, font(size * SCALE), anchor=anchor)


def font(size: int) -> FreeTypeFont:
    """Return the font in a size of the file's pixels."""
    from PIL import ImageFont

    return ImageFont.load_default(size)  # pyright: ignore[reportReturnType]  # with a size it is the scalable font that Pillow bundles


def length(text: str, size: int) -> float:
    """Return how many layout pixels a line takes in a size of the layout."""
    return font(size * SCALE).getlength(text) / SCALE


def save(page: Image, path: Path) -> Path:
    """Save a picture as a PNG, whole or not at all.

    Raises:
        OSError: the PNG can't be written.
    """
    with whole(path) as unfinished:
        page.save(unfinished, "PNG", optimize=True)
    return path
