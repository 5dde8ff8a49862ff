"""Detectors of one step as a network of tensors alone, any batch in and all boxes out: what exporters take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.detection.box_codes import WEIGHTED, decode
from zoo.detection.dense import DenseDetector
from zoo.detection.learning import LearningDetector
from zoo.detection.resizing import Target
from zoo.detection.ssd import SSD
from zoo.detection.suppression import suppress


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
            TypeError: the detector has two steps, whose second depends on what the first finds, or is no such detector.
        """
        super().__init__()
        if not isinstance(model, DenseDetector | SSD):
            raise TypeError(
                f"a {type(model).__name__} can't be one network of tensors: what it crops depends on what it finds. RetinaNet, FCOS, SSD "
                "and SSDlite can"
            )
        self.model: Any = model
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
        """
        image, at, kind = (scores > threshold).nonzero(as_tuple=True)
        where, score = boxes[image, at], scores[image, at, kind]
        labels = kind + (1 if isinstance(self.model, SSD) else 0)
        kept = suppress(where, score, labels, image, len(boxes), overlap, self.model.most)
        return [{"boxes": where[some], "scores": score[some], "labels": labels[some]} for some in kept]
