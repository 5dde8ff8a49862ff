"""How well pixels are classified: intersection over union of each class, and its mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = 255
"""What true maps have where nobody knows the class: PASCAL VOC's borders."""


@dataclass(frozen=True, slots=True)
class PixelMeasures:
    """What a `PixelConfusion` amounts to, each 0..1.

    Attributes:
        miou: mean of `iou` over the classes that are there, true or found.
        accuracy: part of all pixels whose class was found.
        iou: intersection over union of each class; NaN of one that is neither true nor found anywhere.
    """

    miou: float
    accuracy: float
    iou: tuple[float, ...]


class PixelConfusion:
    """Counts pixels by their true class and by the one that was found, over any number of photographs.

    Example:
        >>> counts = PixelConfusion(2)
        >>> counts.add(torch.tensor([[0, 1], [1, 1]]), torch.tensor([[0, 1], [0, 255]]))
        >>> counts.measures().miou
        0.5
    """

    def __init__(self, num_classes: int) -> None:
        """Begin with nothing counted."""
        self.counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def add(self, found: Tensor, true: Tensor, ignored: int = IGNORED) -> None:
        """Count the pixels of one photograph or of many.

        Args:
            found: whole numbers, of any shape.
            true: of the same shape; pixels that are `ignored` are not counted.
            ignored: the number of no class.

        Raises:
            ValueError: the shapes differ, or a number is that of no class.
        """
        if found.shape != true.shape:
            raise ValueError(f"maps of classes have one shape, got {tuple(found.shape)} found and {tuple(true.shape)} true")
        count = len(self.counts)
        known = true != ignored
        found, true = found[known].long().cpu(), true[known].long().cpu()
        for name, numbers in (("found", found), ("true", true)):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
                raise ValueError(f"a pixel that is {name} has class {int(numbers.max())}, and there are {count} classes from 0 on")
        self.counts += torch.bincount(true * count + found, minlength=count**2).view(count, count)

    def measures(self) -> PixelMeasures:
        """Return the measures of all that was counted.

        Raises:
            ValueError: nothing was counted.
        """
        if not self.counts.any():
            raise ValueError("no pixel was counted, so there is nothing to measure")
        counts = self.counts.double()
        both = counts.diagonal()
        either = counts.sum(0) + counts.sum(1) - both
        iou = both / either  # 0 / 0 is NaN: no such pixel
        return PixelMeasures(float(iou[either > 0].mean()), float(both.sum() / counts.sum()), tuple(iou.tolist()))
