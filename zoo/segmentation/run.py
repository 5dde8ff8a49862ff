"""What is every pixel of a photograph? `segment`: a map of classes of the photograph's own size, by any segmenter."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import forgiving, whole
from zoo.extraction.features import no_network
from zoo.images.preprocess import BadImage, is_many, named_images, open_image
from zoo.kernels import plain
from zoo.segmentation.segmenter import Segmenter

if TYPE_CHECKING:
    from PIL.Image import Image

AT_ONCE = 4
"""Classes whose maps are resized at once: those of a large photograph would take gigabytes together."""


@dataclass(frozen=True, slots=True, eq=False)
class Segmentation:
    """The class of every pixel of one photograph.

    Attributes:
        labels: uint8 (H, W), or int16 where there are more than 256 classes: the network's index of each pixel's class, on the CPU.
        names: the names of all classes by index.
        areas: part of the photograph, 0..1, of every class that is there, the largest first, by name.

    Example:
        >>> found = segment(trained(FCN_ResNet50), "street.jpg")  # doctest: +SKIP
        >>> found.areas  # doctest: +SKIP
        {'background': 0.71, 'dog': 0.29}
    """

    labels: Tensor
    names: tuple[str, ...]
    areas: dict[str, float]

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of the upright photograph in pixels."""
        return self.labels.shape[1], self.labels.shape[0]

    def picture(self, photograph: Any) -> Image:
        """Return the photograph under the colours of its classes, with a legend below.

        Args:
            photograph: the one that was segmented: a path, a PIL image or a uint8 array.

        Raises:
            ValueError: the photograph has another size.
            BadImage: it can't be read.
        """
        from zoo.segmentation.drawing import coloured

        return coloured(photograph, self.labels.numpy(), self.names, self.areas)

    def save(self, photograph: Any, path: str | Path) -> Path:
        """Draw the classes over the photograph into a PNG, which appears whole or not at all; see `picture`.

        Raises:
            OSError: the PNG can't be written.
        """
        from zoo.images.canvas import save

        return save(self.picture(photograph), Path(path))

    def numbers(self) -> dict[str, Any]:
        """Return size and areas as JSON can write them."""
        found = [{"index": self.names.index(name), "name": name, "share": share} for name, share in self.areas.items()]
        return {"size": list(self.size), "classes": found}


@forgiving
def segment(model: Any, images: Any, batch_size: int = 8) -> Segmentation | list[Segmentation]:
    """Find the class of every pixel of images.

    The network runs in eval mode and without gradients, on the device that it is on, and stays in the mode that it was found in.

    Example:
        >>> model = trained(DeepLabV3_ResNet50)  # doctest: +SKIP
        >>> found = segment(model, "dog.jpg")  # doctest: +SKIP
        >>> found.areas  # doctest: +SKIP
        {'background': 0.61, 'dog': 0.27, 'bicycle': 0.12}

    Args:
        model: a segmenter, as `trained` returns it, or what `fast` made of one.
        images: a path, a PIL image, a uint8 array or tensor (H, W, C) or (C, H, W), or a list of these, of any sizes.
        batch_size: how many images go through the network at once; only neighbours of the same size do.

    Returns:
        For one image its `Segmentation`; for a list, a tuple or an array of four axes one for each image.

    Raises:
        TypeError: the model is no segmenter.
        ValueError: the list is empty, or `batch_size` is below 1.
        BadImage: an image can't be used.
    """
    network: Any = plain(model) if isinstance(model, torch.nn.Module) else model
    if not isinstance(network, Segmenter):
        raise TypeError(f"segment() takes a segmenter, as trained(DeepLabV3_ResNet50) is one, not {no_network(network)}")
    batch_size = whole("batch_size", batch_size)
    named_pictures = named_images(images)
    if not named_pictures:
        raise BadImage("there are no images to look at: the list is empty")
    names = network.names()
    modes = [(module, module.training) for module in model.modules()]
    found: list[Segmentation] = []
    try:
        model.eval()
        with torch.no_grad():
            for start in range(0, len(named_pictures), batch_size):
                opened = [np.array(open_image(image, "RGB", name)) for name, image in named_pictures[start : start + batch_size]]
                for _, alike in groupby(opened, key=lambda pixels: pixels.shape):
                    photographs = [torch.from_numpy(pixels).permute(2, 0, 1) for pixels in alike]
                    logits = model(network.prepare(photographs))["out"]
                    found += [_settled(one, (photographs[0].shape[1], photographs[0].shape[2]), names) for one in logits]
    finally:
        for module, training in modes:
            module.training = training
    return found if is_many(images) else found[0]


def _settled(logits: Tensor, size: tuple[int, int], names: tuple[str, ...]) -> Segmentation:
    """Resize the logits (K, H', W') of one image to its photograph, and take the best class of each pixel."""
    best = torch.full(size, -torch.inf, device=logits.device)
    labels = torch.zeros(size, dtype=torch.uint8 if len(names) <= 256 else torch.int16, device=logits.device)
    for start in range(0, len(logits), AT_ONCE):
        some = F.interpolate(logits[None, start : start + AT_ONCE].float(), size=size, mode="bilinear", align_corners=False)[0]
        value, number = some.max(0)
        better = value > best
        best = torch.where(better, value, best)
        labels = torch.where(better, (number + start).to(labels.dtype), labels)
    counts = torch.bincount(labels.flatten().long(), minlength=len(names)).tolist()
    order = sorted((index for index, count in enumerate(counts) if count), key=lambda index: -counts[index])
    return Segmentation(labels.cpu(), names, {names[index]: counts[index] / (size[0] * size[1]) for index in order})
