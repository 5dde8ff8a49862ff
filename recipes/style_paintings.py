"""Style pictures that a seed paints: nobody else's work is in them. NumPy and Pillow are enough.

    python recipes/style_paintings.py FOLDER      # writes embers.png, leadlight.png and woodcut.png

- embers: strokes of a loaded brush along a flow field, in warm colours with some teal.
- leadlight: a window of coloured glass, each pane with its own grain, held by dark lead.
- woodcut: waves cut into a block and printed in indigo on cream paper, with a red sun.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

SIDE = 512


def noise(draw: np.random.Generator, side: int, octaves: tuple[int, ...], fall: float = 0.5) -> np.ndarray:
    """Return smooth noise (side, side) of mean 0 and standard deviation 1: grids of random numbers, enlarged and summed."""
    total = np.zeros((side, side), np.float32)
    for number, cells in enumerate(octaves):
        grid = Image.fromarray(draw.standard_normal((cells + 3, cells + 3)).astype(np.float32))
        total += fall**number * np.asarray(grid.resize((side, side), Image.Resampling.BICUBIC))
    return (total - total.mean()) / total.std()


def embers(seed: int = 1, side: int = SIDE) -> Image.Image:
    """Paint 9,000 strokes, from broad to fine, along a field of noise."""
    draw = np.random.default_rng(seed)
    angle = 1.6 * noise(draw, side, (2, 4, 8))
    tone = noise(draw, side, (2, 4, 8, 16))
    palette = np.array(
        [(40, 18, 34), (92, 20, 40), (160, 36, 32), (214, 78, 28), (240, 134, 36), (250, 190, 70), (255, 232, 168), (24, 92, 104)],
        np.float32,
    )
    canvas = Image.new("RGB", (side, side), (60, 20, 30))
    brush = ImageDraw.Draw(canvas)
    for width, count, length in ((20, 700, 60), (11, 2300, 44), (6, 3500, 32), (3, 2500, 22)):
        for _ in range(count):
            x, y = draw.uniform(0, side, 2)
            height = tone[int(y), int(x)]
            place = np.clip(3 + 1.7 * height + draw.normal(0, 0.55), 0, 6.999)
            low = int(place)
            colour = palette[low] + (place - low) * (palette[min(6, low + 1)] - palette[low])
            if draw.random() < 0.07:
                colour = palette[7] * draw.uniform(0.7, 1.6)
            bristles = max(2, width // 3)
            path = [(x, y)]
            for _ in range(length // 4):
                turn = angle[int(y) % side, int(x) % side]
                x, y = x + 4 * np.cos(turn), y + 4 * np.sin(turn)
                path.append((x, y))
            for bristle in range(bristles):  # a brush leaves ridges of slightly different colour
                off = (bristle - (bristles - 1) / 2) * width / bristles
                shade = np.clip(colour * draw.normal(1, 0.10), 0, 255).astype(int)
                nx, ny = (
                    -np.sin(angle[int(path[0][1]) % side, int(path[0][0]) % side]),
                    np.cos(angle[int(path[0][1]) % side, int(path[0][0]) % side]),
                )
                brush.line(
                    [(px + nx * off, py + ny * off) for px, py in path],
                    fill=tuple(shade),
                    width=max(2, width // bristles + 1),
                    joint="curve",
                )
    return canvas


def leadlight(seed: int = 2, side: int = SIDE) -> Image.Image:
    """Cut a window into panes around random points, colour each, and draw lead where two meet."""
    draw = np.random.default_rng(seed)
    points = draw.uniform(-20, side + 20, (330, 2)).astype(np.float32)
    rows, columns = np.mgrid[:side, :side].astype(np.float32)
    rows, columns = rows + 3 * noise(draw, side, (12, 24)), columns + 3 * noise(draw, side, (12, 24))
    distance = np.sqrt((rows[..., None] - points[:, 0]) ** 2 + (columns[..., None] - points[:, 1]) ** 2)
    nearest = distance.argpartition(1, -1)[..., :2]
    two = np.sort(np.take_along_axis(distance, nearest, -1), -1)
    pane = distance.argmin(-1)
    jewels = np.array(
        [
            (18, 60, 160),
            (10, 120, 170),
            (12, 134, 96),
            (60, 160, 60),
            (230, 180, 30),
            (226, 110, 24),
            (190, 30, 40),
            (120, 30, 120),
            (236, 226, 190),
        ]
    )
    colours = jewels[draw.integers(len(jewels), size=len(points))] * draw.uniform(0.75, 1.2, (len(points), 1))
    light = 1 + 0.12 * noise(draw, side, (4, 32, 96), 0.7) + 0.18 * np.exp(-two[..., 0] / 14)
    glass = colours[pane] * light[..., None]
    lead = np.clip((two[..., 1] - two[..., 0] - 2.2) / 1.6, 0, 1)[..., None]
    solder = np.array((26, 24, 30)) * (1 + 0.25 * noise(draw, side, (64,))[..., None])
    return Image.fromarray(np.clip(glass * lead + solder * (1 - lead), 0, 255).astype(np.uint8))


def woodcut(seed: int = 3, side: int = SIDE) -> Image.Image:
    """Print lines of ink whose breadth is the tone, along the crests of waves."""
    draw = np.random.default_rng(seed)
    rows, columns = np.mgrid[:side, :side].astype(np.float32) / side
    swell = 0.10 * np.sin(2 * np.pi * (1.2 * columns + 0.15 * noise(draw, side, (2, 4)))) + 0.05 * noise(draw, side, (2, 4, 8))
    height = rows + swell * (0.5 + rows)
    tone = np.clip(0.5 + 0.28 * noise(draw, side, (3, 6, 12)) + 0.25 * np.sin(2 * np.pi * 4 * height), 0.05, 0.98)
    wave = np.sin(2 * np.pi * 46 * height + 0.5 * noise(draw, side, (24, 48)))
    grain = 0.05 * noise(draw, side, (128,))
    ink = np.clip((2 * tone - 1 - wave + grain) * 4 + 0.5, 0, 1)
    foam = np.clip((noise(draw, side, (6, 12, 24)) - 1.35) * 6, 0, 1) * (rows > 0.2)
    ink = ink * (1 - foam)
    paper = np.array((240, 228, 200)) * (1 + 0.02 * noise(draw, side, (96,))[..., None])
    mixed = np.clip((noise(draw, side, (3, 6)) + 0.4) * 0.7, 0, 1)[..., None]
    indigo = np.array((22, 36, 92)) * (1 - mixed) + np.array((30, 104, 140)) * mixed
    sun = np.clip((0.11 - np.hypot(rows - 0.2, columns - 0.72)) * 120, 0, 1)[..., None]
    paper = paper * (1 - sun) + np.array((206, 60, 44)) * sun
    picture = paper * (1 - ink[..., None]) + indigo * ink[..., None]
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(0.5))


PAINTINGS = {"embers": embers, "leadlight": leadlight, "woodcut": woodcut}
"""Each picture by its name."""


def main(folder: Path) -> None:
    """Paint all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, paint in PAINTINGS.items():
        paint().save(folder / f"{name}.png")
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
