"""Detectors of one step, RetinaNet and FCOS: classes and boxes at every pixel of a pyramid."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import generalized_box_iou_loss, sigmoid_focal_loss

from zoo.detection.anchors import Anchors, flattened
from zoo.detection.assigning import NOTHING, UNSURE, assign
from zoo.detection.box_codes import at_distances, decode, distances, encode
from zoo.detection.learning import PyramidDetector
from zoo.detection.resizing import Batch, Outputs, Target
from zoo.detection.suppression import clip, suppress

PRIOR = 0.01
"""Probability of an object that an untrained classifier gives: Lin et al. 2017, section 4.1."""


class Tower(nn.Module):
    """Four 3x3 convolutions and a last one, the same for all levels."""

    if TYPE_CHECKING:  # the last convolutions, whose names are given

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, channels: int, names: dict[str, int], norm: bool, nested: bool) -> None:
        """Build it.

        Args:
            channels: of the levels.
            names: the last convolutions' names, and how many channels each gives.
            norm: whether GroupNorm follows the four.
            nested: whether each of the four is a unit with its norm and its ReLU, RetinaNet's way, or all are in a row, FCOS's.
        """
        super().__init__()
        units = [self.unit(channels, norm, bias=not (norm and nested)) for _ in range(4)]
        self.conv = nn.Sequential(*units) if nested else nn.Sequential(*(layer for unit in units for layer in unit))
        for name, width in names.items():
            setattr(self, name, nn.Conv2d(channels, width, 3, padding=1))
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, std=0.01)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    @staticmethod
    def unit(channels: int, norm: bool, bias: bool) -> nn.Sequential:
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        return nn.Sequential(conv, nn.GroupNorm(32, channels), nn.ReLU()) if norm else nn.Sequential(conv, nn.ReLU())


class Classification(Tower):
    """Logits of each class for each box."""

    def __init__(self, channels: int, anchors: int, num_classes: int, norm: bool, nested: bool) -> None:
        super().__init__(channels, {"cls_logits": anchors * num_classes}, norm, nested)
        nn.init.constant_(self.cls_logits.bias, -math.log((1 - PRIOR) / PRIOR))

    def forward(self, levels: Sequence[Tensor]) -> list[Tensor]:
        """Return (B, A `num_classes`, H, W) for each level."""
        return [self.cls_logits(self.conv(x)) for x in levels]


class Regression(Tower):
    """Where each box lies, from its anchor; FCOS's also says how central the anchor is."""

    def __init__(self, channels: int, anchors: int, norm: bool, nested: bool, centred: bool = False) -> None:
        names = {"bbox_reg": anchors * 4} | ({"bbox_ctrness": anchors} if centred else {})
        super().__init__(channels, names, norm, nested)
        self.centred = centred

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return codes (B, A 4, H, W) and logits of centredness (B, A, H, W) for each level, of the latter none if no layer gives any."""
        codes: list[Tensor] = []
        central: list[Tensor] = []
        for level in levels:
            x = self.conv(level)
            codes.append(self.bbox_reg(x))
            if self.centred:
                codes[-1] = F.relu(codes[-1])
                central.append(self.bbox_ctrness(x))
        return codes, central


class DenseHead(nn.Module):
    """The two towers of a detector of one step."""

    def __init__(self, channels: int, anchors: int, num_classes: int, norm: bool, nested: bool, centred: bool) -> None:
        """Build it; see `Tower`."""
        super().__init__()
        self.classification_head = Classification(channels, anchors, num_classes, norm, nested)
        self.regression_head = Regression(channels, anchors, norm, nested, centred)

    def forward(self, levels: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return maps of logits, codes and centredness of each level."""
        return self.classification_head(levels), *self.regression_head(levels)


class DenseDetector(PyramidDetector):
    """What RetinaNet and FCOS share: of all boxes of a level the best, of all levels those that overlap none better."""

    at = ("C3", "C4", "C5")
    classifiers = ("head.classification_head.cls_logits",)

    most: ClassVar[int] = 100
    """Things that are told of an image."""
    candidates: ClassVar[int] = 1000
    """Boxes and classes of a level that are looked at."""

    anchor_generator: Anchors
    head: DenseHead

    def scores(self, logits: Tensor, central: Tensor | None) -> Tensor:
        """Return the probability of each class for each box, (B, N, K)."""
        raise NotImplementedError

    def boxes(self, codes: Tensor, anchors: Tensor) -> Tensor:
        """Return the boxes (..., 4) that codes (..., 4) mean."""
        raise NotImplementedError

    def losses(self, outputs: tuple[list[Tensor], ...], anchors: list[Tensor], targets: list[Target]) -> Outputs:
        """Return what training makes small."""
        raise NotImplementedError

    def maps(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return self.head(self.backbone(images))

    def outputs(self, maps: tuple[list[Tensor], ...]) -> tuple[list[Tensor], ...]:
        """Return for each level logits (B, N, K), codes (B, N, 4) and centredness (B, N, 1), box by box as anchors are."""
        return tuple([flattened(x, each) for x in some] for some, each in zip(maps, (self.num_classes, 4, 1), strict=True))

    def run(self, batch: Batch, targets: list[Target] | None, threshold: float, overlap: float) -> list[Target] | Outputs:
        """Return detections of each image in pixels of the batch; the losses in train mode."""
        maps = self.maps(batch.images)
        outputs = self.outputs(maps)
        anchors = self.anchor_generator(batch.padded, maps[0])
        if targets is not None:
            return self.losses(outputs, anchors, targets)
        return self.detections(outputs, anchors, batch, threshold, overlap)

    def detections(
        self, outputs: tuple[list[Tensor], ...], anchors: list[Tensor], batch: Batch, threshold: float, overlap: float
    ) -> list[Target]:
        """Choose the detections of each image."""
        logits, codes, central = outputs
        boxes: list[Tensor] = []
        scores: list[Tensor] = []
        labels: list[Tensor] = []
        for index, (level, start) in enumerate(zip(logits, anchors, strict=True)):
            classes = level.shape[-1]
            found = self.scores(level, central[index] if central else None).flatten(1)
            best, at = found.topk(min(self.candidates, found.shape[1]), 1)
            box = at.div(classes, rounding_mode="floor")
            boxes.append(self.boxes(codes[index].gather(1, box[..., None].expand(-1, -1, 4)), start[box]))
            scores.append(best)
            labels.append(at % classes)
        sizes = torch.tensor(batch.sizes).to(boxes[0].device, non_blocking=True)
        where, score, kind = clip(torch.cat(boxes, 1), sizes[:, None]), torch.cat(scores, 1), torch.cat(labels, 1)
        image, at = (score > threshold).nonzero(as_tuple=True)
        where, score, kind = where[image, at], score[image, at], kind[image, at]
        kept = suppress(where, score, kind, image, len(sizes), overlap, self.most)
        return [{"boxes": where[some], "scores": score[some], "labels": kind[some]} for some in kept]


class RetinaNet(DenseDetector):
    """Lin et al. 2017: the loss keeps many easy boxes from drowning the few hard ones; `version` 2 is torchvision's improved one."""

    paper = "https://arxiv.org/abs/1708.02002"
    most = 300

    version: ClassVar[int] = 1

    def pyramid_on(self) -> tuple[str, bool]:
        return "p5" if self.version == 1 else "c5", False

    def add_heads(self, num_classes: int) -> None:
        self.anchor_generator = Anchors([(side, int(side * 2 ** (1 / 3)), int(side * 2 ** (2 / 3))) for side in (32, 64, 128, 256, 512)])
        self.head = DenseHead(256, self.anchor_generator.per_pixel, num_classes, self.version == 2, nested=True, centred=False)

    def scores(self, logits: Tensor, central: Tensor | None) -> Tensor:
        return logits.sigmoid()

    def boxes(self, codes: Tensor, anchors: Tensor) -> Tensor:
        return decode(codes, anchors)

    def losses(self, outputs: tuple[list[Tensor], ...], anchors: list[Tensor], targets: list[Target]) -> Outputs:
        all_logits, all_codes, start = torch.cat(outputs[0], 1), torch.cat(outputs[1], 1), torch.cat(anchors)
        classification: list[Tensor] = []
        regression: list[Tensor] = []
        for target, logits, codes in zip(targets, all_logits, all_codes, strict=True):
            number = assign(start, target["boxes"], 0.4, 0.5, "ties")
            at = (number >= 0).nonzero()[:, 0]
            true = torch.zeros_like(logits)
            true[at, target["labels"][number[at]]] = 1.0
            sure = number != UNSURE
            classification.append(sigmoid_focal_loss(logits[sure], true[sure], reduction="sum") / max(1, len(at)))
            boxes = target["boxes"][number[at]]
            if self.version == 2:
                loss = generalized_box_iou_loss(decode(codes[at], start[at]), boxes, reduction="sum")
            else:
                loss = F.l1_loss(codes[at], encode(boxes, start[at]), reduction="sum")
            regression.append(loss / max(1, len(at)))
        count = max(1, len(targets))
        return {"classification": torch.stack(classification).sum() / count, "bbox_regression": torch.stack(regression).sum() / count}


class FCOS(DenseDetector):
    """Tian et al. 2019: no anchors but the pixels themselves, each of which says how far the sides of its box are."""

    paper = "https://arxiv.org/abs/1904.01355"
    threshold, overlap = 0.2, 0.6

    radius: ClassVar[float] = 1.5
    """How far from the middle of a true box a pixel may learn it, in strides."""

    def add_heads(self, num_classes: int) -> None:
        self.anchor_generator = Anchors([(8,), (16,), (32,), (64,), (128,)], (1.0,))
        self.head = DenseHead(256, 1, num_classes, norm=True, nested=False, centred=True)

    def scores(self, logits: Tensor, central: Tensor | None) -> Tensor:
        assert central is not None
        return (logits.sigmoid() * central.sigmoid()).sqrt()

    def boxes(self, codes: Tensor, anchors: Tensor) -> Tensor:
        return at_distances(codes, anchors)

    def assign(self, anchors: list[Tensor], true: Tensor) -> Tensor:
        """Return for each pixel the number of the smallest true box that it shall learn, or `NOTHING`: section 3.2."""
        start = torch.cat(anchors)
        if not len(true):
            return torch.full((len(start),), NOTHING, dtype=torch.int64, device=start.device)
        x, y = (start[:, :2] + start[:, 2:]).div(2)[:, :, None].unbind(1)
        stride = (start[:, 2] - start[:, 0])[:, None]
        x1, y1, x2, y2 = true.unbind(1)
        off = torch.stack([x - (x1 + x2) / 2, y - (y1 + y2) / 2]).abs().amax(0)
        sides = torch.stack([x - x1, y - y1, x2 - x, y2 - y])
        least, most = 4 * stride, 8 * stride
        least[: len(anchors[0])] = 0
        most[-len(anchors[-1]) :] = math.inf
        longest = sides.amax(0)
        fits = (off < self.radius * stride) & (sides.amin(0) > 0) & (longest > least) & (longest < most)
        preferred, number = (fits * (1e8 - (x2 - x1) * (y2 - y1))).max(1)
        return number.masked_fill(preferred < 1e-5, NOTHING)

    def losses(self, outputs: tuple[list[Tensor], ...], anchors: list[Tensor], targets: list[Target]) -> Outputs:
        logits, codes, central = (torch.cat(some, 1) for some in outputs)
        start = torch.cat(anchors).expand(len(targets), -1, -1)
        number = torch.stack([self.assign(anchors, target["boxes"]) for target in targets])
        learns = number >= 0
        true = torch.zeros_like(logits)
        boxes = start.clone()
        for index, target in enumerate(targets):
            at = number[index][learns[index]]
            true[index, learns[index].nonzero()[:, 0], target["labels"][at]] = 1.0
            boxes[index, learns[index]] = target["boxes"][at]
        boxes, start = boxes[learns], start[learns]
        left, top, right, bottom = distances(boxes, start).unbind(-1)
        across = torch.minimum(left, right) / torch.maximum(left, right)
        down = torch.minimum(top, bottom) / torch.maximum(top, bottom)
        count = max(1, len(boxes))
        centredness = F.binary_cross_entropy_with_logits(central[learns][:, 0], (across * down).sqrt(), reduction="sum")
        return {
            "classification": sigmoid_focal_loss(logits, true, reduction="sum") / count,
            "bbox_regression": generalized_box_iou_loss(at_distances(codes[learns], start), boxes, reduction="sum") / count,
            "bbox_ctrness": centredness / count,
        }
