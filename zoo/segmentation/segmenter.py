"""The base of every segmenter: what `segment` asks of one, whatever its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.labels import labels
from zoo.networks.published import Published

SEGMENTERS: dict[str, type[Segmenter]] = {}
"""Every published segmenter by its class name, in the order of definition."""


class Segmenter(Published):
    """A network that gives every pixel of an image a class.

    A family implements `forward`, and what `trained` asks of it. A variant is a class line of `zoo.segmentation.catalogue`.

    A photograph's shorter side is resized to `resize` pixels, and its classes' probabilities back to the photograph's own size.
    """

    task = "segmentation"
    catalogue = SEGMENTERS
    input_size: ClassVar[int] = 520
    """Pixels that the shorter side of a photograph is resized to."""
    mean: ClassVar[tuple[float, float, float]] = (0.485, 0.456, 0.406)
    std: ClassVar[tuple[float, float, float]] = (0.229, 0.224, 0.225)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return logits (B, `num_classes`, H, W) of normalised images (B, 3, H, W), under "out"; an auxiliary head's under "aux"."""
        raise NotImplementedError

    @property
    def shorter(self) -> int:
        """Pixels of the shorter side: the checkpoint's, or else those that the variant was published with."""
        known = None if self.checkpoint is None else self.checkpoint.preprocessing.resize
        return self.input_size if known is None else known

    def prepare(self, photographs: Sequence[Tensor]) -> Tensor:
        """Make a batch of photographs that have one size.

        Args:
            photographs: uint8 (3, H, W) each.

        Returns:
            (B, 3, H', W') on the network's device, normalised, the shorter side resized as the checkpoint says.
        """
        like = next(self.parameters())
        batch = torch.stack([photograph.to(like.device, non_blocking=True) for photograph in photographs])
        height, width = batch.shape[-2:]
        scale = self.shorter / min(height, width)
        size = (max(1, int(height * scale)), max(1, int(width * scale)))  # of the longer side the whole pixels, as torchvision counts
        resized = F.interpolate(batch.float(), size=size, mode="bilinear", align_corners=False, antialias=True)
        values = resized.round().clamp(0, 255) / 255
        mean, std = (torch.tensor(of).view(-1, 1, 1).to(like.device, non_blocking=True) for of in (self.mean, self.std))
        return ((values - mean) / std).to(like.dtype)

    def names(self) -> tuple[str, ...]:
        """Return the names of the classes, or "class 17" where they have none."""
        known = labels(self.checkpoint.labels) if self.checkpoint is not None and self.checkpoint.labels else ()
        numbers = range(self.num_classes)
        return tuple(known[i].name if len(known) == self.num_classes else "background" if i == 0 else f"class {i}" for i in numbers)

    def adopt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wanted = self.state_dict()
        own = (name for name in tensors if name in wanted or not name.startswith("aux_classifier."))
        return {name: tensors[name] for name in own}

    @classmethod
    def told_by(cls, facts: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        del facts
        return {}, {"resize": cls.input_size, "crop": None, "interpolation": "bilinear", "mean": cls.mean, "std": cls.std}
