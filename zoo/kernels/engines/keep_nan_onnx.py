"""An ONNX graph whose NaN and infinities are noticed before onnxruntime makes numbers of them, as `keep_nan` does for OpenVINO.

onnxruntime's ReLUs keep NaN; its maxima, clamps, GELU and LayerNorm don't. How large a value can be is followed from inputs of at most
`LARGEST`; where it may have overflowed or become NaN, what enters an operation that could lose that is summed up, in an output of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from zoo.kernels.engines.keep_nan import FEW, LARGEST, LARGEST_WHOLE, LIMITS, UNKNOWN, WATCH, WHOLE, Bounds, largest, times

MOVES = {"Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Split", "Slice", "Gather", "Concat", "Identity", "Expand", "Tile"}
MOVES |= {"AveragePool", "GlobalAveragePool", "ReduceMean", "Pad", "Cast", "Resize", "Relu", "LeakyRelu", "PRelu", "DepthToSpace"}
"""Operations that treat NaN and infinity as PyTorch does, and whose values lie between those of their inputs and 0."""
RANGES: dict[str, Bounds] = {"Sigmoid": (0, 1), "Tanh": (-1, 1), "Softmax": (0, 1), "Erf": (-1, 1)}
"""Such whose values lie there, whatever they are given."""
KEEPS = {"Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "Add", "Sub", "Mul", "Div", "ReduceSum", "Sqrt", "Exp", "Neg"}
KEEPS |= {"Shape", "Constant", "ConstantOfShape", "Range", "Pow", "Abs", "Reciprocal", *MOVES, *RANGES}
"""Operations that treat NaN and infinity as PyTorch does."""
LOSES: dict[str, Bounds | None] = {"Clip": None, "HardSigmoid": (0, 1), "MaxPool": None, "ReduceMax": None, "ReduceMin": None, "Max": None}
LOSES |= {"HardSwish": None, "Gelu": None, "Elu": None, "Mish": None, "Min": None, "Where": None}
"""Operations that may lose them, and where their values lie; None between those of their inputs and 0, or of `Clip` between its limits."""

DRAWS = {"RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Multinomial", "Bernoulli", "Dropout"}
LARGEST_INT32 = 2.0**32
"""No number of 32 bits lies further from its zero point."""
SQUARED = 1e16
"""What is bound by this overflows in no sum of squares, as a LayerNorm makes one."""


def watch(model: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Add an output to a graph that is finite where nothing was lost.

    Args:
        model: an `onnx.ModelProto`; changed in place.
        tensors: the weights, by the names of those inputs or initialisers that stand for them.

    Returns:
        Whether the graph has got the output `WATCH`.
    """
    from onnx import TensorProto, helper, numpy_helper, shape_inference

    graph = model.graph
    shaped = shape_inference.infer_shapes(model).graph
    told = [*shaped.value_info, *shaped.input]
    known: dict[str, np.ndarray] = {one.name: numpy_helper.to_array(one) for one in graph.initializer if one.name not in tensors}
    bounds: dict[str, Bounds] = {given.name: (-LARGEST, LARGEST) for given in graph.input}
    types = {one.name: one.type.tensor_type.elem_type for one in told}
    real = {name for name, type in types.items() if type in (TensorProto.FLOAT, TensorProto.DOUBLE)}
    floats = (TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.UNDEFINED)
    whole = {name for name, type in types.items() if type not in floats}
    inner = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in told}
    watched: dict[str, str] = {}

    def weight(name: str) -> np.ndarray | None:
        return tensors[name].detach().float().numpy() if name in tensors else known.get(name)

    def bound(name: str) -> Bounds:
        if name not in bounds:
            bounds[name] = WHOLE if name in whole else _ends(weight(name))
        return bounds[name]

    last = max((number for number, node in enumerate(graph.node) if node.op_type not in KEEPS), default=-1)
    for node in graph.node[: last + 1]:  # behind it nothing can be lost
        kind = node.op_type
        limit = SQUARED if kind == "LayerNormalization" else LIMITS[torch.float32]
        if kind == "Constant":
            value = next((attribute.t for attribute in node.attribute if attribute.name == "value"), None)
            if value is not None:
                known[node.output[0]] = numpy_helper.to_array(value)
            continue
        names = [name for name in node.input if name]
        if values := _values(node, known, inner, model.opset_import):
            known.update(values)
            continue
        doubtful = [
            name for name in names if (name in real or name in bounds) and not largest(bound(name)) < limit and weight(name) is None
        ]
        if kind not in KEEPS and doubtful:
            watched |= {name: "ReduceSumSquare" if kind == "LayerNormalization" else "ReduceSum" for name in doubtful if name in real}
            for name in doubtful:  # it is finite from here on, or the network itself answers
                bounds[name] = (max(bound(name)[0], -3e38), min(bound(name)[1], 3e38))
        if doubtful and kind in KEEPS:  # NaN goes on, whatever the operation makes of a number
            found = UNKNOWN
        elif kind == "Cast" and names[0] in whole:
            found = -LARGEST_WHOLE, LARGEST_WHOLE
        else:
            found = _of(node, [bound(name) for name in names], names, weight, inner)
        bounds.update({name: found for name in node.output if name not in whole})
    for number, (name, total) in enumerate(watched.items()):
        graph.node.append(helper.make_node(total, [name], [f"{WATCH}.{number}"], keepdims=0))
    if watched:
        graph.node.append(helper.make_node("Sum", [f"{WATCH}.{number}" for number in range(len(watched))], [WATCH]))
        graph.output.append(helper.make_tensor_value_info(WATCH, TensorProto.FLOAT, ()))
    return bool(watched)


def _of(
    node: Any, given: list[Bounds], names: list[str], weight: Callable[[str], np.ndarray | None], inner: Mapping[str, list[int]]
) -> Bounds:
    """Bounds what an operation gives."""
    kind = node.op_type
    low, high = min((one[0] for one in given), default=0.0), max((one[1] for one in given), default=0.0)
    match kind:
        case "Conv" | "ConvTranspose" | "Gemm" | "MatMul":
            found = weight(names[1])
            if found is None:
                shape = inner.get(names[0], [])[-1:] if kind in ("Gemm", "MatMul") else inner.get(names[1], [])
                gain = times(math.prod(shape), largest(given[1])) if shape and min(shape) > 0 else math.inf
            else:
                size = np.abs(found)
                gain = float(size.reshape(size.shape[0], -1).sum(1).max()) if kind == "Conv" and size.size else float(size.sum())
            most = times(largest(given[0]), gain) + (largest(given[2]) if len(given) > 2 else 0.0)
            return -most, most
        case "BatchNormalization":
            epsilon = next((one.f for one in node.attribute if one.name == "epsilon"), 1e-5)
            spread = math.sqrt(max(given[4][0], 0.0) + epsilon)
            most = times(largest(given[0]) + largest(given[3]), largest(given[1]) / spread) + largest(given[2])
            return -most, most
        case "LayerNormalization":
            size = inner.get(names[0], [])
            most = times(math.sqrt(math.prod(size[1:]) or math.inf), largest(given[1])) + (largest(given[2]) if len(given) > 2 else 0.0)
            return -most, most
        case "Add":
            return given[0][0] + given[1][0], given[0][1] + given[1][1]
        case "Sub":
            return given[0][0] - given[1][1], given[0][1] - given[1][0]
        case "Mul":
            most = times(largest(given[0]), largest(given[1]))
            return (0.0 if min(given[0][0], given[1][0]) >= 0 else -most), most
        case "Div" if given[1][0] > 0:
            most = largest(given[0]) / given[1][0]
            return (0.0 if given[0][0] >= 0 else -most), most
        case "Sqrt" if given[0][0] >= 0:
            return 0.0, math.sqrt(given[0][1])
        case "DequantizeLinear":  # of 32 bits at most, as a bias has
            scale = weight(names[1])
            most = math.inf if scale is None else LARGEST_INT32 * float(np.abs(scale).max())
            return -most, most
        case "Clip":
            ends = [_ends(weight(name)) if name else UNKNOWN for name in (*node.input[1:], "", "")][:2]
            return max(low, ends[0][0]), min(high, ends[1][1])
        case "Relu":
            return 0.0, max(high, 0.0)
        case _ if kind in RANGES:
            return RANGES[kind]
        case "Resize":
            return 4 * min(low, 0.0), 4 * max(high, 0.0)
        case _ if kind in MOVES or kind in LOSES:
            return LOSES.get(kind) or (min(low, 0.0, -1.0), max(high, 0.0))
        case _:
            return UNKNOWN


def _values(node: Any, known: Mapping[str, np.ndarray], inner: Mapping[str, list[int]], opsets: Any) -> dict[str, np.ndarray]:
    """Compute what follows from small constants and from shapes alone; {} of all else."""
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "Shape" and not node.attribute:
        shape = inner.get(node.input[0], [])
        return {node.output[0]: np.array(shape, np.int64)} if shape and min(shape) > 0 else {}
    given = {name: known.get(name) for name in node.input if name}
    shapes = [inner.get(name) for name in node.output]
    if node.op_type in DRAWS or not given or any(shape is None or math.prod(shape) > FEW or 0 in shape for shape in shapes):
        return {}
    if any(value is None or value.size > FEW for value in given.values()):
        return {}
    inputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in given]
    outputs = [helper.make_tensor_value_info(name, TensorProto.UNDEFINED, None) for name in node.output]
    one: Any = helper.make_model(helper.make_graph([node], "one", inputs, outputs), opset_imports=opsets)
    try:
        made: Any = ReferenceEvaluator(one).run(None, given)
    except Exception:  # ONNX's reference raises whatever NumPy does, or that it lacks the operation: nothing is known of its values
        return {}
    return dict(zip(node.output, made, strict=True))


def _ends(value: np.ndarray | None) -> Bounds:
    if value is None or not value.size:
        return UNKNOWN if value is None else (0.0, 0.0)
    if value.dtype.kind != "f":
        return 0.0, 0.0
    ends = float(value.min()), float(value.max())
    return ends if all(map(math.isfinite, ends)) else UNKNOWN
