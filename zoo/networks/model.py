"""The base of every classifier: its variants are class lines, and its body and head are separate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.published import Published

if TYPE_CHECKING:
    from zoo.labels import Origin

CATALOGUE: dict[str, type[Model]] = {}
"""Every published classifier by its class name, in the order of definition."""


class Model(Published):
    """A network for images with two halves: ``forward(x) == forward_head(forward_body(x))``.

    The body of a convolutional network gives a map (B, C, H', W'), the body of a transformer tokens (B, L, C), with class
    and register tokens first. The head turns either into logits: by a mean over places, or by one token. What enters the first of
    `classifiers` is the embedding (B, C); where that is a convolution of a map, its mean over H' and W' is.

    Layers may be called as the reference implementation calls them, `stem`, `head`, `body`, `norm`, `stages` included. A name that
    this class uses itself raises ``TypeError`` when a layer is assigned to it.

    Example:
        >>> model = ResNet20().eval()
        >>> images = torch.randn(2, 3, 32, 32)
        >>> model.forward_body(images).shape
        torch.Size([2, 64, 8, 8])
        >>> torch.equal(model(images), model.forward_head(model.forward_body(images)))
        True
    """

    task = "classification"
    catalogue = CATALOGUE
    input_size: ClassVar[int] = 224
    """Side in pixels of the images that the variant was published with."""
    fixed_size: ClassVar[bool] = False
    """Whether it takes images of `input_size` alone, as position embeddings that are not interpolated ask for."""
    resizable: ClassVar[bool] = False
    """Whether the constructor's `image_size` builds a `fixed_size` network for images of another size."""
    size_multiple: ClassVar[int] = 1
    """Both sides of an image are a multiple of this many pixels: of a patch, or of a window at the last stage."""
    first_layer: ClassVar[str]
    """Name of the convolution that reads the image: of patches, in a transformer."""
    classifiers: ClassVar[tuple[str, ...]]
    """Names of the layers that have one output per class; an auxiliary head's layer counts when the network has it."""

    classes: tuple[Origin, ...] | None = None
    """Where each row of the classifier comes from, if ``trained(…, classes=[…])`` chose them."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a layer whose name hides one of this class could not be reached."""
        if isinstance(value, nn.Module | nn.Parameter) and hasattr(type(self), name):
            raise TypeError(f"{type(self).__name__}: no layer can be called {name!r}, which Model uses itself; name it {name}_layer, say")
        super().__setattr__(name, value)

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

    def batch_of(self, images: Any) -> Tensor:
        """Return many images as a preprocessed batch on the CPU; also of a folder or any other source that `zoo embed` reads.

        A float tensor is taken for preprocessed already, and refused where its values can't be.

        Raises:
            ValueError: as `preprocess`; or there is no such source, or a tensor has another range.
        """
        from zoo.images.batch import batch

        if self.checkpoint is None:
            raise ValueError(f"this {type(self).__name__} is untrained, so no preprocessing belongs to it; give preprocessed tensors")
        return batch(images, self.checkpoint.preprocessing, self.in_channels)

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
