"""Of boxes that overlap, the best of each class: non-maximum suppression of a whole batch at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import batched_nms

from zoo.detection import greedy


def suppress(boxes: Tensor, scores: Tensor, kinds: Tensor, images: Tensor, count: int, overlap: float, most: int) -> list[Tensor]:
    """Drop every box that overlaps a better one of the same kind in the same image, and return the numbers of the rest.

    Args:
        boxes: (N, 4) of all images, as x1, y1, x2, y2.
        scores: (N,).
        kinds: (N,): classes, or levels of a pyramid. Boxes of different kinds leave each other alone.
        images: (N,): the number of the image that each box lies in.
        count: of images.
        overlap: intersection over union above which the worse of two goes.
        most: boxes that are kept in an image.

    Returns:
        For each image, indices into N, best score first. On a GPU the whole batch is chosen from at once, and how often that waits for
        the device does not depend on how many images there are.
    """
    if boxes.device.type == "cpu":
        found: list[Tensor] = []
        for image in range(count):
            here = (images == image).nonzero()[:, 0]
            found.append(here[batched_nms(boxes[here], scores[here], kinds[here], overlap)[:most]])
        return found
    return suppress_at_once(boxes, scores, kinds, images, count, overlap, most)


def suppress_at_once(boxes: Tensor, scores: Tensor, kinds: Tensor, images: Tensor, count: int, overlap: float, most: int) -> list[Tensor]:
    """Do the same by one call for the whole batch, which a GPU has in little more time than for one image; a CPU has not."""
    if not len(boxes):
        return [images[:0]] * count
    kept = greedy.suppress(boxes, scores, images * (kinds.max() + 1) + kinds, overlap)
    kept = kept[images[kept].argsort(stable=True)]
    each = torch.bincount(images[kept], minlength=count).tolist()
    return [some[:most] for some in kept.split(each)]


def clip(boxes: Tensor, sizes: Tensor) -> Tensor:
    """Cut boxes (..., 4) off at the borders of images whose heights and widths are `sizes`, (..., 2)."""
    height, width = sizes[..., 0:1], sizes[..., 1:2]
    most = torch.cat([width, height, width, height], -1).to(boxes.dtype)
    return torch.minimum(boxes.clamp(min=0), most)
