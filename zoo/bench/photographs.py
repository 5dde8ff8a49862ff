"""Photographs to measure on: generated ones, and as many of any as a run needs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from zoo.images.kinds import is_image, unreadable

SIZE = 500, 375
"""Of a generated photograph: ImageNet's usual size."""
QUALITY = 90


def photographs(folder: Path, count: int) -> None:
    """Write pictures with the spectrum of photographs as JPEG, in two folders."""
    from PIL import Image

    from zoo.kernels.comparing.sample_images import natural_images

    width, height = SIZE
    for start in range(0, count, 64):
        block = natural_images((min(64, count - start), 3, height, width), torch.device("cpu"))
        low, high = block.amin((1, 2, 3), keepdim=True), block.amax((1, 2, 3), keepdim=True)
        pixels = (255 * (block - low) / (high - low)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        for number, array in enumerate(pixels, start):
            # every generated block is alike: a shift makes each picture another file
            path = folder / ("even", "odd")[number % 2] / f"{number:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(array, number, axis=1)).save(path, quality=QUALITY)


def repeated(folder: Path, into: Path, count: int) -> Path:
    """List the images of class folders again and again, by links, until there are `count`; every way reads and decodes each of them."""
    files = sorted(path for path in folder.glob("*/*") if is_image(path.name) and not unreadable(path.name) and path.is_file())
    if not files:
        raise ValueError(f"{folder} holds no class folders of images")
    for number in range(count):
        file = files[number % len(files)]
        link = into / file.parent.name / f"{number // len(files):04d}-{file.name}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file.absolute())
    return into
