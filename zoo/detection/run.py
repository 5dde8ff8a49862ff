"""What is where on photographs? `detect`: boxes in the photograph's own pixels, by any detector."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import nn

from weights.arguments import forgiving, whole
from zoo.detection.detections import Detections
from zoo.detection.detector import Detector
from zoo.extraction.features import no_network
from zoo.images.preprocess import BadImage, is_many, named_images, open_image
from zoo.kernels import Fast, plain

if TYPE_CHECKING:
    from PIL.Image import Image


@overload
def detect(
    model: Any, images: str | os.PathLike[str] | Image, threshold: float | None = None, overlap: float | None = None, batch_size: int = 8
) -> Detections: ...
@overload
def detect(
    model: Any, images: list[Any] | tuple[Any, ...], threshold: float | None = None, overlap: float | None = None, batch_size: int = 8
) -> list[Detections]: ...
@overload
def detect(
    model: Any, images: np.ndarray | torch.Tensor, threshold: float | None = None, overlap: float | None = None, batch_size: int = 8
) -> Any: ...
@forgiving
def detect(model: Any, images: Any, threshold: float | None = None, overlap: float | None = None, batch_size: int = 8) -> Any:
    """Find the things on images.

    The network runs in eval mode and without gradients, on the device that it is on, and stays in the mode that it was found in.

    Example:
        >>> model = trained(YoloFastest)  # doctest: +SKIP
        >>> found = detect(model, "dog.jpg")  # doctest: +SKIP
        >>> found.names[0], found.scores[0], found.boxes[0]  # doctest: +SKIP

    Args:
        model: a detector, as `trained` returns it, or `fast` of one.
        images: a path, a PIL image, a uint8 array or tensor (H, W, C) or (C, H, W), or a list of these, of any sizes.
        threshold: score above which a thing is told, 0..1; the network's own if left out.
        overlap: intersection over union, 0..1, above which the less probable of two boxes of a class is dropped; the network's own if
            left out.
        batch_size: how many images go through the network at once.

    Returns:
        For one image its detections, their tensors on the CPU; for a list, a tuple or an array of four axes one for each image.

    Raises:
        TypeError: the model is no detector.
        ValueError: a number is out of its range, or the list is empty.
        BadImage: an image can't be used.
    """
    quick, model = (model, plain(model)) if isinstance(model, Fast) else (None, model)
    if not isinstance(model, Detector):
        raise TypeError(f"detect() takes a detector, as trained(YOLOv3Tiny) is one, not {no_network(model)}")
    limits = {"threshold": model.threshold if threshold is None else threshold, "overlap": model.overlap if overlap is None else overlap}
    for name, value in limits.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise ValueError(f"{name} is a number from 0 to 1, got {value!r}")
    batch_size = whole("batch_size", batch_size)
    named = named_images(images)
    if not named:
        raise BadImage("there are no images to look at: the list is empty")
    found: list[Detections] = []
    with evaluating(model), torch.no_grad():
        for start in range(0, len(named), batch_size):
            pixels = [np.array(open_image(image, "RGB", name)) for name, image in named[start : start + batch_size]]
            photographs = [torch.from_numpy(array).permute(2, 0, 1) for array in pixels]
            answers = model.answer(photographs, **limits) if quick is None else model.answer_by(quick, photographs, **limits)
            found += [one.to("cpu") for one in answers]
    return found if is_many(images) else found[0]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a network into eval mode for a while; every layer has its own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
