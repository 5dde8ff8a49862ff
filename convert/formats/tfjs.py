"""TensorFlow.js: a model.json with its shards of weights, of Keras's layers or of a TensorFlow graph, and manifests of weights alone.

Weights in whole numbers are read as the reals that they stand for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert import _guard
from convert.formats import _keras_graph, _keras_prepared, _tf_json, _tf_ops
from convert.formats._keras_config import specs
from convert.formats._keras_layers import Era, Layer, tensors
from convert.formats._mapped import Maps
from convert.graph import Graph
from convert.kinds import is_dict, is_list
from convert.source import Source, Stored
from convert.steps import from_layout
from weights.documents import json_file
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat

SUFFIXES = (".json",)
WRITES = False

WHAT = "TensorFlow.js model"
MOST_BYTES = 64 * 2**20
"""Of a model.json: a large graph's takes a few."""
DTYPES = {"float32": "float32", "float16": "float16", "int32": "int32", "uint8": "uint8", "bool": "uint8", "uint16": "uint16"}
LEAVES = {
    "weights": "weight", "filters": "weight", "filter": "weight", "kernel": "weight", "depthwise_filter": "weight",
    "depthwise_weights": "weight", "depthwise_kernel": "weight", "pointwise_filter": "weight", "pointwise_weights": "weight",
    "pointwise_kernel": "weight", "gamma": "weight", "scale": "weight", "bias": "bias", "biases": "bias", "beta": "bias", "offset": "bias",
    "moving_mean": "running_mean", "moving_variance": "running_var",
}  # fmt: skip


def sniff(path: Path, head: bytes) -> bool:
    """Tell a model by its topology or its list of weights, a manifest by how its list of weights begins."""
    del path
    begins = head.lstrip()
    if begins.startswith(b"{"):
        return re.search(rb'"(weightsManifest|modelTopology)"\s*:', head) is not None
    return re.match(rb'\[\s*\{\s*"(paths|weights)"\s*:\s*\[', begins) is not None


def read(path: Path) -> Source:
    """Open a model, or a manifest of weights.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, WHAT):
        told = json_file(path, most_bytes=MOST_BYTES)
        files = Maps()
        manifest, topology = (told.get("weightsManifest"), told.get("modelTopology")) if is_dict(told) else (told, None)
        if not is_list(manifest) or not manifest:
            raise MalformedFile(f"{path} names no weights: it is the description of a network alone")
        found = _weights(manifest, path, files)
        size, shards = path.stat().st_size + files.size_bytes, files.others(path)
        _guard.check(path, found.values(), size)
        if is_dict(topology) and is_list(topology.get("node")):
            said = _tf_ops.said(_tf_json.nodes(topology, found))
            facts = {"kind": "graph model"}
            return said.finished(path, "tfjs", "TensorFlow.js", size, WHAT, facts=facts, notes=said.notes, close=files.close, beside=shards)
        config = topology.get("model_config", topology) if is_dict(topology) else None
        if is_dict(config) and is_dict(topology) and config.get("class_name"):
            return _of_layers(path, config, topology, found, files)
        named = {name: _guard.guarded(held, path, WHAT) for name, held in _named(found).items()}
        return Source(path, "tfjs", "TensorFlow.js", named, flatten="hwc", facts={"kind": "weights"}, close=files.close, beside=shards)


def _weights(manifest: Sequence[Any], path: Path, files: Maps) -> dict[str, Stored]:
    """Find every weight in its group's shards, which follow each other without a gap."""
    found: dict[str, Stored] = {}
    for group in manifest:
        shards = [_shard(path, str(name), files) for name in group["paths"]]
        starts = np.cumsum([0, *(len(shard) for shard in shards)]).tolist()
        at = 0
        for told in group["weights"]:
            name, shape = str(told["name"]), tuple(int(n) for n in told["shape"])
            if name in found or len(shape) > _guard.MAX_RANK or min(shape, default=0) < 0 or len(found) >= _guard.MAX_TENSORS:
                raise LimitExceeded(f"{name:.100} is there twice, or has {len(shape)} axes; at most {_guard.MAX_RANK} are read")
            quantised: dict[Any, Any] = told.get("quantization") or {}
            kind = str(quantised.get("dtype", told.get("dtype", "float32")))
            if kind not in DTYPES:
                raise MalformedFile(f"{name:.100} has numbers of kind {kind!r:.40}, which is no weight's")
            dtype = np.dtype(DTYPES[kind])
            size = math.prod(shape) * dtype.itemsize
            if at + size > starts[-1]:
                raise MalformedFile(
                    f"{name:.100} leads out of its shards, which have {starts[-1]} bytes. Is one cut short? Fetch them again"
                )
            load = partial(_numbers, shards, starts, at, size, dtype, shape)
            stored = Stored(name, shape, dtype, load)
            if quantised and kind != "float16":
                scale, least = float(quantised["scale"]), float(quantised["min"])
                origin = f"{name}, dequantised from {kind}"
                stored = Stored(origin, shape, np.dtype(np.float32), partial(_dequantised, load, scale, least))
            found[name] = stored
            at += size
    if not found:
        raise MalformedFile(f"{path} names no weights")
    return found


def _shard(path: Path, name: str, files: Maps) -> memoryview:
    """Map a shard, which must be a plain file inside the model's folder."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts or "\\" in name or ":" in name or "\0" in name:
        raise UnsafeFormat(f"{path} keeps weights in {name!r:.100}; only files inside its own folder are read")
    folder = path.absolute().parent.resolve()
    place = folder.joinpath(*parts)
    if not place.is_file():
        raise MalformedFile(f"{path} keeps weights in {name!r:.100}, which is not there. Fetch it too")
    if place.resolve() != place:
        raise UnsafeFormat(f"{path} keeps weights in {name!r:.100}, a link; only plain files are read")
    return files.view(place)


def _numbers(
    shards: Sequence[memoryview], starts: Sequence[int], at: int, size: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray:
    parts = [
        shard[max(at - start, 0) : at + size - start]
        for shard, start in zip(shards, starts, strict=False)
        if start < at + size and at < start + len(shard)
    ]
    raw = parts[0] if len(parts) == 1 else b"".join(parts)
    return np.frombuffer(raw, dtype).reshape(shape)


def _dequantised(load: Any, scale: float, least: float) -> np.ndarray:
    return (load().astype(np.float64) * scale + least).astype(np.float32)


def _of_layers(path: Path, config: Mapping[str, Any], topology: Mapping[str, Any], found: Mapping[str, Stored], files: Maps) -> Source:
    """Give the weights of a Keras model to its layers."""
    stated = {spec.name: spec for spec in specs(config)}
    grouped: dict[str, list[tuple[str, Stored]]] = {}
    for name, held in found.items():
        scope, _, leaf = name.rpartition("/")
        dotted = scope.replace("/", ".")
        tries = (dotted, *(dotted.rpartition(".")[::2] if "." in dotted else ()))
        grouped.setdefault(next((each for each in tries[::-1] if each in stated), dotted), []).append((leaf.removesuffix(":0"), held))
    layers = [
        Layer(name, stated[name].kind if name in stated else "", stated[name].config if name in stated else {}, variables)
        for name, variables in grouped.items()
    ]
    version = str(topology.get("keras_version", ""))[:40]
    era = Era(version if version[:1].isdigit() else "2", "tensorflow")
    made: dict[str, Stored] = {}
    for layer in layers:
        for name, stored in tensors(layer, era):
            if name in made:
                raise MalformedFile(f"{path}: two weights are called {name:.100}")
            made[name] = _guard.guarded(stored, path, WHAT)
    notes: list[str] = []
    drawn: Graph | None = None
    try:
        drawn = _keras_graph.graph(config, era, made.get)
    except (ConvertError, MemoryError, RecursionError):
        raise
    except Exception as why:  # a config can be wrong in any way; the weights are good all the same
        notes.append(f"what the network computes is not understood: {why}"[:300])
    orders: set[str] = {node.attrs["order"] for node in drawn.nodes if node.op == "flatten"} if drawn else set()
    return Source(
        path,
        "tfjs",
        f"TensorFlow.js, Keras {version}".rstrip(),
        made,
        graph=drawn,
        flatten=orders.pop() if len(orders) == 1 else "hwc",
        facts={"kind": "layers model"},
        preprocessing=_keras_prepared.prepared(drawn, made),
        notes=notes,
        beside=files.others(path),
        close=files.close,
    )


def _named(found: Mapping[str, Stored]) -> dict[str, Stored]:
    """Give weights without a network PyTorch's names and form, by TensorFlow's names and axes."""
    made: dict[str, Stored] = {}
    separable = {name.rpartition("/")[0] for name in found if name.rpartition("/")[2].startswith("pointwise_")}
    for name, held in found.items():
        module, _, leaf = name.rpartition("/")
        own = leaf.startswith(("depthwise_", "pointwise_"))
        part = f"{module}.{leaf.partition('_')[0]}" if own else f"{module}.pointwise" if module in separable else module
        target, axes, convention = LEAVES.get(leaf, leaf), len(held.shape), None
        steps = ()
        if target == "weight" and axes == 4:
            kind, layout = ("depthwise", "HWCM") if leaf.startswith("depthwise") else ("conv", "HWIO")
            steps, convention = from_layout(kind, layout, held.shape), "correlation"
        elif target == "weight" and axes == 2:
            steps = from_layout("linear", "IO", held.shape)
        key = f"{part}.{target}" if part else target
        if key in made:
            raise MalformedFile(f"two weights are called {key:.100}")
        made[key] = Stored(held.origin, held.stored_shape, held.stored_dtype, held.load, (*held.steps, *steps), convention)
    return made
