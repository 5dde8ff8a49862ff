"""Photographs of any size as one batch, and what was found in it back on the photographs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Target = dict[str, Tensor]
"""What is true of one photograph, or was found there."""
Outputs = dict[str, Tensor]
"""Losses by name."""
Size = tuple[int, int]


class Batch(NamedTuple):
    """Normalised photographs, padded below and at the right to one size.

    Attributes:
        images: (B, C, H, W).
        sizes: height and width of each as it was resized, without what pads it.
        own: height and width of each photograph.
    """

    images: Tensor
    sizes: list[Size]
    own: list[Size]

    @property
    def padded(self) -> Size:
        """Height and width of the batch."""
        return self.images.shape[-2], self.images.shape[-1]


class Resizing(nn.Module):
    """The size rule of a detector: the shorter side to so many pixels while the longer one keeps below a bound, or to one size.

    It has no parameters, and computes on the device where the photographs are.
    """

    def __init__(
        self,
        shorter: Sequence[int],
        longer: int,
        mean: Sequence[float] = (0.485, 0.456, 0.406),
        std: Sequence[float] = (0.229, 0.224, 0.225),
        multiple: int = 32,
        fixed: Size | None = None,
    ) -> None:
        """Build it.

        Args:
            shorter: pixels of the shorter side; in train mode one of them is drawn for each photograph, else the last is taken.
            longer: most pixels of the longer side.
            mean: of each channel, on the range 0..1.
            std: of each channel, on the range 0..1.
            multiple: height and width of the batch are multiples of this.
            fixed: height and width of every image, whatever its shape.
        """
        super().__init__()
        self.shorter, self.longer, self.multiple, self.fixed = tuple(shorter), longer, multiple, fixed
        self.mean, self.std = tuple(mean), tuple(std)
        self.min_size = self.shorter if fixed is None else fixed  # by which `fast` chooses the image that it compares on

    def size_of(self, height: int, width: int) -> Size:
        """Return height and width to which a photograph is resized; in train mode the shorter side is drawn."""
        shorter = self.shorter[-1]
        if self.training:
            shorter = self.shorter[int(torch.empty(1).uniform_(0.0, float(len(self.shorter))).item())]
        if self.fixed is not None:
            return self.fixed
        scale = min(shorter / min(height, width), self.longer / max(height, width))
        return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))

    def forward(self, photographs: Sequence[Tensor], targets: Sequence[Target] | None = None) -> tuple[Batch, list[Target] | None]:
        """Make a batch of photographs.

        Args:
            photographs: (C, H, W) each, floating point, 0..1, of any sizes.
            targets: of each: "boxes" (N, 4) in its own pixels, and where there are, "masks" (N, H, W) and "keypoints" (N, K, 3).

        Returns:
            The batch, and the targets in pixels of it.
        """
        mean = torch.tensor(self.mean).view(-1, 1, 1)
        std = torch.tensor(self.std).view(-1, 1, 1)
        resized: list[Tensor] = []
        moved: list[Target] = []
        for index, photograph in enumerate(photographs):
            like = {"dtype": photograph.dtype, "device": photograph.device, "non_blocking": True}
            image = (photograph - mean.to(**like)) / std.to(**like)
            size = self.size_of(photograph.shape[-2], photograph.shape[-1])
            resized.append(F.interpolate(image[None], size=size, mode="bilinear", align_corners=False)[0])
            if targets is not None:
                moved.append(resize_target(targets[index], (photograph.shape[-2], photograph.shape[-1]), size))
        height, width = (math.ceil(max(image.shape[axis] for image in resized) / self.multiple) * self.multiple for axis in (-2, -1))
        batch = resized[0].new_zeros((len(resized), resized[0].shape[0], height, width))
        for row, image in zip(batch, resized, strict=True):
            row[:, : image.shape[-2], : image.shape[-1]].copy_(image)
        sizes = [(image.shape[-2], image.shape[-1]) for image in resized]
        own = [(photograph.shape[-2], photograph.shape[-1]) for photograph in photographs]
        return Batch(batch, sizes, own), moved if targets is not None else None

    def extra_repr(self) -> str:
        """Show the rule in the printed network."""
        return f"fixed={self.fixed}" if self.fixed else f"shorter={self.shorter[-1]}, longer={self.longer}, multiple={self.multiple}"


def resize_target(target: Target, old: Size, new: Size) -> Target:
    """Return what is true of a photograph of size `old` in the pixels of one of size `new`."""
    moved: dict[str, Any] = dict(target)
    moved["boxes"] = resize_boxes(target["boxes"], old, new)
    if "masks" in target:
        moved["masks"] = F.interpolate(target["masks"][:, None].float(), size=new)[:, 0].byte()
    if "keypoints" in target:
        moved["keypoints"] = resize_keypoints(target["keypoints"], old, new)
    return moved


def resize_boxes(boxes: Tensor, old: Size, new: Size) -> Tensor:
    """Return boxes (N, 4) of an image of size `old` on one of size `new`."""
    down, across = new[0] / old[0], new[1] / old[1]
    return boxes * torch.tensor([across, down, across, down], dtype=boxes.dtype).to(boxes.device, non_blocking=True)


def resize_keypoints(keypoints: Tensor, old: Size, new: Size) -> Tensor:
    """Return keypoints (N, K, 3), x, y and whether it can be seen, of an image of size `old` on one of size `new`."""
    return keypoints * torch.tensor([new[1] / old[1], new[0] / old[0], 1.0]).to(keypoints, non_blocking=True)
