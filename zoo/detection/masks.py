"""The pixels of each thing: a small map of it, learnt inside its box and pasted onto the photograph."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import roi_align

from zoo.detection.resizing import Size

BORDER = 1
"""Pixels around a map, without which resizing would smear its edge."""


class MaskHead(nn.Sequential):
    """Four 3x3 convolutions on the crop of each box.

    Source:
        He et al. 2017, Figure 4 right: https://arxiv.org/abs/1703.06870.
    """

    def __init__(self, channels: int = 256, norm: bool = False) -> None:
        """Build it for crops of `channels`; with `norm`, BatchNorm follows the convolutions."""
        units: list[nn.Module] = []
        for _ in range(4):
            layers: list[nn.Module] = [nn.Conv2d(channels, channels, 3, padding=1, bias=not norm)]
            units.append(nn.Sequential(*layers, *([nn.BatchNorm2d(channels)] if norm else []), nn.ReLU()))
        super().__init__(*units)
        _initialise(self)


class MaskPredictor(nn.Sequential):
    """A map of twice the size for every class."""

    def __init__(self, num_classes: int, channels: int = 256) -> None:
        """Build it for crops of `channels`."""
        super().__init__()
        self.conv5_mask = nn.ConvTranspose2d(channels, channels, 2, 2)
        self.relu = nn.ReLU()
        self.mask_fcn_logits = nn.Conv2d(channels, num_classes, 1)
        _initialise(self)


def _initialise(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def mask_loss(logits: Tensor, boxes: list[Tensor], numbers: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    """Return the loss of the maps of boxes that have a true mask: cross-entropy of each pixel, of the true class's map alone.

    Args:
        logits: (N, K, M, M) for the boxes of all images.
        boxes: (N_i, 4) of each image.
        numbers: (N_i,): the number of the true box of each.
        targets: "labels" (T,) and "masks" (T, H, W) of each image, in pixels of the batch.
    """
    side = logits.shape[-1]
    wanted: list[Tensor] = []
    for some, number, target in zip(boxes, numbers, targets, strict=True):
        places = torch.cat([number[:, None].to(some), some], 1)
        wanted.append(roi_align(target["masks"][:, None].to(some), places, (side, side), 1.0)[:, 0])
    labels = torch.cat([target["labels"][number] for number, target in zip(numbers, targets, strict=True)])
    if not len(labels):
        return logits.sum() * 0
    return F.binary_cross_entropy_with_logits(logits[torch.arange(len(labels), device=labels.device), labels], torch.cat(wanted))


def paste(maps: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Put each map into its box on an empty photograph.

    Args:
        maps: (N, M, M), probabilities.
        boxes: (N, 4) in pixels of the photograph.
        size: height and width of the photograph.

    Returns:
        (N, H, W), the probability that each pixel belongs to the thing; 0 outside of the box.
    """
    if maps.is_cuda:
        return paste_at_once(maps, boxes, size)
    height, width = size
    out = maps.new_zeros((len(maps), height, width))
    padded = F.pad(maps, (BORDER,) * 4)
    for canvas, picture, (x1, y1, x2, y2) in zip(out, padded, _corners(boxes, maps.shape[-1]).tolist(), strict=True):
        resized = F.interpolate(picture[None, None], size=(max(y2 - y1 + 1, 1), max(x2 - x1 + 1, 1)), mode="bilinear")[0, 0]
        left, top, right, bottom = max(x1, 0), max(y1, 0), min(x2 + 1, width), min(y2 + 1, height)
        canvas[top:bottom, left:right] = resized[top - y1 : bottom - y1, left - x1 : right - x1]
    return out


def paste_at_once(maps: Tensor, boxes: Tensor, size: Size) -> Tensor:
    """Do as `paste` does without reading the boxes: the rows of a photograph are sums of a map's rows, and its columns of columns.

    A GPU need not be waited for, and does all maps in two products of matrices. It computes all pixels, of which most lie outside of their
    boxes: on a CPU that takes longer.
    """
    padded = F.pad(maps.float(), (BORDER,) * 4)
    x1, y1, x2, y2 = _corners(boxes, maps.shape[-1]).unbind(1)
    down, across = (_shares(first, last, side, padded.shape[-1]) for first, last, side in ((y1, y2, size[0]), (x1, x2, size[1])))
    return (down @ padded @ across.transpose(1, 2)).to(maps.dtype)


def _corners(boxes: Tensor, side: int) -> Tensor:
    """Return the whole pixels (N, 4) that a map of so many cells and its border cover, the last ones included."""
    half = (boxes[:, 2:] - boxes[:, :2]) * 0.5 * ((side + 2 * BORDER) / side)
    centre = (boxes[:, 2:] + boxes[:, :2]) * 0.5
    return torch.cat([centre - half, centre + half], 1).to(torch.int64)


def _shares(first: Tensor, last: Tensor, side: int, cells: int) -> Tensor:
    """Return how much of each cell a pixel of one side has, (N, pixels, cells), by lines between centres; nothing outside of the box."""
    at = torch.arange(side, device=first.device) - first[:, None]
    long = (last - first + 1).clamp(min=1)[:, None]
    place = ((at + 0.5) * (cells / long) - 0.5).clamp(0, cells - 1)
    near = (1 - (place[..., None] - torch.arange(cells, device=first.device)).abs()).clamp(min=0)
    return near * ((at >= 0) & (at < long))[..., None]
