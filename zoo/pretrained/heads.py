"""Changes to a complete network: another classifier, another number of input channels."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from weights.arguments import forgiving, whole
from zoo.images.preprocess import with_channels
from zoo.networks.model import Model

log = logging.getLogger("zoo")

M = TypeVar("M", bound=Model)


@forgiving
def reset_head(model: M, num_classes: int) -> M:
    """Put a new, untrained classifier of `num_classes` on the body, in place; auxiliary heads get theirs too.

    The record loses what was true of the old classifier only: labels and metrics.

    Args:
        model: any network of the zoo.
        num_classes: at least 1; the network's own number draws its classifier afresh.

    Returns:
        The same network.

    Raises:
        TypeError: `model` is no network of the zoo; of a fast one, take ``plain(model)``.
        ValueError: `num_classes` is below 1.

    Example:
        >>> model = reset_head(ResNet20(), 4)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 4])
    """
    if not isinstance(model, Model):
        raise TypeError(f"reset_head() takes a network of the zoo, plain(model) of a fast one, not {model!r:.60}")
    replace_head(model, whole("num_classes", num_classes))
    return model


def remove_head(network: Model) -> None:
    """Let the network give what enters its classifier, in place: as of a checkpoint that has none. `reset_head` puts one on."""
    for name in network.classifiers:
        try:
            network.get_submodule(name)
        except AttributeError:  # an auxiliary head that this network was built without
            continue
        network.set_submodule(name, nn.Identity())
    network.num_classes, network.classes = 0, None


def replace_head(network: Model, num_classes: int) -> None:
    """Do what `reset_head` does, and say so in the log."""
    had = network.num_classes
    fresh_head(network, num_classes)
    before = f"{had} classes" if had else "none"
    log.warning(
        "%s: its classifier %s is new and untrained, %d classes instead of %s",
        type(network).__name__,
        network.classifiers[0],
        num_classes,
        before,
    )


def fresh_head(network: Model, num_classes: int) -> None:
    """Draw a new classifier, and new auxiliary ones, and forget what the record said of the old."""
    for name in network.classifiers:
        try:
            old = network.get_submodule(name)
        except AttributeError:  # an auxiliary head that this network was built without
            continue
        training = old.training
        weight = next(old.parameters(), next(network.parameters()))
        place = {"device": weight.device, "dtype": weight.dtype}
        old = _removed(network, name) if isinstance(old, nn.Identity) else old
        if isinstance(old, nn.Conv2d):
            size, padding = (old.kernel_size[0], old.kernel_size[1]), (int(old.padding[0]), int(old.padding[1]))
            new: nn.Module = nn.Conv2d(old.in_channels, num_classes, size, padding=padding, bias=old.bias is not None, **place)
        elif isinstance(old, nn.Linear):
            new = nn.Linear(old.in_features, num_classes, bias=old.bias is not None, **place)
        else:
            raise TypeError(f"{name} of {type(network).__name__} is a {type(old).__name__}, not a layer with one output per class")
        network.initialise_layer(name, new)
        network.set_submodule(name, new.train(training))
    network.num_classes, network.classes = num_classes, None
    if network.checkpoint is not None:
        network.checkpoint = replace(
            network.checkpoint, num_classes=num_classes, embedding=False, labels=None, metrics={}, metrics_data=None
        )


def _removed(network: Model, name: str) -> nn.Module:
    """Build the classifier that `remove_head` took away, on the meta device."""
    options = network.checkpoint.options if network.checkpoint is not None else {}
    with torch.device("meta"):
        return type(network)(**options).get_submodule(name)


def adapt_stem(network: Model, in_channels: int) -> None:
    """Let the first convolution read `in_channels` channels, in place.

    One channel reads by the mean of the old kernels, more by their cyclic repetition, both scaled by old / new channels: so a
    grey image gives in one channel, or in whole repetitions, what it gave as RGB. An unscaled mean would divide every activation
    by three, and BatchNorm's statistics would not know.
    """
    stem = network.get_submodule(network.first_layer)
    if not isinstance(stem, nn.Conv2d):
        raise TypeError(f"{network.first_layer} of {type(network).__name__} is a {type(stem).__name__}, not a convolution")
    old, count = stem.weight.data, network.in_channels
    new = old.mean(1, keepdim=True) if in_channels == 1 else old[:, [i % count for i in range(in_channels)]]
    stem.weight = nn.Parameter((new * (count / in_channels)).contiguous(), requires_grad=stem.weight.requires_grad)
    stem.in_channels = network.in_channels = in_channels
    if network.checkpoint is not None:
        preprocessing = with_channels(network.checkpoint.preprocessing, in_channels)
        network.checkpoint = replace(network.checkpoint, preprocessing=preprocessing, metrics={}, metrics_data=None)
    log.warning("%s: %s now reads %d channels instead of %d", type(network).__name__, network.first_layer, in_channels, count)
