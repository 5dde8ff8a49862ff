"""Small ONNX files of every dialect, made by ONNX's own helpers; for tests and the fuzzer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


def model(
    nodes: Sequence[Any], tensors: dict[str, np.ndarray], shape: Sequence[Any] = ("batch", 3, 8, 8), opset: int = 17
) -> onnx.ModelProto:
    """Join nodes that read "x" and write "y", and constants."""
    graph = helper.make_graph(
        list(nodes),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, list(shape))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8, producer_name="maker", producer_version="1"
    )


def node(op: str, inputs: str, outputs: str = "", /, **attributes: Any) -> Any:
    """Make a node from names with spaces between them."""
    return helper.make_node(op, inputs.split(), (outputs or f"{op}_out").split(), **attributes)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def small_network() -> onnx.ModelProto:
    """A convolution, a BatchNorm, a pool and a dense layer under a state dict's names."""
    tensors = {
        "stem.weight": draw(4, 3, 3, 3),
        "bn.weight": draw(4, seed=1),
        "bn.bias": draw(4, seed=2),
        "bn.running_mean": draw(4, seed=3),
        "bn.running_var": np.abs(draw(4, seed=4)) + 0.5,
        "bn.num_batches_tracked": np.array(3),
        "fc.weight": draw(5, 4, seed=5),
        "fc.bias": draw(5, seed=6),
    }
    nodes = [
        node("Conv", "x stem.weight", "a", pads=[1, 1, 1, 1], strides=[2, 2], kernel_shape=[3, 3]),
        node("BatchNormalization", "a bn.weight bn.bias bn.running_mean bn.running_var", "b", epsilon=1e-3),
        node("Relu", "b", "c"),
        node("GlobalAveragePool", "c", "d"),
        node("Flatten", "d", "e"),
        node("Gemm", "e fc.weight fc.bias", "y", transB=1),
    ]
    return model(nodes, tensors)


def converted_network() -> onnx.ModelProto:
    """The same kind of network as converters from TensorFlow write it: NHWC, kernels behind transposes, MatMul and Add."""
    tensors = {
        "StatefulPartitionedCall/net/stem/Conv2D/ReadVariableOp:0": draw(3, 3, 3, 4),
        "stem_bias": draw(4, seed=1),
        "const_fold": draw(64, 5, seed=2),
        "head/bias:0": draw(5, seed=3),
        "shape": np.array([-1, 64]),
    }
    nodes = [
        node("Transpose", "x", "planes", perm=[0, 3, 1, 2]),
        node("Transpose", "StatefulPartitionedCall/net/stem/Conv2D/ReadVariableOp:0", "kernel", perm=[3, 2, 0, 1]),
        node("Conv", "planes kernel stem_bias", "a", auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3]),
        node("Relu", "a", "b"),
        node("Transpose", "b", "c", perm=[0, 2, 3, 1]),
        node("Reshape", "c shape", "d"),
        node("MatMul", "d const_fold", "e"),
        node("Add", "e head/bias:0", "y"),
    ]
    return model(nodes, tensors, ("batch", 8, 8, 3), 11)


def quantised_network() -> onnx.ModelProto:
    """Weights of eight and sixteen bits, and a reshape of a constant."""
    tensors = {
        "w": np.random.default_rng(0).integers(-127, 127, (4, 3, 3, 3)).astype(np.int8),
        "scale": np.array([0.1, 0.2, 0.3, 0.4], np.float32),
        "zero": np.array([0, 1, 2, 3], np.int8),
        "half": draw(1, 1, 4, 4, seed=1).astype(np.float16),
        "flat": draw(4 * 4, seed=2),
        "to": np.array([4, 4]),
    }
    nodes = [
        node("DequantizeLinear", "w scale zero", "wide", axis=0),
        node("Conv", "x wide", "a", kernel_shape=[3, 3]),
        node("Transpose", "half", "turned", perm=[3, 2, 0, 1]),
        node("Cast", "turned", "single", to=TensorProto.FLOAT),
        node("Conv", "a single", "b", kernel_shape=[1, 1]),
        node("GlobalAveragePool", "b", "c"),
        node("Flatten", "c", "d"),
        node("Reshape", "flat to", "square"),
        node("Gemm", "d square", "y"),
    ]
    return model(nodes, tensors)


def seeds(folder: Path) -> list[Path]:
    made: list[Path] = []
    for name, held in (("named", small_network()), ("nhwc", converted_network()), ("quantised", quantised_network())):
        made.append(folder / f"{name}.onnx")
        made[-1].write_bytes(held.SerializeToString())
    typed = small_network()
    for tensor in typed.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(helper.make_tensor(tensor.name, tensor.data_type, array.shape, array.reshape(-1).tolist()))
    made.append(folder / "typed.onnx")
    made[-1].write_bytes(typed.SerializeToString())
    made.append(folder / "external.onnx")
    onnx.save(small_network(), str(made[-1]), save_as_external_data=True, location="external.data", size_threshold=64)
    return made
