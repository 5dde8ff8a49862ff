"""Pictures of explanations: overlays in the photograph's own size, and sheets with their scales."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from zoo.explanation.maps import Explained
from zoo.images.canvas import save
from zoo.images.lettering import shortened, write
from zoo.prediction.contact_sheet import CARD, EDGE, FAINT, FRAME, INK, PAGE

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

INFERNO = "000004 1b0c41 4a0c6b 781c6d a52c60 cf4446 ed6925 fb9b06 f7d13d fcffa4"
AGAINST_FOR = "053061 2166ac 4393c3 92c5de f7f7f7 f4a582 d6604d b2182b 67001f"
"""Colours at equal distances: of strength, and of evidence against and for, white between (ColorBrewer's RdBu)."""
DARK = 0.45
"""Brightness of what the network did not see."""
MOST = 0.85
"""Opacity of the strongest colour."""
SPARSE = 99.5
"""A map of pixels is drawn up to this percentile: single pixels would leave the rest dark."""
FINE = 64
"""With more cells a side, a map's points are too small for a photograph's colours: the photograph is drawn pale and grey."""
WIDTH, HEIGHT = 300, 225
GAP, PAD, LINE, BAR, TITLE = 14, 10, 19, 12, 16


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a sheet.

    Attributes:
        picture: drawn on the left.
        name: under it.
        cards: the explanations beside it.
    """

    picture: Image | None
    name: str
    cards: Sequence[Explained]


def row(cards: Sequence[Explained], name: str | None = None, picture: bool = True) -> Row:
    """Make a row of explanations of one image; without `picture`, only the name stands on the left, and nothing if that is empty."""
    return Row(cards[0].photograph() if picture else None, Path(cards[0].name).name if name is None else name, cards)


def colours(table: str, steps: int = 256) -> np.ndarray:
    """Return a table of colours, uint8 (steps, 3), linear between those that are named."""
    named = np.array([[int(one[i : i + 2], 16) for i in (0, 2, 4)] for one in table.split()], np.float32)
    place = np.linspace(0, len(named) - 1, steps)
    return np.stack([np.interp(place, np.arange(len(named)), named[:, c]) for c in range(3)], 1).round().astype(np.uint8)


def scale(shown: Explained) -> float:
    """Return the value that has the strongest colour; 0 where nothing is drawn."""
    strength = np.abs(shown.raw) if shown.signed else shown.raw.clip(0)
    return float(np.percentile(strength, SPARSE) if shown.at == "input" else strength.max())


def overlaid(shown: Explained) -> Image:
    """Draw a map over its photograph; see `Explanation.overlay`."""
    from PIL import Image

    photograph = np.asarray(shown.photograph()).copy()
    left, top, right, bottom = shown.seen
    inside = photograph[top:bottom, left:right].copy()
    photograph = (photograph * np.float32(DARK)).astype(np.uint8)
    most = scale(shown)
    if most > 0:
        view = shown.view
        part = shown.rows.weights(shown.raw.shape[0], view.pixels(1)) @ shown.raw.astype(np.float32)
        part = part @ shown.columns.weights(shown.raw.shape[1], view.pixels(0)).T
        part = (part / most).clip(-1 if shown.signed else 0, 1)
        table = colours(AGAINST_FOR if shown.signed else INFERNO)
        index = ((part + 1) / 2 if shown.signed else part) * 255
        if max(shown.raw.shape) > FINE:
            grey = inside.astype(np.float32).mean(2, keepdims=True)
            inside = np.repeat(grey * np.float32(0.3) + np.float32(0.7 * 255), 3, 2)
        alpha = (np.abs(part) * np.float32(MOST))[..., None]
        inside = (inside * (1 - alpha) + table[index.round().astype(np.uint8)] * alpha).round().astype(np.uint8)
    photograph[top:bottom, left:right] = inside
    if (left, top, right, bottom) != (0, 0, *shown.view.size):
        _frame(photograph, left, top, right, bottom)
    return Image.fromarray(photograph)


def _frame(pixels: np.ndarray, left: int, top: int, right: int, bottom: int) -> None:
    """Draw a white line inside of a box, 1 pixel for each 400 of the photograph's longer side."""
    thick = max(1, round(max(pixels.shape[:2]) / 400))
    for part in (np.s_[top : top + thick, left:right], np.s_[bottom - thick : bottom, left:right]):
        pixels[part] = 255
    for part in (np.s_[top:bottom, left : left + thick], np.s_[top:bottom, right - thick : right]):
        pixels[part] = 255


def save_sheet(rows: Sequence[Sequence[Explained] | Row], path: str | os.PathLike[str], heading: str = "") -> Path:
    """Save a sheet as a PNG, whole or not at all: one row for each image, or `Row`s.

    Raises:
        ValueError: the path doesn't end in .png, or there are no rows.
        OSError: it can't be written.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"a sheet is a PNG file, got {path.name}; name it {path.stem}.png")
    if not rows:
        raise ValueError("a sheet needs at least one explanation, got none")
    return save(drawn([one if isinstance(one, Row) else row(one) for one in rows], heading), path)


def drawn(rows: Sequence[Row], heading: str = "") -> Image:
    """Draw rows of explanations: the photograph on the left, a card with its scale for each explanation."""
    from PIL import Image, ImageDraw

    width, height = WIDTH + 2 * PAD, HEIGHT + 2 * PAD + BAR + 5 * LINE
    most = max(len(one.cards) for one in rows)
    top = 44 if heading else GAP
    size = GAP + (most + 1) * (width + GAP), top + len(rows) * (height + GAP)
    page = Image.new("RGB", size, PAGE)
    draw = ImageDraw.Draw(page)
    if heading:
        write(draw, GAP, top / 2, shortened(heading, 18, size[0] - 2 * GAP), 18, INK)
    for index, one in enumerate(rows):
        y = top + index * (height + GAP)
        for column in range(len(one.cards) + 1):
            if not (column or one.picture or one.name):  # the row before goes on
                continue
            x = GAP + column * (width + GAP)
            draw.rounded_rectangle((x, y, x + width - 1, y + height - 1), 8, fill=CARD, outline=EDGE)
            draw.rectangle((x + PAD, y + PAD, x + PAD + WIDTH - 1, y + PAD + HEIGHT - 1), fill=FRAME)
            if column:
                _card(page, draw, x + PAD, y + PAD, one.cards[column - 1])
            else:
                _first(page, draw, x + PAD, y + PAD, one)
    return page


def _first(page: Image, draw: ImageDraw, x: int, y: int, one: Row) -> None:
    shown = one.cards[0]
    if one.picture is not None:
        _paste(page, x, y, one.picture)
    else:
        write(draw, x + WIDTH / 2, y + HEIGHT / 2, shortened(one.name, 22, WIDTH - 10), 22, INK, "m")
    width, height = shown.view.size
    lines = [one.name, f"{width} x {height} pixels", f"seen: {_seen(shown)}", f"by {shown.network}"]
    for index, line in enumerate(lines if one.picture is not None else lines[3:]):
        write(draw, x, y + HEIGHT + PAD + LINE * index + 8, shortened(line, 13, WIDTH), 13, INK if index == 0 else FAINT)


def _seen(shown: Explained) -> str:
    left, top, right, bottom = shown.seen
    if (left, top, right, bottom) == (0, 0, *shown.view.size):
        return "all of it"
    return f"{right - left} x {bottom - top} from ({left}, {top}), the frame"


def _card(page: Image, draw: ImageDraw, x: int, y: int, shown: Explained) -> None:
    _paste(page, x, y, overlaid(shown))
    y += HEIGHT + PAD
    most = scale(shown)
    chance = "" if shown.probability is None else f"  {shown.probability:.1%}"
    if shown.label == "similarity":
        chance = f"  {shown.score:.3f}"
    if most > 0 and not (shown.empty and not shown.signed):
        table = colours(AGAINST_FOR if shown.signed else INFERNO, WIDTH - 130)
        bar = np.repeat(table[None], BAR, 0)
        from PIL import Image

        page.paste(Image.fromarray(bar), (x + 65, y + 2))
        ends = f"{-most:.3g}" if shown.signed else "0", f"{most:.3g}"
        write(draw, x + 60, y + 8, ends[0], 12, FAINT, "r")
        write(draw, x + WIDTH - 60, y + 8, ends[1], 12, FAINT)
        if shown.signed and shown.empty:
            write(draw, x, y + BAR + 12 + 3 * LINE, "no positive evidence", 13, "#b35900")
    else:
        write(draw, x, y + 8, "no positive evidence", 14, "#b35900")
    lines = [f"{shown.label}{chance}", f"{shown.method} at {shown.at}"]
    if shown.error is not None:
        lines.append(f"error {shown.error:.2%}")
    if shown.note:
        lines.append(shown.note)
    for index, line in enumerate(lines):
        size, ink = (15, INK) if index == 0 else (12, FAINT)
        write(draw, x, y + BAR + 14 + LINE * index, shortened(line, size, WIDTH), size, ink)


def _paste(page: Image, x: int, y: int, picture: Image) -> None:
    from PIL.Image import Resampling

    factor = min(WIDTH / picture.width, HEIGHT / picture.height)
    size = max(1, round(picture.width * factor)), max(1, round(picture.height * factor))
    small = picture.resize(size, Resampling.NEAREST if factor >= 3 else Resampling.LANCZOS)
    page.paste(small, (x + (WIDTH - small.width) // 2, y + (HEIGHT - small.height) // 2))
