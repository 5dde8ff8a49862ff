"""What `detect` returns: the things on one photograph, in its own pixels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Detections:
    """The things that a network finds on one photograph, the most probable first.

    Attributes:
        boxes: float32 (N, 4), left, top, right and bottom in pixels of the upright photograph, within it.
        scores: float32 (N,), 0..1; no calibrated probability.
        labels: int64 (N,), the network's index of each thing's class.
        names: N names of these classes, "dog"; "class 17" where the classes have no names.
        size: width and height of the upright photograph in pixels.
        masks: bool (N, height, width), the pixels of each thing, where the network has them; else None.
        keypoints: float32 (N, K, 3), x and y in pixels and a score of each point, where the network has them; else None.

    Example:
        >>> found = detect(trained(YOLOv3Tiny), "street.jpg")  # doctest: +SKIP
        >>> [name for name, score in zip(found.names, found.scores) if score > 0.5]  # doctest: +SKIP
        ['dog', 'bicycle']
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    names: tuple[str, ...]
    size: tuple[int, int]
    masks: Tensor | None = None
    keypoints: Tensor | None = None

    def __post_init__(self) -> None:
        count = len(self.names)
        (width, height), boxes, scores, labels = self.size, self.boxes, self.scores, self.labels
        if tuple(boxes.shape) != (count, 4) or tuple(scores.shape) != (count,) or tuple(labels.shape) != (count,):
            shapes = [tuple(tensor.shape) for tensor in (boxes, scores, labels)]
            raise ValueError(f"{count} names, and boxes, scores and labels of shapes {shapes}: each thing has one of each, a box 4 numbers")
        wanted = count, height, width
        if self.masks is not None and tuple(self.masks.shape) != wanted:
            raise ValueError(f"masks are {wanted}, each of the photograph's size, not {tuple(self.masks.shape)}")
        if self.keypoints is not None and (self.keypoints.dim() != 3 or self.keypoints.shape[::2] != (count, 3)):
            raise ValueError(f"keypoints are ({count}, K, 3), not {tuple(self.keypoints.shape)}")

    def __len__(self) -> int:
        return len(self.names)

    def to(self, device: torch.device | str) -> Detections:
        """Return the same things with their tensors on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("boxes", "scores", "labels")}
        others = {name: None if getattr(self, name) is None else getattr(self, name).to(device) for name in ("masks", "keypoints")}
        return replace(self, **moved, **others)

    @classmethod
    def none(cls, size: tuple[int, int], device: torch.device | str = "cpu") -> Detections:
        """Return the answer for a photograph of this width and height on which nothing was found."""
        empty = torch.zeros(0, device=device)
        return cls(empty.reshape(0, 4), empty, empty.long(), (), size)
