# ruff: noqa: RUF001 - Flux names its fields in Greek
"""Small JLD2 files, for the fuzzer and the tests: ours, and the same state as JLD2.jl nests it, in one compound with references."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from convert.formats import jld2
from convert.source import Part, in_memory

HEADER = b"HDF5-based Julia Data Format, version 0.1.1\0 (Julia 1.9.0 64-bit LE)".ljust(512, b"\0")
DRAW = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return DRAW.standard_normal(shape).astype("f4")


def conv(weight: np.ndarray, bias: np.ndarray | None = None, *, groups: int | None = 1) -> dict[str, Any]:
    """Make what a Flux.state keeps of a Conv, or of a CrossCor, which has no groups; a bias that is not there is elided."""
    fields: dict[str, Any] = {"weight": weight}
    if bias is not None:
        fields["bias"] = bias
    fields |= {"stride": {"1": 1, "2": 1}, "pad": {"1": 0, "2": 0, "3": 0, "4": 0}, "dilation": {"1": 1, "2": 1}}
    return fields if groups is None else fields | {"groups": groups}


def compound(tree: Mapping[str, Any]) -> np.dtype[Any]:
    """Spell the type of a tree as JLD2 does: structs within structs, arrays by reference, numbers in place."""
    types = {dict: compound, int: lambda _: np.dtype("<i8"), float: lambda _: np.dtype("<f8")}
    return np.dtype([(name, types.get(type(item), lambda _: h5py.ref_dtype)(item)) for name, item in tree.items()])


def fill(tree: Mapping[str, Any], file: h5py.File, count: list[int]) -> tuple[Any, ...]:
    values: list[Any] = []
    for item in tree.values():
        if isinstance(item, dict):
            values.append(fill(item, file, count))
        elif isinstance(item, np.ndarray):
            count[0] += 1
            # readers leave _types alone: only the reference leads to it, as in Julia's files, which have no link at all
            values.append(file.create_dataset(f"_types/refs/{count[0]}", data=item).ref)
        else:
            values.append(item)
    return tuple(values)


def save(trees: Mapping[str, Any], path: Path) -> Path:
    """Write scalar compounds, as JLD2 does; a list becomes a dataset of references."""
    with h5py.File(path, "w", userblock_size=512, libver=("earliest", "v110")) as file:
        count = [0]
        for name, tree in trees.items():
            if isinstance(tree, dict):
                file.create_dataset(name, data=np.array(fill(tree, file, count), compound(tree)))
            elif isinstance(tree, list):
                file.create_dataset(name, data=np.array(fill({str(i): item for i, item in enumerate(tree)}, file, count), h5py.ref_dtype))
            else:
                file[name] = tree
    with path.open("r+b") as raw:
        raw.write(HEADER)
    return path


def state() -> dict[str, Any]:
    """Make the state of Chain(Conv, MaxPool, CrossCor, BatchNorm, flatten, Dense): what has no size is elided."""
    norm = {"β": floats(4), "γ": floats(4), "μ": floats(4), "σ²": np.abs(floats(4)) + 1, "ϵ": 1e-5, "chs": 4}
    layers = {
        "1": conv(floats(4, 3, 3, 3), floats(4)),
        "3": conv(floats(4, 4, 3, 3), groups=None),
        "4": norm,
        "6": {"weight": floats(16, 5), "bias": floats(5)},
    }
    return {"layers": layers}


def parts() -> list[Part]:
    """Make a module of each kind, with asymmetric kernels."""
    leaves = {name: in_memory(name, floats(4)) for name in ("weight", "bias", "running_mean", "running_var")}
    return [
        Part("layers.1.layers.1", "conv", {"weight": in_memory("w", floats(4, 3, 3, 5)), "bias": in_memory("b", floats(4))}),
        Part("layers.1.layers.2", "norm", leaves | {"num_batches_tracked": in_memory("n", np.array(3))}),
        Part("layers.1.layers.3", "conv", {"weight": in_memory("w", floats(6, 2, 3, 3))}, groups=2),
        Part("layers.1.layers.4", "depthwise", {"weight": in_memory("w", floats(12, 1, 3, 3))}, groups=6),
        Part(
            "layers.1.layers.6", "transposed", {"weight": in_memory("w", floats(8, 5, 2, 2)), "bias": in_memory("b", floats(10))}, groups=2
        ),
        Part("layers.2.layers.3", "linear", {"weight": in_memory("w", floats(7, 9)), "bias": in_memory("b", floats(7))}, grid=(1, 3, 3)),
    ]


def seeds(folder: Path) -> list[Path]:
    made = [
        save({"model_state": state(), "acc": 0.5}, folder / "state.jld2"),
        save({"params": [floats(4, 3, 3, 3), floats(4), floats(16, 5), floats(5)]}, folder / "params.jld2"),
    ]
    jld2.write(parts(), folder / "ours.jld2", metadata={"source": "a test"})
    return [*made, folder / "ours.jld2"]
