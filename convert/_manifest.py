"""What a reader found, as words between two processes: all of a `Source` but the numbers, in JSON that is believed in nothing."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from convert import steps as known_steps
from convert._guard import MAX_DEPTH, MAX_RANK, MAX_TENSORS
from convert.formats._torch import EXTENDED
from convert.graph import Graph, Node
from convert.kinds import is_array, is_dict, is_list, is_mapping, is_scalar, is_tuple
from convert.source import FromFile, Positional, Source, Stored
from convert.steps import Shape, Step

KINDS = ("conv", "depthwise", "transposed", "linear", "norm")
LEAVES = ("weight", "bias", "running_mean", "running_var")
MAX_SHAPES = 2000
"""Different shapes of a file that keeps only an order; the steps of each kind of layer are listed for each."""
MAX_DIM = 2**40
STEPS = {
    name: cls
    for name, cls in vars(known_steps).items()
    if isinstance(cls, type) and issubclass(cls, Step) and not name.startswith(("Step", "_"))
}
CUT = 71
"""Exit code of a reader whose file was cut short while it was sent."""
CONVENTIONS = (None, "correlation", "convolution", "unknown")


def described(source: Source) -> dict[str, Any]:
    """Describe what a reader found."""
    return {
        "path": str(source.path),
        "format": source.format,
        "framework": source.framework,
        "tensors": [
            [name, one.origin, list(one.stored_shape), dtype_name(one.stored_dtype), _steps(one.steps), one.convention]
            for name, one in source.tensors.items()
        ],
        "positional": source.positional,
        "graph": None
        if source.graph is None
        else [
            [[node.name, node.op, list(node.inputs), packed(dict(node.attrs))] for node in source.graph.nodes],
            list(source.graph.outputs),
        ],
        "flatten": source.flatten,
        "spatial": source.spatial,
        "facts": dict(source.facts),
        "preprocessing": packed(dict(source.preprocessing)),
        "notes": list(source.notes),
        "beside": list(source.beside),
        "layout": None if source.layout is None else _layout(source.layout, source.tensors),
    }


def believed(told: Mapping[str, Any], path: Path, load: Any, pour: Any, close: Any) -> Source:
    """Build a `Source` of such a description.

    Args:
        told: what `described` made, or whatever a damaged reader says instead.
        path: the file that was to be read.
        load: makes the function that loads a tensor: (name, shape, dtype).
        pour: likewise the one that copies its bytes to a file.
        close: of the source.

    Raises:
        ValueError, TypeError, KeyError, OverflowError, RecursionError: it describes nothing that a reader returns.
    """
    listed = _typed(told["tensors"], list)
    if len(listed) > MAX_TENSORS:
        raise ValueError(f"{len(listed)} tensors")
    tensors: dict[str, Stored] = {}
    for name, origin, dims, dtype, steps, convention in listed:
        shape, kind = _shape(dims), dtype_named(dtype)
        if convention not in CONVENTIONS or _typed(name, str) in tensors:
            raise ValueError(f"{name!r:.100} comes twice, or with a convention that is none")
        call = FromFile(load(name, shape, kind), pour(name, shape, kind))
        stored = Stored(_typed(origin, str), shape, kind, call, _read_steps(steps), convention)
        _ = stored.shape  # each step must fit
        tensors[name] = stored
    graph = told["graph"]
    if told["spatial"] not in ("hw", "wh", "unknown"):
        raise ValueError("no order of axes")
    return Source(
        path=path,
        format=_typed(told["format"], str),
        framework=_typed(told["framework"], str),
        tensors=tensors,
        positional=_typed(told["positional"], bool),
        graph=None if graph is None else Graph(tuple(_node(node) for node in graph[0]), tuple(_typed(each, str) for each in graph[1])),
        flatten=_typed(told["flatten"], str),
        spatial=told["spatial"],
        facts={_typed(key, str): _typed(value, str) for key, value in told["facts"].items()},
        preprocessing=_typed(unpacked(told["preprocessing"]), dict),
        notes=[_typed(note, str) for note in told["notes"]],
        beside=tuple(_inside(name) for name in told.get("beside", ())),
        layout=None if told["layout"] is None else _read_layout(told["layout"]),
        close=close,
    )


def _inside(name: Any) -> str:
    """Take the name of a file for one only where it leads to no other folder than the source's and those in it."""
    place = PurePosixPath(_typed(name, str))
    if place.is_absolute() or ".." in place.parts or not place.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r:.100} is no file beside the source")
    return name


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name a dtype of numbers, with its byte order."""
    if dtype.name in EXTENDED:
        return dtype.name
    if dtype.kind not in "biufc":
        raise ValueError(f"{dtype} is no dtype of numbers")
    return dtype.str


def dtype_named(name: Any) -> np.dtype[Any]:
    """Find the dtype of a name."""
    if name in EXTENDED:
        return np.dtype(EXTENDED[name])
    dtype = np.dtype(_typed(name, str)[:4])
    if dtype.kind not in "biufc" or dtype.str != name:
        raise ValueError(f"{name!r:.40} is no dtype of numbers")
    return dtype


def packed(value: Any) -> Any:
    """Turn Python's values and NumPy's into what JSON keeps apart: a tuple is no list, a float32 no float."""
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if is_scalar(value) or is_array(value):
        array: np.ndarray = np.ascontiguousarray(value).reshape(np.shape(value))
        content = [dtype_name(array.dtype), list(array.shape), base64.b64encode(array.tobytes()).decode()]
        return {"array" if is_array(value) else "scalar": content}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if is_mapping(value):
        return {"dict": [[packed(key), packed(inner)] for key, inner in value.items()]}
    if is_tuple(value):
        return {"tuple": [packed(inner) for inner in value]}
    if is_list(value):
        return [packed(inner) for inner in value]
    raise TypeError(f"{type(value).__name__} is nothing that a reader says")


def unpacked(value: Any, depth: int = 0) -> Any:
    """Turn it back."""
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    if is_list(value):
        return [unpacked(inner, depth + 1) for inner in value]
    if not is_dict(value):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[inner]
    if kind in ("array", "scalar"):
        dtype, shape, text = inner
        array = np.frombuffer(base64.b64decode(text), dtype_named(dtype)).reshape(_shape(shape)).copy()
        return array if kind == "array" else array[()]
    if kind == "bytes":
        return base64.b64decode(inner)
    if kind == "tuple":
        return tuple(unpacked(each, depth + 1) for each in inner)
    if kind == "dict":
        return {unpacked(key, depth + 1): unpacked(each, depth + 1) for key, each in inner}
    raise ValueError(f"{kind!r:.40} is no kind of value")


def _steps(steps: Sequence[Step]) -> list[Any]:
    return [[type(step).__name__, *(packed(getattr(step, field.name)) for field in fields(step))] for step in steps]


def _read_steps(listed: Any) -> tuple[Step, ...]:
    made: list[Step] = []
    for name, *values in _typed(listed, list):
        cls = STEPS[name]
        wanted = fields(cls)
        if len(values) != len(wanted):
            raise ValueError(f"{name} has {len(wanted)} fields")
        arguments = [_suited(unpacked(value), str(field.type)) for value, field in zip(values, wanted, strict=True)]
        made.append(cls(*arguments))
    return tuple(made)


def _suited(value: Any, annotation: str) -> Any:
    """Check a step's field against its annotation, which are few."""
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int, np.floating), "str": (str,), "np.ndarray": (np.ndarray,)}
    if annotation in kinds:
        return _typed(value, *kinds[annotation])
    inner = (float, int) if "float" in annotation else (int,)
    return tuple(_typed(each, *inner) for each in _typed(value, tuple))


def _node(told: Any) -> Node:
    name, op, inputs, attrs = told
    given = tuple(_typed(each, str) for each in _typed(inputs, list))
    return Node(_typed(name, str), _typed(op, str), given, _typed(unpacked(attrs), dict))


def _layout(layout: Positional, tensors: Mapping[str, Stored]) -> dict[str, Any]:
    """List what the layout makes of every shape of the file: a function can't go from one process to another, and needs not."""
    shapes = {one.stored_shape for one in tensors.values()}
    if len(shapes) > MAX_SHAPES:
        raise ValueError(f"{len(shapes)} different shapes in a file without names")
    table: list[list[Any]] = []
    for kind in KINDS:
        for leaf in LEAVES:
            for shape in sorted(shapes):
                try:
                    told: Any = _steps(layout.steps(kind, leaf, shape))
                except (ValueError, LookupError) as error:  # no layer of this kind has such a leaf
                    told = str(error)
                if told:
                    table.append([kind, leaf, list(shape), told])
    return {"leaves": {kind: list(leaves) for kind, leaves in layout.leaves.items()}, "steps": table, "convention": layout.convention}


def _read_layout(told: Mapping[str, Any]) -> Positional:
    table: dict[tuple[str, str, Shape], tuple[Step, ...] | str] = {}
    for kind, leaf, dims, steps in told["steps"]:
        table[_typed(kind, str), _typed(leaf, str), _shape(dims)] = steps if isinstance(steps, str) else _read_steps(steps)
    leaves = {_typed(kind, str): tuple(_typed(leaf, str) for leaf in listed) for kind, listed in told["leaves"].items()}
    if told["convention"] not in CONVENTIONS[1:]:
        raise ValueError("no convention")

    def steps_of(kind: str, leaf: str, shape: Shape) -> tuple[Step, ...]:
        found = table.get((kind, leaf, shape), ())
        if isinstance(found, str):
            raise ValueError(found)
        return found

    return Positional(leaves, steps_of, told["convention"])


def _shape(dims: Any) -> Shape:
    shape = tuple(_typed(dims, list))
    if len(shape) > MAX_RANK or not all(type(dim) is int and 0 <= dim <= MAX_DIM for dim in shape):
        raise ValueError(f"{str(dims)[:100]} is no shape")
    return shape


def _typed(value: Any, *kinds: type) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise TypeError(f"a {type(value).__name__} where {' or '.join(kind.__name__ for kind in kinds)} was due")
    return value
