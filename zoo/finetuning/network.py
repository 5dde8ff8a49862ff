"""The network that a run trains: with which head, which preprocessing, and how it is built again."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import weights
from weights import Checkpoint, Preprocessing, WeightsMismatch
from zoo.catalogue import model_class
from zoo.finetuning.augment import steps_for
from zoo.finetuning.chance import seed_of
from zoo.finetuning.settings import Settings
from zoo.images.preprocess import with_channels
from zoo.labels import Label
from zoo.labels import labels as labels_named
from zoo.networks.model import Model
from zoo.pretrained.heads import replace_head
from zoo.pretrained.names import named as name_and_weights
from zoo.pretrained.trained import trained

IMAGENET = Preprocessing(256, 224, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@dataclass(frozen=True, slots=True)
class Subject:
    """A network ready to be trained.

    Attributes:
        network: on the CPU.
        classes: in the order of its logits.
        steps: its images' preprocessing, of a definite size.
        options: constructor keywords that build it, without the number of classes.
        base: name, sha256 and licence of the weights that it begins with; None where they are fresh.
        new_head: whether its classifier is untrained.
    """

    network: Model
    classes: list[str]
    steps: Preprocessing
    options: dict[str, Any]
    base: dict[str, str | None] | None
    new_head: bool


def subject(
    model: type[Model] | Model | str,
    classes: Sequence[str],
    settings: Settings,
    *,
    named: str | os.PathLike[str] | None,
    from_scratch: bool,
    options: Mapping[str, Any],
    preprocessing: Preprocessing | None,
) -> Subject:
    """Build the network, or copy the one that is given, and put a head for the classes on it.

    A head stays only if its labels are these very classes, and then the classes take its order; that of a network without labels stays
    if the number fits.

    Args:
        model: a class or its name, or a network of one.
        classes: the data's, sorted.
        settings: the seed, and the images' size.
        named: the weights, as `trained` takes them.
        from_scratch: whether the weights are fresh.
        options: constructor keywords.
        preprocessing: instead of the checkpoint's.

    Raises:
        ValueError: the network was changed after it was built, so that nobody could build it again; or arguments contradict.
        TypeError: `model` is no network.
        WeightsError: as `trained` raises.
    """
    if isinstance(model, str):
        model, named = class_and_weights(model, named)
    if inspect.isclass(model) and issubclass(model, Model):
        if settings.size is not None and "image_size" in inspect.signature(model).parameters:
            options = {"image_size": settings.size, **options}
        network, base, kept = _built(model, classes, settings, named, from_scratch, options)
    elif isinstance(model, Model):
        if named is not None or from_scratch or options:
            raise ValueError("weights, from_scratch and options go with a network's class; this is a network that has its weights already")
        network, base = copy.deepcopy(model).float(), model.checkpoint
        options = dict(base.options) if base else {}
        known = _labels(network)
        kept = network.num_classes == len(classes) and (not known or _fitting(network, classes) is not None)
    else:
        raise TypeError(f"a network is trained, its class or its name, MobileNetV2, not {model!r:.60}")
    ordered = _fitting(network, classes) if kept else None
    if not kept:
        torch.manual_seed(seed_of(settings.seed, "head"))
        replace_head(network, len(classes))
    steps = preprocessing or (network.checkpoint.preprocessing if network.checkpoint else usual(type(network)))
    if len(steps.mean) != network.in_channels:
        steps = with_channels(steps, network.in_channels)
    side = network.input_size if network.fixed_size else settings.size
    if settings.size not in (None, side):
        todo = f"give its class, {type(network).__name__}, to have it built for that" if network.resizable else "leave size out"
        raise ValueError(f"{type(network).__name__} is built for images of {side} px, not for size={settings.size}; {todo}")
    steps = steps_for(steps, network.input_size, side)
    if (steps.crop or 0) < network.min_size:
        raise ValueError(f"{type(network).__name__} needs images of at least {network.min_size} pixels, got size={steps.crop}")
    known = inspect.signature(type(network)).parameters
    told = {name: value for name, value in options.items() if name in known and name != "in_channels"}  # which the weights tell
    _check_rebuilt(network, told)
    began = None if base is None else {"name": f"{base.model}:{base.tag}", "sha256": base.sha256, "license": base.license}
    return Subject(network, ordered or list(classes), steps, told, began, not kept and base is not None)


def class_and_weights(model: str, named: Any = None) -> tuple[type[Model], Any]:
    """Return the class of a name, "resnet50:imagenet1k_v1", and the weights that the name or `named` tells; raises UnknownWeights."""
    name, told = name_and_weights(model, named)
    return model_class(name), told


def rebuilt(model: type[Model], facts: Mapping[str, Any]) -> Model:
    """Build the network of a run again, untrained, from its `settings.json`."""
    known = inspect.signature(model).parameters
    counts = {name: facts[name] for name in ("num_classes", "in_channels") if name in known}
    return model(**counts, **facts["options"])


def usual(model: type[Model]) -> Preprocessing:
    """Return the preprocessing of a network that has no checkpoint: its variant's, where one is known, else ImageNet's or CIFAR's."""
    default = next((c for c in weights.checkpoints(model.variant().__name__) if c.default), None)
    if default is not None:
        return default.preprocessing
    side = model.input_size
    return replace(IMAGENET, resize=side if side < 64 else round(side * 256 / 224), crop=side)


def _built(
    model: type[Model],
    classes: Sequence[str],
    settings: Settings,
    named: str | os.PathLike[str] | None,
    from_scratch: bool,
    options: Mapping[str, Any],
) -> tuple[Model, Checkpoint | None, bool]:
    if from_scratch:
        if named is not None:
            raise ValueError(f"from_scratch takes no weights, got {named!r}; leave one of them out")
        torch.manual_seed(seed_of(settings.seed, "weights"))
        return model(**{**options, "num_classes": len(classes)}), None, True
    try:
        network = trained(model, named, **options)
    except WeightsMismatch:
        torch.manual_seed(seed_of(settings.seed, "head"))
        network = trained(model, named, num_classes=len(classes), **options)  # of a file without a classifier
        return network, network.checkpoint, False
    return network, network.checkpoint, _fitting(network, classes) is not None


def _labels(network: Model) -> tuple[Label, ...]:
    """Return what a network's logits mean: as they were chosen, or as its checkpoint says; () where nobody does."""
    if network.classes:
        return tuple(origin.label for origin in network.classes)
    record = network.checkpoint
    return labels_named(record.labels) if record is not None and record.labels else ()


def _fitting(network: Model, classes: Sequence[str]) -> list[str] | None:
    """Return the classes in the order of a network's labels, if those are these classes, by name or WordNet id."""
    known = _labels(network)
    for names in ([label.name for label in known], [label.wnid for label in known]):
        if known and len(set(names)) == len(names) and set(names) == set(classes):
            return [name for name in names if name is not None]
    return None


def _check_rebuilt(network: Model, options: Mapping[str, Any]) -> None:
    cls = type(network)
    with torch.device("meta"):
        again = rebuilt(cls, {"num_classes": network.num_classes, "in_channels": network.in_channels, "options": options})
    for ours, theirs in zip(repr(network).splitlines(), repr(again).splitlines(), strict=False):
        if ours != theirs:
            raise ValueError(
                f"this {cls.__name__} was changed after it was built, so trained({cls.__name__}, …) would be another network: "
                f"it has {ours.strip()} where {cls.__name__}() has {theirs.strip()}. Give the class with options, or a class of your own"
            )
