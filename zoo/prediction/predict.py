"""Images in, names out: preprocessing, network and labels of one checkpoint together."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch
from torch import Tensor, nn

from weights import UnknownWeights
from weights.arguments import forgiving, whole
from zoo.catalogue import CATALOGUE
from zoo.images.preprocess import is_many, named_images, preprocess_named
from zoo.images.preprocessed import WrongInput as WrongInput
from zoo.images.preprocessed import check_preprocessed as check_preprocessed
from zoo.kernels import Fast
from zoo.labels import Label, labels
from zoo.networks.model import Model
from zoo.networks.published import Published
from zoo.pretrained.names import named
from zoo.pretrained.offline import usual
from zoo.pretrained.trained import trained

log = logging.getLogger("zoo")

if TYPE_CHECKING:
    from PIL.Image import Image


UNCERTAIN = 0.2
"""Below this probability the first class is a guess: with three networks on a hundred photographs 5 of 12 such answers were right, above it
273 of 288 (docs/notes/five-minutes.md)."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One class and how probable the network finds it.

    Attributes:
        label: the class's name, "tabby"; "class 17" where the classes have no names.
        wnid: its WordNet id, "n02123045", or None where it has none.
        probability: softmax of the logits, 0..1; no calibrated confidence.
        index: of its logit.

    Example:
        >>> best = predict(trained(ResNet20), "cat.jpg")[0]  # doctest: +SKIP
        >>> best.label, best.probability  # doctest: +SKIP
        ('cat', 0.98)
    """

    label: str
    wnid: str | None
    probability: float
    index: int

    @property
    def uncertain(self) -> bool:
        """Whether the network hardly prefers this class: of the first one, that the picture may show none of its classes."""
        return self.probability < UNCERTAIN

    def __str__(self) -> str:
        return f"{self.label}{f' ({self.wnid})' if self.wnid else ''} {self.probability:.1%}"


@overload
def predict(model: Any, *, top: int = 5, batch_size: int = 32) -> list[Any]: ...
@overload
def predict(model: Model | Fast | str, images: str | os.PathLike[str] | Image, top: int = 5, batch_size: int = 32) -> list[Prediction]: ...
@overload
def predict(
    model: Model | Fast | str, images: list[Any] | tuple[Any, ...], top: int = 5, batch_size: int = 32
) -> list[list[Prediction]]: ...
@overload
def predict(model: Model | Fast | str, images: np.ndarray | Tensor, top: int = 5, batch_size: int = 32) -> list[Any]: ...
@forgiving
def predict(model: Any, images: Any = None, top: int = 5, batch_size: int = 32) -> list[Any]:
    """Classify images with the preprocessing and the labels of the model's own checkpoint.

    The network runs in eval mode and without gradients; every layer keeps the mode that it was found in. Threads may share a network
    that is in eval mode, as `trained` returns it; one in train mode is switched during the call.

    Example:
        >>> predict(trained(ResNet50), "cat.jpg")[0].label  # doctest: +SKIP
        'tabby'
        >>> predict("cat.jpg")[0].label  # doctest: +SKIP
        'tabby'

    Args:
        model: what `trained` returns, or `fast` of it, on any device and in any floating-point type; or the name of a checkpoint,
            "resnet50" or "resnet50:imagenet1k_v1". It may be left out.
        images: what `model.preprocess` takes, or a floating-point tensor (B, C, H, W) or (C, H, W) that is preprocessed already;
            the latter goes through `check_preprocessed`.
        top: how many classes, the most probable first; all of them if there are fewer.
        batch_size: how many images go through the network at once.

    Returns:
        For one image a list of predictions; for a list, a tuple or an array of four axes such a list for each image.

    Raises:
        TypeError: the model is no network of the zoo, or stands behind the images.
        UnknownWeights: there is no network or checkpoint of this name.
        ValueError: the model has no checkpoint, or one that gives embeddings and knows no classes; or `top` or `batch_size` is no whole
            number of at least 1.
        BadImage: an image can't be used.
        WrongInput: a tensor is not what the checkpoint's preprocessing gives.
        FloatingPointError: the network computes NaN or infinity.
    """
    top, batch_size = whole("top", top), whole("batch_size", batch_size)
    if isinstance(images, nn.Module):
        raise TypeError("predict() takes the network first: predict(model, images)")
    if images is None:
        if isinstance(model, nn.Module):
            raise TypeError("predict(model, images) takes the images, too; without a network: predict(images)")
        model, images = usual_network(), model
    elif isinstance(model, str):
        model = network_named(model)
    network = _own(model)
    record = network.checkpoint
    if record is None:
        name = type(network).__name__
        raise ValueError(
            f"this {name} is untrained, so no labels or preprocessing belong to it; use trained({name}), or set model.checkpoint to a "
            "record of the weights that you gave it"
        )
    if record.embedding:
        name = f"{record.model}:{record.tag}"
        raise ValueError(
            f'{name} has no classes: it gives an embedding of an image. features(model, "embedding") and zoo embed are for that; '
            f'trained("{name}", num_classes=…) puts a classifier on, for you to train'
        )
    if record.pixels is not None and record.pixels.startswith("GUESSED"):
        log.warning(
            "how images are prepared for %s:%s is %s. zoo convert --images FOLDER decides it by labelled photographs; --channel-order, "
            "--mean and --std of zoo add state it.",
            *(record.model, record.tag, record.pixels),
        )
    chosen = tuple(origin.label for origin in network.classes or ())
    names = chosen or (labels(record.labels) if record.labels else ())
    preprocessed = isinstance(images, Tensor) and images.is_floating_point()
    many = is_many(images)
    if preprocessed:
        check_preprocessed(images, record.preprocessing, network.in_channels)
        images = images if many else images[None]
    else:
        images = named_images(images)
    weight, results = next(network.parameters()), []
    there = network.device if isinstance(network, Fast) else weight.device  # which leaves its weights where they were
    with _evaluating(network), torch.no_grad():
        for start in range(0, len(images), batch_size):
            batch = images[start : start + batch_size]
            x = batch if preprocessed else preprocess_named(batch, record.preprocessing)
            results += _best(network(x.to(there, weight.dtype)), top, names)
    return results if many else results[0]


def _own(model: Any) -> Model | Fast:
    """Return a network that knows its labels and its preprocessing.

    Raises:
        TypeError: it is no network, or one of another library.
    """
    if isinstance(model, Model) or (isinstance(model, Fast) and hasattr(model, "checkpoint")):
        return model
    if isinstance(model, Published):
        verb = {"detection": "; detect(model, images) finds the things on them"}.get(model.task, "")
        raise TypeError(f"predict() takes a classifier, and {type(model).__name__} is a network for {model.task}{verb}")
    if isinstance(model, nn.Module):
        todo = (
            "load its weights into the zoo's network of that name, trained(ResNet50, FILE), or call it yourself on images that you prepared"
        )
        raise TypeError(f"{type(model).__name__} is no network of the zoo, so no labels or preprocessing belong to it: {todo}")
    raise TypeError(f"predict() takes a network, trained(ResNet20), not {model!r}")


@lru_cache(maxsize=1)
def _usual_network(model: str, tag: str | None) -> Model:
    return trained(CATALOGUE[model], tag)


def network_named(model: str) -> Model:
    """Build the network of a name, "resnet50:imagenet1k_v1"; it is built once.

    Raises:
        UnknownWeights: no network is called so.
    """
    try:
        return _usual_network(*named(model))
    except UnknownWeights as error:
        if Path(model).is_file():
            raise TypeError(f"predict() takes the network first, and {model!r} is a file: predict(model, images)") from None
        raise error


def usual_network() -> Model:
    """Build the network that is used when none is named. It is built once."""
    record, why = usual()
    log.info("predicting by %s:%s, %s", record.model, record.tag, why)
    return _usual_network(record.model, record.tag)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [layer for layer in model.modules() if layer.training]
    for layer in training:  # not model.train(): frozen layers must stay as they are, whatever mode the whole is in
        layer.training = False
    try:
        yield
    finally:
        for layer in training:
            layer.training = True


def _best(logits: Tensor, top: int, names: tuple[Label, ...]) -> list[list[Prediction]]:
    if not logits.isfinite().all():
        raise FloatingPointError(
            f"the network computes NaN or infinite logits: {logits.dtype} is too narrow for it; try model.float(), or check its weights"
        )
    count = logits.shape[1]
    if len(names) != count:  # a list of another length names other classes
        names = tuple(Label(f"class {index}") for index in range(count))
    rows = zip(*(values.tolist() for values in logits.float().softmax(1).topk(min(top, count))), strict=True)
    return [[Prediction(names[i].name, names[i].wnid, p, i) for p, i in zip(*row, strict=True)] for row in rows]
