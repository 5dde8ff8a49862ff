"""Fifth pass: let the parts of a concatenation be computed where they belong, so that nothing is concatenated.

DenseNet's blocks become one buffer: every layer reads the first channels of it and writes the next ones.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zoo.kernels.passes.graph import OUTSIDE, Graph, Node

WRITERS = ("conv", "pool", "pointwise", "mean", "cat")
"""Kinds of steps whose kernels can write into a channel slice of a wider map."""


@dataclass(frozen=True, eq=False)
class Buffer:
    """A map that several values share."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value lies: the channels of a buffer from `offset` on."""

    buffer: Buffer
    offset: int


def place(graph: Graph) -> dict[Node, Place]:
    """Find a place for every concatenation and as many of its parts as can be computed there; the rest is copied."""
    places: dict[Node, Place] = {}
    users = graph.users()
    cats = sorted((node for node in graph.nodes if node.op == "cat"), key=lambda node: node.shape[1], reverse=True)
    for cat in cats:
        if cat not in places and _is_prefix(cat, places):
            places[cat] = places[cat.inputs[0]]
        home = places.setdefault(cat, Place(Buffer(cat.shape), 0))
        offset = home.offset
        for part in cat.inputs:
            free = part.op in WRITERS and part not in places and OUTSIDE not in users[part] and cat.inputs.count(part) == 1
            if free:
                places[part] = Place(home.buffer, offset)
            offset += part.shape[1]
    return places


def copied(graph: Graph, places: dict[Node, Place]) -> tuple[Graph, dict[Node, Place]]:
    """Return a graph and its places with nodes of their own, and the same tensors."""
    memo: dict[int, Any] = {}
    waiting: list[Any] = [node.attrs for node in graph.nodes]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            memo[id(value)] = value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
    nodes = copy.deepcopy(graph.nodes, memo)  # in their order, so that none is copied from within another
    return Graph(nodes, *copy.deepcopy((graph.inputs, graph.outputs), memo), graph.spec), copy.deepcopy(places, memo)


def _is_prefix(cat: Node, places: dict[Node, Place]) -> bool:
    """Tell whether the parts lie beside each other in one buffer already, as torchvision's DenseNet concatenates all over again."""
    first = places.get(cat.inputs[0])
    if first is None:
        return False
    offset = first.offset
    for part in cat.inputs:
        found = places.get(part)
        if found is None or found.buffer is not first.buffer or found.offset != offset:
            return False
        offset += part.shape[1]
    return True
