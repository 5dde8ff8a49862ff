"""The base of every detector: what `detect` asks of one, whatever its family."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from zoo.detection.detections import Detections
from zoo.labels import labels
from zoo.networks.published import Published

DETECTORS: dict[str, type[Detector]] = {}
"""Every published detector by its class name, in the order of definition."""


class _Caught(Exception):
    """Ends a pass once its input is known."""


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

    def batch_of(self, images: Any) -> Tensor:
        """Return what the layers are given for many photographs, fitted into the network's size.

        Args:
            images: a folder or any other source that `zoo embed` reads, or a list of what `detect` takes.

        Raises:
            ValueError: an image can't be used, or this network takes photographs of any size.
        """
        from zoo.images.batch import pictures
        from zoo.images.preprocess import named_images, open_image

        caught: list[Tensor] = []

        def catch(*given: Any, **named: Any) -> None:
            if len(given) != 1 or named or not isinstance(given[0], Tensor):
                raise ValueError(f"{type(self).__name__} takes photographs of any size, so they make no batch of one size")
            caught.append(given[0])
            raise _Caught

        for name, picture in named_images(pictures(images)):
            pixels = torch.from_numpy(np.array(open_image(picture, "RGB", name))).permute(2, 0, 1)
            with contextlib.suppress(_Caught):
                self.answer_by(catch, [pixels], 0.5, 0.5)
        return torch.cat(caught)

    def names_of(self, found: Sequence[int]) -> tuple[str, ...]:
        """Return the names of classes by their indices: the checkpoint's, or "class 17" where it has none for this many classes."""
        listed = labels(self.checkpoint.labels) if self.checkpoint is not None and self.checkpoint.labels else ()
        known = self.called or [label.name for label in listed]
        return tuple(known[i] if len(known) == self.num_classes else f"class {i}" for i in found)
