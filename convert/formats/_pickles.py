"""Pickles as data: a reader of the format that builds lists, dicts, strings and arrays, and calls nothing that a file names.

Python's own unpickler runs what a pickle tells it to. Here `convert.formats._picklemachine` records calls and makes none, and only
afterwards it is looked at which of the records describe arrays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from convert._guard import MAX_DEPTH, MAX_TENSORS
from convert.formats._picklearrays import Call, is_array
from convert.formats._picklemachine import Machine, safe_key
from convert.kinds import is_dict, is_list, is_row, is_tuple
from convert.source import Stored
from weights.errors import LimitExceeded


def load(data: memoryview, path: Path) -> Any:
    """Read the first pickle of the data.

    Returns:
        Numbers, str, bytes (views where long), lists, dicts, `Name`s and `Call`s, in which arrays are `Stored`s.

    Raises:
        UnsafeFormat: it names what no file of weights needs; the message says what.
        MalformedFile, LimitExceeded: it is damaged, or made of more steps than any file of weights.
    """
    return Machine(data, path).run()


def arrays(tree: Any, by_kind: bool = False) -> dict[tuple[str, ...], Stored]:
    """List the arrays of what `load` returned, by their place in it.

    Args:
        tree: lists, dicts and records.
        by_kind: name the arrays of a list that a layer has by what they are, weight and bias or beta, gamma, mean and inverse
            deviation, not by number.
    """
    found: dict[tuple[str, ...], Stored] = {}
    visited = 0

    def walk(node: Any, place: tuple[str, ...]) -> None:
        nonlocal visited
        visited += 1
        if visited > MAX_TENSORS or len(place) > MAX_DEPTH:
            raise LimitExceeded(f"more than {MAX_TENSORS} values, or more than {MAX_DEPTH} levels of them")
        node = opened(node)
        if isinstance(node, Stored):
            found[place] = node
        elif is_dict(node):
            for key, value in node.items():
                walk(value, (*place, str(key)))
        elif is_row(node):
            kinds = _kinds(node) if by_kind and place else None
            for number, value in enumerate(node):
                walk(value, (*place, kinds[number] if kinds else str(number)))

    walk(tree, ())
    return found


def _kinds(node: list[Any] | tuple[Any, ...]) -> tuple[str, ...] | None:
    values = [opened(value) for value in node]
    if not all(isinstance(value, Stored) for value in values):
        return None
    axes = [len(value.stored_shape) for value in values]
    if len(axes) in (1, 2) and axes[0] > 1 and axes[1:] in ([], [1]):
        return ("weight", "bias")[: len(axes)]
    return ("bias", "weight", "running_mean", "inv_std") if axes == [1, 1, 1, 1] else None


def opened(node: Any) -> Any:
    """Look into what holds one array: a shared variable of Theano's, an array of a graphics card, an ordered dict."""
    for _ in range(MAX_DEPTH):
        if not isinstance(node, Call):
            return node
        if is_array(node):
            return node.state if isinstance(node.state, Stored) or is_list(node.state) else None
        if node.items or str(node.what) == "collections.OrderedDict":
            return node.items or dict(pair for pair in _pairs(node.arguments))
        state = node.state if is_dict(node.state) else {}
        if "container" in state:
            node = state["container"]
        elif is_list(state.get("storage")) and len(state["storage"]) == 1:
            node = state["storage"][0]
        elif "unpickler" in str(node.what).lower() and is_tuple(node.arguments) and node.arguments:
            node = node.arguments[0]
        elif node.elements:
            return node.elements
        else:
            return None
    raise LimitExceeded(f"more than {MAX_DEPTH} records in one another")


def _pairs(arguments: Any) -> list[tuple[Any, Any]]:
    """Read OrderedDict's argument of Python 2: a list of pairs."""
    pairs = arguments[0] if is_tuple(arguments) and len(arguments) == 1 and is_list(arguments[0]) else []
    return [(safe_key(pair[0]), pair[1]) for pair in pairs if is_row(pair) and len(pair) == 2]
