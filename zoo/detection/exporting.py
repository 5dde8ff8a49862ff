"""Detectors as networks of tensors alone, any batch in and all boxes out: what exporters take."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.ops import nms, roi_align

from zoo.detection.anchors import flattened
from zoo.detection.box_codes import WEIGHTED, decode
from zoo.detection.dense import DenseDetector
from zoo.detection.learning import LearningDetector
from zoo.detection.rcnn import FasterRCNN
from zoo.detection.resizing import Target
from zoo.detection.ssd import SSD
from zoo.detection.suppression import clip, suppress


class AllBoxes(nn.Module):
    """Every box of a detector of one step, with the probability of every class, before any is dropped.

    Nothing in it depends on what is on the images. So it exports for any batch, and images without things are no special case.

    Example:
        >>> model = SSDlite320_MobileNet_V3_Large().eval()  # doctest: +SKIP
        >>> boxes, scores = AllBoxes(model)(torch.randn(2, 3, 320, 320))  # doctest: +SKIP
    """

    def __init__(self, model: LearningDetector) -> None:
        """Take the layers of a detector, in eval mode.

        Raises:
            TypeError: the detector has two steps, which `AllRegions` is for, or is no such detector.
        """
        super().__init__()
        if not isinstance(model, DenseDetector | SSD):
            raise TypeError(
                f"a {type(model).__name__} has no fixed number of boxes: AllRegions is for R-CNNs, and AllBoxes for RetinaNet, FCOS and SSD"
            )
        self.model: Any = model
        self._levels: dict[int, list[int]] = {}
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Compute all boxes.

        Args:
            images: (B, 3, H, W), normalised, of the size that `Resizing` gives.

        Returns:
            Boxes (B, N, 4), left, top, right and bottom in pixels of the images; and scores (B, N, K), 0..1, of the classes without
            SSD's background: column 0 is class 1 of SSD, class 0 of the others.
        """
        model = self.model
        size = (images.shape[2], images.shape[3])
        maps = model.maps(images)
        if isinstance(model, SSD):
            logits, codes = model.head.outputs(maps)
            boxes, scores = decode(codes, model.anchor_generator(size, maps[0]), WEIGHTED), logits.softmax(2)[..., 1:]
        else:
            logits, codes, central = model.outputs(maps)
            rows = [int(level.shape[1]) for level in logits]
            self._levels[sum(rows)] = rows
            start = torch.cat(model.anchor_generator(size, maps[0]))
            scores = model.scores(torch.cat(logits, 1), torch.cat(central, 1) if central else None)
            boxes = model.boxes(torch.cat(codes, 1), start)
        x1, y1, x2, y2 = boxes.unbind(-1)
        sides = [x1.clamp(0, size[1]), y1.clamp(0, size[0]), x2.clamp(0, size[1]), y2.clamp(0, size[0])]
        return torch.stack(sides, -1), scores

    def settle(self, boxes: Tensor, scores: Tensor, threshold: float, overlap: float) -> list[Target]:
        """Choose what is told of each image among all boxes, as the detector does; arguments are what `forward` returns.

        Returns:
            For each image "boxes", "scores" and "labels", the best first; none where there is nothing.

        Raises:
            ValueError: they are of images of another size than `forward` has seen, as tracing shows it one.
        """
        image, at, kind = (self._considered(scores) & (scores > threshold)).nonzero(as_tuple=True)
        where, score = boxes[image, at], scores[image, at, kind]
        labels = kind + (1 if isinstance(self.model, SSD) else 0)
        kept = suppress(where, score, labels, image, len(boxes), overlap, self.model.most)
        return [{"boxes": where[some], "scores": score[some], "labels": labels[some]} for some in kept]

    def _considered(self, scores: Tensor) -> Tensor:
        """Tell which scores (B, N, K) are among the best that a detector looks at: of each class with SSD, else of each level."""
        most = self.model.candidates
        best = torch.zeros_like(scores, dtype=torch.bool)
        if isinstance(self.model, SSD):
            return best.scatter_(1, scores.topk(min(most, scores.shape[1]), 1).indices, True)
        rows = self._levels.get(scores.shape[1])
        if rows is None:
            seen = ", ".join(map(str, self._levels)) or "none"
            raise ValueError(
                f"{scores.shape[1]} boxes an image belong to images of a size that this has not computed ({seen}); "
                "call it once on images of that size, zeros will do, so that it knows where each level of the pyramid begins"
            )
        of_levels = zip(best.split(rows, 1), scores.split(rows, 1), strict=True)
        chosen = [b.flatten(1).scatter(1, s.flatten(1).topk(min(most, s[0].numel()), 1).indices, True).view(s.shape) for b, s in of_levels]
        return torch.cat(chosen, 1)


class AllRegions(nn.Module):
    """Every proposal of an R-CNN with the box and the probability of every class, before any of these is dropped.

    How many there are depends on the images, and may be 0. So outputs are rows of all images, each with the number of its image, and it
    exports for any batch of images of the size that it was traced with.

    Example:
        >>> model = FasterRCNN_ResNet50_FPN().eval()  # doctest: +SKIP
        >>> boxes, scores, image = AllRegions(model)(torch.randn(2, 3, 800, 1088))  # doctest: +SKIP
    """

    def __init__(self, model: LearningDetector) -> None:
        """Take the layers of an R-CNN, in eval mode; masks and keypoints are left out.

        Raises:
            TypeError: the detector is no R-CNN.
        """
        super().__init__()
        if not isinstance(model, FasterRCNN):
            raise TypeError(f"a {type(model).__name__} has no proposals: AllBoxes is for detectors of one step, and this for R-CNNs")
        self.model: Any = model
        self.eval()

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute all regions.

        Args:
            images: (B, 3, H, W), normalised, of the size that `Resizing` gives.

        Returns:
            Boxes (N, K, 4), left, top, right and bottom in pixels of the images, and scores (N, K), 0..1, of the K classes without the
            background, column 0 is class 1; and (N,), the number of the image that each row lies in.
        """
        size = torch.tensor([images.shape[2], images.shape[3]], device=images.device)
        levels, logits, codes = self.model.maps(images)
        rpn = self.model.rpn
        anchors = rpn.anchor_generator((images.shape[2], images.shape[3]), logits)
        found = [flattened(x, 1)[..., 0] for x in logits], [flattened(x, 4) for x in codes]
        where, score, kind, image = rpn.candidates(*found, anchors, size)
        apart = (image * len(levels) * 2 + kind).to(where.dtype) * float(max(images.shape[2:]) + 1)
        kept = nms(where + apart[:, None], score, rpn.overlap)
        rank = (image[kept][:, None] == torch.arange(images.shape[0], device=images.device)).long().cumsum(0)
        kept = kept[rank.gather(1, image[kept][:, None])[:, 0] <= rpn.most]
        where, image = where[kept], image[kept]
        likely, coded = self.model.roi_heads.classify(self.crops(levels, where, image, (images.shape[2], images.shape[3])))
        boxes = clip(decode(coded, where[:, None], WEIGHTED), size)
        return boxes[:, 1:], likely.softmax(1)[:, 1:], image

    def crops(self, levels: list[Tensor], where: Tensor, image: Tensor, size: tuple[int, int]) -> Tensor:
        """Crop each region from the level that suits its size (Lin et al. 2016, equation 1), by one crop of every level."""
        places = torch.cat([image[:, None].to(where.dtype), where], 1)
        sides = (where[:, 2:] - where[:, :2]).prod(1).sqrt()
        steps = [2.0 ** round(math.log2(x.shape[-2] / size[0])) for x in levels]
        finest, coarsest = -math.log2(steps[0]), -math.log2(steps[-1])
        suits = (4 + torch.log2(sides / 224) + 1e-6).floor().clamp(finest, coarsest) - finest
        found = roi_align(levels[0], places, 7, steps[0], 2)
        for number, (level, step) in enumerate(zip(levels[1:], steps[1:], strict=True), start=1):
            found = torch.where((suits == number)[:, None, None, None], roi_align(level, places, 7, step, 2), found)
        return found

    def settle(self, boxes: Tensor, scores: Tensor, image: Tensor, count: int, threshold: float, overlap: float) -> list[Target]:
        """Choose the regions of each of `count` images, as the detector does. Arguments are what `forward` returns."""
        heads = self.model.roi_heads
        wide = (boxes[..., 2:] - boxes[..., :2] >= heads.smallest).all(-1)
        region, kind = ((scores > threshold) & wide).nonzero(as_tuple=True)
        where, score = boxes[region, kind], scores[region, kind]
        kept = suppress(where, score, kind + 1, image[region], count, overlap, heads.most)
        return [{"boxes": where[some], "scores": score[some], "labels": kind[some] + 1} for some in kept]
