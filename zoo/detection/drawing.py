"""Photographs with the boxes and names of what was found on them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weights.whole import whole
from zoo.detection.detections import Detections
from zoo.images import lettering
from zoo.images.kinds import OPAQUE, WRITTEN
from zoo.images.preprocess import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

COLOURS = ("#e6194b", "#1f77d0", "#2a9d3a", "#b5179e", "#c45a00", "#008080", "#7b3ff2", "#a0522d", "#3a5a00", "#c2185b")
"""Of boxes by their class; white letters are readable on each."""
LETTERS = 0.028
"""Height of letters as a share of the photograph's shorter side."""
SMALLEST, LARGEST = 13, 64
"""Of letters, in pixels."""
VEIL = 0.45
"""How much of a mask's colour lies on the photograph."""


def drawn(photograph: Any, found: Detections) -> Image:
    """Draw what was found on a photograph, the most probable on top, in the photograph's own size.

    Args:
        photograph: what `detect` was given for it.
        found: its answer.

    Raises:
        BadImage: the photograph can't be read.
        ValueError: it has another size than the answer.
    """
    from PIL import Image, ImageDraw

    page = open_image(photograph, "RGB")
    if page.size != found.size:
        (width, height), (across, down) = page.size, found.size
        raise ValueError(f"the photograph has {width}x{height} pixels, and the answer is of one with {across}x{down}")
    page = page.copy()
    if found.masks is not None and len(found):
        page = Image.fromarray(_veiled(np.asarray(page), found))
    draw = ImageDraw.Draw(page)
    size = min(LARGEST, max(SMALLEST, round(LETTERS * min(page.size))))
    line = max(2, size // 7)
    for place in reversed(range(len(found))):
        ink = COLOURS[int(found.labels[place]) % len(COLOURS)]
        left, top, right, bottom = (round(float(edge)) for edge in found.boxes[place])
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=ink, width=line)
        if found.keypoints is not None:
            for x, y, _ in found.keypoints[place].tolist():
                draw.ellipse((x - line, y - line, x + line, y + line), fill=ink)
    taken: list[tuple[float, float, float, float]] = []
    for place in range(len(found)):  # above all boxes, so that no line crosses a name
        ink = COLOURS[int(found.labels[place]) % len(COLOURS)]
        text = f"{found.names[place]} {float(found.scores[place]):.0%}"
        _name(draw, page.size, found.boxes[place].tolist(), text, size, ink, taken)
    return page


def save(page: Image, path: str | os.PathLike[str]) -> Path:
    """Save a picture, whole or not at all; its name's ending says in which format.

    Raises:
        ValueError: nothing here writes such a format.
        OSError: it can't be written.
    """
    place = Path(path)
    kind = WRITTEN.get(place.suffix.lower())
    if kind is None:
        raise ValueError(f"a picture ends in {', '.join(WRITTEN)}, not '{place.name}'")
    options = {"quality": 92} if kind in OPAQUE and kind == "JPEG" else {}
    with whole(place) as unfinished:
        page.save(unfinished, kind, **options)
    return place


def _name(
    draw: Any, size: tuple[int, int], box: list[float], text: str, letters: int, ink: str, taken: list[tuple[float, float, float, float]]
) -> None:
    """Write a name on a ground of its colour: above its box, or where it hides no other: in it, at its foot, or lower and lower."""
    pad = max(2, letters // 4)
    width, height = min(float(size[0]), lettering.length(text, letters) + 2 * pad), float(letters + pad)
    left = min(max(0.0, box[0]), size[0] - width)
    places = [box[1] - height, box[1], box[3] - height, *(box[1] + step * height for step in range(1, 6))]
    inside = [top for top in places if 0 <= top <= size[1] - height] or [min(max(0.0, box[1]), size[1] - height)]
    grounds = [(left, top, left + width, top + height) for top in inside]
    ground = next((one for one in grounds if not any(_meet(one, other) for other in taken)), grounds[0])
    taken.append(ground)
    draw.rectangle(ground, fill=ink)
    middle = (ground[1] + ground[3]) / 2
    lettering.write(draw, left + pad, middle, lettering.shortened(text, letters, width - 2 * pad), letters, "#ffffff")


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _veiled(pixels: np.ndarray, found: Detections) -> np.ndarray:
    out = pixels.astype(np.float32)
    assert found.masks is not None
    for place in reversed(range(len(found))):
        ink = COLOURS[int(found.labels[place]) % len(COLOURS)]
        colour = np.array([int(ink[at : at + 2], 16) for at in (1, 3, 5)], np.float32)
        there = found.masks[place].cpu().numpy()
        out[there] = (1 - VEIL) * out[there] + VEIL * colour
    return out.round().astype(np.uint8)
