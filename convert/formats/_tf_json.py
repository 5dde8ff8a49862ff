"""Nodes of a TensorFlow graph as TensorFlow.js writes them, in JSON; their constants are among the model's weights."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from convert.formats._tf_nodes import Node, inputs, ordered
from convert.kinds import is_dict, is_list
from convert.source import Stored


def nodes(topology: Mapping[str, Any], held: Mapping[str, Stored]) -> list[Node]:
    """Read a topology's nodes, in an order in which they can be computed."""
    made: list[Node] = []
    for told in topology["node"]:
        name = str(told["name"])
        stated: dict[Any, Any] = told.get("attr") or {}
        attrs = {str(key): _attribute(value) for key, value in stated.items() if is_dict(value)}
        made.append(Node(name, str(told["op"]), inputs([str(each) for each in told.get("input", [])]), attrs, held.get(name)))
    return ordered(made)


def _attribute(value: dict[Any, Any]) -> Any:
    if "list" in value:
        listed: dict[Any, Any] = value["list"] or {}
        if "s" in listed:
            return [_text(each) for each in listed["s"]]
        return [int(n) for n in listed["i"]] if "i" in listed else [float(n) for n in listed.get("f", [])]
    if "shape" in value:
        shape: dict[Any, Any] = value["shape"] or {}
        dims: list[Any] = shape.get("dim") or []
        return None if shape.get("unknownRank") else [n if (n := int(dim.get("size", 0))) > 0 else None for dim in dims]
    if "s" in value:
        return _text(value["s"])
    if "i" in value:
        return int(value["i"])
    return float(value["f"]) if "f" in value else value.get("b")


def _text(held: Any) -> str:
    """Read a text, which is bytes in base64, or, in older files, a list of bytes."""
    content = bytes(int(n) for n in held) if is_list(held) else base64.b64decode(str(held))
    return str(content, "utf-8", "backslashreplace")
