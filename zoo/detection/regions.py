"""What is in each proposed region: its class, its box, and where wanted its pixels or its points."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import MultiScaleRoIAlign

from zoo.detection.assigning import NOTHING, UNSURE, assign, sample
from zoo.detection.box_codes import WEIGHTED, decode, encode
from zoo.detection.keypoints import KeypointHead, KeypointPredictor, keypoint_loss, place
from zoo.detection.masks import MaskHead, MaskPredictor, mask_loss
from zoo.detection.proposals import BETA
from zoo.detection.resizing import Batch, Outputs, Target
from zoo.detection.suppression import clip, suppress

WIDTH = 1024
"""Of the vector that a region becomes."""


class DenseBoxHead(nn.Module):
    """Two dense layers on the crop of each region (Lin et al. 2016, section 4.2)."""

    def __init__(self, channels: int, side: int) -> None:
        """Build it for crops (`channels`, `side`, `side`)."""
        super().__init__()
        self.fc6 = nn.Linear(channels * side**2, WIDTH)
        self.fc7 = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return (N, 1024)."""
        return F.relu(self.fc7(F.relu(self.fc6(x.flatten(1)))))


class ConvolutionalBoxHead(nn.Sequential):
    """Four convolutions with BatchNorm and a dense layer on the crop of each region (Li et al. 2021, https://arxiv.org/abs/2111.11429)."""

    def __init__(self, channels: int, side: int) -> None:
        """Build it for crops (`channels`, `side`, `side`)."""
        units = [
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()) for _ in range(4)
        ]
        super().__init__(*units, nn.Flatten(), nn.Linear(channels * side**2, WIDTH), nn.ReLU())
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


class BoxPredictor(nn.Module):
    """Logits of the classes, background first, and a box for each class."""

    def __init__(self, num_classes: int) -> None:
        """Build it for vectors of 1024 numbers."""
        super().__init__()
        self.cls_score = nn.Linear(WIDTH, num_classes)
        self.bbox_pred = nn.Linear(WIDTH, num_classes * 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (N, K) and codes (N, K, 4)."""
        return self.cls_score(x), self.bbox_pred(x).unflatten(1, (self.bbox_pred.out_features // 4, 4))  # exports for no rows, too


class Regions(nn.Module):
    """The second step of a detector: classes and boxes of the proposals, then masks or keypoints of what was found.

    Source:
        Ren et al. 2015; He et al. 2017, section 3: https://arxiv.org/abs/1703.06870.
    """

    most = 100
    """Things that are told of an image."""
    smallest = 1e-2

    def __init__(self, num_classes: int, levels: int, version: int = 1, masks: bool = False, points: int = 0) -> None:
        """Build it.

        Args:
            num_classes: with the background.
            levels: of the pyramid that crops are made of, the finest ones.
            version: torchvision's, 1 or 2, of the heads.
            masks: whether things have masks.
            points: keypoints of each thing.
        """
        super().__init__()
        names = [str(level) for level in range(levels)]
        self.box_roi_pool = MultiScaleRoIAlign(names, 7, 2)
        self.box_head = DenseBoxHead(256, 7) if version == 1 else ConvolutionalBoxHead(256, 7)
        self.box_predictor = BoxPredictor(num_classes)
        self.masks, self.points = masks, points
        if masks:
            self.mask_roi_pool = MultiScaleRoIAlign(names, 14, 2)
            self.mask_head = MaskHead(norm=version == 2)
            self.mask_predictor = MaskPredictor(num_classes)
        if points:
            self.keypoint_roi_pool = MultiScaleRoIAlign(names, 14, 2)
            self.keypoint_head = KeypointHead()
            self.keypoint_predictor = KeypointPredictor(points)

    def classify(self, crops: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (N, K) and codes (N, K, 4) of crops (N, C, 7, 7)."""
        return self.box_predictor(self.box_head(crops))

    def draw_masks(self, crops: Tensor) -> Tensor:
        """Return logits (N, K, 28, 28) of the masks of crops (N, C, 14, 14)."""
        return self.mask_predictor(self.mask_head(crops))

    def draw_points(self, crops: Tensor) -> Tensor:
        """Return maps (N, points, 56, 56) of the keypoints of crops (N, C, 14, 14)."""
        return self.keypoint_predictor(self.keypoint_head(crops))

    def forward(self, batch: Batch, levels: Sequence[Tensor], proposals: list[Tensor], threshold: float, overlap: float) -> list[Target]:
        """Return what is in the proposals of each image, in pixels of the batch; "maps" instead of masks, (N, 28, 28)."""
        named = {str(index): x for index, x in enumerate(levels)}
        logits, codes = self.classify(self.box_roi_pool(named, proposals, batch.sizes))
        found = self.choose(logits.softmax(1), codes, proposals, batch, threshold, overlap)
        boxes = [one["boxes"] for one in found]
        counts = [len(some) for some in boxes]
        if self.masks:
            maps = self.draw_masks(self.mask_roi_pool(named, boxes, batch.sizes)).sigmoid()
            labels = torch.cat([one["labels"] for one in found])
            maps = maps[torch.arange(len(labels), device=labels.device), labels]
            for one, some in zip(found, maps.split(counts), strict=True):
                one["maps"] = some
        if self.points:
            maps = self.draw_points(self.keypoint_roi_pool(named, boxes, batch.sizes))
            for one, some in zip(found, maps.split(counts), strict=True):
                one["keypoints"], one["keypoints_scores"] = place(some, one["boxes"])
        return found

    def choose(
        self, scores: Tensor, codes: Tensor, proposals: list[Tensor], batch: Batch, threshold: float, overlap: float
    ) -> list[Target]:
        """Choose the things of each image among the classes of its proposals; the background is none."""
        counts = torch.tensor([len(some) for some in proposals])
        image = torch.repeat_interleave(torch.arange(len(proposals)), counts).to(scores.device, non_blocking=True)
        sizes = torch.tensor(batch.sizes).to(scores.device, non_blocking=True)
        boxes = clip(decode(codes, torch.cat(proposals)[:, None], WEIGHTED), sizes[image][:, None])[:, 1:]
        likely = scores[:, 1:]
        wide = (boxes[..., 2:] - boxes[..., :2] >= self.smallest).all(-1)
        region, kind = ((likely > threshold) & wide).nonzero(as_tuple=True)
        where, score, image = boxes[region, kind], likely[region, kind], image[region]
        kept = suppress(where, score, kind + 1, image, len(proposals), overlap, self.most)
        return [{"boxes": where[some], "labels": kind[some] + 1, "scores": score[some]} for some in kept]

    def losses(self, batch: Batch, levels: Sequence[Tensor], proposals: list[Tensor], targets: list[Target]) -> Outputs:
        """Return the losses of 512 proposals of each image, at most a quarter of them on something; true boxes are proposals too."""
        named = {str(index): x for index, x in enumerate(levels)}
        proposals, numbers, labels, codes = self.draw(proposals, targets)
        logits, found = self.classify(self.box_roi_pool(named, proposals, batch.sizes))
        truth = torch.cat(labels)
        at = (truth > 0).nonzero()[:, 0]
        boxes = F.smooth_l1_loss(found[at, truth[at]], torch.cat(codes)[at], beta=BETA, reduction="sum") / len(truth)
        losses = {"loss_classifier": F.cross_entropy(logits, truth), "loss_box_reg": boxes}
        if not self.masks and not self.points:
            return losses
        positive = [some > 0 for some in labels]
        where = [some[kept] for some, kept in zip(proposals, positive, strict=True)]
        numbers = [some[kept] for some, kept in zip(numbers, positive, strict=True)]
        if self.masks:
            maps = self.draw_masks(self.mask_roi_pool(named, where, batch.sizes))
            losses["loss_mask"] = mask_loss(maps, where, numbers, targets)
        if self.points:
            maps = self.draw_points(self.keypoint_roi_pool(named, where, batch.sizes))
            losses["loss_keypoint"] = keypoint_loss(maps, where, numbers, targets)
        return losses

    @torch.no_grad()
    def draw(self, proposals: list[Tensor], targets: list[Target]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
        """Draw the proposals that learn: of each image their boxes, the numbers of their true boxes, their classes and their codes."""
        drawn: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] = ([], [], [], [])
        for some, target in zip(proposals, targets, strict=True):
            true = target["boxes"].to(some.dtype)
            boxes = torch.cat([some, true])
            number = assign(boxes, true, 0.5, 0.5)
            if not len(true):
                true, classes = some.new_zeros(1, 4), target["labels"].new_zeros(1)
            else:
                classes = target["labels"]
            label = classes[number.clamp(min=0)].masked_fill(number == NOTHING, 0).masked_fill(number == UNSURE, -1)
            kept = torch.cat(sample(label, 512, 0.25)).sort().values
            boxes, number = boxes[kept], number[kept].clamp(min=0)
            for into, what in zip(drawn, (boxes, number, label[kept], encode(true[number], boxes, WEIGHTED)), strict=True):
                into.append(what)
        return drawn
