"""Sizes of a picture, from small to large, and the ways from one to the next: the original program's, and DeepDream.jl's."""

from __future__ import annotations

import math

from torch import Tensor
from torch.nn import functional as F


def zoomed(x: Tensor, height: int, width: int) -> Tensor:
    """Resize maps (B, C, H, W) by lines from corner to corner, as SciPy's ``zoom(order=1)`` does, which the original program calls."""
    return x if x.shape[2:] == (height, width) else F.interpolate(x, (height, width), mode="bilinear", align_corners=True)


def sizes(height: int, width: int, octaves: int, scale: float) -> list[tuple[int, int]]:
    """List height and width of each octave, the largest first; each is made of the one before it.

    Example:
        >>> sizes(600, 800, 3, 1.4)
        [(600, 800), (429, 571), (306, 408)]
    """
    found = [(height, width)]
    for _ in range(octaves - 1):
        found.append((round(found[-1][0] / scale), round(found[-1][1] / scale)))
    return found


def fitting(height: int, width: int, scale: float, least: int) -> int:
    """Return how many octaves have sides of at least `least` pixels; 0 where even the picture is smaller."""
    count = 0
    while min(height, width) >= least:
        count += 1
        smaller = round(height / scale), round(width / scale)
        if smaller == (height, width):
            break
        height, width = smaller
    return count


def centre(x: Tensor, scale: float) -> Tensor:
    """Cut out the middle of maps and resize it to the whole, as DeepDream.jl makes octaves.

    Its indices count from 1 and include both ends, which makes the part a pixel larger than its share.
    """
    height, width = x.shape[2:]
    (top, bottom), (left, right) = (_part(length, 1 / scale) for length in (height, width))
    return F.interpolate(x[:, :, top:bottom, left:right], (height, width), mode="bilinear", align_corners=False)


def _part(length: int, share: float) -> tuple[int, int]:
    first, last = (min(max(math.ceil(length * (1 + way * share) / 2), 1), length) for way in (-1, 1))
    return first - 1, last


def nearer(x: Tensor, share: float) -> Tensor:
    """Zoom into the middle of pictures: each side loses `share` of its length, half at each end, as between the original's frames.

    Row i is read at ``(1 - share) * i + share * H / 2``, by lines between pixels.
    """
    height, width = x.shape[2:]
    for axis, length in ((2, height), (3, width)):
        at = (1 - share) * _counted(x, length) + share * length / 2
        low = at.floor().clamp(0, length - 1)
        part = (at - low).to(x.dtype).view([-1 if a == axis else 1 for a in range(4)])
        first = x.index_select(axis, low.long())
        second = x.index_select(axis, (low.long() + 1).clamp(max=length - 1))
        x = first.lerp(second, part.expand_as(first))
    return x


def _counted(x: Tensor, length: int) -> Tensor:
    import torch

    return torch.arange(length, device=x.device, dtype=torch.float64)
