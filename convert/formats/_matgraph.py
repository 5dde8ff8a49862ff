"""MatConvNet's layers as a graph: simplenn's chain, and DagNN's layers by the variables that they read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from convert.formats._mat import Matrix
from convert.graph import Graph, Node
from convert.kinds import is_dict, is_list

if TYPE_CHECKING:
    from convert.formats._matlayers import Maker

INPUT = "input"
LOSSES = ("loss", "softmaxloss", "dagnn.Loss")
LRN = (5.0, 1.0, 1.0, 0.5)
"""N, kappa, alpha and beta where a layer doesn't say."""


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
    written = {variable for layer, _ in waiting for variable in _variables(layer, "outputs")}
    nodes: list[Node] = []
    made: dict[str, str] = {}
    widths: dict[str, int | None] = {}
    for variable in dict.fromkeys(v for layer, _ in waiting for v in _variables(layer, "inputs")):
        if variable not in written:
            nodes.append(Node(f"{variable} (input)", "input", (), {"layout": "nchw", "shape": (None, None, None)}))
            made[variable] = nodes[-1].name
    while waiting:
        ready = [(layer, name) for layer, name in waiting if all(variable in made for variable in _variables(layer, "inputs"))]
        if not ready:
            maker.notes.append("the layers wait for one another in a circle: no graph")
            return None
        for layer, name in ready:
            inputs = tuple(made[variable] for variable in _variables(layer, "inputs"))
            says = block if is_dict(block := layer.get("block")) else {}
            node, widths[name] = _node(str(layer.get("type")), name, inputs, says, maker, widths.get(inputs[0]) if inputs else None)
            nodes.append(node)
            made |= dict.fromkeys(_variables(layer, "outputs"), name)
        waiting = [pair for pair in waiting if pair not in ready]
    read = {source for node in nodes for source in node.inputs}
    return Graph(tuple(nodes), tuple(node.name for node in nodes if node.name not in read))


def _variables(layer: Mapping[str, Any], field: str) -> list[str]:
    value = layer.get(field)
    return [value] if isinstance(value, str) else [item for item in value if isinstance(item, str)] if is_list(value) else []


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


def _numbers(says: Mapping[str, Any], field: str, default: tuple[float, ...]) -> list[float]:
    value = says.get(field)
    found = value.numbers() if isinstance(value, Matrix) else []
    return found if len(found) >= len(default) else [*found, *default[len(found) :]]


def _pair(says: Mapping[str, Any], field: str, default: int) -> tuple[int, int]:
    value = says.get(field)
    found = [int(n) for n in value.numbers()] if isinstance(value, Matrix) else []
    return (found[0], found[1]) if len(found) > 1 else (found[0], found[0]) if found else (default, default)


def _pads(says: Mapping[str, Any], field: str) -> tuple[int, int, int, int]:
    """Turn [top bottom left right], or one number for all, into top, left, bottom, right."""
    value = says.get(field)
    found = [int(n) for n in value.numbers()] if isinstance(value, Matrix) else []
    if len(found) == 4:
        return found[0], found[2], found[1], found[3]
    if len(found) == 2:
        return found[0], found[1], found[0], found[1]
    same = found[0] if found else 0
    return same, same, same, same
