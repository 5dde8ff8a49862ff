"""Whole numbers that name rows of a table: engines answer those that no row has, where PyTorch refuses them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.errors import Untraceable
from zoo.kernels.passes.aten import bound, is_view
from zoo.kernels.passes.graph import Graph, Node

aten = torch.ops.aten
_CASTS = (aten._to_copy.default, aten.clone.default, aten.contiguous.default, aten.alias.default, aten.expand.default)
_ARITHMETIC = ("add", "sub", "rsub", "mul", "neg", "abs", "remainder", "fmod", "floor_divide", "div", "bitwise_and", "where", "cumsum")
"""Operators after which a number may name no row any more; others, as argmax, make numbers that do."""


def rows_of(graph: Graph) -> list[int]:
    """Return of each input the rows of the smallest table that it names rows of; the largest number where there is none.

    Without whole numbers among the inputs nothing has to be looked at: [].

    Raises:
        Untraceable: an index is computed from an input's whole numbers, so that nobody can tell from these whether it is one.
    """
    rows = {node: torch.iinfo(torch.int64).max for node in graph.inputs}
    if all(node.dtype.is_floating_point for node in graph.inputs):
        return []
    for node in graph.nodes:
        for index, count in _named(node):
            source = _seen(index)
            if source in rows:
                rows[source] = min(rows[source], count)
            elif _computed(source):
                raise Untraceable("an index is computed from whole numbers of the input, and engines answer those that no row has")
    return list(rows.values())


def is_index(tensor: Tensor, rows: int) -> bool:
    """Tell whether whole numbers are 0 or more and less than `rows`; others are no matter."""
    if tensor.is_floating_point() or tensor.dtype is torch.bool or not tensor.numel():
        return True
    least, most = tensor.aminmax()
    return int(least) >= 0 and int(most) < rows


def _named(node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the indices that a step takes, and how many rows there are."""
    if node.op != "aten":
        return
    name = node.attrs["func"]._overloadpacket.__name__
    if name == "embedding":
        table, index, *_ = bound(node)
        yield index, table.shape[0]
    elif name == "index":
        table, indices, *_ = bound(node)
        yield from ((index, table.shape[axis]) for axis, index in enumerate(indices) if isinstance(index, Node))
    elif name in ("index_select", "gather"):
        table, axis, index, *_ = bound(node)
        yield index, table.shape[axis]


def _seen(node: Node) -> Node:
    """Return whose numbers these are, in another shape or type."""
    while node.inputs and (node.op == "view" or (node.op == "aten" and _shows(node.attrs["func"]))):
        node = node.inputs[0]
    return node


def _shows(func: Any) -> bool:
    return func in _CASTS or is_view(func)


def _computed(node: Node) -> bool:
    """Tell whether numbers come from whole numbers of an input by arithmetic."""
    stack, seen, reckoned = [node], set[Node](), False
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        if one.op == "input":
            if reckoned and not one.dtype.is_floating_point:
                return True
            continue
        if one.op == "aten" and one.attrs["func"]._overloadpacket.__name__.rstrip("_") in _ARITHMETIC:
            reckoned = True
        elif one.op == "aten" and not _shows(one.attrs["func"]):
            continue  # what it makes hangs on no single number
        stack += one.inputs
    return False
