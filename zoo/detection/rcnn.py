"""Detectors of two steps: Faster, Mask and Keypoint R-CNN."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from zoo.detection.anchors import Anchors
from zoo.detection.learning import PyramidDetector
from zoo.detection.proposals import Proposals
from zoo.detection.regions import Regions
from zoo.detection.resizing import Batch, Outputs, Target
from zoo.networks.model import Model

if TYPE_CHECKING:
    from torch import Tensor


class FasterRCNN(PyramidDetector):
    """Ren et al. 2015 with the pyramid of Lin et al. 2016; `version` 2 has the deeper heads of Li et al. 2021."""

    paper = "https://arxiv.org/abs/1506.01497"
    classifiers = ("roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred")

    version: ClassVar[int] = 1
    sizes: ClassVar[tuple[tuple[int, ...], ...]] = ((32,), (64,), (128,), (256,), (512,))
    """Of the anchors, for each level."""
    proposals: ClassVar[int] = 1000
    """Of an image, in eval mode."""
    least: ClassVar[float] = 0.0
    """Probability of a proposal that something is there."""
    fast_parts = PyramidDetector.fast_parts | {"roi_heads.classify": "classes of regions"}
    masks: ClassVar[bool] = False
    points: ClassVar[int] = 0

    def pyramid_on(self) -> tuple[str, bool]:
        return "pool", self.version == 2

    def add_heads(self, num_classes: int) -> None:
        self.rpn = Proposals(Anchors(self.sizes), self.version, self.proposals, self.least)
        self.roi_heads = Regions(num_classes, len(self.sizes) - 1, self.version, self.masks, self.points)

    def maps(self, images: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        levels = self.backbone(images)
        return levels[:-1], *self.rpn.head(levels)  # the coarsest is proposed from, and never cropped

    def run(self, batch: Batch, targets: list[Target] | None, threshold: float, overlap: float) -> list[Target] | Outputs:
        levels, *found = self.maps(batch.images)
        proposals, losses = self.rpn(batch, found, targets)
        if targets is not None:
            return self.roi_heads.losses(batch, levels, proposals, targets) | losses
        return self.roi_heads(batch, levels, proposals, threshold, overlap)


class MaskRCNN(FasterRCNN, masks=True):
    """He et al. 2017: Faster R-CNN that also answers which pixels belong to each thing."""

    paper = "https://arxiv.org/abs/1703.06870"
    classifiers = (*FasterRCNN.classifiers, "roi_heads.mask_predictor.mask_fcn_logits")
    fast_parts = FasterRCNN.fast_parts | {"roi_heads.draw_masks": "masks"}


class KeypointRCNN(FasterRCNN, points=17):
    """He et al. 2017, section 5: Faster R-CNN that also answers where 17 points of each person are."""

    paper = "https://arxiv.org/abs/1703.06870"
    fast_parts = FasterRCNN.fast_parts | {"roi_heads.draw_points": "keypoints"}

    def __init__(
        self,
        num_classes: int = 2,
        norm: Literal["batch", "frozen"] = "batch",
        norm_eps: float | None = None,
        body: Model | None = None,
    ) -> None:
        """Build the network untrained; see `FasterRCNN`. The classes are the background and the person."""
        super().__init__(num_classes, norm, norm_eps, body)
