"""Small Keras files of every dialect, written with h5py from the description of each, so that no Keras is needed."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

KERNEL = np.arange(3 * 3 * 2 * 4, dtype=np.float32).reshape(3, 3, 2, 4) / 50 - 0.5
"""(h, w, I, O), no symmetry in it."""
DENSE = np.arange(4 * 6 * 6 * 3, dtype=np.float32).reshape(144, 3) / 400 - 0.4
BIAS = np.arange(4, dtype=np.float32) / 4
NORM = {name: np.full(4, value, np.float32) for name, value in (("gamma", 1), ("beta", 2), ("mean", 3), ("variance", 4))}


def sequential(version: int = 2) -> dict[str, Any]:
    """State a small network as Keras 1, 2 or 3 does."""
    conv = {"name": "conv", "kernel_size": [3, 3], "strides": [1, 1], "padding": "valid", "use_bias": True, "activation": "relu"}
    layers = [
        ("Conv2D", {**conv, "filters": 4, "data_format": "channels_last", "batch_input_shape": [None, 8, 8, 2]}),
        ("BatchNormalization", {"name": "bn", "axis": -1, "epsilon": 0.01, "scale": True, "center": True}),
        ("Flatten", {"name": "flatten", "data_format": "channels_last"}),
        ("Dense", {"name": "fc", "units": 3, "use_bias": False, "activation": "softmax"}),
    ]
    if version == 1:
        old = {"name": "conv", "nb_filter": 4, "nb_row": 3, "nb_col": 3, "subsample": [1, 1], "border_mode": "valid", "activation": "relu"}
        layers[0] = ("Convolution2D", {**old, "dim_ordering": "th", "bias": True, "batch_input_shape": [None, 2, 8, 8]})
        layers[1] = ("BatchNormalization", {"name": "bn", "axis": 1, "epsilon": 0.01, "mode": 0})
        layers[2] = ("Flatten", {"name": "flatten"})
    stated = [{"class_name": kind, "config": config} for kind, config in layers]
    return {"class_name": "Sequential", "config": stated if version == 1 else {"name": "net", "layers": stated}}


def put(group: h5py.Group, names: str, layers: Sequence[tuple[str, Mapping[str, np.ndarray]]]) -> None:
    """Write layers with Keras's attributes, `names` "layer_names"."""
    group.attrs[names] = [name.encode() for name, _ in layers]
    for name, variables in layers:
        folder = group.create_group(name)
        folder.attrs["weight_names"] = [variable.encode() for variable in variables]
        for variable, array in variables.items():
            folder[variable] = array


def keras_0(path: Path) -> Path:
    """Keras 0.x: numbers for names; Theano's order of axes."""
    layers = [[KERNEL.transpose(3, 2, 0, 1), BIAS], [], [DENSE]]
    with h5py.File(path, "w") as file:
        file.attrs["nb_layers"] = len(layers)
        for number, parameters in enumerate(layers):
            group = file.create_group(f"layer_{number}")
            group.attrs["nb_params"] = len(parameters)
            for parameter, array in enumerate(parameters):
                group[f"param_{parameter}"] = array
    return path


def keras_1(path: Path, ordering: str = "th", config: bool = True) -> Path:
    """Keras 1.x: names joined by underscores, no backend."""
    norm = {f"bn_{leaf}": NORM[n] for leaf, n in zip(("gamma", "beta", "running_mean", "running_std"), NORM, strict=True)}
    kernel = KERNEL.transpose(3, 2, 0, 1) if ordering == "th" else KERNEL
    with h5py.File(path, "w") as file:
        group = file
        if config:
            file.attrs["model_config"] = json.dumps(sequential(1)).encode()
            file.attrs["keras_version"] = b"1.2.2"
            group = file.create_group("model_weights")
        put(group, "layer_names", [("conv", {"conv_W": kernel, "conv_b": BIAS}), ("bn", norm), ("flatten", {}), ("fc", {"fc_W": DENSE})])
    return path


def keras_2(path: Path, backend: str = "tensorflow", config: bool = True) -> Path:
    """Keras 2.x and tf.keras: names with a scope and a number."""
    norm = {f"bn/{leaf}:0": NORM[n] for leaf, n in zip(("gamma", "beta", "moving_mean", "moving_variance"), NORM, strict=True)}
    with h5py.File(path, "w") as file:
        group = file
        if config:
            file.attrs["model_config"] = json.dumps(sequential()).encode()
            group = file.create_group("model_weights")
            file.create_group("optimizer_weights")["adam/iter:0"] = np.int64(3)
        for place in {file, group}:
            place.attrs["keras_version"] = b"2.4.3"
            place.attrs["backend"] = backend.encode()
        conv = {"conv/kernel:0": KERNEL, "conv/bias:0": BIAS}
        put(group, "layer_names", [("conv", conv), ("bn", norm), ("flatten", {}), ("fc", {"fc/kernel:0": DENSE})])
    return path


def keras_3(path: Path, named: bool = True, lists: str = "layers") -> Path:
    """Keras 3's weights: classes and numbers; `named` as Keras has it since 3.6, `lists` as TensorFlow 2.13 wrote them."""
    layers = [("conv2d", "conv", [KERNEL, BIAS]), ("batch_normalization", "bn", list(NORM.values())), ("dense", "fc", [DENSE])]
    with h5py.File(path, "w") as file:
        for counted, name, arrays in layers:
            variables = file.create_group(f"{lists}/{counted}/vars")
            if named:
                variables.attrs["name"] = name
            for number, array in enumerate(arrays):
                variables[str(number)] = array
        file["optimizer/vars/0"] = np.int64(7)
    return path


def archive(path: Path, packed: bool = False) -> Path:
    """A .keras file, whose members are stored plainly, as Keras does, or compressed."""
    inner = keras_3(path.with_suffix(".inner.h5"), named=False)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        file.writestr("metadata.json", json.dumps({"keras_version": "3.4.1"}))
        file.writestr("config.json", json.dumps(sequential()))
        file.write(inner, "model.weights.h5")
    inner.unlink()
    return path


def sharded(path: Path) -> Path:
    """A map of shards and two shards, a layer divided between them."""
    stem = path.name.removesuffix(".weights.json")
    shards = [path.with_name(f"{stem}_0000{number}.weights.h5") for number in range(2)]
    with h5py.File(shards[0], "w") as first, h5py.File(shards[1], "w") as second:
        first["layers/conv2d/vars/0"] = KERNEL
        second["layers/conv2d/vars/1"] = BIAS
        second["layers/dense/vars/0"] = DENSE
        for file in (first, second):
            file["layers/conv2d/vars"].attrs["name"] = "conv"
        second["layers/dense/vars"].attrs["name"] = "fc"
    names = [shard.name for shard in shards]
    path.write_text(json.dumps({"weight_map": {"/layers/conv2d/vars": names, "/layers/dense/vars": names[1]}}))
    return path


def seeds(folder: Path) -> list[Path]:
    return [
        keras_0(folder / "keras_0.h5"),
        keras_1(folder / "keras_1.h5"),
        keras_2(folder / "keras_2.hdf5"),
        keras_2(folder / "weights.h5", config=False),
        keras_3(folder / "keras_3.weights.h5"),
        archive(folder / "plain.keras"),
        archive(folder / "packed.keras", packed=True),
        sharded(folder / "many.weights.json"),
    ]
