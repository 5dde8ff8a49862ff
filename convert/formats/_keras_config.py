"""What a Keras file states of its architecture: layers by name and by the path that Keras 3 numbers them under. It is only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert._guard import MAX_DEPTH, MAX_TENSORS
from convert.formats._keras_layers import MODERN, snake
from convert.kinds import is_dict, is_list, is_mapping
from weights.documents import read_json
from weights.errors import LimitExceeded, MalformedFile

MAX_CONFIG_BYTES = 64 * 2**20
WRAPPERS = ("TimeDistributed",)
"""Layers that apply another one; the variables are its, the name is theirs."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One layer as the file states it.

    Attributes:
        name: dots where models nest.
        kind: its class, by today's name.
        config: its settings.
        path: the layers of the file that lead to it, as Keras 3 counts them: ("functional", "conv2d_1").
    """

    name: str
    kind: str
    config: Mapping[str, Any]
    path: tuple[str, ...]


def parse(text: str | bytes, path: Path) -> dict[str, Any]:
    """Read a model's JSON; MalformedFile or LimitExceeded if it is none."""
    if len(text) > MAX_CONFIG_BYTES:
        raise LimitExceeded(f"{path}: {len(text)} bytes of model config; at most {MAX_CONFIG_BYTES} are read")
    found = read_json(text, f"{path}: the model config", most_bytes=MAX_CONFIG_BYTES, most_depth=MAX_DEPTH)
    if not is_dict(found):
        raise MalformedFile(f"{path}: the model config is no object")
    return found


def specs(model: Mapping[str, Any]) -> list[Spec]:
    """List every layer, those of nested models with their prefix, in the order of the file."""
    found = list(_specs(model, "", (), 0))
    if len(found) > MAX_TENSORS:
        raise LimitExceeded(f"a model config of {len(found)} layers")
    return found


def children(model: Mapping[str, Any]) -> Sequence[Mapping[str, Any]] | None:
    """List the layers of a model as the file states them; None if it is a layer, not a model."""
    config = model.get("config")
    layers = config.get("layers") if is_mapping(config) else config if model.get("class_name") == "Sequential" else None
    if not is_list(layers):
        return None
    return [layer for layer in layers if is_mapping(layer)]


def kind_of(layer: Mapping[str, Any]) -> str:
    """Tell a layer's class by today's name, without the package that it was registered in."""
    name = str(layer.get("class_name", "")).rsplit(">", 1)[-1]
    return MODERN.get(name, name)


def name_of(layer: Mapping[str, Any]) -> str:
    """Tell a layer's name, wherever its generation keeps it."""
    config = layer.get("config")
    inner = config.get("name") if is_mapping(config) else None
    return str(inner or layer.get("name") or "")


def settings(layer: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find a layer's settings."""
    config = layer.get("config")
    return config if is_mapping(config) else {}


def is_operation(layer: Mapping[str, Any]) -> bool:
    """Tell a function of Keras 3 that a model calls, keras.ops.add, from a layer: it is not counted among the layers."""
    return ".ops." in str(layer.get("module") or "")


def _specs(model: Mapping[str, Any], prefix: str, path: tuple[str, ...], depth: int) -> Iterator[Spec]:
    if depth > MAX_DEPTH:
        raise LimitExceeded(f"models nest more than {MAX_DEPTH} deep")
    counter: Counter[str] = Counter()
    for layer in children(model) or ():
        counted = ""
        if not is_operation(layer):
            base = snake(str(layer.get("class_name", "")).rsplit(">", 1)[-1])
            counted = f"{base}_{counter[base]}" if counter[base] else base
            counter[base] += 1
        name, here = prefix + name_of(layer), (*path, counted)
        inner = settings(layer).get("layer")
        if children(layer) is not None:
            yield from _specs(layer, f"{name}.", here, depth + 1)
        elif kind_of(layer) in WRAPPERS and is_mapping(inner):
            if children(inner) is not None:
                yield from _specs(inner, f"{name}.", (*here, "layer"), depth + 1)
            else:
                yield Spec(name, kind_of(inner), settings(inner), (*here, "layer"))
        else:
            yield Spec(name, kind_of(layer), settings(layer), here)
