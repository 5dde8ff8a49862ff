"""Fold what a checkpoint's images need into its first convolution: channel order, standard deviation and, where that is exact, the mean."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import nn

from convert.network import Layer
from convert.source import Stored
from convert.steps import Minus, ScaleChannels, SwapChannels
from weights import ConvertError, Preprocessing
from zoo.networks.model import Model


def fold_input(
    network: Model, layers: list[Layer], tensors: dict[str, Stored], steps: Preprocessing
) -> tuple[dict[str, Stored], Preprocessing]:
    """Give the first convolution images in RGB, 0..1, whatever it was trained on.

    The mean can be folded only where the first convolution does not pad: its zeros stand for the mean colour, and would become black.
    There the mean stays in the preprocessing.

    Args:
        network: whose `first_layer` is the first convolution.
        layers: of the network.
        tensors: by the network's names.
        steps: what the tensors were trained with.

    Returns:
        The tensors, and the preprocessing that they now want.
    """
    if not network.first_layer:
        raise ConvertError(f"{type(network).__name__} does not begin with a convolution, so nothing can be folded into it")
    stem = network.get_submodule(network.first_layer)
    name, made = network.first_layer, dict(tensors)
    mean, std = np.array(steps.mean), np.array(steps.std)
    weight = made[f"{name}.weight"]
    if steps.channel_order == "bgr":
        weight, mean, std = weight.then(SwapChannels()), mean[::-1], std[::-1]
    if (std != 1).any():
        weight = weight.then(ScaleChannels(tuple(float(1 / each) for each in std)))
    made[f"{name}.weight"] = weight
    readers = [layer for layer in layers if name in layer.inputs]
    norm = readers[0].name if len(readers) == 1 and readers[0].kind == "norm" else None
    if getattr(network, "transform_input", False):
        raise ConvertError(f"{type(network).__name__} with transform_input prepares its images itself; there is nothing to fold")
    target, sign = (f"{name}.bias", 1) if f"{name}.bias" in made else (f"{norm}.running_mean", -1)
    unpadded = isinstance(stem, nn.Conv2d) and type(stem) is nn.Conv2d and not any(np.ravel(stem.padding))
    if unpadded and target in made and mean.any():
        shift = np.einsum("oihw,i->o", weight.array().astype(np.float64), mean)
        made[target] = made[target].then(Minus(sign * shift, "the mean of the images, through the first convolution"))
        mean = np.zeros_like(mean)
    folded = replace(steps, channel_order="rgb", mean=tuple(map(float, mean)), std=(1.0,) * len(std))
    return made, folded
