"""The base of every network: class keywords become configuration, variants register themselves, body and head are separate."""

from __future__ import annotations

import difflib
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from weights import Checkpoint
    from zoo.pretrained.classes import Origin

CATALOGUE: dict[str, type[Model]] = {}
"""Every published variant by its class name, in the order of definition."""


class Model(nn.Module):
    """A convolutional network with two halves: ``forward(x) == head(body(x))``.

    A family derives from it and declares its configuration as ``ClassVar`` annotations; a variant is one class line that
    sets them as class keywords, and `params` makes it a member of `CATALOGUE`. A keyword that no family declares raises
    ``TypeError`` when the class is created.
    """

    params: ClassVar[int]
    """Published number of trainable parameters with the default constructor arguments."""
    paper: ClassVar[str]
    """Link to the paper whose table the variant comes from."""
    input_size: ClassVar[int] = 224
    """Side in pixels of the images that the variant was published with."""
    min_size: ClassVar[int] = 1
    """Smallest side in pixels that the network's arithmetic allows."""
    stem: ClassVar[str]
    """Name of the convolution that reads the image."""
    classifiers: ClassVar[tuple[str, ...]]
    """Names of the layers that have one output per class; an auxiliary head's layer counts when the network has it."""

    num_classes: int
    in_channels: int
    checkpoint: Checkpoint | None = None
    """The record of the weights that `trained` loaded, or None."""
    classes: tuple[Origin, ...] | None = None
    """Where each row of the classifier comes from, if ``trained(…, classes=[…])`` chose them."""

    if TYPE_CHECKING:  # layers that a loop has added are unknown to type checkers, and nn.Module says they may be tensors

        def __getattr__(self, name: str) -> Any: ...

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__()
        declared = {
            name
            for base in cls.__mro__
            for name, annotation in inspect.get_annotations(base).items()
            if str(annotation).startswith(("ClassVar", "typing.ClassVar"))
        }
        for name, value in config.items():
            if name not in declared:
                nearest = difflib.get_close_matches(name, declared, n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else f"; it declares {', '.join(sorted(declared))}"
                raise TypeError(f"{cls.__name__}: {cls.__bases__[0].__name__} has no class keyword {name!r}{hint}")
            setattr(cls, name, value)
        if "params" in config:
            if CATALOGUE.get(cls.__name__, cls).__module__ != cls.__module__:
                raise TypeError(f"{cls.__name__} is published already; a network of your own takes another name, or no params")
            CATALOGUE[cls.__name__] = cls

    @classmethod
    def variant(cls) -> type[Model]:
        """Return the published variant that this class is, or derives from; the class itself where there is none."""
        return next((base for base in cls.__mro__ if "params" in vars(base)), cls)

    @classmethod
    def family(cls) -> type[Model]:
        """Return the family's class, ResNet for ResNet50."""
        return cls.variant().__mro__[1]

    def body(self, x: Tensor) -> Tensor:
        """Compute the last feature map, (B, C, H', W'), of images (B, `in_channels`, H, W)."""
        raise NotImplementedError

    def head(self, x: Tensor) -> Tensor:
        """Compute logits (B, `num_classes`) of the feature map that `body` returns."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, `num_classes`) of preprocessed images (B, `in_channels`, H, W) with H, W >= `min_size`.

        Raises:
            ValueError: the tensor is not four-dimensional, not floating point, has other channels or is too small.
        """
        self.check_input(x)
        return self.head(self.body(x))

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError, saying what to do, when `x` can't be a batch of preprocessed images for this network."""
        check_images(x, type(self).__name__, self.in_channels, self.min_size)

    def paper_names(self) -> dict[str, str]:
        """Return the names that the paper, or its authors' Caffe network, gives to layers: name -> our module, in order."""
        return {}

    def preprocess(self, images: Any) -> Tensor:
        """Turn images into the batch that this model's checkpoint was measured with.

        Args:
            images: a path, a PIL image, a uint8 array or tensor (H, W, C) or (C, H, W), or a list of these.

        Returns:
            float32 (B, C, H, W) on the model's device.

        Raises:
            ValueError: the model has no checkpoint, or an image can't be used; the message says why.
        """
        from zoo.images.preprocess import preprocess

        if self.checkpoint is None:
            raise ValueError(
                f"this {type(self).__name__} is untrained, so no preprocessing belongs to it; use trained({type(self).__name__}), "
                "or zoo.images.preprocess.preprocess(images, preprocessing) with one of your own."
            )
        return preprocess(images, self.checkpoint.preprocessing).to(next(self.parameters()).device)

    def initialise(self) -> None:
        """Draw fresh parameters as the family's paper or torchvision does; nothing on the meta device."""
        if next(self.parameters()).is_meta:
            return
        for name, layer in self.named_modules():
            self.initialise_layer(name, layer)

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        """Draw the parameters of one layer; a family overrides this with its paper's rule."""
        del name
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def check_images(x: Tensor, name: str, in_channels: int, min_size: int) -> None:
    """Raise ValueError, saying what to do, when `x` can't be a batch of images for the network `name`; see `Model.check_input`.

    Raises:
        TypeError: `x` is no tensor.
    """
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]  # shapes are tensors there, and comparing them would warn
        return
    if not hasattr(x, "dim"):  # and may be no tensor, but what records one
        todo = "model.preprocess(images) makes one of files, pictures and arrays"
        raise TypeError(f"{name} takes a tensor (batch, {in_channels}, height, width), got a {type(x).__name__}; {todo}.")
    if x.dim() != 4:
        add = " Add the batch axis with x.unsqueeze(0)." if x.dim() == 3 else ""
        raise ValueError(f"{name} takes (batch, {in_channels}, height, width), got shape {tuple(x.shape)}.{add}")
    if not x.is_floating_point():
        raise ValueError(f"{name} takes normalised floating-point images, got {x.dtype}; model.preprocess(images) makes them.")
    if x.shape[1] != in_channels:
        last = x.shape[3] == in_channels
        todo = "move the channels first with x.permute(0, 3, 1, 2)" if last else f"build it with {name}(in_channels={x.shape[1]})"
        raise ValueError(f"{name} takes {in_channels} channels, got shape {tuple(x.shape)}; {todo}.")
    if x.shape[2] < min_size or x.shape[3] < min_size:
        raise ValueError(
            f"{name} needs images of at least {min_size}x{min_size} pixels, got {x.shape[2]}x{x.shape[3]}; "
            "resize them: smaller ones vanish in its strides."
        )
