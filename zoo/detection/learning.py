"""Detectors that resize photographs themselves, answer many of different sizes at once, and learn by losses of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from zoo.detection.detections import Detections
from zoo.detection.detector import Detector
from zoo.detection.masks import paste
from zoo.detection.resizing import Batch, Outputs, Resizing, Target, resize_boxes, resize_keypoints
from zoo.extraction.stages import PyramidBackbone, freeze_norms, stages
from zoo.networks.model import Model

OLDER = [
    (re.compile(r"(\.fpn\.(?:inner|layer)_blocks\.\d+)\.(weight|bias)$"), r"\1.0.\2"),
    (re.compile(r"^rpn\.head\.conv\.(weight|bias)$"), r"rpn.head.conv.0.0.\1"),
    (re.compile(r"\.mask_fcn(\d)\.(weight|bias)$"), lambda found: f".{int(found[1]) - 1}.0.{found[2]}"),
    (re.compile(r"^(head\.\w+\.conv)\.(\d)\.(weight|bias)$"), lambda found: f"{found[1]}.{int(found[2]) // 2}.0.{found[3]}"),
]
"""Names in torchvision's older files, and what they are now."""


class LearningDetector(Detector):
    """A detector with torchvision's ways: a list of photographs in, a dict for each out; in train mode losses.

    The background is class 0 of `num_classes`, and never answered. Layers have torchvision's names, so that files fit both ways.

    A variant over another body is one line, for any network of the catalogue that has a `pyramid`:
    ``class Mine(FasterRCNN, body=ConvNeXtTiny, at=("C2", "C3", "C4", "C5")): ...``
    """

    threshold = 0.05
    overlap = 0.5
    input_size = 800

    body: ClassVar[Any]
    """The class of the network whose maps are read."""
    at: ClassVar[tuple[str, ...]] = ("C2", "C3", "C4", "C5")
    """The maps that are read: levels of the body's pyramid, or other taps of it."""
    usual_norms: ClassVar[bool] = False
    """Whether norms of the body have PyTorch's constants instead of those of the body's paper, as in torchvision's detectors."""
    shorter: ClassVar[tuple[int, ...]] = (800,)
    """Pixels that the shorter side of a photograph is resized to; in train mode one of them is drawn."""
    longer: ClassVar[int] = 1333
    """Most pixels of the longer side."""
    multiple: ClassVar[int] = 32
    """Sides of a batch are a multiple of this."""
    fixed: ClassVar[tuple[int, int] | None] = None
    """Height and width of every image, whatever its shape."""
    mean: ClassVar[tuple[float, float, float]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, float, float]] = (0.229, 0.224, 0.225)

    fast_parts: ClassVar[dict[str, str]] = {"maps": "maps (body, pyramid, heads)"}
    """Methods of tensors alone, whatever is found, and what they compute: these `fast` makes fast. The first takes images, others crops."""

    transform: Resizing

    def resizing(self) -> Resizing:
        """Return the size rule of this class."""
        return Resizing(self.shorter, self.longer, self.mean, self.std, self.multiple, self.fixed)

    def maps(self, images: Tensor) -> tuple[list[Tensor], ...]:
        """Compute what depends on no box that is found: the heads' maps of each level for images (B, 3, H, W), normalised.

        Returns:
            Maps (B, C, H', W') of each level: of a detector of one step logits and codes, of an R-CNN the levels, and of the proposals
            logits and codes.
        """
        raise NotImplementedError

    def run(self, batch: Batch, targets: list[Target] | None, threshold: float, overlap: float) -> list[Target] | Outputs:
        """Return what is in each image, in pixels of the batch; with targets the losses."""
        raise NotImplementedError

    def forward(
        self,
        photographs: Sequence[Tensor],
        targets: Sequence[Target] | None = None,
        threshold: float | None = None,
        overlap: float | None = None,
    ) -> list[Target] | Outputs:
        """Find things, or in train mode return losses.

        Args:
            photographs: (3, H, W) each, floating point, 0..1, of any sizes.
            targets: in train mode, of each photograph "boxes" (N, 4), left, top, right and bottom in its pixels, and "labels" (N,), 1 to
                ``num_classes - 1``; Mask R-CNN also wants "masks" (N, H, W) of zeros and ones, Keypoint R-CNN "keypoints" (N, K, 3).
            threshold: score above which a thing is told; None takes the class's.
            overlap: intersection over union above which the worse of two things of a class goes; None takes the class's.

        Returns:
            In eval mode a dict for each photograph: "boxes" (N, 4) in its pixels, "labels" (N,), "scores" (N,), the best first; with
            masks "masks" (N, 1, H, W), probabilities, with keypoints "keypoints" (N, K, 3) and "keypoints_scores" (N, K). In train
            mode a dict of losses, whose sum training makes small.

        Raises:
            ValueError: there are no photographs, one is no (3, H, W) of floating point, or a target is missing or no box.
        """
        if not len(photographs):
            raise ValueError(f"{type(self).__name__} takes a list of photographs (3, height, width), and this one is empty")
        for number, photograph in enumerate(photographs):
            if photograph.dim() != 3 or not photograph.is_floating_point():
                shown = f"{photograph.dtype} of shape {tuple(photograph.shape)}"
                raise ValueError(f"photograph {number} is {shown}; it should be floating point, 0..1, (3, height, width)")
        if self.training:
            self.check_targets(photographs, targets)
        batch, moved = self.transform(photographs, targets if self.training else None)
        limits = self.threshold if threshold is None else threshold, self.overlap if overlap is None else overlap
        found = self.run(batch, moved, *limits)
        if isinstance(found, dict):
            return found
        return [self.on_photograph(one, size, own) for one, size, own in zip(found, batch.sizes, batch.own, strict=True)]

    def check_targets(self, photographs: Sequence[Tensor], targets: Sequence[Target] | None) -> None:
        """Raise ValueError where training has no target, or one is no box."""
        kind = type(self).__name__
        if targets is None or len(targets) != len(photographs):
            raise ValueError(f"in train mode {kind} takes a target for each photograph; call .eval() to find things")
        for number, target in enumerate(targets):
            boxes = target["boxes"]
            if boxes.dim() != 2 or boxes.shape[1] != 4:
                raise ValueError(
                    f'"boxes" of target {number} have shape {tuple(boxes.shape)}; it should be (N, 4), (0, 4) where there are none'
                )
            wrong = (boxes[:, 2:] <= boxes[:, :2]).any(1)
            if wrong.any():
                box = [round(side, 2) for side in boxes[wrong][0].tolist()]
                raise ValueError(f"a box of target {number} has no area: {box} should be left, top, right, bottom")

    def on_photograph(self, found: Target, size: tuple[int, int], own: tuple[int, int]) -> Target:
        """Bring what was found in an image of a batch, `size` large there, to the pixels of its photograph, `own` large."""
        moved = dict(found)
        moved["boxes"] = resize_boxes(found["boxes"], size, own)
        if "maps" in moved:
            moved["masks"] = paste(moved.pop("maps"), moved["boxes"], own)[:, None]
        if "keypoints" in moved:
            moved["keypoints"] = resize_keypoints(found["keypoints"], size, own)
        return moved

    def answer(self, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        return self.answer_by(self, photographs, threshold, overlap)

    def answer_by(self, network: Any, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        like = next(self.parameters())
        device = getattr(network, "device", like.device)  # of a fast network, which may lie elsewhere
        pixels = [photograph.to(device, non_blocking=True).to(like.dtype) / 255 for photograph in photographs]
        found: Any = network(pixels, threshold=threshold, overlap=overlap)
        answers: list[Detections] = []
        names = iter(self.names_of(torch.cat([one["labels"] for one in found]).tolist()))  # waits for the device once, not for each
        for one, photograph in zip(found, photographs, strict=True):
            height, width = photograph.shape[-2:]
            points = None
            if "keypoints" in one:
                points = torch.cat([one["keypoints"][..., :2], one["keypoints_scores"][..., None]], -1).float()
            answers.append(
                Detections(
                    one["boxes"].float(),
                    one["scores"].float(),
                    one["labels"],
                    tuple(islice(names, len(one["labels"]))),
                    (width, height),
                    one["masks"][:, 0] >= 0.5 if "masks" in one else None,
                    points,
                )
            )
        return answers

    def adopt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wanted = self.state_dict()
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            if name.endswith("num_batches_tracked") and name not in wanted:  # of norms that are frozen here
                continue
            found[name if name in wanted else _renamed(name)] = tensor
        return found

    @classmethod
    def told_by(cls, facts: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        del facts
        steps = {"resize": cls.shorter[-1] if cls.fixed is None else cls.fixed[0], "crop": None, "interpolation": "bilinear"}
        return {}, steps | {"mean": cls.mean, "std": cls.std, "squash": cls.fixed is not None, "longest": None if cls.fixed else cls.longer}


class PyramidDetector(LearningDetector):
    """What R-CNNs, RetinaNet and FCOS share: heads on the pyramid of any body."""

    def __init__(
        self,
        num_classes: int = 91,
        norm: Literal["batch", "frozen"] = "batch",
        norm_eps: float | None = None,
        body: Model | None = None,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: with the background, which is class 0.
            norm: of the body, "batch" or "frozen": statistics and parameters that never change.
            norm_eps: added to the variances of the body's norms; None takes the body's own (torchvision's first checkpoints: 0).
            body: a network whose layers to take, such as ``trained(ResNet50)``; None builds the class's own, untrained.

        Raises:
            ValueError: another `norm`, or the body has no pyramid.
            TypeError: the body is no network.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, 3
        self.transform = self.resizing()
        coarser, normed = self.pyramid_on()
        self.backbone = self.pyramid_backbone(body, coarser, normed, norm, norm_eps)
        self.add_heads(num_classes)

    def pyramid_on(self) -> tuple[str, bool]:
        """Return what the levels above the body's last one are made of, see `FeaturePyramid`, and whether its convolutions have norms."""
        return "p5", False

    def add_heads(self, num_classes: int) -> None:
        """Add what reads the levels."""
        raise NotImplementedError

    def pyramid_backbone(self, body: Model | None, coarser: str, normed: bool, norm: str, norm_eps: float | None) -> PyramidBackbone:
        """Return a pyramid on the body; the class's own body, untrained, where none is given.

        Raises:
            ValueError: `norm` is neither "batch" nor "frozen", or the body has no pyramid.
            TypeError: the body is no network.
        """
        if norm not in ("batch", "frozen"):
            raise ValueError(f'norm is "batch" or "frozen", got {norm!r}')
        network = self.body() if body is None else body
        if not isinstance(network, Model):
            raise TypeError(f"{type(self).__name__}'s body is a network such as trained(ResNet50), not {network!r:.60}")
        backbone = PyramidBackbone(stages(network, self.at), coarser, normed)
        for layer in backbone.body.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eps, layer.momentum = (1e-5, 0.1) if self.usual_norms else (layer.eps, layer.momentum)
                layer.eps = layer.eps if norm_eps is None else norm_eps
        if norm == "frozen":
            freeze_norms(backbone.body)
        return backbone


def _renamed(name: str) -> str:
    """Return the present name of a tensor in files from before torchvision 0.13, whose units were bare convolutions."""
    for old, new in OLDER:
        name = old.sub(new, name)
    return name
