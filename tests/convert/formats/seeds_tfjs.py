"""Small models of TensorFlow.js, written by hand; for tests and the fuzzer."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def written(path: Path, weights: Mapping[str, np.ndarray], topology: Any = None, *, bits: int = 32, shards: int = 2) -> Path:
    """Write a model of these weights, in halves or in whole numbers of so many bits if asked, cut into shards anywhere."""
    told: list[dict[str, Any]] = []
    content = b""
    for name, held in weights.items():
        one: dict[str, Any] = {"name": name, "shape": list(held.shape), "dtype": str(held.dtype)}
        if bits == 16 and held.dtype == np.float32:
            one["quantization"] = {"dtype": "float16", "original_dtype": "float32"}
            content += held.astype(np.float16).tobytes()
        elif bits == 8 and held.dtype == np.float32:
            least, scale = float(held.min()), float(np.ptp(held)) / 255 or 1.0
            one["quantization"] = {"dtype": "uint8", "min": least, "scale": scale, "original_dtype": "float32"}
            content += np.rint((held - least) / scale).astype(np.uint8).tobytes()
        else:
            content += held.tobytes()
        told.append(one)
    names = [f"{path.stem}-shard{number + 1}of{shards}.bin" for number in range(shards)]
    step = -(-len(content) // shards)
    for number, name in enumerate(names):
        (path.parent / name).write_bytes(content[number * step : (number + 1) * step])
    manifest = [{"paths": names, "weights": told}]
    kind = "graph-model" if topology and "node" in topology else "layers-model"
    model = (
        manifest if topology is None else {"format": kind, "generatedBy": "maker", "modelTopology": topology, "weightsManifest": manifest}
    )
    path.write_text(json.dumps(model))
    return path


def node(op: str, inputs: Sequence[str], name: str, **attrs: Any) -> dict[str, Any]:
    """Write a node of a graph: texts in base64, numbers as they are or as texts, as protobuf's JSON has them."""

    def attribute(value: Any) -> dict[str, Any]:
        if isinstance(value, bool):
            return {"b": value}
        if isinstance(value, list):
            texts = [base64.b64encode(each.encode()).decode() for each in value if isinstance(each, str)]
            return {"list": {"s": texts} if texts else {"i": [str(each) for each in value]}}
        if isinstance(value, dict):
            return value
        return (
            {"s": base64.b64encode(value.encode()).decode()}
            if isinstance(value, str)
            else {"f" if isinstance(value, float) else "i": value}
        )

    return {"name": name, "op": op, "input": list(inputs), "attr": {key: attribute(value) for key, value in attrs.items()}}


def graph() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Make a graph as TensorFlow.js's converter does, layers fused, and its weights."""
    sizes = {"shape": {"dim": [{"size": "-1"}, {"size": "8"}, {"size": "8"}, {"size": "3"}]}}
    weights = {
        "a/kernel": draw(3, 3, 3, 4), "a/bias": draw(4), "dw/depthwise_kernel": draw(3, 3, 4, 1), "axes": np.array([1, 2], np.int32),
        "fc/kernel": draw(4, 5), "fc/bias": draw(5),
    }  # fmt: skip
    how = {"strides": [1, 2, 2, 1], "padding": "SAME", "data_format": "NHWC", "dilations": [1, 1, 1, 1]}
    nodes = [
        node("Placeholder", [], "images", shape=sizes),
        *(node("Const", [], name) for name in weights),
        node("_FusedConv2D", ["images", "a/kernel", "a/bias"], "a/Relu", **how, fused_ops=["BiasAdd", "Relu"]),
        node("DepthwiseConv2dNative", ["a/Relu", "dw/depthwise_kernel"], "dw/depthwise", **{**how, "strides": [1, 1, 1, 1]}),
        node("Mean", ["dw/depthwise", "axes"], "mean", keep_dims=False),
        node("_FusedMatMul", ["mean", "fc/kernel", "fc/bias"], "fc/BiasAdd", fused_ops=["BiasAdd"]),
    ]
    return {"node": nodes, "library": {}}, weights


def layers() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """State a model of Keras's layers as its second generation did, and its weights."""
    conv = {"name": "stem", "filters": 4, "kernel_size": [3, 3], "strides": [2, 2], "padding": "same", "activation": "relu"}
    conv["batch_input_shape"] = [None, 8, 8, 3]
    stated = [
        {"class_name": "Conv2D", "config": conv},
        {"class_name": "BatchNormalization", "config": {"name": "bn", "axis": [3], "epsilon": 1e-3}},
        {"class_name": "Flatten", "config": {"name": "flat"}},
        {"class_name": "Dense", "config": {"name": "head", "units": 5, "activation": "softmax"}},
    ]
    norm = {f"bn/{leaf}": np.abs(draw(4, seed=seed)) + 0.5 for seed, leaf in enumerate(("gamma", "beta", "moving_mean", "moving_variance"))}
    weights = {"stem/kernel": draw(3, 3, 3, 4), "stem/bias": draw(4), **norm, "head/kernel": draw(64, 5), "head/bias": draw(5)}
    model = {"class_name": "Sequential", "config": {"name": "net", "layers": stated}}
    return {"keras_version": "2.4.0", "backend": "tensorflow", "model_config": model}, weights


def seeds(folder: Path) -> list[Path]:
    topology, weights = graph()
    made = [written(folder / "graph.json", weights, topology), written(folder / "eight.json", weights, bits=8)]
    topology, weights = layers()
    return [*made, written(folder / "layers.json", weights, topology, bits=16)]
