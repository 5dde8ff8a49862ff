"""One naming tried on a file: the network is built as the file asks, and takes its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import nn

from convert import names
from convert.adopted import Adopted
from convert.conversion import IN_ORDER, adopt
from convert.core import Row, by_module
from convert.match import NoUniqueMatch
from convert.match import match as derive
from convert.network import Layer, layers
from convert.source import Source
from weights.errors import ConvertError
from zoo.conversion.foreign import Foreign
from zoo.conversion.notes import accepted
from zoo.conversion.options import Asked, options_of
from zoo.conversion.own import OwnNetwork
from zoo.networks.model import Model

M = TypeVar("M", bound=Model)


def adopt_by(source: Source, model: type[Model], naming: str, asked: Asked) -> Foreign | None:
    """Give a file's tensors to a network by one naming; None where the naming is of other networks.

    The network is built twice where the file has another number of classes or channels than was assumed.
    """
    if asked.headless and not model.classifiers:
        raise ConvertError(
            f"{model.__name__} is your own network, and nothing here knows which of its layers is a classifier; leave headless=True out"
        )
    keywords, taken = options_of(source, model, naming, asked), accepted(model)
    found = None
    for last in (False, True):
        network = _meta(model, keywords, asked.headless)
        shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
        structure = (
            layers(network, network.image_shape, network.traced_on)
            if isinstance(network, OwnNetwork)
            else _structure(model, tuple(sorted(keywords.items())), asked.headless)
        )
        try:
            mapped = _mapped(source, network, structure, shapes, naming, asked)
        except NoUniqueMatch:
            classes = None if asked.headless else _classes(source, network)
            if last or classes is None or "num_classes" in asked.options:
                raise
            keywords["num_classes"] = classes
            continue
        if mapped is None:
            return None
        result, renamed = mapped
        own = {k: v for k, v in keywords.items() if k not in ("num_classes", "in_channels", "dropout")}
        found = Foreign(source, model, network, structure, result, own, asked.convention, asked.spatial, asked.known, renamed, asked.beside)
        widths = _widths(result, network)
        other = {k: v for k, v in widths.items() if k in taken and k not in asked.options and v != getattr(network, k)}
        if not other:
            break
        keywords |= other
    return found


def _mapped(
    source: Source, network: Model, structure: list[Layer], shapes: Mapping[str, tuple[int, ...]], naming: str, asked: Asked
) -> tuple[Adopted, bool] | None:
    """Map tensors to the network's names: what was adopted, and whether the file's classifier has another name than in its naming."""
    chosen: dict[str, Any] = {"family": type(network), "convention": asked.convention, "spatial": asked.spatial}
    if asked.match:
        return adopt(source, structure, shapes, rows=derive(source, structure, shapes), **chosen), False
    chosen["naming"] = naming
    if source.positional:
        if naming == IN_ORDER:
            return adopt(source, structure, shapes, order=_order(source, structure, shapes), **chosen), False
        return (adopt(source, structure, shapes, **chosen), False) if hasattr(names.NAMINGS[naming], "order") else None
    rows = names.rows(naming, type(network), shapes)
    if not rows:
        return None
    result = adopt(source, structure, shapes, rows=rows, **chosen)
    head = None if asked.headless or not network.classifiers else _other_head(result, network)
    if head is None:
        return result, False
    result = adopt(source, structure, shapes, rows=[row for row in rows if row.ours != head.ours] + [head], **chosen)
    result.notes.append(f"the classifier is called {head.theirs} in the file")
    return result, True


def _order(source: Source, structure: list[Layer], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Choose the order of our modules in which a list's tensors fit best: that in which they compute, or that of the network's code."""
    computed = [layer.name for layer in structure]
    written = list(by_module(dict.fromkeys(shapes, ())))
    if sorted(computed) != sorted(written):
        return computed

    def misfits(order: list[str]) -> int:
        sizes = [math.prod(shapes[f"{module}.{leaf}"]) for module in order for leaf in ("weight", "bias") if f"{module}.{leaf}" in shapes]
        theirs = [math.prod(stored.stored_shape) for stored in source.tensors.values()]
        return sum(a != b for a, b in zip(sizes, theirs, strict=False))

    return min((computed, written), key=misfits)


def _classes(source: Source, network: Model) -> int | None:
    """Find how many classes a file has, whose only weight like our classifier's has another number of them."""
    if not network.classifiers:
        return None
    wanted = network.state_dict()[f"{network.classifiers[0]}.weight"].shape
    like = [s.shape for n, s in source.tensors.items() if n.endswith(".weight") and s.shape[1:] == tuple(wanted[1:])]
    return like[0][0] if len(like) == 1 else None


def _other_head(result: Adopted, network: Model) -> Row | None:
    """Find the classifier where it is all that is missing, and one module that reads as much is all that is left: a fine-tuned file."""
    head = network.classifiers[0]
    left = {name.rpartition(".")[0] for name in result.report.unmatched}
    missing = {ours.rpartition(".")[0] for ours, _ in result.report.missing}
    if missing != {head} or len(left) != 1:
        return None
    theirs = left.pop()
    ours, wanted = result.theirs.get(f"{theirs}.weight", ()), network.state_dict()[f"{head}.weight"].shape
    if len(ours) < 2 or ours[1] != wanted[1] or set(ours[2:]) - {1}:
        return None
    same = len(ours) == len(wanted)
    return Row(
        theirs,
        head,
        ("linear" if len(wanted) == 2 else "conv") if same else ("linear_from_conv" if len(wanted) == 2 else "conv_from_linear"),
    )


@lru_cache(32)
def _structure(model: type[Model], keywords: tuple[tuple[str, Any], ...], headless: bool) -> list[Layer]:
    """List a network's layers; several namings ask for the same."""
    network = _meta(model, dict(keywords), headless)
    return layers(network, (network.in_channels, network.input_size, network.input_size))


def _meta(model: type[M], keywords: Mapping[str, Any], headless: bool) -> M:
    if issubclass(model, OwnNetwork):  # whose own code may compute with what it keeps beside its parameters
        return model(**keywords)
    with torch.device("meta"):
        network = model(**keywords)
    if headless:
        network.set_submodule(network.classifiers[0], nn.Identity())
    return network


def _widths(result: Adopted, network: Model) -> dict[str, int]:
    """Read from the tensors how many classes and channels the file has."""
    found: dict[str, int] = {}
    if not network.classifiers:
        return found
    for keyword, layer, axis in (("num_classes", network.classifiers[0], 0), ("in_channels", network.first_layer, 1)):
        stored = result.tensors.get(f"{layer}.weight")
        if stored is not None and len(stored.shape) > axis:
            found[keyword] = stored.shape[axis]
    return found
