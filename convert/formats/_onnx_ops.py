"""What each ONNX operator is in our graph; one that says something the graph has no words for is left unknown."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from convert.formats import _onnx_layers, _onnx_shapes
from convert.formats._onnx_fold import axes
from convert.formats._onnx_graph import Builder, Value
from convert.formats._onnx_proto import Operator
from convert.formats._onnx_windows import pads_of, pair_of, per_channel, side, slid

FLOATING = (1, 10, 11, 16)


def plain(op: str, b: Builder, operator: Operator, **defaults: tuple[str, float]) -> bool:
    """Change numbers one by one; `defaults` name our attributes, theirs and their defaults."""
    x = b.value(operator)
    attrs = {ours: float(operator.attrs.get(theirs, default)) for ours, (theirs, default) in defaults.items()}
    return x is not None and b.layer(operator, op, [x], attrs, x.shape, x.layout)


def gate(op: str, fused: str, b: Builder, operator: Operator) -> bool:
    """A sigmoid, which with the product behind it is one activation."""
    x, reader = b.value(operator), b.only_reader(operator)
    hard = op == "hardsigmoid"
    attrs = {"alpha": float(operator.attrs.get("alpha", 0.2)), "beta": float(operator.attrs.get("beta", 0.5))} if hard else {}
    if x is None:
        return False
    usual = not hard or (abs(attrs["alpha"] - 1 / 6) < 1e-6 and attrs["beta"] == 0.5)
    if usual and reader is not None and reader.op == "Mul" and set(reader.inputs) == {operator.inputs[0], operator.outputs[0]}:
        b.done.add(id(reader))
        return b.layer(reader, fused, [x], {}, x.shape, x.layout)
    return b.layer(operator, op, [x], attrs, x.shape, x.layout)


def gelu(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    attrs = {"approximate": operator.attrs.get("approximate") == "tanh"}
    return x is not None and b.layer(operator, "gelu", [x], attrs, x.shape, x.layout)


def clip(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    low, high = operator.attrs.get("min", -math.inf), operator.attrs.get("max", math.inf)
    for place, name in enumerate(operator.inputs[1:3]):
        number = b.constants.number(name) if name else (low, high)[place]
        if number is None:
            return False
        low, high = (number, high) if place == 0 else (low, number)
    if x is None:
        return False
    six = low == 0 and high == 6
    return b.layer(operator, "relu6" if six else "clip", [x], {} if six else {"low": float(low), "high": float(high)}, x.shape, x.layout)


def alias(b: Builder, operator: Operator) -> bool:
    """Dropout in eval mode, Identity, a change of precision: nothing."""
    x = b.value(operator)
    return x is not None and (operator.op != "Cast" or operator.attrs.get("to") in FLOATING) and b.gives(operator, x)


def pool(b: Builder, operator: Operator) -> bool:
    x, pads, kernel, stride = b.value(operator), pads_of(operator), pair_of(operator, "kernel_shape"), pair_of(operator, "strides")
    if x is None or x.layout not in ("nchw", "") or pads is None or stride is None or kernel is None:
        return False
    if not operator.attrs.get("kernel_shape"):
        return False
    if pair_of(operator, "dilations") != (1, 1) or any(name in b.readers for name in operator.outputs[1:]):
        return False
    ceil = bool(operator.attrs.get("ceil_mode"))
    attrs: dict[str, Any] = {"kernel": kernel, "stride": stride, "pads": pads, "rounding": "ceil" if ceil else "floor"}
    if operator.op == "AveragePool":
        attrs["count_pad"] = "all" if operator.attrs.get("count_include_pad") else "none"
    sizes = (slid(side(x, a), a, kernel[a], stride[a], 1, pads, ceil) for a in (0, 1))
    shape = (*(x.shape or (None, None))[:2], *sizes)
    return b.layer(operator, "maxpool" if operator.op == "MaxPool" else "avgpool", [x], attrs, shape, "nchw")


def global_pool(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    if x is None or x.layout not in ("nchw", "nhwc"):
        return False
    at, keep = [2, 3], True
    if operator.op.startswith("Reduce"):
        found = axes(operator, b.constants)
        at, keep = sorted(a % 4 for a in found or []), bool(operator.attrs.get("keepdims", 1))
    if at != sorted((x.layout.index("h"), x.layout.index("w"))):
        return False
    op = "global_maxpool" if "Max" in operator.op else "global_avgpool"
    shape = x.sized(h=1, w=1) if keep else (x.dim("n"), x.dim("c"))
    return b.layer(operator, op, [x], {"keepdims": keep}, shape, x.layout if keep else "flat")


def softmax(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    if x is None or not x.layout:
        return False
    rank = 2 if x.layout == "flat" else 4
    axis = operator.attrs.get("axis", -1 if b.model.opset >= 13 else 1) % rank
    if axis != x.axis("c") or (b.model.opset < 13 and rank == 4 and (x.dim("h"), x.dim("w")) != (1, 1)):
        return False
    return b.layer(operator, "softmax", [x], {}, x.shape, x.layout)


def concat(b: Builder, operator: Operator) -> bool:
    read = [b.value(operator, place) for place in range(len(operator.inputs))]
    xs = [x for x in read if x is not None]
    if not xs or len(xs) < len(read) or len({x.layout for x in xs}) > 1 or not xs[0].layout:
        return False
    rank = 2 if xs[0].layout == "flat" else 4
    if operator.attrs.get("axis", 1) % rank != xs[0].axis("c"):
        return False
    widths = [x.dim("c") for x in xs]
    total = sum(n for n in widths if n is not None) if None not in widths else None
    return b.layer(operator, "concat", xs, {}, xs[0].sized(c=total), xs[0].layout)


def arithmetic(b: Builder, operator: Operator) -> bool:
    read = [b.value(operator, place) for place in range(len(operator.inputs))]
    xs = [x for x in read if x is not None]
    if len(xs) == len(read) and xs:
        op = {"Add": "add", "Sum": "add", "Sub": "sub", "Mul": "mul", "Max": "maximum", "Mean": "average"}.get(operator.op)
        known = [x for x in xs if x.layout]
        if op is None or len({x.layout for x in known}) > 1 or (operator.op == "Sub" and len(xs) != 2):
            return False
        widest = next((x for x in xs if x.layout in ("nchw", "nhwc") and (x.dim("h"), x.dim("w")) != (1, 1)), xs[0])
        return b.layer(operator, op, xs, {}, widest.shape, widest.layout)
    return len(xs) == 1 and len(read) == 2 and _with_constant(b, operator, xs[0], read.index(xs[0]))


def _with_constant(b: Builder, operator: Operator, x: Value, place: int) -> bool:
    """An operator on a map and numbers: an affine layer on pixels, or a module of its own behind them."""
    name = operator.inputs[1 - place]
    stored = b.constants.stored.get(name)
    count = None if stored is None else per_channel(stored.shape, x) if x.layout else 1 if math.prod(stored.shape) == 1 else None
    if stored is None or count is None or (operator.op == "Div" and place == 1) or operator.op not in ("Add", "Sub", "Mul", "Div"):
        return False
    if (shift := _shift_behind(b, operator, x, name)) is not None:
        return _scale_and_shift(b, *shift, x, name)
    pixels = b.ops[x.node] in ("input", "affine", "permute_channels")
    if not pixels and b.own(name, single=count == 1):
        return False
    if operator.op in ("Add", "Mul") and count > 1 and not pixels:
        leaf = "weight" if operator.op == "Mul" else "bias"
        module = b.module(operator, {leaf: name})
        if module is None:
            return False
        b.keep(module, leaf, name)
        return b.gives(operator, Value(b.emit(module, "scale", [x]), x.shape, x.layout))
    numbers = b.constants.small(name)
    if numbers is None or numbers.dtype.kind not in "iuf":
        return False
    vector = [float(n) for n in numbers.reshape(-1)]
    sign = -1.0 if operator.op == "Sub" and place == 1 else 1.0
    if operator.op in ("Add", "Sub"):
        attrs = {"scale": sign, "offset": [(-n if operator.op == "Sub" and place == 0 else n) for n in vector]}
    elif operator.op == "Div" and 0.0 in vector:
        return False
    else:
        attrs = {"scale": [1 / n if operator.op == "Div" else n for n in vector], "offset": 0.0}
    attrs = {key: held[0] if isinstance(held, list) and len(held) == 1 else held for key, held in attrs.items()}
    return b.layer(operator, "affine", [x], attrs, x.shape, x.layout)


def _shift_behind(b: Builder, operator: Operator, x: Value, name: str) -> tuple[list[Operator], str] | None:
    """Find the Add behind a Mul whose numbers are of the same module by their names, as a BatchNorm is written that nothing took up."""
    stored, chain = b.constants.stored[name], [operator]
    while (reader := b.only_reader(chain[-1])) is not None and reader.op == "Identity":
        chain.append(reader)
    if operator.op != "Mul" or reader is None or reader.op != "Add" or len(reader.inputs) != 2:
        return None
    other = reader.inputs[0] if reader.inputs[1] == chain[-1].outputs[0] else reader.inputs[1]
    added = b.constants.stored.get(other)
    if added is None or len({per_channel(one.shape, x) for one in (stored, added)} - {None}) != 1 or len(stored.shape) != 1:
        return None
    owner = _named(b, name, "weight")
    return ([*chain[1:], reader], other) if owner and owner == _named(b, other, "bias") else None


def _named(b: Builder, name: str, leaf: str) -> str:
    """Tell whose leaf a tensor is by the name that the file has for it; "" where it says nothing."""
    root = b.constants.roots[name]
    ending = next((ending for ending in (f".{leaf}", f"/{leaf}s", f"/{leaf}") if root.endswith(ending)), None)
    return root.removesuffix(ending) if ending else ""


def _scale_and_shift(b: Builder, behind: Sequence[Operator], other: str, x: Value, name: str) -> bool:
    module = b.module(Operator("Mul", _named(b, name, "weight"), "", [], [], {}, _named(b, name, "weight")), {"weight": name})
    if module is None:
        return False
    b.keep(module, "weight", name)
    b.keep(module, "bias", other)
    b.done.update(map(id, behind))
    return b.gives(behind[-1], Value(b.emit(module, "scale", [x]), x.shape, x.layout))


def extremum(b: Builder, operator: Operator) -> bool:
    """Max and Min with a number are clips."""
    x = next((v for place in range(len(operator.inputs)) if (v := b.value(operator, place)) is not None), None)
    number = next((n for name in operator.inputs if (n := b.constants.number(name)) is not None), None)
    if x is None or number is None or len(operator.inputs) != 2:
        return operator.op == "Max" and arithmetic(b, operator)
    if operator.op == "Max" and number == 0:
        return b.layer(operator, "relu", [x], {}, x.shape, x.layout)
    attrs = {"low": number, "high": math.inf} if operator.op == "Max" else {"low": -math.inf, "high": number}
    return b.layer(operator, "clip", [x], attrs, x.shape, x.layout)


def lrn(b: Builder, operator: Operator) -> bool:
    x, size = b.value(operator), operator.attrs.get("size")
    if x is None or x.layout != "nchw" or not isinstance(size, int) or size < 1:
        return False
    read = operator.attrs
    attrs = {"size": size, "alpha": read.get("alpha", 1e-4), "beta": read.get("beta", 0.75), "k": read.get("bias", 1.0)}
    return b.layer(operator, "lrn", [x], attrs, x.shape, x.layout)


HANDLERS: dict[str, Callable[[Builder, Operator], bool]] = {
    **_onnx_layers.HANDLERS,
    **_onnx_shapes.HANDLERS,
    "Relu": partial(plain, "relu"),
    "LeakyRelu": partial(plain, "leaky_relu", slope=("alpha", 0.01)),
    "Elu": partial(plain, "elu", alpha=("alpha", 1.0)),
    "Tanh": partial(plain, "tanh"),
    "Softplus": partial(plain, "softplus"),
    "HardSwish": partial(plain, "hardswish"),
    "Sigmoid": partial(gate, "sigmoid", "silu"),
    "HardSigmoid": partial(gate, "hardsigmoid", "hardswish"),
    "Gelu": gelu,
    "Clip": clip,
    **dict.fromkeys(("Dropout", "Identity", "Cast"), alias),
    **dict.fromkeys(("MaxPool", "AveragePool"), pool),
    **dict.fromkeys(("GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax"), global_pool),
    "Softmax": softmax,
    "Concat": concat,
    **dict.fromkeys(("Add", "Sum", "Sub", "Mul", "Div", "Mean"), arithmetic),
    **dict.fromkeys(("Max", "Min"), extremum),
    "LRN": lrn,
}
