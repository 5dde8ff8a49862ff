"""Pictures of segmentations: the photograph under the colours of its classes, and a legend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from zoo.images.lettering import length, shortened, write
from zoo.images.preprocess import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

OPACITY = 0.6
PAGE, INK = "#ffffff", "#1b1f23"
SHOWN = 12
"""Classes in a legend."""


def palette(count: int) -> np.ndarray:
    """Return colours of classes, uint8 (`count`, 3), that differ as much as they can, as those of PASCAL VOC do; class 0 is black.

    Source:
        The development kit of PASCAL VOC 2012: the bits of a class's number, three at a time, are the high bits of its colour.
    """
    numbers = np.arange(count)
    found = np.zeros((count, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            found[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    return found


def coloured(photograph: Any, classes: np.ndarray, legend: Sequence[str], areas: Mapping[str, float]) -> Image:
    """Draw a map of classes (H, W) over its photograph; the rest is as in `Segmentation`, and so is what it raises."""
    from PIL import Image, ImageDraw

    picture = open_image(photograph, "RGB")
    height, width = classes.shape
    if picture.size != (width, height):
        own = "x".join(map(str, picture.size))
        raise ValueError(f"the segmentation is of a photograph of {width}x{height} pixels, and this one has {own}")
    colours = palette(len(legend))
    pixels = np.asarray(picture, np.float32)
    over = np.where(classes[..., None] > 0, (1 - OPACITY) * pixels + OPACITY * colours[classes], pixels).astype(np.uint8)
    size = max(12, min(32, height // 24))
    rows: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    room = 0.0
    for name, share in list(areas.items())[:SHOWN]:
        text = shortened(f"{name} {share:.0%}", size, width - 3 * size)
        room += length(text, size) + 3 * size
        if room > width and rows[-1]:
            rows.append([])
            room = length(text, size) + 3 * size
        rows[-1].append((text, tuple(int(value) for value in colours[legend.index(name)])))
    page = Image.new("RGB", (width, height + (len(rows) * 2 + 1) * size), PAGE)
    page.paste(Image.fromarray(over), (0, 0))
    draw = ImageDraw.Draw(page)
    for row, entries in enumerate(rows):
        x, y = float(size), height + (2 * row + 1.5) * size
        for text, colour in entries:
            draw.rectangle((x, y - size / 2, x + size, y + size / 2), fill=colour)
            write(draw, x + 1.5 * size, y, text, size, INK)
            x += length(text, size) + 3 * size
    return page
