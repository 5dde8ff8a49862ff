"""Behind the passes, for int8 and fp8: convolutions and linear layers whose maps and weights have 8 bits, with no wide map between them.

A value is stored narrow where whatever reads it takes it so, and what computes it can write it so. Else a step of its own rounds it for the
layers that do. Scales are one for each value and one for each output channel of the weights (e4m3 of Micikevicius et al., "FP8 Formats for
Deep Learning", 2022). What rounding the weights does to an output's mean goes into its bias (Nagel et al. 2019, section 4.2).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.errors import Untraceable
from zoo.kernels.ops._narrow import MOST
from zoo.kernels.passes.graph import OUTSIDE, Graph, Node
from zoo.kernels.passes.kinds import is_stem
from zoo.kernels.passes.place import Place
from zoo.kernels.passes.trace import Ref
from zoo.kernels.plans.ranges import KINDS, SHAPES, Scales, able, finite_values, narrow_weight, root, steps_of

HOMOGENEOUS = ("none", "relu", "leaky_relu_0.1", "leaky_relu_0.01")
"""Activations that a factor may be taken through."""

Users = dict[Node, list[Node]]


def narrow(graph: Graph, places: dict[Node, Place], scales: Scales, kind: str, keep: frozenset[int], *, clip: bool) -> int:
    """Let layers of a graph compute in 8 bits.

    Args:
        graph: fused and placed, with weights as they were; changed.
        places: where parts of concatenations lie; what lies there stays wide.
        scales: what was measured of the same network.
        kind: "int8" or "fp8".
        keep: numbers of layers that stay as they are.
        clip: let int8's ranges end where the squared error is least, not at the largest number.

    Returns:
        How many layers do.

    Raises:
        Untraceable: the graph is not that of which the scales are.
    """
    if steps_of(graph) != scales.steps:
        raise Untraceable(f"the ranges for {kind} were measured on another graph of this network")
    users, number, dtype = graph.users(), {node: index for index, node in enumerate(graph.steps())}, KINDS[kind]
    finite = finite_values(graph)
    possible = [node for node in number if able(node, kind, users, finite)]
    layers = [node for node in possible if number[node] not in keep and number[node] in scales.means]
    clipped = scales.clipped if clip and kind == "int8" else {}  # of what is added alone, nobody has measured that
    scale = _value_scales(graph, scales.largest | clipped, MOST[dtype])
    stored = _stored(graph, places, users, set(layers), scale)
    for node in stored - set(layers):
        node.attrs["stored"] = dtype
        _write_scaled(node, 1 / scale[node])
    made = {node: _layer(node, kind, scales.means[number[node]], scale, stored) for node in layers}
    wide: dict[Node, Node] = {}
    for node in layers:
        source = node.inputs[0]
        if root(source) not in stored:
            if source not in wide:
                wide[source] = _quantize(graph, source, scale[root(source)], dtype)
            node.inputs[0] = wide[source]
        node.op, node.attrs = "narrow_conv", made[node]
    if kind == "int8":
        _mark_unfinite(graph)
    for node in graph.steps():
        if node.op in SHAPES and root(node) in stored:
            node.attrs["stored"] = dtype
    return len(layers)


def _value_scales(graph: Graph, ranges: dict[int, float], most: float) -> dict[Node, float]:
    """Return the scales of the values that were measured; a maximum has that of what it is the maximum of."""
    number = {node: index for index, node in enumerate(graph.steps())}
    found = {node: max(ranges[index], 1e-12) / most for node, index in number.items() if index in ranges}
    for alike in _families(graph):
        if known := [found[node] for node in alike if node in found]:
            found.update(dict.fromkeys(alike, max(known)))
    return found


def _stored(graph: Graph, places: dict[Node, Place], users: Users, layers: set[Node], scale: dict[Node, float]) -> set[Node]:
    """Return the values that are stored narrow: what computes them can write them so, and whatever reads them takes them so."""
    found: dict[Node, bool] = {}

    def takes(reader: Node, value: Node) -> bool:
        if reader.op in SHAPES:
            return all(takes(further, reader) for further in users[reader])
        if reader in layers:
            return all(role in ("x", "residual") for role, source in zip(reader.roles, reader.inputs, strict=True) if source is value)
        return _is_max_pool(reader) and is_stored(reader)

    def is_stored(value: Node) -> bool:
        if value not in found:
            writes = value in layers or value.op == "layer_norm" or _is_max_pool(value) or _stem_writes(value, users, layers)
            inside = value in scale and value not in places and bool(users[value]) and OUTSIDE not in users[value]
            found[value] = writes and inside and all(takes(reader, value) for reader in users[value])
        return found[value]

    for node in graph.steps():  # in their order: a maximum is stored only where what it is made of is
        found[node] = is_stored(node) and (not _is_max_pool(node) or found.get(root(node.inputs[0]), False))
    return {node for node, narrow in found.items() if narrow}


def _write_scaled(node: Node, factor: float) -> None:
    """Let a step that is no layer in 8 bits write its value times a factor; of a maximum that comes with what it reads."""
    a = node.attrs
    if node.op == "layer_norm":
        a["scale"] = torch.full((node.shape[1],), factor) if a["scale"] is None else a["scale"] * factor
        a["shift"] = None if a["shift"] is None else a["shift"] * factor
    elif node.op == "conv":
        a["weight"] = a["weight"] * factor
        a["bias"] = None if a["bias"] is None else a["bias"] * factor


def _layer(node: Node, kind: str, means: Tensor, scale: dict[Node, float], stored: set[Node]) -> dict[str, Any]:
    """Return what a layer is in 8 bits: its weights with their factors, and a bias with what rounding them does to the mean."""
    a, other = node.attrs, node.argument("residual")
    weight = a["weight"].float()
    held, each = narrow_weight(weight, kind)
    lost = (held.float() * each.view(-1, 1, 1, 1) - weight).flatten(1) @ means.to(weight.device).flatten()
    made: dict[str, Any] = {name: a[name] for name in ("stride", "padding", "dilation", "act", "source") if name in a}
    made |= {"kind": kind, "weight": held, "factor": each * scale[root(node.inputs[0])]}
    made["bias"] = -lost if a["bias"] is None else a["bias"].float() - lost
    made["residual_factor"] = _one(scale[root(other)]) if other is not None and root(other) in stored else None
    made["out_factor"] = _one(1 / scale[node]) if node in stored else None
    return made | ({"stored": KINDS[kind]} if node in stored else {})


def _quantize(graph: Graph, value: Node, scale: float, dtype: torch.dtype) -> Node:
    """Add the step that rounds a wide value for the layers that read it narrow."""
    attrs = {"out_factor": _one(1 / scale), "act": "none", "stored": dtype}
    made = Node("quantize", [value], attrs, value.shape, value.dtype, ["x"], root(value).layers)
    graph.nodes.insert(graph.nodes.index(value) + 1, made)
    return made


def _stem_writes(node: Node, users: dict[Node, list[Node]], chosen: set[Node]) -> bool:
    """Tell whether a first convolution can write 8 bits and should; where a pool reads it one kernel computes both."""
    a = node.attrs
    able = is_stem(node) and a["act"] in HOMOGENEOUS and a["pre_act"] == "none" and a["weight"].shape[0] % 16 == 0
    return able and all(reader in chosen for reader in users[node])


def _families(graph: Graph) -> list[list[Node]]:
    """Return the values that have a scale in common: those that maxima are made of, with the maxima."""
    found: dict[Node, list[Node]] = {}
    for node in graph.steps():
        value = node
        while _is_max_pool(value):
            value = root(value.inputs[0])
        found.setdefault(value, []).append(node)
    return [
        [value, *(node for node in alike if node is not value)] for value, alike in found.items() if len(alike) > 1 and value.op != "input"
    ]


def _mark_unfinite(graph: Graph) -> None:
    """Let an image with NaN or infinity in it have NaN for an answer: int8 would make plausible numbers of them.

    Each image's largest magnitude times 0, which is 0 or NaN, is added to what the last layer reads, or to an output without such a layer.
    To what is not one row of numbers for each image that of all images is added.
    """
    aten = torch.ops.aten
    marks: dict[tuple[Node, int, int], Node] = {}
    renamed: dict[Node, Node] = {}

    def step(func: Any, source: list[Node], shape: tuple[int, ...], *args: Any) -> Node:
        made = Node("aten", source, {"func": func, "args": args, "kwargs": {}}, shape, source[0].dtype, ["x"] * len(source))
        graph.nodes.append(made)
        return made

    def mark(image: Node, marked: Node) -> Node:
        each = len(marked.shape) > 0 and marked.shape[0] == image.shape[0]
        count, dims = image.shape[0] if each else 1, max(1, len(marked.shape))
        if (image, count, dims) not in marks:
            axes = list(range(int(each), len(image.shape)))
            most = step(aten.linalg_vector_norm.default, [image], (count,) if each else (), Ref(0), float("inf"), axes)
            none = step(aten.mul.Tensor, [most], most.shape, Ref(0), 0.0)
            shape = (count, *[1] * (dims - 1))
            marks[image, count, dims] = step(aten.view.default, [none], shape, Ref(0), list(shape))
        return marks[image, count, dims]

    images = [node for node in graph.inputs if node.dtype.is_floating_point and len(node.shape) == 4]
    outputs = [leaf for leaf in graph.outputs if isinstance(leaf, Node) and leaf.dtype.is_floating_point and leaf.shape]
    for leaf in dict.fromkeys(outputs):
        last = root(leaf)
        for image in images:
            if last.op == "conv" and last.inputs[0].shape[0] == image.shape[0] == leaf.shape[0]:
                x = last.inputs[0]
                last.inputs[0] = step(aten.add.Tensor, [x, mark(image, x)], x.shape, Ref(0), Ref(1))
            else:
                now = renamed.get(leaf, leaf)
                renamed[leaf] = step(aten.add.Tensor, [now, mark(image, leaf)], leaf.shape, Ref(0), Ref(1))
    graph.outputs = [renamed.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in graph.outputs]
    graph.prune()


def _is_max_pool(node: Node) -> bool:
    a = node.attrs
    return node.op == "pool" and a["kind"] == "max" and a.get("scale") is None and a.get("shift") is None and a["pre_act"] == "none"


def _one(value: float) -> Tensor:
    return torch.full((1,), value)
