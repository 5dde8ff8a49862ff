"""MatConvNet's layers: their tensors, and their graph, be it simplenn's chain or DagNN's layers joined by variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.formats._mat import Matrix, Value
from convert.graph import Graph, Node
from convert.kinds import is_dict, is_list
from convert.source import Convention, Stored
from convert.steps import Moment, from_layout

EPS = 1e-4
"""What MatConvNet's vl_nnbnorm adds to a variance unless a layer says otherwise."""
ALIKE = 1e-6
"""Relative: a variance that a file of ours keeps beside the moments counts if it is what the moments say."""
KINDS = {"conv": "conv", "convt": "transposed", "dagnn.Conv": "conv", "dagnn.ConvTranspose": "transposed"}
NORMS = ("bnorm", "dagnn.BatchNorm")
INPUT = "input"
LOSSES = ("loss", "softmaxloss", "dagnn.Loss")
LRN = (5.0, 1.0, 1.0, 0.5)
"""N, kappa, alpha and beta where a layer doesn't say."""


class Maker:
    """Collects tensors by module.

    Attributes:
        names: of the layers, each once.
        moments: of each norm, how the second moment is kept: "std" or "variance"; and its eps.
        layouts: of each kernel.
        widths: output and input channels of each kernel, in PyTorch's form.
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.tensors: dict[str, Stored] = {}
        self.notes: list[str] = []
        self.facts: dict[str, str] = {}
        self.names: list[str] = []
        self.moments: dict[str, tuple[str, float]] = {}
        self.layouts: dict[str, str] = {}
        meta = values.get("meta")
        ours = meta.get("kernelzoo") if is_dict(meta) else None
        if is_dict(ours):
            self.facts |= {key: value for key, value in ours.items() if isinstance(value, str)}
        self.convention: Convention = "convolution" if self.facts.get("kernel_convention") == "convolution" else "correlation"

    def simple(self, layers: list[dict[str, Any]]) -> None:
        for number, layer in enumerate(layers, start=1):
            name = self.named(layer, number)
            weights = layer.get("weights")
            listed = weights if is_list(weights) else [layer.get("filters"), layer.get("biases")]
            kind = layer.get("type")
            if kind in NORMS:
                self.norm(name, listed, layer)
            elif kind in KINDS:
                self.kernel(name, KINDS[kind], listed, layer.get("kind") == "linear")
            elif kind == "custom" and is_dict(layer.get("leaves")):
                for leaf, value in layer["leaves"].items():
                    self.other(f"{name}.{leaf}", value)
            else:
                for place, value in enumerate(listed):
                    self.other(f"{name}.{place}", value)

    def dag(self, layers: list[dict[str, Any]], parameters: list[dict[str, Any]]) -> None:
        known = {str(parameter.get("name")): parameter.get("value") for parameter in parameters}
        used: set[str] = set()
        for number, layer in enumerate(layers, start=1):
            name = self.named(layer, number)
            wanted = _texts(layer.get("params"))
            used |= set(wanted)
            values = [known.get(each) for each in wanted]
            block = layer.get("block")
            kind = str(layer.get("type"))
            if kind in NORMS:
                self.norm(name, values, block if is_dict(block) else {})
            elif kind in KINDS:
                self.kernel(name, KINDS[kind], values)
            else:
                for place, value in enumerate(values):
                    self.other(f"{name}.{place}", value)
        for name, value in known.items():
            if name not in used:
                self.other(name, value)

    def plain(self, values: Mapping[str, Value]) -> None:
        """Take a variable a layer: a cell {kernel, bias}, a struct with fields of such names, or the numbers themselves."""
        for name, value in values.items():
            if is_list(value) and value and all(isinstance(item, Matrix | None) for item in value):
                self.listed(name, value)
            elif is_dict(value):
                lower = {str(key).lower(): item for key, item in value.items()}
                kernel = next((lower[key] for key in ("weights", "weight", "filters", "kernel", "w") if key in lower), None)
                bias = next((lower[key] for key in ("biases", "bias", "b") if key in lower), None)
                if is_list(kernel):
                    self.listed(name, kernel)
                elif isinstance(kernel, Matrix):
                    self.listed(name, [kernel, bias])
                else:
                    self.plain({f"{name}.{key}": item for key, item in value.items()})
            else:
                self.other(name, value)

    def listed(self, name: str, values: list[Any]) -> None:
        if len(values) == 3 and isinstance(values[2], Matrix) and values[2].dims[1:] == (2,):
            self.norm(name, values, {})
        else:
            self.kernel(name, "conv", values)

    def named(self, layer: Mapping[str, Any], number: int) -> str:
        name = layer.get("name")
        name = name if isinstance(name, str) and name else f"{layer.get('type') or 'layer'}{number}"
        self.names.append(name if name not in self.names else f"{name}_{number}")
        return self.names[-1]

    def kernel(self, name: str, kind: str, values: list[Any], dense: bool = False) -> None:
        weight, bias, *more = [*values, None, None]
        if isinstance(weight, Matrix) and weight.count:
            stored = weight.stored(max(4, len(weight.dims)))
            axes = len(stored.stored_shape)
            layout = "DHW"[5 - min(axes, 5) :] + ("OI" if kind == "transposed" else "IO")
            layout = layout[::-1] if weight.reverse else layout
            self.layouts[name] = layout
            stored = replace(stored, steps=from_layout(kind, layout, stored.stored_shape), convention=self.convention)
            if dense:
                stored = replace(stored.reshape(stored.shape[0], int(np.prod(stored.shape[1:]))), convention=None)
            self.tensors[f"{name}.weight"] = stored
        self.other(f"{name}.bias", bias)
        for place, value in enumerate(more):
            self.other(f"{name}.{place + 2}", value)

    def norm(self, name: str, values: list[Any], layer: Mapping[str, Any]) -> None:
        gamma, beta, moments, *_ = [*values, None, None, None]
        self.other(f"{name}.weight", gamma)
        self.other(f"{name}.bias", beta)
        given = layer.get("epsilon")
        eps = given.numbers()[0] if isinstance(given, Matrix) and given.count == 1 else EPS
        if not isinstance(moments, Matrix) or len(moments.dims) != 2 or moments.dims[1] != 2:
            self.notes.append(f"{name}: a BatchNorm without moments, as it is before it is trained")
            return
        deviation = moments.column(1)
        self.moments[name] = ("std", eps)
        self.tensors[f"{name}.running_mean"] = moments.column(0)
        variance = layer.get("variance")
        if isinstance(variance, Matrix) and _same(variance, deviation, eps):
            self.moments[name] = ("variance", eps)
            self.tensors[f"{name}.running_var"] = variance.stored()
        else:
            self.tensors[f"{name}.running_var"] = deviation.then(Moment("std", eps))

    def other(self, name: str, value: Any) -> None:
        """Take numbers as they are: a row or column as a vector."""
        if isinstance(value, Matrix) and value.count:
            if name in self.tensors:
                name = f"{name}_{len(self.tensors)}"
            wide = sum(dim > 1 for dim in value.dims) > 1
            self.tensors[name] = value.stored(len(value.dims)) if wide else value.stored()


def chain(layers: Sequence[Mapping[str, Any]], maker: Maker) -> Graph | None:
    """Describe simplenn's layers, each of which reads the one before it; None where the file says nothing of strides and pads."""
    if not any("stride" in layer or "pad" in layer or layer.get("type") in ("relu", "pool", "softmax") for layer in layers):
        return None
    nodes = [Node(INPUT, "input", (), {"layout": "nchw", "shape": (None, None, None)})]
    channels: int | None = None
    for layer, name in zip(layers, maker.names, strict=True):
        kind = str(layer.get("type"))
        if kind in LOSSES and kind != "softmaxloss":
            continue
        made, channels = _node(kind, name, (nodes[-1].name,), layer, maker, channels)
        nodes.append(made)
    return Graph(tuple(nodes), (nodes[-1].name,))


def of_dag(layers: Sequence[Mapping[str, Any]], maker: Maker) -> Graph | None:
    """Describe DagNN's layers in an order in which they can be computed; None, and a note, where there is none."""
    waiting = [(layer, name) for layer, name in zip(layers, maker.names, strict=True) if layer.get("type") not in LOSSES]
    written = {variable for layer, _ in waiting for variable in _texts(layer.get("outputs"))}
    nodes: list[Node] = []
    made: dict[str, str] = {}
    widths: dict[str, int | None] = {}
    for variable in dict.fromkeys(v for layer, _ in waiting for v in _texts(layer.get("inputs"))):
        if variable not in written:
            nodes.append(Node(f"{variable} (input)", "input", (), {"layout": "nchw", "shape": (None, None, None)}))
            made[variable] = nodes[-1].name
    while waiting:
        ready = [(layer, name) for layer, name in waiting if all(variable in made for variable in _texts(layer.get("inputs")))]
        if not ready:
            maker.notes.append("the layers wait for one another in a circle: no graph")
            return None
        for layer, name in ready:
            inputs = tuple(made[variable] for variable in _texts(layer.get("inputs")))
            says = block if is_dict(block := layer.get("block")) else {}
            node, widths[name] = _node(str(layer.get("type")), name, inputs, says, maker, widths.get(inputs[0]) if inputs else None)
            nodes.append(node)
            made |= dict.fromkeys(_texts(layer.get("outputs")), name)
        waiting = [pair for pair in waiting if pair not in ready]
    read = {source for node in nodes for source in node.inputs}
    return Graph(tuple(nodes), tuple(node.name for node in nodes if node.name not in read))


def _texts(value: Any) -> list[str]:
    return [value] if isinstance(value, str) and value else [item for item in value if isinstance(item, str)] if is_list(value) else []


def _same(variance: Matrix, deviation: Stored, eps: float) -> bool:
    """Tell whether a variance is what the moments say; whoever trained on in MATLAB has changed the moments alone."""
    if variance.count != deviation.stored_shape[0]:
        return False
    kept = variance.load().reshape(-1).astype(np.float64)
    return bool(np.allclose(np.sqrt(np.maximum(kept + eps, 0)), deviation.load().astype(np.float64), rtol=ALIKE, atol=0))


def _node(
    kind: str, name: str, inputs: tuple[str, ...], says: Mapping[str, Any], maker: Maker, channels: int | None
) -> tuple[Node, int | None]:
    """Describe one layer, and tell how many channels it gives; None where that isn't known."""
    plain = kind.removeprefix("dagnn.").lower()
    weight = maker.tensors.get(f"{name}.weight")
    if plain in ("conv", "convtranspose", "convt") and weight is not None and len(weight.shape) == 4:
        attrs: dict[str, Any] = {"layout": maker.layouts[name], "convention": maker.convention}
        attrs |= {"stride": _pair(says, "stride", 1), "pads": _pads(says, "pad"), "dilation": _pair(says, "dilate", 1)}
        if plain == "conv":
            groups = channels // weight.shape[1] if channels and channels % weight.shape[1] == 0 else 1
            return Node(name, "conv", inputs, attrs | {"groups": groups}), weight.shape[0]
        groups = int(_numbers(says, "numGroups", (1,))[0])
        attrs |= {"stride": _pair(says, "upsample", 1), "pads": _pads(says, "crop"), "groups": groups}
        return Node(name, "transposed", inputs, attrs), weight.shape[1] * groups
    if plain in ("bnorm", "batchnorm") and name in maker.moments:
        moment, eps = maker.moments[name]
        return Node(name, "norm", inputs, {"eps": eps, "moment": moment}), channels
    if plain == "relu":
        slope = _numbers(says, "leak", (0,))[0]
        return Node(name, "leaky_relu", inputs, {"slope": slope}) if slope else Node(name, "relu", inputs), channels
    if plain in ("pool", "pooling"):
        most = str(says.get("method") or "max").lower() == "max"
        size = _pair(says, "pool" if "pool" in says else "poolSize", 1)
        attrs = {"kernel": size, "stride": _pair(says, "stride", 1), "pads": _pads(says, "pad"), "rounding": "floor"}
        return Node(name, "maxpool" if most else "avgpool", inputs, attrs if most else attrs | {"count_pad": "none"}), channels
    if plain in ("normalize", "lrn"):
        size, kappa, alpha, beta = _numbers(says, "param", LRN)[:4]
        return Node(name, "lrn", inputs, {"size": int(size), "alpha": alpha * size, "beta": beta, "k": kappa}), channels
    if plain == "sum":
        return Node(name, "add", inputs), channels
    same = {"softmax": "softmax", "softmaxloss": "softmax", "sigmoid": "sigmoid", "dropout": "identity", "concat": "concat"}
    return Node(name, same.get(plain, f"unknown:{kind}"), inputs), None if plain == "concat" else channels


def _numbers(says: Mapping[str, Any], field: str, default: tuple[float, ...] = ()) -> list[float]:
    value = says.get(field)
    found = value.numbers() if isinstance(value, Matrix) else []
    return found if len(found) >= len(default) else [*found, *default[len(found) :]]


def _pair(says: Mapping[str, Any], field: str, default: int) -> tuple[int, int]:
    found = [int(n) for n in _numbers(says, field)]
    return (found[0], found[1]) if len(found) > 1 else (found[0], found[0]) if found else (default, default)


def _pads(says: Mapping[str, Any], field: str) -> tuple[int, int, int, int]:
    """Turn [top bottom left right], or one number for all, into top, left, bottom, right."""
    found = [int(n) for n in _numbers(says, field)]
    if len(found) == 4:
        return found[0], found[2], found[1], found[3]
    if len(found) == 2:
        return found[0], found[1], found[0], found[1]
    same = found[0] if found else 0
    return same, same, same, same
