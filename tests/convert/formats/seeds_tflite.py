"""Small TFLite files, made with the schema that LiteRT ships; for tests and the fuzzer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated

schema: Any = schema_py_generated
"""Its classes say of each list that it may be None."""
KINDS = {"float32": 0, "float16": 1, "int32": 2, "uint8": 3, "int64": 4, "int8": 9}


class Making:
    """A model that grows operator by operator; values are numbers of tensors."""

    def __init__(self, *shape: int, kind: str = "float32", scale: float = 0.0, zero: int = 0) -> None:
        self.graph, self.model = schema.SubGraphT(), schema.ModelT()
        self.graph.tensors, self.graph.operators = [], []
        self.model.version, self.model.subgraphs, self.model.operatorCodes = 3, [self.graph], []
        self.model.buffers, self.model.description = [schema.BufferT()], "maker"
        self.x = self.tensor("images", shape, kind, scale=[scale] if scale else [], zero=[zero] if scale else [])
        self.graph.inputs = [self.x]

    def tensor(
        self, name: str, shape: Sequence[int], kind: str = "float32", held: np.ndarray | None = None,
        scale: Sequence[float] = (), zero: Sequence[int] = (), axis: int = 0,
    ) -> int:  # fmt: skip
        made = schema.TensorT()
        made.name, made.shape, made.type, made.buffer = name, list(shape), KINDS[kind], 0
        if len(scale):
            made.quantization = schema.QuantizationParametersT()
            made.quantization.scale, made.quantization.zeroPoint = list(scale), list(zero)
            made.quantization.quantizedDimension = axis
        if held is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(held.astype(kind).tobytes(), np.uint8)
            self.model.buffers.append(buffer)
            made.buffer = len(self.model.buffers) - 1
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def constant(self, name: str, held: Any, kind: str = "float32", **quantised: Any) -> int:
        array = np.asarray(held)
        return self.tensor(name, array.shape, kind, array, **quantised)

    def add(
        self, op: str, inputs: Sequence[int], *shape: int, name: str = "", kind: str = "float32", version: int = 1, **options: Any
    ) -> int:
        """Add an operator of one output; `options` are the schema's, with its class under `of`."""
        code = schema.OperatorCodeT()
        code.builtinCode = getattr(schema.BuiltinOperator, op)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), version
        self.model.operatorCodes.append(code)
        made, of = schema.OperatorT(), options.pop("of", "")
        scale, zero = options.pop("scale", ()), options.pop("zero", ())
        made.opcodeIndex, made.inputs = len(self.model.operatorCodes) - 1, list(inputs)
        made.outputs = [self.tensor(name or f"{op.lower()}_{len(self.graph.operators)}", shape, kind, scale=scale, zero=zero)]
        if of:
            made.builtinOptionsType = getattr(schema.BuiltinOptions, of)
            made.builtinOptions = getattr(schema, f"{of}T")()
            for key, value in options.items():
                setattr(made.builtinOptions, key, value)
        self.graph.operators.append(made)
        return made.outputs[0]

    def bytes(self, *outputs: int) -> bytes:
        self.graph.outputs = list(outputs)
        builder = flatbuffers.Builder(1024)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


CONV = {"of": "Conv2DOptions", "strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
DEPTHWISE = {**CONV, "of": "DepthwiseConv2DOptions", "depthMultiplier": 1}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def small_network(half: bool = False) -> bytes:
    """A strided convolution, a depthwise one with two outputs a channel, a pool, and a dense layer that flattens for itself."""
    m = Making(1, 8, 8, 3)

    def held(name: str, array: np.ndarray) -> int:
        if not half:
            return m.constant(name, array)
        return m.add("DEQUANTIZE", [m.constant(f"{name}/half", array, "float16")], *array.shape, name=name, of="DequantizeOptions")

    weight, bias = held("net/stem/Conv2D", draw(4, 3, 3, 3)), held("net/stem/BiasAdd/ReadVariableOp", draw(4, seed=1))
    a = m.add(
        "CONV_2D",
        [m.x, weight, bias],
        1,
        4,
        4,
        4,
        name="net/stem/Relu",
        **{**CONV, "strideH": 2, "strideW": 2, "fusedActivationFunction": 1},
    )
    weight = held("net/dw/depthwise", draw(1, 3, 3, 8, seed=2))
    b = m.add(
        "DEPTHWISE_CONV_2D",
        [a, weight, held("net/dw/BiasAdd", draw(8, seed=3))],
        1,
        4,
        4,
        8,
        **{**DEPTHWISE, "depthMultiplier": 2, "fusedActivationFunction": 3},
    )
    c = m.add("AVERAGE_POOL_2D", [b], 1, 2, 2, 8, of="Pool2DOptions", strideH=2, strideW=2, filterHeight=3, filterWidth=3)
    weight = held("net/head/MatMul", draw(5, 32, seed=4))
    d = m.add("FULLY_CONNECTED", [c, weight, held("net/head/BiasAdd", draw(5, seed=5))], 1, 5, of="FullyConnectedOptions")
    return m.bytes(m.add("SOFTMAX", [d], 1, 5, name="probabilities", of="SoftmaxOptions", beta=1.0))


def quantised_network() -> bytes:
    """Whole numbers everywhere: weights with a scale an output, biases of 32 bits, images and values with scales of their own."""
    whole = np.random.default_rng(0)
    m = Making(1, 8, 8, 3, kind="int8", scale=1 / 64, zero=-3)
    scales = np.array([0.01, 0.02, 0.03, 0.015], np.float32)
    weight = m.constant("net/stem/Conv2D", whole.integers(-127, 128, (4, 3, 3, 3)), "int8", scale=scales, zero=[0] * 4)
    bias = m.constant("net/stem/BiasAdd", whole.integers(-500, 500, 4), "int32", scale=scales / 64, zero=[0] * 4)
    a = m.add(
        "CONV_2D",
        [m.x, weight, bias],
        1,
        8,
        8,
        4,
        kind="int8",
        version=3,
        scale=[0.05],
        zero=[-128],
        **{**CONV, "fusedActivationFunction": 1},
    )
    b = m.add(
        "MEAN", [a, m.constant("axes", [1, 2], "int32")], 1, 4, kind="int8", version=2, scale=[0.02], zero=[-128], of="ReducerOptions"
    )
    weight = m.constant("net/head/MatMul", whole.integers(-127, 128, (5, 4)), "int8", scale=[0.02], zero=[0])
    bias = m.constant("net/head/BiasAdd", whole.integers(-500, 500, 5), "int32", scale=[0.02 * 0.02], zero=[0])
    c = m.add("FULLY_CONNECTED", [b, weight, bias], 1, 5, kind="int8", version=4, scale=[0.1], zero=[5], of="FullyConnectedOptions")
    return m.bytes(m.add("DEQUANTIZE", [c], 1, 5, name="logits", version=2, of="DequantizeOptions"))


def seeds(folder: Path) -> list[Path]:
    made: list[Path] = []
    for name, held in (("small", small_network()), ("half", small_network(half=True)), ("whole", quantised_network())):
        made.append(folder / f"{name}.tflite")
        made[-1].write_bytes(held)
    return made
