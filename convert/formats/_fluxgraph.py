"""The graph of a Flux.jl model that was saved whole: its layers are types with numbers in them, only closures stay dark."""

# ruff: noqa: RUF001 - Flux names its fields in Greek

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from convert.formats._flux import join, kind_of, layout_of, named
from convert.formats._julia import Array, Opaque, Struct
from convert.graph import Graph, Node
from convert.kinds import is_dict, is_row

ACTIVATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "relu": ("relu", {}),
    "relu6": ("relu6", {}),
    "leakyrelu": ("leaky_relu", {"slope": 0.01}),
    "elu": ("elu", {"alpha": 1.0}),
    "σ": ("sigmoid", {}),
    "sigmoid": ("sigmoid", {}),
    "sigmoid_fast": ("sigmoid", {}),
    "tanh": ("tanh", {}),
    "tanh_fast": ("tanh", {}),
    "swish": ("silu", {}),
    "gelu": ("gelu", {"approximate": True}),
    "gelu_tanh": ("gelu", {"approximate": True}),
    "gelu_erf": ("gelu", {"approximate": False}),
    "softplus": ("softplus", {}),
    "hardswish": ("hardswish", {}),
    "hardσ": ("hardsigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    "hardsigmoid": ("hardsigmoid", {"alpha": 1 / 6, "beta": 0.5}),
    "softmax": ("softmax", {}),
    "identity": ("identity", {}),
    "flatten": ("flatten", {"order": "chw"}),
}
JOINS = {"+": "add", "*": "mul", "vcat": "concat", "cat_channels": "concat", "max": "maximum"}
PASSING = ("Dropout", "AlphaDropout", "StochasticDepth", "DropBlock")


def build(model: Any) -> Graph | None:
    """Build the graph of a Chain, or of a Metalhead model, which is one in a struct; None for anything else.

    A node's attributes speak of the reversed arrays: Julia's second spatial axis is the first here, so strides and pads come
    reversed too.
    """
    if not isinstance(model, Struct) or (model.name not in ("Chain", "Parallel", "SkipConnection") and "Metalhead" not in model.path):
        return None
    builder = _Builder()
    last = builder.layer(model, "", "input")
    return Graph(tuple(builder.nodes), (last,))


class _Builder:
    def __init__(self) -> None:
        self.nodes = [Node("input", "input", (), {"layout": "nchw"})]
        self.names = {"input"}

    def add(self, name: str, op: str, inputs: Sequence[str], attrs: Mapping[str, Any] | None = None) -> str:
        unique, count = name or "model", 1
        while unique in self.names:  # a layer that is used twice is two nodes; its tensors are those of the first
            count += 1
            unique = f"{name}:{count}"
        self.names.add(unique)
        self.nodes.append(Node(unique, op, tuple(inputs), attrs or {}))
        return unique

    def layer(self, value: Any, path: str, before: str) -> str:
        """Add what `value` computes of the node `before`, and tell the node of its result."""
        if not isinstance(value, Struct):
            what = "closure" if isinstance(value, Opaque) else type(value).__name__
            return self.add(path, f"unknown:{what}", [before])
        if value.function is not None:
            return self.activation(value, path, before)
        fields = named(value)
        if value.name == "Chain" or (len(fields) == 1 and "Metalhead" in value.path):
            inside = fields.get("layers")
            walk = self.layer if isinstance(inside, Struct) else self.chain  # a model around a Chain, or the Chain itself
            return walk(inside, join(path, "layers"), before)
        if value.name in ("Parallel", "SkipConnection"):
            return self.branches(value, fields, path, before)
        kind = kind_of(fields, value.name)
        if kind:
            return self.weighted(value, fields, kind, path, before)
        if value.name in ("MaxPool", "MeanPool"):
            attrs = {"kernel": _pair(fields.get("k")), "pads": _pads(fields.get("pad")), "stride": _pair(fields.get("stride"))}
            extra = {"count_pad": "all"} if value.name == "MeanPool" else {}
            return self.add(path, "avgpool" if value.name == "MeanPool" else "maxpool", [before], {**attrs, "rounding": "floor", **extra})
        whole = value.name.startswith("Global") or fields.get("out") in ((1, 1), [1, 1])
        if whole and (pool := re.fullmatch(r"(?:Global|Adaptive)(Mean|Max)Pool", value.name)):
            return self.add(path, "global_avgpool" if pool[1] == "Mean" else "global_maxpool", [before], {"keepdims": True})
        return self.add(path, "identity" if value.name in PASSING else f"unknown:{value.name}", [before])

    def chain(self, layers: Any, path: str, before: str) -> str:
        for name, item in _children(layers):
            before = self.layer(item, join(path, name), before)
        return before

    def branches(self, value: Struct, fields: Mapping[str, Any], path: str, before: str) -> str:
        inside = join(path, "layers")
        if value.name == "SkipConnection":  # connection(layers(x), x)
            ends = [self.layer(fields.get("layers"), inside, before), before]
        else:
            ends = [self.layer(item, join(inside, name), before) for name, item in _children(fields.get("layers"))]
        function, given = _connection(fields.get("connection"))
        if function == "addact" and given:  # Metalhead's: the activation of the sum
            return self.activation(given[0], join(path, "connection"), self.add(path, "add", ends))
        return self.add(path, JOINS.get(function or "", f"unknown:{function or 'closure'}"), ends)

    def weighted(self, value: Struct, fields: Mapping[str, Any], kind: str, path: str, before: str) -> str:
        if kind == "norm":
            attrs: dict[str, Any] = {"eps": fields.get("ϵ", 1e-5), "moment": "std" if "σ" in fields else "variance"}
            op = "norm" if isinstance(fields.get("μ"), Array) else f"unknown:{value.name}"
            return self.activation(fields.get("λ"), join(path, "λ"), self.add(path, op, [before], attrs))
        if kind == "linear":
            op, attrs = "dense" if value.name == "Dense" else f"unknown:{value.name}", {"layout": "IO"}
        else:
            weight = fields["weight"]
            groups = fields.get("groups", 1)
            attrs = {
                "layout": layout_of(kind, len(weight.shape)),
                "convention": "correlation" if value.name == "CrossCor" else "convolution",
                "stride": _pair(fields.get("stride", (1, 1))),
                "pads": _pads(fields.get("pad", (0, 0))),
                "dilation": _pair(fields.get("dilation", (1, 1))),
            }
            if kind != "depthwise":
                attrs["groups"] = weight.shape[0] if value.name == "DepthwiseConv" else groups
            if kind == "transposed":
                attrs["output_padding"] = _pair(fields.get("outpad", (0, 0)))
            op = kind if len(weight.shape) == 4 else f"unknown:{value.name} of {len(weight.shape) - 2} axes"
        return self.activation(fields.get("σ"), join(path, "σ"), self.add(path, op, [before], attrs))

    def activation(self, value: Any, path: str, before: str) -> str:
        function = value.function if isinstance(value, Struct) else None
        if function == "identity" or value is None:
            return before
        op, attrs = ACTIVATIONS.get(function or "", (f"unknown:{function or 'closure'}", {}))
        return self.add(path, op, [before], attrs)


def _connection(value: Any) -> tuple[str | None, tuple[Any, ...]]:
    """Tell which function joins branches, and the arguments that PartialFunctions.jl has bound to it."""
    if not isinstance(value, Struct):
        return None, ()
    if value.name == "PartialFunction" and len(value.fields) > 1 and isinstance(value.fields[0], Struct):
        bound = value.fields[1]
        return value.fields[0].function, tuple(bound) if is_row(bound) else (bound,)
    return value.function, ()


def _children(layers: Any) -> list[tuple[str, Any]]:
    if is_dict(layers):
        return list(layers.items())
    return [(str(index + 1), item) for index, item in enumerate(layers)] if is_row(layers) else []


def _pair(value: Any) -> tuple[int, ...]:
    numbers = (value, value) if isinstance(value, int) else tuple(value) if is_row(value) else ()
    return tuple(reversed([number for number in numbers if isinstance(number, int)]))


def _pads(value: Any) -> Any:
    """Turn Flux's pads, (before, after) of each axis or one for both, into (top, left, bottom, right)."""
    numbers = _pair(value)  # reversed: (after2, before2, after1, before1) or (2, 1)
    if len(numbers) == 4:
        return (numbers[1], numbers[3], numbers[0], numbers[2])
    return (*numbers, *numbers)
