"""Small IRs, which OpenVINO itself writes; for tests and the fuzzer."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from convert.formats._openvino_export import imported

openvino = imported()  # without the report that it sends home

op: Any = importlib.import_module("openvino.opset13")
"""Its functions are made when it is imported, without types."""


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def constant(name: str, array: np.ndarray) -> Any:
    made = op.constant(array)
    made.set_friendly_name(name)
    return made


def saved(path: Path, build: Callable[[Any], Any], shape: tuple[int, ...] = (-1, 3, 8, 8), half: bool = False) -> Path:
    """Write the network that `build` makes of its images."""
    images = op.parameter(list(shape), np.float32, name="images")
    model: Any = openvino.Model
    openvino.save_model(model([op.result(build(images))], [images], "maker"), path, compress_to_fp16=half)
    return path


def small_network(x: Any) -> Any:
    """A strided convolution with a bias behind it, a depthwise one, a pool, and a dense layer."""
    a = op.convolution(x, constant("stem.weight", draw(4, 3, 3, 3)), [2, 2], [1, 1], [1, 1], [1, 1], name="stem/WithoutBiases")
    a = op.relu(op.add(a, constant("stem.bias", draw(1, 4, 1, 1)), name="stem"))
    a = op.group_convolution(a, constant("dw.weight", draw(4, 2, 1, 3, 3)), [1, 1], [1, 1], [1, 1], [1, 1], name="dw")
    a = op.avg_pool(op.clamp(a, 0.0, 6.0), [2, 2], [0, 0], [0, 0], [2, 2], exclude_pad=False)
    a = op.reshape(a, op.constant(np.array([0, -1])), special_zero=True)
    a = op.matmul(a, constant("head.weight", draw(5, 32)), False, True, name="head/MatMul")
    return op.softmax(op.add(a, constant("head.bias", draw(1, 5))), 1)


def whole(name: str, shape: tuple[int, ...]) -> Any:
    """Weights in eight bits, as NNCF compresses them: an offset and a factor for each output."""
    held = constant(name, np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8))
    sides = (shape[0], *(1,) * (len(shape) - 1))
    moved = op.subtract(op.convert(held, np.float32), op.constant(np.full(sides, 128, np.float32)))
    return op.multiply(moved, op.constant((draw(*sides, seed=1) ** 2 / 64).astype(np.float32)))


def compressed_network(x: Any) -> Any:
    a = op.relu(op.convolution(x, whole("stem.weight", (4, 3, 3, 3)), [1, 1], [0, 0], [0, 0], [1, 1], name="stem"))
    a = op.reduce_mean(a, op.constant(np.array([2, 3])), keep_dims=False)
    return op.matmul(a, whole("head.weight", (5, 4)), False, True, name="head")


def seeds(folder: Path) -> list[Path]:
    made = [saved(folder / "small.xml", small_network), saved(folder / "half.xml", small_network, half=True)]
    return [*made, saved(folder / "whole.xml", compressed_network)]
