"""Photographs of any size into a detector's image, as Darknet does it, and boxes back into the photograph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

GREY = 0.5


@dataclass(frozen=True, slots=True)
class Fit:
    """Where a photograph lies in the network's image.

    Attributes:
        size: width and height of the photograph in pixels.
        inner: width and height that it has in the network's image.
        image: width and height of that.
    """

    size: tuple[int, int]
    inner: tuple[int, int]
    image: tuple[int, int]

    @property
    def corner(self) -> tuple[int, int]:
        """Its left and top pixel there."""
        return (self.image[0] - self.inner[0]) // 2, (self.image[1] - self.inner[1]) // 2


def fit(size: tuple[int, int], image: tuple[int, int], letterbox: bool) -> Fit:
    """Say where a photograph goes: the whole image, or as much of it as keeps its shape, by whole numbers as Darknet reckons.

    Args:
        size: width and height of the photograph.
        image: width and height of the network's image.
        letterbox: whether its shape is kept.
    """
    if not letterbox:
        return Fit(size, image, image)
    (width, height), (across, down) = size, image
    wide = across / width < down / height
    inner = (across, height * across // width) if wide else (width * down // height, down)
    return Fit(size, (max(1, inner[0]), max(1, inner[1])), image)


def fitted(photographs: Sequence[Tensor], fits: Sequence[Fit], like: Tensor) -> Tensor:
    """Make the network's batch: resized bilinearly with the corners on the corners, 0..1, grey around.

    Args:
        photographs: uint8 (3, H, W) each.
        fits: of each.
        like: a parameter of the network, whose device and type the batch has.
    """
    across, down = fits[0].image
    batch = torch.full((len(fits), len(photographs[0]), down, across), GREY, device=like.device)
    for place, (photograph, one) in enumerate(zip(photographs, fits, strict=True)):
        pixels = photograph.to(like.device, torch.float32)[None] / 255
        if one.inner != one.size:
            pixels = F.interpolate(pixels, one.inner[::-1], mode="bilinear", align_corners=True)
        left, top = one.corner
        batch[place, :, top : top + one.inner[1], left : left + one.inner[0]] = pixels[0]
    return batch.to(like.dtype)


def unfitted(boxes: Tensor, places: Tensor, fits: Sequence[Fit]) -> Tensor:
    """Return boxes in their photographs' pixels.

    Args:
        boxes: (N, 4), left, top, right, bottom as shares of the network's image.
        places: int64 (N,), the photograph of each.
        fits: of all photographs.

    Returns:
        (N, 4), within the photographs.
    """
    image, inner, size = (
        torch.tensor([getattr(one, name) for one in fits], dtype=torch.float32, device=boxes.device) for name in ("image", "inner", "size")
    )
    image, inner, size = image[places].repeat(1, 2), inner[places].repeat(1, 2), size[places].repeat(1, 2)
    found = (boxes - (image - inner) / 2 / image) * image / inner * size
    return torch.minimum(found.clamp_min(0), size)
