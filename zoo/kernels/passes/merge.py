"""Sixth pass: steps that may become one kernel, where the clock decides.

join               1x1 + shortcut (+ projection) + activation, and the 1x1 behind it
stem_pool          first convolution + max pool
depthwise_squeeze  depthwise with sums over the pixels, and squeeze-excite from those
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from zoo.kernels.passes.graph import OUTSIDE, Graph, Node, joined
from zoo.kernels.passes.kinds import is_1x1, is_depthwise, is_pointwise, is_stem
from zoo.kernels.passes.place import Place


@dataclass(eq=False)
class Merge:
    """Steps that `node` can do alone; the last of `parts` is the value that it returns first, `second` the other one it returns."""

    parts: list[Node]
    node: Node
    value: Node
    second: Node | None = None


def merges(graph: Graph, places: dict[Node, Place]) -> list[Merge]:
    """Return every merge that the graph allows; they may overlap."""
    users = graph.users()
    rules = (_joins, _stem_pool, _depthwise_squeeze)
    found = [merge for node in graph.nodes for rule in rules for merge in rule(node, users, places)]
    for merge in found:
        merge.node.attrs["source"] = "+".join(part.attrs.get("source", "") for part in merge.parts)
    return found


def apply(graph: Graph, chosen: list[Merge], places: dict[Node, Place]) -> None:
    """Put each merged step in the place of its parts; the merges must not overlap."""
    renamed: dict[Node, Node] = {}
    for merge in chosen:
        merge.node.inputs = [renamed.get(source, source) for source in merge.node.inputs]
        renamed[merge.value] = merge.node
        graph.nodes.insert(graph.nodes.index(merge.value), merge.node)
        if (spot := places.pop(merge.value, None)) is not None:
            places[merge.node] = spot
        graph.replace(merge.value, merge.node)
        if merge.second is not None:
            other = Node("second", [merge.node], {}, merge.second.shape, merge.second.dtype, ["x"], merge.second.layers)
            graph.nodes.insert(graph.nodes.index(merge.node) + 1, other)
            if (spot := places.pop(merge.second, None)) is not None:
                places[other] = spot
            renamed[merge.second] = other
            graph.replace(merge.second, other)
            other.inputs = [merge.node]
    graph.prune()


Users = dict[Node, list[Node]]


def plain_pointwise(node: Node) -> bool:
    """Tell whether a node is a dense 1x1 convolution at stride 1 without prologue or gate."""
    return is_pointwise(node) and node.attrs["pre_act"] == "none" and node.attrs.get("scale") is None and "gate" not in node.roles


def _joins(node: Node, users: Users, places: dict[Node, Place]) -> Iterator[Merge]:
    if not plain_pointwise(node) or node.shape[2:] == (1, 1) or node in places:
        return
    shortcut = node.argument("residual")
    projections: list[Node | None] = [None]
    if shortcut is not None and is_1x1(shortcut) and len(users[shortcut]) == 1 and _is_linear(shortcut) and shortcut not in places:
        projections.append(shortcut)
    nexts: list[Node | None] = [None]
    nexts += [r for r in users[node] if r is not OUTSIDE and plain_pointwise(r) and len(r.inputs) == 1 and r not in places]
    for projection in projections:
        for after in nexts:
            if projection is None and after is None:
                continue
            yield _join(node, projection, after)


def _is_linear(node: Node) -> bool:
    a = node.attrs
    return a["act"] == "none" and a["pre_act"] == "none" and len(node.inputs) == 1 and a.get("scale") is None


def _join(node: Node, projection: Node | None, after: Node | None) -> Merge:
    a = node.attrs
    attrs: dict[str, Any] = {"weight": a["weight"], "bias": a["bias"], "act": a["act"], "weight2": None, "stride2": (1, 1)}
    attrs |= {"next_weight": None, "next_bias": None, "next_act": "none"}
    new = Node("join", [node.inputs[0]], attrs, node.shape, node.dtype, ["x"], joined(*(n for n in (projection, node, after) if n)))
    shortcut = node.argument("residual")
    if projection is not None:
        p = projection.attrs
        biases = [b for b in (a["bias"], p["bias"]) if b is not None]
        attrs |= {"weight2": p["weight"], "stride2": p["stride"], "bias": sum(biases[1:], biases[0]) if biases else None}
        new.add_input("x2", projection.inputs[0])
    elif shortcut is not None:
        new.add_input("residual", shortcut)
    if after is not None:
        attrs |= {"next_weight": after.attrs["weight"], "next_bias": after.attrs["bias"], "next_act": after.attrs["act"]}
    return Merge([n for n in (projection, node, after) if n], new, node, after)


def _stem_pool(node: Node, users: Users, places: dict[Node, Place]) -> Iterator[Merge]:
    if node.op != "pool" or not is_stem(conv := node.inputs[0]) or len(users[conv]) != 1:
        return
    a, c = node.attrs, conv.attrs
    shape = (a["kind"], a["kernel"], a["stride"])
    if shape != ("max", (3, 3), (2, 2)) or a.get("scale") is not None or a["padding"] not in ((0, 0, 0, 0), (1, 1, 1, 1)):
        return
    attrs = {name: c[name] for name in ("weight", "bias", "stride", "padding", "act")}
    attrs |= {"pool_padding": a["padding"], "ceil_mode": a["ceil_mode"]}
    yield Merge([conv, node], Node("stem_pool", [conv.inputs[0]], attrs, node.shape, node.dtype, ["x"], joined(conv, node)), node)


def _depthwise_squeeze(node: Node, users: Users, places: dict[Node, Place]) -> Iterator[Merge]:
    if not is_depthwise(node) or "residual" in node.roles or node in places:
        return
    for reader in users[node]:
        if reader.op == "squeeze_excite":
            attrs = dict(node.attrs) | {"squeeze": dict(reader.attrs)}
            new = Node("depthwise_squeeze", [node.inputs[0]], attrs, node.shape, node.dtype, ["x"], joined(node, reader))
            yield Merge([node, reader], new, node, reader)
