"""Small MAT files of every dialect, for the fuzzer: version 5 plain and compressed by SciPy, version 7.3 as MATLAB lays it out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np


def cell(*values: Any) -> np.ndarray:
    """SciPy's form of a cell."""
    made = np.empty((1, len(values)), object)
    for number, value in enumerate(values):
        made[0, number] = value
    return made


def simplenn(seed: int = 0) -> dict[str, Any]:
    """A network of five layers: convolution, BatchNorm, leaky ReLU, convolution to one channel (old style), pool."""
    draw = np.random.default_rng(seed)
    kernel, bias = draw.standard_normal((3, 5, 2, 4)).astype("f4"), draw.standard_normal((1, 4)).astype("f4")
    moments = np.stack([draw.standard_normal(4), draw.uniform(0.5, 2, 4)], 1).astype("f4")
    layers = cell(
        {"type": "conv", "name": "c1", "weights": cell(kernel, bias), "stride": np.array([[2.0, 1.0]]), "pad": np.array([[1.0, 2, 3, 4]])},
        {"type": "bnorm", "name": "b1", "weights": cell(bias.T * 2, bias.T, moments)},
        {"type": "relu", "name": "r1", "leak": 0.1},
        {
            "type": "conv",
            "name": "c2",
            "filters": draw.standard_normal((1, 1, 4, 1)).astype("f4"),
            "biases": np.ones((1, 1), "f4"),
            "stride": 1.0,
        },
        {"type": "pool", "name": "p1", "method": "avg", "pool": np.array([[2.0, 2.0]]), "stride": 2.0, "pad": np.array([[0.0, 1, 0, 1]])},
    )
    mean = np.array([122.8, 116.7]).reshape(1, 1, 2)
    return {"layers": layers, "meta": {"normalization": {"imageSize": np.array([[12.0, 10.0, 2.0]]), "averageImage": mean}}}


def dagnn() -> dict[str, Any]:
    """Two convolutions beside each other, added, and a BatchNorm; the layers are out of order."""
    draw = np.random.default_rng(1)

    def block(**says: Any) -> dict[str, Any]:
        return says

    def layer(name: str, kind: str, inputs: list[str], output: str, params: list[str], says: dict[str, Any]) -> dict[str, Any]:
        return {
            "name": name,
            "type": f"dagnn.{kind}",
            "inputs": cell(*inputs),
            "outputs": cell(output),
            "params": cell(*params),
            "block": says,
        }

    layers = [
        layer("sum", "Sum", ["a", "b"], "s", [], block(numInputs=2.0)),
        layer("left", "Conv", ["data"], "a", ["lf", "lb"], block(pad=np.array([[1.0, 1, 1, 1]]), stride=np.array([[1.0, 1.0]]))),
        layer("right", "Conv", ["data"], "b", ["rf"], block(pad=0.0, stride=1.0, hasBias=False)),
        layer("norm", "BatchNorm", ["s"], "n", ["g", "h", "m"], block(epsilon=1e-3)),
    ]
    values = {"lf": (3, 3, 2, 4), "lb": (4, 1), "rf": (1, 1, 2, 4), "g": (4, 1), "h": (4, 1), "m": (4, 2)}
    params = [{"name": name, "value": draw.uniform(0.5, 2, shape).astype("f4")} for name, shape in values.items()]

    def array_of_structs(items: list[dict[str, Any]]) -> np.ndarray:
        made = np.empty((1, len(items)), [(key, object) for key in items[0]])
        for number, item in enumerate(items):
            made[0, number] = tuple(item.values())
        return made

    return {"layers": array_of_structs(layers), "params": array_of_structs(params), "meta": {"note": "a test"}}


def mat73(path: Path, values: dict[str, Any]) -> Path:
    """Write version 7.3 as MATLAB lays it out: axes reversed, cells and arrays of structs by reference, text as numbers."""
    import h5py

    with h5py.File(path, "w", userblock_size=512) as file:
        hidden, numbers = file.create_group("#refs#"), itertools.count()

        def refer(value: Any) -> Any:
            return put(hidden, f"r{next(numbers)}", value).ref

        def put(group: Any, name: str, value: Any) -> Any:
            if isinstance(value, dict):
                made = group.create_group(name)
                made.attrs["MATLAB_class"] = np.bytes_("struct")
                for key, item in value.items():
                    put(made, key, item)
            elif isinstance(value, np.ndarray) and value.dtype.names:
                made = group.create_group(name)
                made.attrs["MATLAB_class"] = np.bytes_("struct")
                for key in value.dtype.names:
                    column = np.array([refer(item) for item in value[key].reshape(-1)], h5py.ref_dtype)
                    made.create_dataset(key, data=column.reshape(-1, 1))
            elif isinstance(value, np.ndarray) and value.dtype == object:
                references = np.array([refer(item) for item in value.reshape(-1)], h5py.ref_dtype)
                made = group.create_dataset(name, data=references.reshape(-1, 1) if len(references) else np.zeros(2, "u8"))
                made.attrs["MATLAB_class"] = np.bytes_("cell")
                if not len(references):
                    made.attrs["MATLAB_empty"] = np.uint8(1)
            elif isinstance(value, str):
                made = group.create_dataset(name, data=np.frombuffer(value.encode("utf-16-le"), "u2").reshape(-1, 1))
                made.attrs["MATLAB_class"] = np.bytes_("char")
            else:
                array = np.atleast_2d(value)
                made = group.create_dataset(name, data=array.T)
                made.attrs["MATLAB_class"] = np.bytes_({"f4": "single", "f8": "double", "b1": "logical"}[array.dtype.str[1:]])
            return made

        for name, value in values.items():
            put(file, name, value)
    data = bytearray(path.read_bytes())
    data[:128] = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\0\2IM"
    path.write_bytes(data)
    return path


def seeds(folder: Path) -> list[Path]:
    from scipy.io import savemat

    cells = {
        "fire2": cell(np.ones((3, 3, 2, 4), "f4"), np.ones((1, 4), "f4")),
        "conv1": {"weights": np.ones((3, 3, 2), "f4"), "biases": 1.0},
    }
    made: list[Path] = []
    for number, tree in enumerate(({"net": simplenn()}, dagnn(), cells)):
        for packed in (False, True):
            made.append(folder / f"v{5 + 2 * packed}_{number}.mat")
            savemat(made[-1], tree, do_compression=packed)
    trees = {"simple": {"net": simplenn()}, "dag": dagnn(), "cells": {"fire2": cells["fire2"]}}
    return made + [mat73(folder / f"hdf_{name}.mat", tree) for name, tree in trees.items()]
