"""The ONNX operators that have weights: each becomes a layer under its module's name, and its tensors that module's."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from convert.formats._onnx_graph import Builder, Dims, Value
from convert.formats._onnx_proto import Operator
from convert.formats._onnx_windows import pads_of, pair_of, per_channel, side, slid


def _bias_behind(b: Builder, operator: Operator, x: Value, width: int) -> tuple[Operator, str] | None:
    """Find the Add that gives a layer its bias, if it is the layer's only reader: it, and the bias's name.

    A transpose may lie between, where converters have put a layer's channels first for this layer alone.
    """
    reader = b.only_reader(operator)
    if reader is not None and reader.op == "Transpose" and x.layout == "nchw" and list(reader.attrs.get("perm") or ()) == [0, 2, 3, 1]:
        operator, x, reader = reader, Value("", x.shape, "nhwc"), b.only_reader(reader)
    if reader is None or reader.op != "Add" or len(reader.inputs) != 2:
        return None
    name = reader.inputs[0] if reader.inputs[1] == operator.outputs[0] else reader.inputs[1]
    stored = b.constants.stored.get(name)
    if stored is None or per_channel(stored.shape, x) != width:
        return None
    return reader, name


def conv(b: Builder, operator: Operator) -> bool:
    x, weight = b.value(operator), b.constant(operator, 1)
    transposed = operator.op == "ConvTranspose"
    if x is None or weight is None or len(weight.shape) != 4 or x.layout not in ("nchw", "") or len(x.shape or "nchw") != 4:
        return False
    if len(operator.attrs.get("output_padding") or (0, 0)) != 2:
        return False
    pads, stride, dilation = pads_of(operator), pair_of(operator, "strides"), pair_of(operator, "dilations")
    group = operator.attrs.get("group") or 1
    if pads is None or stride is None or dilation is None or group < 1 or operator.attrs.get("output_shape"):
        return False
    width = weight.shape[1] * group if transposed else weight.shape[0]
    roles, also = {"weight": operator.inputs[1]}, None
    if len(operator.inputs) > 2 and operator.inputs[2]:
        if b.constant(operator, 2) is None:
            return False
        roles["bias"] = operator.inputs[2]
    elif (found := _bias_behind(b, operator, Value("", (None,) * 4, "nchw"), width)) is not None:
        also, roles["bias"] = found
    module = b.module(operator, roles, also)
    if module is None:
        return False
    letters = b.keep(module, "weight", roles["weight"], "transposed" if transposed else "conv", "IOHW" if transposed else "OIHW")
    if "bias" in roles:
        b.keep(module, "bias", roles["bias"])
    attrs: dict[str, Any] = {"layout": letters, "convention": "correlation", "stride": stride, "pads": pads, "dilation": dilation}
    attrs["groups"] = group
    kernel = weight.shape[2:]
    shape: Dims | None
    if transposed:
        more = tuple(operator.attrs.get("output_padding") or (0, 0))
        attrs["output_padding"], shape = more, ((x.shape or (None,))[0], width, None, None)
        if not isinstance(pads, str) and x.shape is not None:
            reach = [(kernel[a] - 1) * dilation[a] + 1 - pads[a] - pads[a + 2] + more[a] for a in (0, 1)]
            sizes = [None if n is None else (n - 1) * stride[a] + reach[a] for a, n in enumerate(x.shape[2:])]
            shape = (x.shape[0], width, *sizes)
    else:
        shape = (x.shape or (None,))[0], width, *(slid(side(x, a), a, kernel[a], stride[a], dilation[a], pads) for a in (0, 1))
    node = b.emit(module, "transposed" if transposed else "conv", [x], attrs)
    if also is not None:
        b.done.add(id(also))
        straight = operator.outputs[0] in also.inputs
        turned = (shape[0], *shape[2:], shape[1])
        b.gives(also, Value(node, shape, "nchw") if straight else Value(node, turned, "nhwc"))
    return b.gives(operator, Value(node, shape, "nchw"))


def gemm(b: Builder, operator: Operator) -> bool:
    x, weight = b.value(operator), b.constant(operator, 1)
    if x is None or weight is None or len(weight.shape) != 2 or operator.attrs.get("transA"):
        return False
    if operator.attrs.get("alpha", 1.0) != 1.0 or operator.attrs.get("beta", 1.0) != 1.0:
        return False
    return _dense(b, operator, x, "OI" if operator.attrs.get("transB") else "IO", bias=2)


def matmul(b: Builder, operator: Operator) -> bool:
    x, weight = b.value(operator), b.constant(operator, 1)
    if x is None or weight is None or len(weight.shape) != 2 or x.layout == "nchw":
        return False
    return _dense(b, operator, x, "IO", bias=None)


def _dense(b: Builder, operator: Operator, x: Value, letters: str, bias: int | None) -> bool:
    if b.own(operator.inputs[1], single=False):  # as attention's in_proj_weight is
        return False
    weight = b.constants.stored[operator.inputs[1]]
    width = weight.shape[letters.index("O")]
    roles, also = {"weight": operator.inputs[1]}, None
    if bias is not None and len(operator.inputs) > bias and operator.inputs[bias]:
        given = b.constant(operator, bias)
        if given is None or math.prod(given.shape) != width:
            return False
        roles["bias"] = operator.inputs[bias]
    elif (found := _bias_behind(b, operator, Value("", (None,) * (4 if x.layout == "nhwc" else 2), x.layout or "flat"), width)) is not None:
        also, roles["bias"] = found
    module = b.module(operator, roles, also)
    if module is None:
        return False
    raw = b.keep(module, "weight", roles["weight"], "linear", letters)
    if "bias" in roles:
        b.keep(module, "bias", roles["bias"])
    vector = x.layout == "flat" or (operator.op == "Gemm" and x.layout != "nhwc")
    if not vector and x.layout != "nhwc":  # tokens, or behind what is unknown: its tensors are kept, and it is not executed
        node, given_layout, shape = b.emit(module, f"unknown:{operator.op}", [x]), "", None
    else:
        node, given_layout = b.emit(module, "dense", [x], {"layout": raw}), "flat" if vector else "nhwc"
        shape = ((x.shape or (None,))[0], width) if vector else x.sized(c=width)
    if also is not None:
        b.done.add(id(also))
        b.gives(also, Value(node, shape, given_layout))
    return b.gives(operator, Value(node, shape, given_layout))


def norm(b: Builder, operator: Operator) -> bool:
    x = b.value(operator)
    names: dict[str, str] = dict(zip(("weight", "bias", "running_mean", "running_var"), operator.inputs[1:5], strict=False))
    if x is None or len(names) < 4 or operator.attrs.get("training_mode") or any(name not in b.constants.stored for name in names.values()):
        return False
    module = b.module(operator, names)
    if module is None or x.layout == "nhwc":
        return False
    for leaf, name in names.items():
        if not _plain(b, leaf, name, names["running_mean"]):
            b.keep(module, leaf, name)
    eps = float(operator.attrs.get("epsilon", 1e-5))
    return b.gives(operator, Value(b.emit(module, "norm", [x], {"eps": eps, "moment": "variance"}), x.shape, x.layout))


def _plain(b: Builder, leaf: str, name: str, mean: str) -> bool:
    """Tell whether a norm's scale or shift is the ones or zeros that an exporter writes for a module that has none."""
    roots, otherwise = b.constants.roots, {"weight": 1, "bias": 0}.get(leaf)
    owner = roots[mean].removesuffix(".running_mean")
    if otherwise is None or owner == roots[mean] or roots[name] == f"{owner}.{leaf}":
        return False
    held = b.constants.small(name)
    return held is not None and bool((held == otherwise).all())


def prelu(b: Builder, operator: Operator) -> bool:
    x, slope = b.value(operator), b.constant(operator, 1)
    if x is None or slope is None or b.own(operator.inputs[1], single=False):
        return False
    wide = slope.shape[:1] if x.layout == "flat" and slope.shape[1:] == (1, 1) else slope.shape  # a map's, of a vector
    if per_channel(wide, x) is None:
        return False
    module = b.module(operator, {"weight": operator.inputs[1]})
    if module is None:
        return False
    b.keep(module, "weight", operator.inputs[1])
    b.tensors[f"{module}.weight"] = slope.reshape(math.prod(slope.shape))
    return b.gives(operator, Value(b.emit(module, "prelu", [x]), x.shape, x.layout))


HANDLERS: dict[str, Callable[[Builder, Operator], bool]] = {
    **dict.fromkeys(("Conv", "ConvTranspose"), conv),
    "Gemm": gemm,
    "MatMul": matmul,
    "BatchNormalization": norm,
    "PRelu": prelu,
}
