"""Parts of photographs for training, drawn by seed and step alone: step 700 sees the same whether a run was interrupted or not.

It needs PyTorch and NumPy alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

ALIKE = 1.5
"""A picture's shorter side is kept at this many times the side of a crop, so that crops differ in scale."""
PERMUTED = 0.1
"""Share of the crops whose colours change places, where colours are varied."""


def crops(
    picture: Callable[[int], Tensor], count: int, *, step: int, batch: int, size: int, seed: int, vary_colours: bool, device: str = "cpu"
) -> Tensor:
    """Draw one step's photographs.

    Args:
        picture: returns a picture by its number, uint8 (3, H, W), on any device.
        count: of the pictures.
        step: of the run, from 0.
        batch: how many crops.
        size: their side in pixels.
        seed: of the run.
        vary_colours: whether brightness, contrast and saturation are changed at random too.
        device: where the crops are to be.

    Returns:
        float32 (batch, 3, size, size) of 0..255.
    """
    return torch.stack([_crop(picture, count, size, np.random.default_rng([seed, step, i]), vary_colours, device) for i in range(batch)])


def _crop(picture: Callable[[int], Tensor], count: int, size: int, draw: np.random.Generator, vary_colours: bool, device: str) -> Tensor:
    pixels = picture(int(draw.integers(count)))
    height, width = pixels.shape[1:]
    short = min(height, width)
    side = round(short * draw.uniform(min(1.0, size / short / ALIKE), 1.0)) if short > size else short
    side = min(short, max(8, side))
    top, left = int(draw.integers(height - side + 1)), int(draw.integers(width - side + 1))
    part = pixels[:, top : top + side, left : left + side].to(device).float()[None]
    if side != size:
        part = F.interpolate(part, (size, size), mode="bilinear", antialias=side > size, align_corners=False).clamp(0, 255)
    if draw.random() < 0.5:
        part = part.flip(3)
    return (_recoloured(part, draw) if vary_colours else part)[0]


def _recoloured(x: Tensor, draw: np.random.Generator) -> Tensor:
    """Change brightness, contrast and saturation by up to a third, and let the colours change places now and then."""
    bright, contrast, saturation = (float(draw.uniform(2 / 3, 4 / 3)) for _ in range(3))
    if draw.random() < PERMUTED:
        x = x[:, torch.from_numpy(draw.permutation(3)).to(x.device)]
    x = (x - x.mean()) * contrast + x.mean() * bright
    grey = x.mean(1, keepdim=True)
    return (grey + (x - grey) * saturation).clamp(0, 255)
