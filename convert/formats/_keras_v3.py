"""Keras 3's weights: variables with numbers, under classes that are counted; in HDF5, in shards of it, and in a .keras archive."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from convert._guard import MAX_DEPTH, MAX_TENSORS
from convert.formats._hdf5 import Dataset, Group, Hdf5
from convert.formats._keras_config import Spec, parse
from convert.formats._keras_layers import SNAKES, Layer, numbered, variable
from convert.kinds import is_list, is_mapping
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile, UnsafeFormat

LISTS = ("layers", "_layer_checkpoint_dependencies", "operations", "_operations")
"""Attributes of a model that hold its layers; TensorFlow 2.13 wrote the second."""
SKIPPED = ("optimizer", "seed_generator", "loss_tracker", "_metrics", "metrics", "compile_metrics", "_compile_metrics")


@dataclass(slots=True)
class Entry:
    """What belongs to one object of the model: its path in the file, its name if the file has it, its variables by number."""

    path: tuple[str, ...]
    name: str = ""
    order: int = 0
    variables: dict[str, Stored] = field(default_factory=dict[str, Stored])


def is_store(root: Group, depth: int = 0) -> bool:
    """Tell whether a file is of this kind: not far below its root there is a group "vars" with numbered variables."""
    if depth > 4:
        return False
    for name in list(root.links)[:20]:
        child = root[name] if root.links[name].kind == "hard" else None
        if isinstance(child, Group) and ((name == "vars" and ("0" in child.links or "name" in child.attrs)) or is_store(child, depth + 1)):
            return True
    return False


def entries(file: Hdf5) -> dict[tuple[str, ...], Entry]:
    """Go through a file: every object with variables or a name, in the order in which Keras wrote them.

    Keras writes layer after layer, while HDF5's groups list names by the alphabet; but addresses are given out in order. Freed space
    is used again, so that single objects lie lower: the highest address of a layer tells, and it can't come before the layer of its
    class that was counted before it.
    """
    found: dict[tuple[str, ...], Entry] = {}
    for entry in _walk(file.root, (), set()):
        found[entry.path] = entry
        if len(found) > MAX_TENSORS:
            raise LimitExceeded(f"{file.path} has more than {MAX_TENSORS} layers")
    last: dict[tuple[str, ...], int] = {}
    for entry in sorted(found.values(), key=lambda entry: _counter(entry.path[-1] if entry.path else "")):
        kind = (*entry.path[:-1], _class(entry.path[-1] if entry.path else ""))
        entry.order = last[kind] = max(entry.order, last.get(kind, -1) + 1)
    return dict(sorted(found.items(), key=lambda item: item[1].order))


def shards(path: Path, text: bytes) -> list[Path]:
    """List the files that a .weights.json divides its weights over.

    Raises:
        MalformedFile: the map is none.
        UnsafeFormat: it names a file in another folder.
    """
    found: dict[str, None] = {}
    weight_map = parse(text, path).get("weight_map")
    if not is_mapping(weight_map):
        raise MalformedFile(f"{path} has no weight_map; a sharded Keras file has one")
    for names in weight_map.values():
        for name in [names] if isinstance(names, str) else names if is_list(names) else []:
            if not isinstance(name, str) or Path(name).name != name or "\\" in name:
                raise UnsafeFormat(f"{path} names the file {name!r}; only files in its own folder are opened")
            found[name] = None
    return [path.with_name(name) for name in found]


def merge(stores: Sequence[Mapping[tuple[str, ...], Entry]]) -> dict[tuple[str, ...], Entry]:
    """Join the shards of one model; a layer's variables may lie in two of them."""
    joined: dict[tuple[str, ...], Entry] = {}
    for store in stores:
        for path, entry in store.items():
            whole = joined.setdefault(path, Entry(path, entry.name, len(joined)))
            whole.name = whole.name or entry.name
            whole.variables.update(entry.variables)
    return joined


def layers(found: Mapping[tuple[str, ...], Entry], specs: Sequence[Spec]) -> tuple[list[Layer], str]:
    """Give every entry its layer's name and class.

    Args:
        found: what `entries` or `merge` gave.
        specs: what the file states of its layers, if it does.

    Returns:
        The layers, in the file's order or the config's, and where their names come from: "config", "name attributes" or
        "class counters".
    """
    by_path = {spec.path: spec for spec in specs}
    named = any(entry.name for path, entry in found.items() if path)
    made: list[tuple[int, Layer]] = []
    positions = {path: number for number, path in enumerate(by_path)}
    for path, entry in found.items():
        if not entry.variables:
            continue
        plain = tuple(part for part in path if part not in LISTS)
        spec = by_path.get(plain)
        name = spec.name if spec else _named(path, found) if named else ".".join(plain)
        kind = spec.kind if spec else _kind(plain[-1] if plain else "")
        keys = sorted(entry.variables, key=lambda key: (not key.isdigit(), int(key) if key.isdigit() else 0, key))
        if spec is None and plain[-1:] == ("layer",):  # TimeDistributed
            name = _named(path[:-1], found) if named else ".".join(plain[:-1])
            kind = "Dense" if len(entry.variables[keys[0]].stored_shape) == 2 else "Conv2D"
        config = spec.config if spec else dict[str, object]()
        leaves = numbered(kind, config, len(keys)) if all(key.isdigit() for key in keys) else keys
        layer = Layer(name or "top", kind, config, [(leaf, entry.variables[key]) for leaf, key in zip(leaves, keys, strict=True)])
        place = next((positions[plain[:end]] for end in range(len(plain), 0, -1) if plain[:end] in positions), len(positions))
        made.append((place, layer))
    if specs:
        made.sort(key=lambda item: item[0])
    return [layer for _, layer in made], "config" if specs else "name attributes" if named else "class counters"


def _walk(group: Group, path: tuple[str, ...], above: set[int], depth: int = 0) -> Iterator[Entry]:
    if depth > MAX_DEPTH:
        raise LimitExceeded(f"{group.file.path} nests more than {MAX_DEPTH} groups")
    if group.address in above:
        raise MalformedFile(f"{group.file.path}: the group {group.name} contains itself")
    for name in group.links:
        if name in SKIPPED:
            continue
        child = group[name]
        if not isinstance(child, Group):
            continue
        if name == "vars":
            said = child.attrs.get("name")
            entry = Entry(path, said if isinstance(said, str) else "", max(child.address, group.address))
            for key in child.links:
                dataset = child[key]
                if isinstance(dataset, Dataset):
                    entry.order = max(entry.order, dataset.address)
                    entry.variables[key] = variable(dataset, "/".join((*path, "vars", key)))
            yield entry
        else:
            parts = tuple(part for part in re.split(r"[\\/]", name) if part)
            yield from _walk(child, (*path, *parts), above | {group.address}, depth + 1)


def _class(counted: str) -> str:
    return re.sub(r"_\d+$", "", counted) if counted not in SNAKES else counted


def _kind(counted: str) -> str:
    # MultiHeadAttention's parts have no class in their path, and end in _dense
    return SNAKES.get(_class(counted), "EinsumDense" if counted.endswith("_dense") else "")


def _counter(counted: str) -> int:
    digits = counted.removeprefix(_class(counted)).removeprefix("_")
    return int(digits) if digits.isdecimal() and len(digits) < 9 else 0


def _named(path: tuple[str, ...], found: Mapping[tuple[str, ...], Entry]) -> str:
    """Put a module's name together from the names of all objects that lead to it."""
    parts: list[str] = []
    for end in range(1, len(path) + 1):
        here = found.get(path[:end])
        if here is not None and here.name:
            parts.append(here.name)
        elif path[end - 1] not in LISTS:
            parts.append(path[end - 1])
    return ".".join(parts)
