"""Points of each thing: a map of each point's place, learnt inside the thing's box."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class KeypointHead(nn.Sequential):
    """Eight 3x3 convolutions on the crop of each box.

    Source:
        He et al. 2017, section 5: https://arxiv.org/abs/1703.06870.
    """

    def __init__(self, in_channels: int = 256, channels: int = 512) -> None:
        """Build it for crops of `in_channels`."""
        layers: list[nn.Module] = []
        for index in range(8):
            layers += [nn.Conv2d(channels if index else in_channels, channels, 3, padding=1), nn.ReLU()]
        super().__init__(*layers)
        for layer in self:
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]


class KeypointPredictor(nn.Module):
    """A map of four times the size for every point."""

    def __init__(self, points: int, channels: int = 512) -> None:
        """Build it for crops of `channels`."""
        super().__init__()
        self.kps_score_lowres = nn.ConvTranspose2d(channels, points, 4, 2, 1)
        nn.init.kaiming_normal_(self.kps_score_lowres.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.kps_score_lowres.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, `points`, 4 * H, 4 * W) of crops (N, `channels`, H, W)."""
        return F.interpolate(self.kps_score_lowres(x), scale_factor=2.0, mode="bilinear", recompute_scale_factor=False)


def keypoint_loss(logits: Tensor, boxes: list[Tensor], numbers: list[Tensor], targets: list[dict[str, Tensor]]) -> Tensor:
    """Return the loss of the maps of boxes: cross-entropy over all places of each point that can be seen inside the box.

    Args:
        logits: (N, K, M, M) for the boxes of all images.
        boxes: (N_i, 4) of each image.
        numbers: (N_i,): the number of the true box of each.
        targets: "keypoints" (T, K, 3) of each image, in pixels of the batch: x, y and whether it can be seen.
    """
    side = logits.shape[-1]
    places: list[Tensor] = []
    inside: list[Tensor] = []
    for some, number, target in zip(boxes, numbers, targets, strict=True):
        points = target["keypoints"][number]
        start, end = some[:, None, :2], some[:, None, 2:]
        at = ((points[..., :2] - start) * (side / (end - start))).floor().long()
        at = torch.where(points[..., :2] == end, side - 1, at)  # its own border counts as inside
        seen = ((at >= 0) & (at < side)).all(-1) & (points[..., 2] > 0)
        places.append((at[..., 1] * side + at[..., 0]).flatten())
        inside.append(seen.flatten())
    seen = torch.cat(inside).nonzero()[:, 0]
    if not len(seen):
        return logits.sum() * 0
    return F.cross_entropy(logits.flatten(0, 1).flatten(1)[seen], torch.cat(places)[seen])


def place(maps: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """Find the points.

    Args:
        maps: (N, K, M, M).
        boxes: (N, 4).

    Returns:
        (N, K, 3), x and y in the boxes' pixels and 1; and the values (N, K) of the maps there, resized to the boxes.
    """
    found = maps.new_ones((len(maps), maps.shape[1], 3))
    scores = maps.new_zeros((len(maps), maps.shape[1]))
    sides = (boxes[:, 2:] - boxes[:, :2]).clamp(min=1)
    whole = sides.ceil()
    for index, (width, height) in enumerate(whole.long().tolist()):
        values = F.interpolate(maps[index][:, None], size=(height, width), mode="bicubic")[:, 0].flatten(1)
        best = values.argmax(1)
        at = torch.stack([best % width, best.div(width, rounding_mode="floor")], 1)
        found[index, :, :2] = (at + 0.5) * (sides[index] / whole[index]) + boxes[index, :2]
        scores[index] = values.gather(1, best[:, None])[:, 0]
    return found, scores
