"""The base of every detector: what `detect` asks of one, whatever its family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from zoo.detection.detections import Detections
from zoo.labels import labels
from zoo.networks.published import Published

DETECTORS: dict[str, type[Detector]] = {}
"""Every published detector by its class name, in the order of definition."""


class Detector(Published):
    """A network that finds things on photographs.

    A family implements `answer`, and what `trained` asks of it: `classifiers`, `told_by`, and `adopt` where a file's names are not its
    own. A variant is a class line of `zoo.detection.catalogue`. `trained`, `detect`, `zoo list` and `zoo info` follow.

    How a photograph becomes the network's image is said by `checkpoint.preprocessing`: with `letterbox` it is fitted in whole, with
    `squash` stretched, else its shorter side is resized. The network does that itself, on its own device, for photographs of any sizes.
    """

    task = "detection"
    catalogue = DETECTORS
    input_size: ClassVar[int] = 416
    """Side in pixels of the images that the variant was published with; the shorter one where it takes images of any shape."""
    called: tuple[str, ...] = ()
    """Names of the classes, where their user gave them; the checkpoint's labels else."""
    threshold: ClassVar[float] = 0.25
    """Score from which on a thing is told, where the caller says none."""
    overlap: ClassVar[float] = 0.45
    """Intersection over union from which on the less probable of two boxes of a class is dropped, where the caller says none."""

    def answer(self, photographs: Sequence[Tensor], threshold: float, overlap: float) -> list[Detections]:
        """Find the things on photographs of any sizes, in eval mode and without gradients.

        Args:
            photographs: uint8 (3, H, W) each, upright RGB, on any device.
            threshold: score above which a thing is told, 0..1.
            overlap: intersection over union, 0..1, above which the less probable of two boxes of a class is dropped.

        Returns:
            One answer a photograph, its tensors on the network's device. A photograph without things has an empty one.
        """
        raise NotImplementedError

    def answer_by(
        self, network: Callable[[Tensor], Any], photographs: Sequence[Tensor], threshold: float, overlap: float
    ) -> list[Detections]:
        """Do what `answer` does with another way to compute this network, `fast` of it.

        Raises:
            TypeError: this family has no such way.
        """
        raise TypeError(f"detect() takes {type(self).__name__} as it is, and no fast() of it")

    def names_of(self, found: Sequence[int]) -> tuple[str, ...]:
        """Return the names of classes by their indices: the checkpoint's, or "class 17" where it has none for this many classes."""
        listed = labels(self.checkpoint.labels) if self.checkpoint is not None and self.checkpoint.labels else ()
        known = self.called or [label.name for label in listed]
        return tuple(known[i] if len(known) == self.num_classes else f"class {i}" for i in found)
