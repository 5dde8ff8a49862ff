"""What a checkpoint is called: NAME, NAME:TAG, in any case, or a run's folder. It needs no torch."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeVar

from weights import UnknownWeights
from weights.places import at_home
from zoo.pretrained.run_folder import is_run, read_row, unfinished
from zoo.variants import of_all_tasks, spelt

TORCHVISIONS = re.compile(r"(\w+)_Weights\.(?!DEFAULT)(\w+)")
"""How torchvision's own functions take checkpoints as words, "ResNet50_Weights.IMAGENET1K_V2"."""
W = TypeVar("W", None, str, os.PathLike[str], str | None, str | os.PathLike[str] | None)


def named(model: str, weights: W = None) -> tuple[str, W | str]:
    """Read how a network and its weights are named.

    Example:
        >>> named("resnet50:imagenet1k_v1")
        ('ResNet50', 'imagenet1k_v1')

    Args:
        model: a network, "ResNet50"; a checkpoint, "ResNet50:imagenet1k_v1"; or the folder of a run, "runs/x". Names in any case.
        weights: a tag, a checkpoint of that network, a URL or a path; None where the model says it, or the default is meant.

    Returns:
        The network's name, and what `trained` takes as its weights.

    Raises:
        UnknownWeights: no network is called so; it names weights and others are given; the run is not finished, or none lies there.
        BadRecord: the run's record is damaged.
    """
    folder = at_home(model).absolute()
    if weights is None and folder.is_dir():
        if why := unfinished(folder):
            raise UnknownWeights(why)
        if is_run(folder):
            return read_row(folder).model, str(folder)
    if weights is not None and is_run(folder):
        raise UnknownWeights(
            f"{model} is a run, which has weights of its own: leave out {weights}, or name the network, {read_row(folder).model}"
        )
    if "://" in model or folder.is_file():
        raise UnknownWeights(
            f"{model!r} names weights, and not the network that they are for: name that first, ResNet50, and them behind it"
        )
    name, colon, tag = model.partition(":")
    if "/" in name or os.sep in name:
        raise UnknownWeights(
            f"{model}: no run of zoo finetune lies there, and no network is called so; `zoo list` shows the networks, and a run lies where "
            "its --out said"
        )
    if colon and _is_module(name):
        raise UnknownWeights(
            f"{model} is a network of your own, which only `zoo convert` takes as --model. In Python your module is filled by "
            f"zoo.trained(module, file), a {tag or 'Network'} here; its preprocessing and its labels are known to you alone, so call it "
            "on images that you prepared"
        )
    name = spelt(name)
    if not colon:
        return name, of_network(name, weights)
    if not tag:
        raise UnknownWeights(f"{model} names no checkpoint behind its colon: {name}:TAG, or {name} for the default; `zoo info {name}`")
    if weights is not None:
        raise UnknownWeights(f"{model} names its weights already: leave out {weights}, or name the network alone, {name}")
    return name, of_network(name, tag)


def _is_module(name: str) -> bool:
    """Tell a Python module of the working folder, "mynets" or "mypackage.mynets", from the name of a network."""
    place = Path(*name.split(".")) if name else Path()
    try:
        spelt(name, of_all_tasks())
    except UnknownWeights:
        return all(map(str.isidentifier, name.split("."))) and (place.with_suffix(".py").is_file() or (place / "__init__.py").is_file())
    return False


def of_network(name: str, weights: W) -> W | str:
    """Take the network's name from a checkpoint's, "imagenet1k_v1" of "ResNet50:imagenet1k_v1"; whatever else names weights stays.

    Raises:
        UnknownWeights: the checkpoint is another network's.
    """
    if not isinstance(weights, str) or "://" in weights:
        return weights
    if (enum := TORCHVISIONS.fullmatch(weights)) and spelt(enum[1]) == name:
        return enum[2]
    first, colon, tag = weights.partition(":")
    if colon and first.lower() == name.lower():
        return tag
    other = next((known for known in of_all_tasks() if colon and known.lower() == first.lower()), None)
    if other is not None:
        raise UnknownWeights(f"{weights} is a checkpoint of {other}, not of {name}: name it alone, {other}:{tag}")
    return weights
