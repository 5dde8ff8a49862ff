"""Small frozen graphs of TensorFlow's, written by hand; for tests and the fuzzer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protobuf import message, packed

KINDS = {"float32": 1, "float64": 2, "int32": 3, "int64": 9, "float16": 19}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def shape_of(sizes: Sequence[int]) -> bytes:
    return message(*((2, message((1, size))) for size in sizes))


def attribute(value: Any) -> bytes:
    """Write an attribute: a text, a number, a truth, a list of numbers or texts; a type or a shape is a pair."""
    if isinstance(value, tuple):
        return message((6, value[1])) if value[0] == "type" else message((7, shape_of(value[1])))
    if isinstance(value, bool):
        return message((5, value))
    if isinstance(value, list):
        return message(
            (1, message((3, packed(*value))) if not value or isinstance(value[0], int) else message(*((2, text) for text in value)))
        )
    return message((2 if isinstance(value, str) else 3 if isinstance(value, int) else 4, value))


class Making:
    """A graph that grows node by node."""

    def __init__(self, *shape: int) -> None:
        self.nodes: list[bytes] = []
        self.x = self.add("Placeholder", [], "images", dtype=("type", 1), shape=("shape", shape))

    def add(self, op: str, inputs: Sequence[str], name: str, /, **attrs: Any) -> str:
        attrs = {} if op in ("Placeholder",) and not attrs else attrs
        if op not in ("Placeholder", "NoOp"):
            attrs.setdefault("T", ("type", 1))
        entries = [(5, message((1, key), (2, attribute(value)))) for key, value in attrs.items()]
        self.nodes.append(message((1, name), (2, op), *((3, each) for each in inputs), *entries))
        return name

    def constant(self, name: str, array: Any, *, listed: bool = False) -> str:
        """Add a constant, its numbers raw or one by one."""
        held = np.asarray(array)
        content = (
            (4, held.tobytes())
            if not listed
            else (5, held.astype("<f4").tobytes())
            if held.dtype.kind == "f"
            else (7, packed(*held.reshape(-1)))
        )
        tensor = message((1, KINDS[str(held.dtype)]), (2, shape_of(held.shape)), content)
        entries = [
            (5, message((1, "value"), (2, message((8, tensor))))),
            (5, message((1, "dtype"), (2, attribute(("type", KINDS[str(held.dtype)]))))),
        ]
        self.nodes.append(message((1, name), (2, "Const"), *entries))
        return name

    def ints(self, name: str, *values: int) -> str:
        return self.constant(name, np.array(values, np.int32))

    def bytes(self) -> bytes:
        return message(*((1, node) for node in self.nodes))


CONV = {"strides": [1, 1, 1, 1], "padding": "SAME", "data_format": "NHWC", "dilations": [1, 1, 1, 1]}


def small_network(listed: bool = False) -> bytes:
    """slim's names: a strided convolution with a norm, a depthwise one with two outputs a channel, a pool, a dense layer.

    `listed` writes one variance number by number.
    """
    m = Making(1, 8, 8, 3)
    kernel = m.add("Identity", [m.constant("net/stem/weights", draw(3, 3, 3, 4))], "net/stem/weights/read")
    a = m.add("Conv2D", [m.x, kernel], "net/stem/Conv2D", **{**CONV, "strides": [1, 2, 2, 1]})
    leaves = [
        m.constant(f"net/stem/BatchNorm/{name}", draw(4, seed=seed)) for seed, name in ((1, "gamma"), (2, "beta"), (3, "moving_mean"))
    ]
    leaves.append(m.constant("net/stem/BatchNorm/moving_variance", np.abs(draw(4, seed=4)) + 0.5, listed=listed))
    a = m.add(
        "FusedBatchNormV3",
        [a, *leaves],
        "net/stem/BatchNorm/FusedBatchNormV3",
        epsilon=1e-3,
        is_training=False,
        data_format="NHWC",
        U=("type", 1),
    )
    a = m.add("Relu6", [a], "net/stem/Relu6")
    a = m.add("DepthwiseConv2dNative", [a, m.constant("net/dw/depthwise_weights", draw(3, 3, 4, 2))], "net/dw/depthwise", **CONV)
    a = m.add("BiasAdd", [a, m.constant("net/dw/biases", draw(8, seed=5))], "net/dw/BiasAdd", data_format="NHWC")
    a = m.add(
        "AvgPool",
        [m.add("Relu", [a], "net/dw/Relu")],
        "net/pool",
        ksize=[1, 3, 3, 1],
        strides=[1, 2, 2, 1],
        padding="SAME",
        data_format="NHWC",
    )
    a = m.add("Reshape", [a, m.ints("net/shape", -1, 32)], "net/flat", Tshape=("type", 3))
    a = m.add("MatMul", [a, m.constant("net/head/weights", draw(32, 5))], "net/head/MatMul", transpose_a=False, transpose_b=False)
    a = m.add("BiasAdd", [a, m.constant("net/head/biases", draw(5, seed=6))], "net/head/BiasAdd", data_format="NHWC")
    m.add("Softmax", [a], "net/probabilities")
    return m.bytes()


def fused_network() -> bytes:
    """What an optimiser makes of it: layers with their biases and activations inside, a shape that is computed."""
    m = Making(1, 8, 8, 3)
    inputs = [m.x, m.constant("a/kernel", draw(3, 3, 3, 4)), m.constant("a/bias", draw(4))]
    a = m.add("_FusedConv2D", inputs, "a/Relu", **CONV, fused_ops=["BiasAdd", "Relu"], num_args=1)
    shape = m.add("Shape", [a], "shape", out_type=("type", 3))
    bounds = [m.ints(f"cut/{name}", value) for name, value in (("begin", 0), ("end", 1), ("strides", 1))]
    batch = m.add("StridedSlice", [shape, *bounds], "batch", shrink_axis_mask=1, Index=("type", 3), T=("type", 3))
    shape = m.add("Pack", [batch, m.constant("rest", np.int32(256))], "packed", N=2, axis=0, T=("type", 3))
    a = m.add("Reshape", [a, shape], "flat", Tshape=("type", 3))
    m.add(
        "_FusedMatMul",
        [a, m.constant("b/kernel", draw(256, 5)), m.constant("b/bias", draw(5))],
        "logits",
        fused_ops=["BiasAdd"],
        num_args=1,
    )
    return m.bytes()


def seeds(folder: Path) -> list[Path]:
    made: list[Path] = []
    for name, held in (("small", small_network()), ("listed", small_network(listed=True)), ("fused", fused_network())):
        made.append(folder / f"{name}.pb")
        made[-1].write_bytes(held)
    return made
