"""Pictures of a training: photographs beside their paintings, and the curves of the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from zoo.images import canvas
from zoo.stylizing.painting import as_picture

if TYPE_CHECKING:
    from PIL.Image import Image

SHEETS, CURVES = "sheet-*.png", "curves.png"
CELL = 192
"""Side in pixels of a photograph on a sheet."""
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 260, 56, 34, 18, 34
"""Layout pixels of the curves, and of the room around them."""
LINES = {"style": "#c2410c", "content": "#0369a1"}


def name(step: int) -> str:
    """Name the sheet of a step."""
    return f"sheet-{step:06}.png"


def sheet(style: Image, photographs: Tensor, paintings: Tensor, path: Path) -> None:
    """Draw the style picture, then photographs above their paintings, (B, 3, H, W) of 0..255 both; whole or not at all."""
    from PIL import Image as Pillow

    page = Pillow.new("RGB", (CELL * (1 + len(photographs)), 2 * CELL), "white")
    scale = CELL / max(style.size)
    page.paste(style.resize([max(1, round(scale * side)) for side in style.size]), (0, 0))
    for row, images in enumerate((photographs, paintings.float())):
        for column, image in enumerate(images):
            page.paste(as_picture(image).resize((CELL, CELL)), (CELL * (column + 1), CELL * row))
    canvas.save(page, path)


def curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw style and content over the steps, on a logarithmic axis; 1 is a photograph that nobody painted, or another photograph."""
    page, draw = canvas.blank(WIDTH, HEIGHT)
    values = [max(1e-6, line[term]) for line in lines for term in LINES]
    low, high = math.floor(math.log10(min(values))), max(math.ceil(math.log10(max(values))), math.floor(math.log10(min(values))) + 1)
    steps = max(line["step"] for line in lines)

    def at(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - RIGHT) * step / steps
        y = TOP + (HEIGHT - TOP - BOTTOM) * (high - math.log10(max(1e-6, value))) / (high - low)
        return canvas.SCALE * x, canvas.SCALE * y

    for power in range(low, high + 1):
        draw.line([at(0, 10**power), at(steps, 10**power)], fill=canvas.GRID, width=canvas.SCALE)
        canvas.write(draw, LEFT - 8, at(0, 10**power)[1] / canvas.SCALE, f"{10**power:g}", 11, canvas.FAINT, "r")
    for place, (term, colour) in enumerate(LINES.items()):
        draw.line([at(line["step"], line[term]) for line in lines], fill=colour, width=2 * canvas.SCALE)
        canvas.write(draw, LEFT + 90 * place, TOP / 2, term, 13, colour)
    canvas.write(draw, WIDTH - RIGHT, HEIGHT - BOTTOM / 2, f"{steps:,} steps", 11, canvas.FAINT, "r")
    canvas.save(page, path)
