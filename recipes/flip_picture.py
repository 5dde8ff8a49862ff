"""Draw docs/flip.png: true convolution against cross-correlation of one asymmetric kernel on one image.

    python recipes/flip_picture.py docs/flip.png

The kernel is a letter F and the image is dark but for three dots and a bar, so that every dot shows what an operation makes of the kernel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy.signal import convolve, correlate

from convert.steps import flip
from zoo.images.lettering import write

KERNEL = np.array(
    [
        [1, 1, 1, 1, 1],
        [1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 0, 0],
        [1, 0, 0, 0, 0],
    ],
    np.float64,
)
SIDE = 21
TILE, GAP, CAPTION, MARGIN = 210, 34, 46, 20
PAPER, INK, DIM = "#ffffff", "#1c1c1e", "#6a6a70"
DARK, BRIGHT = np.array([18, 32, 58.0]), np.array([255, 214, 92.0])


def scene() -> np.ndarray:
    """Place three dots and a bar on a dark image."""
    image = np.zeros((SIDE, SIDE))
    for row, column in ((4, 4), (4, 15), (14, 4)):
        image[row, column] = 1
    image[13:16, 15] = 0.6
    return image


def panels() -> list[tuple[np.ndarray, str, str]]:
    """Compute the six pictures with their captions."""
    image, turned = scene(), flip(KERNEL, "HW")
    convolved, correlated, mended = (
        convolve(image, KERNEL, "same"),
        correlate(image, KERNEL, "same"),
        correlate(image, turned, "same"),
    )
    difference = np.abs(convolved - mended).max()
    if difference > 1e-12:
        raise ValueError(f"the flip does not turn one into the other: they differ by {difference}")
    return [
        (image, "the image", "three dots and a bar"),
        (KERNEL, "the kernel K", "asymmetric, or nothing would show"),
        (turned, "flip(K)", "rows and columns reversed"),
        (convolved, "true convolution with K", "Flux's Conv, Theano: each dot is a K"),
        (correlated, "cross-correlation with K", "PyTorch: each dot is K turned round"),
        (mended, "cross-correlation with flip(K)", "the true convolution again"),
    ]


def tile(values: np.ndarray) -> Image.Image:
    """Draw numbers as squares, 0 dark and the greatest bright."""
    share = np.clip(values / values.max(), 0, 1)[..., None]
    pixels = np.round(DARK + share * (BRIGHT - DARK)).astype(np.uint8)
    return Image.fromarray(pixels).resize((TILE, TILE), Image.Resampling.NEAREST)


def draw() -> Image.Image:
    """Lay the panels out, the three that go in above the three that come out."""
    step = TILE + GAP
    height = 2 * (TILE + CAPTION) + 2 * MARGIN + GAP // 2
    sheet = Image.new("RGB", (3 * step - GAP + 2 * MARGIN + GAP, height), PAPER)
    pen = ImageDraw.Draw(sheet)
    for number, (values, name, words) in enumerate(panels()):
        left = MARGIN + GAP // 2 + number % 3 * step
        top = MARGIN + number // 3 * (TILE + CAPTION + GAP // 2)
        sheet.paste(tile(values), (left, top))
        write(pen, left, top + TILE + 14, name, 15, INK)
        write(pen, left, top + TILE + 32, words, 11, DIM)
    return sheet


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="the PNG to write")
    draw().quantize(64).save(parser.parse_args().path, optimize=True)


if __name__ == "__main__":
    main()
