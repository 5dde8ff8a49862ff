"""Boxes that detectors start from: anchors at every pixel of a map, and SSD's default boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def flattened(x: Tensor, each: int) -> Tensor:
    """Return (B, H * W * A, `each`) of a head's map (B, A * `each`, H, W)."""
    return x.unflatten(1, (-1, each)).permute(0, 3, 4, 1, 2).flatten(1, 3)


def exact(like: Tensor) -> torch.dtype:
    """Return the dtype of boxes that codes of this tensor's dtype start from: half precision knows no pixel beyond 256 exactly."""
    return torch.promote_types(like.dtype, torch.float32)


class Anchors(nn.Module):
    """Boxes of some sizes and shapes around every pixel of each map.

    Source:
        Ren et al. 2015, section 3.1.1: https://arxiv.org/abs/1506.01497; a size for each level: Lin et al. 2016, section 4.1.
    """

    def __init__(self, sizes: Sequence[Sequence[float]], ratios: Sequence[float] = (0.5, 1.0, 2.0)) -> None:
        """Build them.

        Args:
            sizes: for each map, the roots of the boxes' areas in pixels of the padded image.
            ratios: heights over widths.
        """
        super().__init__()
        self.sizes, self.ratios = sizes, ratios

    @property
    def per_pixel(self) -> int:
        """Boxes around each pixel of a map."""
        return len(self.sizes[0]) * len(self.ratios)

    def around(self, sizes: Sequence[float], like: Tensor) -> Tensor:
        """Return the boxes (A, 4) around the origin, rounded to pixels; sizes change fastest."""
        dtype = exact(like)
        scales = torch.tensor(sizes, dtype=dtype)
        heights = torch.tensor(self.ratios, dtype=dtype).sqrt()
        w, h = ((side[:, None] * scales).flatten() for side in (1 / heights, heights))
        return (torch.stack([-w, -h, w, h], 1) / 2).round().to(like.device, non_blocking=True)

    def forward(self, size: tuple[int, int], maps: Sequence[Tensor]) -> list[Tensor]:
        """Return the boxes of each map, (H' * W' * A, 4) as x1, y1, x2, y2, for a batch padded to `size`, its height and width."""
        found: list[Tensor] = []
        for sizes, x in zip(self.sizes, maps, strict=True):
            height, width = x.shape[-2:]
            across = torch.arange(width, device=x.device, dtype=torch.int32) * (size[1] // width)
            down = torch.arange(height, device=x.device, dtype=torch.int32) * (size[0] // height)
            y, x0 = torch.meshgrid(down, across, indexing="ij")
            corners = torch.stack([x0, y, x0, y], -1).reshape(-1, 1, 4)
            found.append((corners + self.around(sizes, x)).reshape(-1, 4))
        return found


class DefaultBoxes(nn.Module):
    """SSD's boxes around every pixel of each map, in parts of the image.

    Source:
        Liu et al. 2015, section 2.2: https://arxiv.org/abs/1512.02325.
    """

    def __init__(self, ratios: Sequence[Sequence[float]], scales: Sequence[float], steps: Sequence[int] | None = None) -> None:
        """Build them.

        Args:
            ratios: for each map, widths over heights beside 1; each is taken both ways.
            scales: sides in parts of the image's, one for each map and one more.
            steps: pixels of the image between neighbours of each map; None divides the image by the map's size.
        """
        super().__init__()
        self.steps = steps
        self.shapes: list[list[tuple[float, float]]] = []
        for index, shapes in enumerate(ratios):
            side, between = scales[index], math.sqrt(scales[index] * scales[index + 1])
            found = [(side, side), (between, between)]
            for root in map(math.sqrt, shapes):
                found += [(side * root, side / root), (side / root, side * root)]
            self.shapes.append([(min(w, 1.0), min(h, 1.0)) for w, h in found])

    @property
    def per_pixel(self) -> list[int]:
        """Boxes around each pixel, of each map."""
        return [len(shapes) for shapes in self.shapes]

    def forward(self, size: tuple[int, int], maps: Sequence[Tensor]) -> Tensor:
        """Return the boxes of all maps, (N, 4) as x1, y1, x2, y2 in pixels of images of `size`, their height and width."""
        found: list[Tensor] = []
        for index, x in enumerate(maps):
            height, width = x.shape[-2:]
            down, across = (height, width) if self.steps is None else (size[0] / self.steps[index], size[1] / self.steps[index])
            cy = (torch.arange(height, device=x.device) + 0.5) / down
            cx = (torch.arange(width, device=x.device) + 0.5) / across
            y, x0 = torch.meshgrid(cy, cx, indexing="ij")
            shapes = torch.tensor(self.shapes[index], dtype=exact(x)).to(x.device, non_blocking=True)
            centres = torch.stack([x0, y], -1).reshape(-1, 1, 2).to(exact(x)).expand(-1, len(shapes), 2)
            half = 0.5 * shapes.expand_as(centres)
            found.append(torch.cat([centres - half, centres + half], -1).reshape(-1, 4))
        pixels = torch.tensor([size[1], size[0]] * 2).to(found[0].device, non_blocking=True)
        return torch.cat(found) * pixels
