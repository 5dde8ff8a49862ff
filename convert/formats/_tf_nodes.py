"""Nodes of TensorFlow's graphs as plain objects: those of a frozen graph's GraphDef, whose constants are the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _wire
from convert.formats._operators import in_order
from convert.formats._wire import Budget, Message, message, one, schema
from convert.source import Stored
from weights.errors import LimitExceeded, MalformedFile

DTYPES = {
    1: "float32", 2: "float64", 3: "int32", 4: "uint8", 5: "int16", 6: "int8", 9: "int64", 10: "bool", 14: "bfloat16", 17: "uint16",
    19: "float16", 22: "uint32", 23: "uint64",
}  # fmt: skip
FIELDS = {5: "float32", 6: "float64", 7: "int32", 10: "int64", 11: "bool", 13: "int32", 16: "uint32", 17: "uint64"}
"""Numbers that are written one by one, by the field that they stand in; halves are written as their bits."""
SHAPE = schema("dim dims 2, int unknown 3", dim=schema("int size 1"))
TENSOR = schema(
    "int dtype 1, shape shapes 2, bytes content 4, field typed 5, field typed 6, field typed 7, field typed 10, field typed 11, "
    "field typed 13, field typed 16, field typed 17",
    shape=SHAPE,
)
VALUE = schema(
    "lst lists 1, string s 2, int i 3, float f 4, int b 5, int type 6, shape shapes 7, bytes tensor 8",
    lst=schema("string s 2, ints i 3, floats f 4"),
    shape=SHAPE,
)
NODE = schema("string name 1, string op 2, string inputs 3, entry attrs 5", entry=schema("string key 1, value values 2", value=VALUE))
GRAPH = schema("node nodes 1, library libraries 2", node=NODE, library=schema("bytes functions 1"))
MOST_NODES = 200_000


@dataclass(slots=True)
class Node:
    """One node; an input is a node's name, with ":1" for its second output.

    Attributes:
        attrs: numbers, texts, and lists of them; of a shape, its sizes, None where free.
        held: what a Const holds.
    """

    name: str
    op: str
    inputs: list[str]
    attrs: Mapping[str, Any]
    held: Stored | None = None


def parse(data: memoryview) -> tuple[list[Node], int]:
    """Read a GraphDef: its nodes in an order in which they can be computed, and how many functions it brings along."""
    budget = Budget()
    told = message(data, GRAPH, budget)
    nodes = [_node(node, budget) for node in told.get("nodes", [])]
    return ordered(nodes), sum(len(library.get("functions", [])) for library in told.get("libraries", []))


def ordered(nodes: Sequence[Node]) -> list[Node]:
    """Put nodes in an order in which they can be computed."""
    if len(nodes) > MOST_NODES:
        raise LimitExceeded(f"it has more than {MOST_NODES} nodes")
    named = {node.name: node for node in nodes}
    if len(named) < len(nodes):
        raise MalformedFile("two nodes have one name")
    origins = {node.name: [name for value in node.inputs if (name := value.partition(":")[0]) in named] for node in nodes}
    return [named[name] for name in in_order(origins)]


def inputs(told: Sequence[str]) -> list[str]:
    """Read a node's inputs; those that only say what comes first are none."""
    return [name.removesuffix(":0") for name in told if not name.startswith("^")]


def _node(told: Message, budget: Budget) -> Node:
    name, op = one(told, "name", ""), one(told, "op", "")
    attrs: dict[str, Any] = {}
    held: Stored | None = None
    for entry in told.get("attrs", []):
        key, value = one(entry, "key", ""), one(entry, "values", dict[str, Any]())
        if "tensor" in value and op == "Const" and key == "value":
            held = _tensor(message(value["tensor"][-1], TENSOR, budget), name)
        else:
            attrs[key] = _attribute(value)
    return Node(name, op, inputs(told.get("inputs", [])), attrs, held)


def _attribute(value: Message) -> Any:
    if "lists" in value:
        held = value["lists"][-1]
        return held.get("i") or held.get("f") or held.get("s") or []
    if "shapes" in value:
        shape = value["shapes"][-1]
        return None if one(shape, "unknown", 0) else [n if (n := one(dim, "size", 0)) > 0 else None for dim in shape.get("dims", [])]
    return next((value[kind][-1] for kind in ("s", "i", "f", "b", "type") if kind in value), None)


def _tensor(told: Message, name: str) -> Stored | None:
    """Describe a constant; None where it is none of numbers."""
    dims = [one(dim, "size", 0) for shape in told.get("shapes", [])[-1:] for dim in shape.get("dims", [])]
    kind = DTYPES.get(one(told, "dtype", 0))
    if kind is None:
        return None
    if len(dims) > _guard.MAX_RANK:
        raise LimitExceeded(f"{name:.100} has {len(dims)} axes; at most {_guard.MAX_RANK} are read")
    shape, dtype = tuple(dims), _guard.dtype_of(kind)
    if min(shape, default=0) < 0:
        raise MalformedFile(f"{name:.100} has shape {shape}")
    content = told["content"][-1] if "content" in told else memoryview(b"")
    if len(content):
        if len(content) != math.prod(shape) * dtype.itemsize:
            raise MalformedFile(f"{name:.100} of shape {shape} needs {math.prod(shape) * dtype.itemsize} bytes and has {len(content)}")
        return Stored(name, shape, dtype, lambda: np.frombuffer(content, dtype).reshape(shape))
    typed = told.get("typed", [])
    if math.prod(shape) > 1_000_000 and sum(1 if isinstance(value, int) else len(value) for _, _, value in typed) < math.prod(shape):
        raise LimitExceeded(f"{name:.100} of shape {shape} repeats a few numbers; a weight has each of its own")
    return Stored(name, shape, dtype, partial(_listed, typed, dtype, shape, name))


def _listed(typed: Sequence[tuple[int, int, Any]], dtype: np.dtype[Any], shape: tuple[int, ...], name: str) -> np.ndarray:
    """Read numbers that are written one by one; the last one stands for all that are missing."""
    chunks: list[np.ndarray] = []
    for number, wire, value in typed:
        kind = np.dtype(FIELDS[number])
        if kind.kind == "f":
            chunks.append(np.frombuffer(_wire.content(wire, value) if wire == _wire.BYTES else value, kind))
        else:
            chunks.append(np.array(_wire.numbers(wire, value), np.int64))
    flat, count = np.concatenate(chunks) if chunks else np.zeros(0, np.int64), math.prod(shape)
    if flat.size > count:
        raise MalformedFile(f"{name:.100} of shape {shape} has {flat.size} numbers")
    if flat.dtype.kind == "i" and dtype.itemsize == 2 and dtype.kind not in "iu":
        flat = flat.astype(np.uint16).view(dtype)
    if flat.size < count:
        flat = np.concatenate([flat, np.repeat(flat[-1:] if flat.size else np.zeros(1, flat.dtype), count - flat.size)])
    return flat.astype(dtype, copy=False).reshape(shape)
