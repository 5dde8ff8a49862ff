"""Small programs and state dicts of Paddle's, written by hand; for tests and the fuzzer."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from protobuf import message

KINDS = {"float32": 5, "float16": 4, "int64": 3}
NONE = -1


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attribute(name: str, value: Any) -> bytes:
    """Write an attribute under the number of its type."""
    if isinstance(value, bool):
        kind, fields = 6, [(10, value)]
    elif isinstance(value, int):
        kind, fields = 0, [(3, value)]
    elif isinstance(value, float):
        kind, fields = 1, [(4, value)]
    elif isinstance(value, str):
        kind, fields = 2, [(5, value)]
    else:
        kind, fields = (4, [(7, n) for n in value]) if value and isinstance(value[0], float) else (3, [(6, n) for n in value])
    return message((1, name), (2, kind), *fields)


def tensor(shape: Sequence[int], kind: str = "float32") -> bytes:
    return message((1, KINDS[kind]), *((2, size) for size in shape))


class Making:
    """A program that grows operator by operator, and its arrays."""

    def __init__(self, *shape: int) -> None:
        listed = [message((1, "feed"), (2, message((1, 9))), (3, True)), message((1, "fetch"), (2, message((1, 10))), (3, True))]
        self.variables, self.steps, self.arrays = listed, list[bytes](), dict[str, np.ndarray]()
        self.variable("x", shape)
        self.step("feed", {"X": "feed"}, {"Out": "x"}, col=0)

    def variable(self, name: str, shape: Sequence[int], kept: bool = False) -> str:
        held = message((1, 7), (3, message((1, tensor(shape)), (2, 0))))
        self.variables.append(message((1, name), (2, held), (3, kept)))
        return name

    def array(self, name: str, held: np.ndarray) -> str:
        self.arrays[name] = held
        return self.variable(name, held.shape, kept=True)

    def step(self, op: str, inputs: Mapping[str, str | Sequence[str]], outputs: Mapping[str, str | Sequence[str]], **attrs: Any) -> None:
        sides = [
            (place, message((1, role), *((2, name) for name in ([names] if isinstance(names, str) else names))))
            for place, roles in ((1, inputs), (2, outputs))
            for role, names in roles.items()
        ]
        self.steps.append(message(*sides, (3, op), *((4, attribute(name, value)) for name, value in attrs.items())))

    def made(
        self, op: str, name: str, shape: Sequence[int], inputs: Mapping[str, str | Sequence[str]], role: str = "Out", **attrs: Any
    ) -> str:
        """Add an operator of one output."""
        self.variable(name, shape)
        self.step(op, inputs, {role: name}, **attrs)
        return name

    def conv(self, name: str, x: str, weight: np.ndarray, shape: Sequence[int], op: str = "conv2d", **attrs: Any) -> str:
        """Add a convolution with a bias behind it, as Paddle's layers are."""
        usual = {
            "strides": [1, 1],
            "paddings": [0, 0],
            "dilations": [1, 1],
            "groups": 1,
            "data_format": "NCHW",
            "padding_algorithm": "EXPLICIT",
        }
        inputs = {"Input": x, "Filter": self.array(f"{name}.w_0", weight)}
        made = self.made(op, f"{name}.tmp_0", shape, inputs, "Output", **{**usual, **attrs})
        bias = self.array(f"{name}.b_0", draw(shape[1], seed=9))
        return self.made("elementwise_add", f"{name}.tmp_1", shape, {"X": made, "Y": bias}, axis=1)

    def written(self, folder: Path, *ends: str, name: str = "net") -> Path:
        for column, end in enumerate(ends):
            self.step("fetch", {"X": end}, {"Out": "fetch"}, col=column)
        block = message((1, 0), (2, NONE), *((3, held) for held in self.variables), *((4, held) for held in self.steps))
        (folder / f"{name}.pdmodel").write_bytes(message((1, block), (4, message((1, 0)))))
        parts: list[bytes] = []
        for held in (self.arrays[key] for key in sorted(self.arrays)):
            told = tensor(held.shape, str(held.dtype))
            parts.append(struct.pack("<IQIi", 0, 0, 0, len(told)) + told + held.tobytes())
        (folder / f"{name}.pdiparams").write_bytes(b"".join(parts))
        return folder / f"{name}.pdmodel"


def small_network() -> Making:
    """A convolution with a norm, a depthwise one, a branch that is added, a pool, and a dense layer."""
    m = Making(NONE, 3, 8, 8)
    a = m.conv("conv2d_0", "x", draw(4, 3, 3, 3), [NONE, 4, 4, 4], strides=[2, 2], paddings=[1, 1])
    leaves = {"Scale": draw(4, seed=1), "Bias": draw(4, seed=2), "Mean": draw(4, seed=3), "Variance": np.abs(draw(4, seed=4)) + 0.5}
    names = {"Scale": "w_0", "Bias": "b_0", "Mean": "w_1", "Variance": "w_2"}
    inputs = {role: m.array(f"batch_norm_0.{names[role]}", held) for role, held in leaves.items()}
    a = m.made("batch_norm", "bn.tmp", [NONE, 4, 4, 4], {"X": a, **inputs}, "Y", epsilon=1e-3, data_layout="NCHW", is_test=True)
    m.step("relu", {"X": a}, {"Out": a})
    b = m.conv("conv2d_1", a, draw(4, 1, 3, 3), [NONE, 4, 4, 4], "depthwise_conv2d", paddings=[1, 1], groups=4)
    a = m.made("elementwise_add", "sum", [NONE, 4, 4, 4], {"X": a, "Y": b}, axis=-1)
    how = {"pooling_type": "avg", "ksize": [3, 3], "strides": [2, 2], "paddings": [1, 1], "exclusive": True, "data_format": "NCHW"}
    a = m.made("pool2d", "pool", [NONE, 4, 2, 2], {"X": a}, **how, ceil_mode=False, global_pooling=False, adaptive=False)
    a = m.made("flatten_contiguous_range", "flat", [NONE, 16], {"X": a}, start_axis=1, stop_axis=3)
    a = m.made("matmul_v2", "head", [NONE, 5], {"X": a, "Y": m.array("linear_0.w_0", draw(16, 5))}, trans_x=False, trans_y=False)
    a = m.made("elementwise_add", "logits", [NONE, 5], {"X": a, "Y": m.array("linear_0.b_0", draw(5))}, axis=1)
    m.made("softmax", "probabilities", [NONE, 5], {"X": a}, axis=-1)
    return m


def state() -> dict[str, np.ndarray]:
    norm = {f"bn.{leaf}": draw(4, seed=seed) for seed, leaf in enumerate(("weight", "bias", "_mean", "_variance"))}
    return {"conv.weight": draw(4, 3, 3, 3), "conv.bias": draw(4), **norm, "fc.weight": draw(4, 5), "fc.bias": draw(5)}


def new_program(folder: Path) -> Path:
    """Write a program of PaddlePaddle 3's as far as its parameters go, which stand there in another order than their numbers."""
    norm = {f"batch_norm2d_0.{leaf}": draw(4, seed=seed) for seed, leaf in enumerate(("w_0", "b_0", "w_1", "w_2"))}
    held = {"linear_0.w_0": draw(4, 5), "linear_0.b_0": draw(5), **norm, "conv2d_0.w_0": draw(4, 3, 3, 3), "conv2d_0.b_0": draw(4)}
    places = [
        {"#": "p", "A": [0, 1, 1, name], "O": {"%": number, "TT": {"#": "0.t_dtensor", "D": [{"#": "0.t_f32"}, list(array.shape), "NCHW"]}}}
        for number, (name, array) in enumerate(held.items(), 1)
    ]
    block = {"#": "block_0", "args": [], "ops": [*places, {"#": "1.data", "A": [], "I": [], "O": []}]}
    told = {"base_code": {"magic": "pir", "version": 4}, "program": {"regions": [{"#": "region_0", "blocks": [block]}]}}
    (folder / "new.json").write_text(json.dumps(told, separators=(",", ":")))
    parts: list[bytes] = []
    for name in sorted(held):
        described = tensor(held[name].shape)
        parts.append(struct.pack("<IQIi", 0, 0, 0, len(described)) + described + held[name].tobytes())
    (folder / "new.pdiparams").write_bytes(b"".join(parts))
    return folder / "new.json"


def seeds(folder: Path) -> list[Path]:
    made = [small_network().written(folder, "probabilities"), folder / "state.pdparams"]
    names = {name: name.replace(".", "_0.") for name in state()}
    made[1].write_bytes(pickle.dumps({**state(), "StructuredToParameterName@@": names}, protocol=2))
    return [*made, made[0].with_suffix(".pdiparams"), new_program(folder)]
