"""The base of every network: class keywords become configuration, variants register themselves, body and head are separate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from weights.arguments import did_you_mean, python_scalar, unknown_keyword, whole

if TYPE_CHECKING:
    from weights import Checkpoint
    from zoo.labels import Origin

CATALOGUE: dict[str, type[Model]] = {}
"""Every published variant by its class name, in the order of definition."""

WORDS = {
    "pretrained": "{0}() is untrained; trained({0}) loads pretrained weights",
    "weights": "{0}() is untrained; trained({0}, TAG) loads the weights of that tag, URL or path",
    "checkpoint": "{0}() is untrained; trained({0}, PATH) loads a file",
    "device": '{0}().to("cuda") moves it',
    "dtype": "{0}().to(torch.bfloat16) changes it",
    "features_only": "features({0}(), ...) and pyramid({0}()) give inner maps",
}
"""What to do instead of other libraries' words; {0} is the class."""
KINDS: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a word"),
}
"""What an option may be whose default is of this kind."""


class Model(nn.Module):
    """A network for images with two halves: ``forward(x) == forward_head(forward_body(x))``.

    A family derives from it and declares its configuration as ``ClassVar`` annotations; a variant is one class line that
    sets them as class keywords, and `params` makes it a member of `CATALOGUE`. A keyword that no family declares raises
    ``TypeError`` when the class is created.

    The body of a convolutional network gives a map (B, C, H', W'), the body of a transformer tokens (B, L, C), with class
    and register tokens first. The head turns either into logits: by a mean over places, or by one token. What enters the first of
    `classifiers` is the embedding (B, C); where that is a convolution of a map, its mean over H' and W' is.

    Layers may be called as the reference implementation calls them, `stem`, `head`, `body`, `norm`, `stages` included. A name that
    this class uses itself raises ``TypeError`` when a layer is assigned to it.
    """

    params: ClassVar[int]
    """Published number of trainable parameters with the default constructor arguments."""
    paper: ClassVar[str]
    """Link to the paper whose table the variant comes from."""
    input_size: ClassVar[int] = 224
    """Side in pixels of the images that the variant was published with."""
    fixed_size: ClassVar[bool] = False
    """Whether it takes images of `input_size` alone, as position embeddings that are not interpolated ask for."""
    resizable: ClassVar[bool] = False
    """Whether the constructor's `image_size` builds a `fixed_size` network for images of another size."""
    size_multiple: ClassVar[int] = 1
    """Both sides of an image are a multiple of this many pixels: of a patch, or of a window at the last stage."""
    min_size: ClassVar[int] = 1
    """Smallest side in pixels that the network's arithmetic allows."""
    first_layer: ClassVar[str]
    """Name of the convolution that reads the image: of patches, in a transformer."""
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
                hint = did_you_mean(name, declared) or f"; it declares {', '.join(sorted(declared))}"
                raise TypeError(f"{cls.__name__}: {cls.__bases__[0].__name__} has no class keyword {name!r}{hint}")
            setattr(cls, name, value)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)
        if "params" in config:
            if CATALOGUE.get(cls.__name__, cls).__module__ != cls.__module__:
                raise TypeError(f"{cls.__name__} is published already; a network of your own takes another name, or no params")
            CATALOGUE[cls.__name__] = cls

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a layer whose name hides one of this class could not be reached."""
        if isinstance(value, nn.Module | nn.Parameter) and hasattr(type(self), name):
            raise TypeError(f"{type(self).__name__}: no layer can be called {name!r}, which Model uses itself; name it {name}_layer, say")
        super().__setattr__(name, value)

    @classmethod
    def variant(cls) -> type[Model]:
        """Return the published variant that this class is, or derives from; the class itself where there is none."""
        return next((base for base in cls.__mro__ if "params" in vars(base)), cls)

    @classmethod
    def family(cls) -> type[Model]:
        """Return the family's class, ResNet for ResNet50."""
        return cls.variant().__mro__[1]

    def forward_body(self, x: Tensor) -> Tensor:
        """Compute the last map (B, C, H', W'), or tokens (B, L, C), of images (B, `in_channels`, H, W)."""
        raise NotImplementedError

    def forward_head(self, x: Tensor) -> Tensor:
        """Compute logits (B, `num_classes`) of what `forward_body` returns."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """Compute logits (B, `num_classes`) of preprocessed images (B, `in_channels`, H, W).

        H and W are at least `min_size` and multiples of `size_multiple`; with `fixed_size` they are `input_size`.

        Raises:
            ValueError: the tensor is not four-dimensional, not floating point, or has other channels or another size.
        """
        self.check_input(x)
        return self.forward_head(self.forward_body(x))

    def check_input(self, x: Tensor) -> None:
        """Raise ValueError, saying what to do, when `x` can't be a batch of preprocessed images for this network."""
        check_images(x, self, type(self).__name__)

    @property
    def first_patch(self) -> int | None:
        """Index of the first token of a patch, where the body gives tokens of a square of patches in rows; else None."""
        return None

    def fit_size(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return a checkpoint's tensors, under this network's names, resized from another size of images to its own `input_size`."""
        return state

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


def _checked(build: Callable[..., None]) -> Callable[..., None]:
    """Let a constructor take whole numbers of any library, and name the public class and the right word in its errors."""
    known = list(inspect.signature(build).parameters.values())[1:]
    names = [one.name for one in known]
    usual = {one.name: one.default for one in known}
    takes_all = any(one.kind is one.VAR_KEYWORD for one in known)

    @wraps(build)
    def init(self: Model, *args: Any, **options: Any) -> None:
        called = type(self).__name__
        for word in () if takes_all else options:
            if word not in names:
                raise unknown_keyword(f"{called}()", word, names, {key: todo.format(called) for key, todo in WORDS.items()})
        given = dict(zip(names, args, strict=False)) | options
        counts = {name: whole(name, given[name]) for name in ("num_classes", "in_channels") if name in given}
        placed = [counts.get(name, python_scalar(value)) for name, value in zip(names, args, strict=False)]
        named = {name: counts.get(name, python_scalar(value)) for name, value in options.items()}
        for name, value in (dict(zip(names, placed, strict=False)) | named).items():
            kinds, what = KINDS.get(type(usual.get(name)), ((), ""))
            if kinds and type(value) not in kinds:
                raise TypeError(f"{called}'s {name} is {what}, {usual[name]!r} by default, not {value!r:.60}")
        build(self, *placed, *args[len(placed) :], **named)

    return init


def check_images(x: Tensor, takes: Any, name: str) -> None:
    """Raise ValueError, saying what to do, when `x` can't be a batch of images for the network `name`; see `Model.check_input`.

    `takes` is a network or a part of one: it says `in_channels`, `input_size`, `fixed_size`, `size_multiple` and `min_size`.

    Raises:
        TypeError: `x` is no tensor.
    """
    in_channels, min_size = takes.in_channels, takes.min_size
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
    if takes.fixed_size and (x.shape[2] != takes.input_size or x.shape[3] != takes.input_size):
        side = takes.input_size
        build = ", or build it with image_size=… for others" if getattr(takes, "resizable", False) else ""
        raise ValueError(f"{name} takes images of {side}x{side} pixels alone, got {x.shape[2]}x{x.shape[3]}; resize them{build}.")
    if x.shape[2] % takes.size_multiple or x.shape[3] % takes.size_multiple:
        raise ValueError(
            f"{name} takes images whose sides are multiples of {takes.size_multiple} pixels, got {x.shape[2]}x{x.shape[3]}; "
            "resize or pad them."
        )
