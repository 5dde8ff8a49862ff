"""The order of Lasagne's lists of parameters, and the layers' names where a pickle has them.

`lasagne.layers.get_all_params` walks from the output back to the inputs, so the order is that in which layers compute, and of two
branches that are added the one named first comes first. Recipes' ResNet-50 names its projection first, its CIFAR ResNets last.

Its GoogLeNet is the paper's, with 5x5 convolutions and response normalisation; ours is the later one with BatchNorm. Its list does
not fit ours, and says so by its shapes.

Source: https://github.com/Lasagne/Recipes, modelzoo and papers/deep_residual_learning; Lasagne's layers/helper.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from convert.core import Row, Shape, modules
from convert.names import caffe, keras

FORMATS = ("npz", "theano")
NORMALISED = ("ResNet", "CIFARResNet", "DenseNet", "CIFARDenseNet", "MobileNet", "Xception", "EfficientNet")
"""Families that take `norm_eps`."""


def rows(family: Sequence[str], ours: Mapping[str, Shape]) -> list[Row]:
    """List a row for each of our modules, in a list's order; where layers have names, VGG's are conv1_1 to fc8."""
    found = modules(ours)
    named = caffe.vgg(family, found) if "VGG" in family and "norm" not in found.values() else {}
    return [Row(named.get(module, module), module, found[module]) for module in order(family, ours)]


def order(family: Sequence[str], ours: Mapping[str, Shape]) -> list[str]:
    """List our modules in the order of the file."""
    listed = list(modules(ours))
    if "ResNet" not in family or not any(".downsample." in module for module in listed):
        return listed
    ordered: list[str] = []
    for module in listed:
        block = module.rpartition(".downsample.")[0]
        if block:
            first = next(at for at, other in enumerate(ordered) if other.startswith(f"{block}.") and ".downsample." not in other)
            ordered.insert(first, module)
        else:
            ordered.append(module)
    return ordered


def options(family: Sequence[str]) -> dict[str, Any]:
    """Say how our network has to be built: Lasagne's eps, and the stride on a bottleneck's first convolution, as in Caffe."""
    found: dict[str, Any] = {"norm_eps": 1e-4} if any(name in family for name in NORMALISED) else {}
    if "ResNet" in family and any(name.endswith(("50", "101", "152")) for name in family):
        found["stride_on"] = "1x1"
    return found


def biased(family: Sequence[str]) -> dict[str, str]:
    """Name the convolutions that have a bias there and none here, and the BatchNorm behind each: Recipes' ResNet-50 has one."""
    return {"conv1": "bn1"} if "ResNet" in family else {}


def preprocessing(family: Sequence[str]) -> dict[str, Any]:
    """Say how its images are prepared: Caffe's BGR for the model zoo's.

    On CIFAR it subtracts a picture, the mean of the training images; its mean colours stand for it here (79.7 % instead of 79.3 on a
    fifth of the test images).
    """
    if "VGG" in family:
        return dict(keras.CAFFE)
    if "CIFARResNet" in family:
        return {"mean": (0.4914, 0.4822, 0.4465), "std": (1.0, 1.0, 1.0), "channel_order": "rgb"}
    return {}
