"""An OpenVINO graph that loses no NaN and no infinity: where one could arise inside, it reaches an output, or a sum that is looked at.

OpenVINO's activations and pools make numbers of NaN. Bounds are carried through the graph, from inputs of at most `LARGEST`: behind what
can only be finite nothing changes. Elsewhere a ReLU becomes a leaky one, whose slope is too small to change a number and keeps NaN at no
cost; and what enters another operation that could lose one is summed up, in an output of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

LARGEST = 1e6
"""Inputs up to here are computed; what is larger is the network's own to answer."""
LIMITS = {torch.float32: 1e37, torch.bfloat16: 1e37, torch.float16: 6e4}
"""What is bound by this overflows in no sum, by what is computed in."""
SLOPE = {torch.float32: 1e-8, torch.bfloat16: 1e-8, torch.float16: 1e-7}
"""Of a ReLU that keeps NaN, by what is computed in: less than the type's rounding of 1, and enough to make no denormal numbers."""
WATCH = "zoo.watch"
"""The name of the output that is finite where nothing was lost."""

Bounds = tuple[float, float]
UNKNOWN = (-math.inf, math.inf)
WHOLE = (0.0, 0.0)
"""Bounds of whole numbers, which are shapes and places and widen no others'."""
LARGEST_WHOLE = 2.0**64
"""Up to which whole numbers go that become real."""
FEW = 1024
"""Elements up to which what follows from constants and shapes is computed here: the root of a head's width, say."""
SAME = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "VariadicSplit", "Slice", "StridedSlice", "Gather", "Concat"}
SAME |= {"AvgPool", "MaxPool", "ReduceMean", "ReduceMax", "ReduceMin", "Pad", "Result", "Convert", "Broadcast", "Tile"}
"""Operations whose values lie between those of their inputs and 0."""
DRAWS = {"RandomUniform", "Multinomial"}
"""Operations that draw numbers, whatever they are given."""
KNOWN: dict[str, Bounds] = {"Sigmoid": (0, 1), "HardSigmoid": (0, 1), "Tanh": (-1, 1), "Erf": (-1, 1), "Softmax": (0, 1)}
KNOWN |= {"MVN": (-1e6, 1e6)}
POSITIVE = {"Swish": -0.3, "HSwish": -0.4, "Gelu": -0.2, "Relu": 0.0, "Mish": -0.4}
"""Activations that end at their input above, and here below."""
KEEPS = {"Convolution", "GroupConvolution", "MatMul", "BatchNormInference", "Add", "Subtract", "Multiply", "ReduceSum", "PRelu", "MVN"}
KEEPS |= {"ShapeOf", "Swish", "HSwish", "Gelu", "Relu", "Interpolate", "Sqrt"} | (SAME - {"MaxPool", "ReduceMax", "ReduceMin"})
"""Operations that give NaN or infinity where they are given one; a ReLU, once it is a leaky one."""


def keep_nan(model: Any, dtype: torch.dtype) -> bool:
    """Change a graph, whose weights are constants, so that no NaN or infinity that arises inside is lost.

    Args:
        model: an `ov.Model`; changed in place.
        dtype: what is computed in.

    Returns:
        Whether the graph has got the output `WATCH`.
    """
    from openvino import opset13 as ops

    limit = LIMITS[dtype]
    bounds: dict[tuple[Any, int], Bounds] = {}
    known: dict[tuple[Any, int], Any] = {}
    watched: list[Any] = []
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if values := _values(node, kind, known):
            known.update(values)
            bounds.update({key: _ends(tensor.data) for key, tensor in values.items()})
            continue
        given = [_bounds(port, bounds) for port in node.input_values()]
        doubtful = [port for port, one in zip(node.input_values(), given, strict=True) if _real(port) and not largest(one) < limit]
        if doubtful and kind == "Relu":
            leaky = ops.prelu(node.input_value(0), ops.constant(np.array([SLOPE[dtype]], np.float32)))
            for target in node.output(0).get_target_inputs():
                target.replace_source_output(leaky.output(0))
            bounds[_key(leaky.output(0))] = (0.0, math.inf)
            continue
        if doubtful and kind not in KEEPS and not _swish(node):
            watched += doubtful
            given = [(max(one[0], -3e38), min(one[1], 3e38)) for one in given]
        elif doubtful:  # NaN goes on, whatever the operation makes of a number
            bounds.update(dict.fromkeys(map(_key, node.outputs()), UNKNOWN))
            continue
        for port in node.outputs():
            bounds[_key(port)] = _of(node, kind, given)
    if watched:
        axes = [ops.constant(np.arange(len(port.get_partial_shape())), np.int64) for port in watched]
        sums = [ops.reduce_sum(port, axis, False) for port, axis in zip(watched, axes, strict=True)]
        total = sums[0]
        for each in sums[1:]:
            total = ops.add(total, each)
        watch = ops.reshape(total, ops.constant(np.array([1], np.int64)), False)  # with an axis, for parts of a batch
        watch.output(0).set_names({WATCH})
        model.add_results([ops.result(watch)])
    model.validate_nodes_and_infer_types()
    return bool(watched)


def _of(node: Any, kind: str, given: list[Bounds]) -> Bounds:
    """Bound what an operation gives."""
    low, high = min((one[0] for one in given), default=-LARGEST), max((one[1] for one in given), default=LARGEST)
    match kind:
        case "Parameter":
            return -LARGEST, LARGEST
        case "Constant":
            return _ends(node.data)
        case "Convolution" | "GroupConvolution" | "MatMul":
            return _product(node, kind, given)
        case "Convert" if not _real(node.input_value(0)):
            return -LARGEST_WHOLE, LARGEST_WHOLE
        case "BatchNormInference":
            scale, shift, mean, variance = given[1:]
            spread = math.sqrt(max(variance[0], 0) + node.get_attributes()["epsilon"])
            most = times(largest(given[0]) + largest(mean), largest(scale)) / spread
            return -most - largest(shift), most + largest(shift)
        case "Add":
            return sum(one[0] for one in given), sum(one[1] for one in given)
        case "Subtract":
            return given[0][0] - given[1][1], given[0][1] - given[1][0]
        case "Multiply":
            most = times(largest(given[0]), largest(given[1]))
            return -most, most
        case "Divide" if given[1][0] > 0:
            most = largest(given[0]) / given[1][0]
            return -most, most
        case "FakeQuantize":
            return given[3][0], given[4][1]
        case "Clamp":
            return node.get_attributes()["min"], node.get_attributes()["max"]
        case "Maximum":
            return max(one[0] for one in given), high
        case "Minimum":
            return low, min(one[1] for one in given)
        case "Sqrt" if given[0][0] >= 0:
            return 0.0, math.sqrt(given[0][1])
        case "Interpolate":
            return 4 * min(low, 0.0), 4 * max(high, 0.0)
        case _ if kind in KNOWN:
            return KNOWN[kind]
        case _ if kind in POSITIVE:
            return min(POSITIVE[kind], 0.0), max(high, 0.0)
        case _ if kind in SAME:
            return min(low, 0.0), max(high, 0.0)
        case _:
            return UNKNOWN


def _ends(values: Any) -> Bounds:
    ends = (float(values.min()), float(values.max())) if values.size and values.dtype.kind == "f" else WHOLE
    return ends if all(map(math.isfinite, ends)) else UNKNOWN


def _values(node: Any, kind: str, known: dict[tuple[Any, int], Any]) -> dict[tuple[Any, int], Any]:
    """Compute what follows from small constants and from shapes alone; {} of all else."""
    from openvino import Tensor

    if kind == "Constant":
        return {_key(node.output(0)): Tensor(np.array(node.data))} if node.data.size <= FEW else {}
    ports, given = node.outputs(), [known.get(_key(port)) for port in node.input_values()]
    if any(port.get_partial_shape().is_dynamic or math.prod(port.get_shape()) > FEW for port in ports):
        return {}
    made = [Tensor(port.get_element_type(), port.get_shape()) for port in ports]
    if kind == "ShapeOf" and not node.input_value(0).get_partial_shape().is_dynamic:
        made[0].data[:] = node.input_value(0).get_shape()
    elif kind in DRAWS or not given or any(one is None for one in given) or not _evaluated(node, made, given):
        return {}
    return {_key(port): tensor for port, tensor in zip(ports, made, strict=True)}


def _evaluated(node: Any, made: list[Any], given: list[Any]) -> bool:
    try:
        return node.evaluate(made, given)
    except RuntimeError:  # an operation that only a device computes
        return False


def _product(node: Any, kind: str, given: list[Bounds]) -> Bounds:
    """Bound a product with weights: by the sum of those of one output, where that is easily said, else of all."""
    weight = node.input_value(1).get_node()
    if weight.get_type_name() == "Constant":
        size = np.abs(weight.data.astype(np.float32, copy=False))
        gain = float(size.reshape(size.shape[0], -1).sum(1).max()) if kind == "Convolution" else float(size.sum())
    else:
        constants = [one.get_node() for one in _sources(weight)]
        if not constants or any(one.get_type_name() != "Constant" for one in constants):
            shape = node.input_value(0).get_partial_shape()
            inner = shape[len(shape) - 1].get_length() if shape[len(shape) - 1].is_static else math.inf
            gain = times(inner, largest(given[1]))
        else:
            gain = sum(float(np.abs(one.data).sum()) for one in constants if one.data.dtype.kind == "f")
    most = times(largest(given[0]), gain)
    return -most, most


def _sources(node: Any) -> list[Any]:
    """List the constants that a node's value is made of by moving numbers alone; [] where it is not."""
    found: list[Any] = []
    for port in filter(_real, node.input_values()):
        above = port.get_node()
        if above.get_type_name() == "Constant" or above.get_type_name() not in SAME:
            found.append(port)
        else:
            found += _sources(above) or [port]
    return found


def _swish(node: Any) -> bool:
    """Tell a sigmoid whose input it is multiplied with, which keeps NaN and infinity."""
    if node.get_type_name() != "Sigmoid":
        return False
    readers = [target.get_node() for target in node.output(0).get_target_inputs()]
    own = _key(node.input_value(0))
    return all(one.get_type_name() == "Multiply" and own in [_key(port) for port in one.input_values()] for one in readers)


def _key(port: Any) -> tuple[Any, int]:
    return port.get_node().get_friendly_name(), port.get_index()


def _bounds(port: Any, bounds: dict[tuple[Any, int], Bounds]) -> Bounds:
    """Say what bounds a value."""
    return bounds.get(_key(port), UNKNOWN) if _real(port) else WHOLE


def _real(port: Any) -> bool:
    return port.get_element_type().is_real()


def largest(one: Bounds) -> float:
    """Return the largest absolute value within bounds."""
    return max(abs(one[0]), abs(one[1]))


def times(one: float, other: float) -> float:
    """Multiply bounds. With an unbounded factor the product is unbounded: 0 times infinity is NaN."""
    return one * other if math.isfinite(one) and math.isfinite(other) else math.inf
