"""Keras 0 to 3 in HDF5 with names in attributes: whole models, and weights alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert._guard import MAX_TENSORS
from convert.formats._hdf5 import Dataset, Group, Hdf5
from convert.formats._keras_config import Spec
from convert.formats._keras_layers import LEAVES, ORDER, Layer, channels_first
from convert.formats._keras_layers import variable as stored_variable
from convert.kinds import is_list
from convert.source import WEIGHTED, Positional, Shape, Stored
from convert.steps import Moment, Step, from_layout
from weights.errors import LimitExceeded, MalformedFile

OLD = re.compile(r"^(?P<layer>.*)_(?P<leaf>W|b|gamma|beta|running_mean|running_std|alphas|depthwise_kernel|pointwise_kernel)$")
"""Keras 1's spelling of a variable: convolution2d_1_W."""


def attribute(group: Group, name: str) -> str:
    """Read an attribute that is text; "" if there is none."""
    value = group.attrs.get(name)
    return value if isinstance(value, str) else ""


def names(group: Group, name: str) -> list[str] | None:
    """Read a list of names, also one that was split over several attributes because it is long; None if there is none."""
    found = group.attrs.get(name)
    if found is None and f"{name}0" in group.attrs:
        pieces: list[str] = []
        number = 0
        while (piece := group.attrs.get(f"{name}{number}")) is not None and number < MAX_TENSORS:
            pieces.extend(_listed(piece))
            number += 1
        return pieces
    return None if found is None and name not in group.attrs else _listed(found)


def layers(file: Hdf5, top: Group, specs: Sequence[Spec]) -> list[Layer]:
    """Read the layers that a group lists, in its order.

    Args:
        file: the open file.
        top: the group that has "layer_names".
        specs: what the file states of its layers, if it does.

    Raises:
        MalformedFile: a layer or a variable that is listed is not there.
    """
    known = {spec.name: spec for spec in specs}
    found: list[Layer] = []
    listed = names(top, "layer_names") or []
    if "top_level_model_weights" in top.links:
        listed = [*listed, "top_level_model_weights"]
    for name in listed:
        group = _child(file, top, name)
        variables: list[tuple[str, Dataset]] = []
        for variable in names(group, "weight_names") or []:
            dataset = _child(file, group, variable)
            if not isinstance(dataset, Dataset):
                raise MalformedFile(f"{file.path}: {name}/{variable} is no array")
            variables.append((variable, dataset))
        if len(variables) + len(found) > MAX_TENSORS:
            raise LimitExceeded(f"{file.path} lists more than {MAX_TENSORS} variables")
        if variables:
            found.extend(_split(name, variables, known))
    return found


def numbered(file: Hdf5) -> list[Stored]:
    """Read Keras 0.x: layers and their parameters have numbers, and nothing has a name."""
    count = _count(file, file.root, "nb_layers")
    found: list[Stored] = []
    for number in range(count):
        group = _child(file, file.root, f"layer_{number}")
        for parameter in range(_count(file, group, "nb_params")):
            dataset = _child(file, group, f"param_{parameter}")
            if not isinstance(dataset, Dataset):
                raise MalformedFile(f"{file.path}: layer_{number}/param_{parameter} is no array")
            found.append(dataset.stored(f"layer_{number}/param_{parameter}"))
    return found


def positional(found: Sequence[Stored]) -> Positional:
    """Say how Keras 0.x stores each kind of layer; the order of kernel axes is told by the shapes of all kernels together."""
    shapes = [stored.stored_shape for stored in found]
    layers = [stored.origin.split("/")[0] for stored in found]
    votes = 0
    for number, shape in enumerate(shapes):
        if len(shape) == 4:
            biased = number + 1 < len(shapes) and layers[number + 1] == layers[number]
            votes += channels_first(shape, shapes[number + 1] if biased else None)
    layout = "OIHW" if votes >= 0 else "HWIO"

    def steps(kind: str, leaf: str, shape: Shape) -> tuple[Step, ...]:
        if leaf == "running_var":
            return (Moment("std", 0.0),)  # its epsilon, 1e-6, stands outside of the root
        if leaf == "weight" and kind == "linear" and len(shape) == 2:
            return from_layout("linear", "IO", shape)
        if leaf == "weight" and kind in ("conv", "depthwise") and len(shape) == 4:
            return from_layout("conv", layout, shape)
        return ()

    return Positional({**WEIGHTED, "norm": ("weight", "bias", "running_mean", "running_var")}, steps, "unknown")


def _listed(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for text in value if isinstance(text, str)] if is_list(value) else []


def _count(file: Hdf5, group: Any, name: str) -> int:
    value: Any = group.attrs.get(name) if isinstance(group, Group) else None
    try:
        count = int(value)
    except (TypeError, ValueError) as error:
        raise MalformedFile(f"{file.path}: {group.name} should have a number {name!r}, and has {value!r}") from error
    if not 0 <= count <= MAX_TENSORS:
        raise LimitExceeded(f"{file.path}: {name} is {count}")
    return count


def _child(file: Hdf5, group: Any, name: str) -> Any:
    try:
        return group[name]
    except (KeyError, TypeError) as error:
        raise MalformedFile(
            f"{file.path}: {name!r} is listed in {getattr(group, 'name', '?')} and is not there. Is it cut short?"
        ) from error


def _leaf(variable: str) -> tuple[str, str]:
    """Split a variable's name into its scope and its leaf: "a/b/kernel:0" and "a_W" alike."""
    plain = re.sub(r":\d+$", "", variable)
    scope, _, leaf = plain.rpartition("/")
    if leaf not in LEAVES and (old := OLD.match(leaf)):
        return "/".join(filter(None, (scope, old["layer"]))), old["leaf"]
    return scope, leaf


def _split(name: str, variables: Sequence[tuple[str, Dataset]], known: Mapping[str, Spec]) -> Iterator[Layer]:
    """Take a listed layer's variables apart by the layers within it, if it is a model."""
    parsed = [(*_leaf(variable), variable, dataset) for variable, dataset in variables]
    scopes = list(dict.fromkeys(scope for scope, *_ in parsed))
    leaves = Counter(leaf for _, leaf, *_ in parsed)
    spec = known.get(name)
    nested = spec is None and (len(scopes) > 1 or any(other.startswith(f"{name}.") for other in known))
    if spec is not None and spec.kind not in ORDER:
        nested = len(scopes) > 1 or max(leaves.values()) > 1  # MultiHeadAttention and the like: parts with scopes of their own
    if not nested:
        yield Layer(name, spec.kind if spec else "", spec.config if spec else {}, _unique(name, [(leaf, v, d) for _, leaf, v, d in parsed]))
        return
    whole = spec
    inner = {other.removeprefix(f"{name}."): other for other in known if other.startswith(f"{name}.")}
    for scope in scopes:
        own = _within(name, scope, inner)
        spec = known.get(f"{name}.{own}")
        module = f"{name}.{own}" if own else name
        chosen = [(leaf, v, d) for at, leaf, v, d in parsed if at == scope]
        kind = spec.kind if spec else f"part of {whole.kind}" if whole else ""
        yield Layer(module, kind, spec.config if spec else {}, _unique(name, chosen))


def _within(name: str, scope: str, inner: Mapping[str, str]) -> str:
    """Find which layer of a nested model a scope means; Keras prefixes it with the model's name, or appends a counter, or neither."""
    bare = scope.removeprefix(f"{name}/") if scope != name else ""
    spelt = {own.replace(".", "/"): own for own in inner}
    last = {own.rsplit(".", 1)[-1]: own for own in inner}
    for candidate in (bare, scope, re.sub(r"_\d+$", "", bare)):
        if found := spelt.get(candidate) or last.get(candidate):
            return found
    return bare


def _unique(name: str, chosen: Sequence[tuple[str, str, Dataset]]) -> list[tuple[str, Stored]]:
    seen: Counter[str] = Counter()
    made: list[tuple[str, Stored]] = []
    for leaf, variable, dataset in chosen:
        seen[leaf] += 1
        made.append((leaf if seen[leaf] == 1 else f"{leaf}_{seen[leaf] - 1}", stored_variable(dataset, f"{name}/{variable}")))
    return made


def path_hint(path: Path) -> tuple[str, str]:
    """Read what the old keras.applications files say in their names: (ordering, kernels), each "th", "tf" or ""."""
    order = re.search(r"(th|tf)_dim_ordering", path.name)
    kernels = re.search(r"(th|tf)_kernels", path.name)
    return order[1] if order else "", kernels[1] if kernels else ""
