"""A contact sheet: pictures with what the network saw in them, in one PNG."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weights.arguments import forgiving
from zoo.images.canvas import save
from zoo.images.lettering import length, shortened, write
from zoo.images.preprocess import open_image

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

    from zoo.prediction.predict import Prediction

WIDTH, HEIGHT = 240, 180
"""Of the frame that holds a picture, in pixels, as all lengths here."""
GAP, PAD, UNDER, ROW, TITLE, HEADING = 16, 12, 6, 33, 24, 48
SHOWN = 3
"""Predictions under a picture."""
PAGE, CARD, FRAME, EDGE, TRACK = "#f1f3f5", "#ffffff", "#e3e7eb", "#d5dade", "#e9ecef"
INK, FAINT, BEST, GUESS, OTHER = "#1b1f23", "#59636e", "#1a7f4b", "#b35900", "#8c97a3"


@dataclass(frozen=True, slots=True)
class Line:
    """A line under a picture that is no probability.

    Attributes:
        label: on the left; "" leaves the line to the figure.
        figure: on the right, with its name: "cosine 0.873".
        share: of the bar that is filled, 0..1.
    """

    label: str
    figure: str
    share: float


@forgiving
def contact_sheet(
    entries: Sequence[tuple[Any, Sequence[Prediction | Line]]],
    path: str | os.PathLike[str],
    *,
    titles: Sequence[str] | None = None,
    heading: str = "",
    columns: int | None = None,
) -> Path:
    """Draw pictures with their best three labels, probabilities and bars, and save them as a PNG.

    The file appears whole or not at all.

    Args:
        entries: a picture (a path, a PIL image or a uint8 array) and its predictions, the most probable first, or `Line`s of other figures.
        path: of the PNG, in a folder that is there.
        titles: a line above each picture's labels, its file name for example.
        heading: a line above all.
        columns: pictures in a row; None chooses.

    Returns:
        The path of the PNG.

    Raises:
        ValueError: there are no entries, not one title per entry, `columns` is below 1, or the path doesn't end in .png.
        BadImage: a picture can't be read.
        OSError: the PNG can't be written.
    """
    path = Path(path)
    if not entries:
        raise ValueError("a contact sheet needs at least one picture, got none")
    if titles is not None and len(titles) != len(entries):
        raise ValueError(f"a contact sheet needs one title for each of its {len(entries)} pictures, got {len(titles)}")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    if path.suffix.lower() != ".png":
        raise ValueError(f"a contact sheet is a PNG file, got {path.name}; name it {path.stem}.png")
    return save(_drawn(entries, titles, heading, columns or _columns(len(entries))), path)


def _columns(count: int) -> int:
    """Choose a page that is a little wider than high, with few empty places."""
    near = min(8, round(math.sqrt(1.4 * count)))
    return min(near, near + 1, key=lambda columns: -count % columns)


def _drawn(entries: Sequence[tuple[Any, Sequence[Prediction | Line]]], titles: Sequence[str] | None, heading: str, columns: int) -> Image:
    from PIL import Image, ImageDraw

    columns = min(columns, len(entries))
    width = WIDTH + 2 * PAD
    shown = min(SHOWN, max(len(predictions) for _, predictions in entries))
    height = HEIGHT + 2 * PAD + UNDER + (TITLE if titles else 0) + ROW * shown
    top = HEADING if heading else GAP
    rows = math.ceil(len(entries) / columns)
    page = Image.new("RGB", (GAP + columns * (width + GAP), top + rows * (height + GAP)), PAGE)
    draw = ImageDraw.Draw(page)
    if heading:
        _text(draw, GAP, top / 2, heading, 18, INK, page.width - 2 * GAP)
    for index, (picture, predictions) in enumerate(entries):
        x, y = GAP + index % columns * (width + GAP), top + index // columns * (height + GAP)
        draw.rounded_rectangle((x, y, x + width - 1, y + height - 1), 8, fill=CARD, outline=EDGE)
        x, y = x + PAD, y + PAD
        draw.rectangle((x, y, x + WIDTH - 1, y + HEIGHT - 1), fill=FRAME)
        small = _fitted(open_image(picture))
        page.paste(small, (x + (WIDTH - small.width) // 2, y + (HEIGHT - small.height) // 2))
        y += HEIGHT + UNDER
        if titles:
            _text(draw, x, y + TITLE / 2, titles[index], 13, FAINT, WIDTH)
            y += TITLE
        for rank, prediction in enumerate(predictions[:shown]):
            _row(draw, x, y + rank * ROW, prediction, best=rank == 0)
    return page


def _row(draw: ImageDraw, x: int, y: int, shown: Prediction | Line, *, best: bool) -> None:
    line = shown if isinstance(shown, Line) else Line(shown.label, f"{shown.probability:.1%}", shown.probability)
    guess = best and not isinstance(shown, Line) and shown.uncertain
    room = WIDTH - length(line.figure, 14)
    ink, bar = (INK, GUESS if guess else BEST) if best else (FAINT, OTHER)
    _text(draw, x + room, y + 12, line.figure, 14, ink, WIDTH)
    _text(draw, x, y + 12, f"uncertain: {line.label}" if guess else line.label, 14, ink, room - 8)
    draw.rectangle((x, y + 22, x + WIDTH - 1, y + 26), fill=TRACK)
    if filled := round(WIDTH * line.share):
        draw.rectangle((x, y + 22, x + filled - 1, y + 26), fill=bar)


def _fitted(picture: Image) -> Image:
    from PIL.Image import Resampling

    scale = min(WIDTH / picture.width, HEIGHT / picture.height)
    size = max(1, round(picture.width * scale)), max(1, round(picture.height * scale))
    return picture.resize(size, Resampling.NEAREST if scale >= 3 else Resampling.LANCZOS)  # a tiny picture shows its pixels


def _text(draw: ImageDraw, x: float, middle: float, text: str, size: int, ink: str, room: float) -> None:
    write(draw, x, middle, shortened(" ".join(text.split()), size, room), size, ink)
