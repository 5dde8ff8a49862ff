"""Small files of MXNet's, written by hand; for tests and the fuzzer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

KINDS = {"float32": 0, "float64": 1, "float16": 2, "uint8": 3, "int32": 4, "int64": 6}


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def params(arrays: Mapping[str, np.ndarray], generation: int = 2) -> bytes:
    """Write a list of arrays as one of MXNet's three generations did: 0, 1 or 2."""
    parts = [struct.pack("<QQQ", 0x112, 0, len(arrays))]
    for held in arrays.values():
        begins = [b"", struct.pack("<I", 0xF993FAC8), struct.pack("<Ii", 0xF993FAC9, 0)][generation]
        shape = struct.pack(f"<I{held.ndim}{'q' if generation else 'I'}", held.ndim, *held.shape)
        parts.append(begins + shape + struct.pack("<iii", 1, 0, KINDS[str(held.dtype)]) + held.tobytes())
    parts.append(struct.pack("<Q", len(arrays)))
    return b"".join([*parts, *(struct.pack("<Q", len(name)) + name.encode() for name in arrays)])


class Making:
    """A symbol that grows node by node, and its arrays."""

    def __init__(self, key: str = "attrs") -> None:
        self.nodes: list[dict[str, Any]] = []
        self.places: dict[str, int] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.key = key
        self.node("null", "data")

    def node(self, op: str, name: str, inputs: tuple[str, ...] = (), **attrs: Any) -> str:
        places = [[self.places[given.partition(":")[0]], int(given.partition(":")[2] or 0), 0] for given in inputs]
        self.places[name] = len(self.nodes)
        self.nodes.append({"op": op, "name": name, self.key: {key: str(value) for key, value in attrs.items()}, "inputs": places})
        return name

    def layer(self, op: str, name: str, x: str, leaves: Mapping[str, np.ndarray], **attrs: Any) -> str:
        """Add a layer with its arrays, those of statistics as auxiliary ones."""
        for leaf, held in leaves.items():
            self.node("null", f"{name}_{leaf}")
            self.arrays[f"{'aux' if leaf.startswith('moving') else 'arg'}:{name}_{leaf}"] = held
        return self.node(op, name, (x, *(f"{name}_{leaf}" for leaf in leaves)), **attrs)

    def written(self, folder: Path, *heads: str, generation: int = 2) -> Path:
        (folder / "net-0007.params").write_bytes(params(self.arrays, generation))
        symbol = {"nodes": self.nodes, "arg_nodes": [], "heads": [[self.places[head], 0, 0] for head in heads]}
        (folder / "net-symbol.json").write_text(json.dumps(symbol))
        return folder / "net-0007.params"


def statistics(width: int) -> dict[str, np.ndarray]:
    spread = np.abs(draw(width, seed=4)) + 0.5
    return {"gamma": draw(width, seed=1), "beta": draw(width, seed=2), "moving_mean": draw(width, seed=3), "moving_var": spread}


def small_network(key: str = "attrs") -> Making:
    """Convolutions with norms, one of a fixed gamma, a branch that is added, and a dense layer that flattens for itself."""
    m = Making(key)
    a = m.layer(
        "Convolution", "conv0", "data", {"weight": draw(4, 3, 3, 3)}, kernel=(3, 3), stride=(2, 2), pad=(1, 1), no_bias=True, num_filter=4
    )
    a = m.layer("BatchNorm", "bn0", a, statistics(4), eps=2e-5, fix_gamma=False)
    a = m.node("Activation", "relu0", (a,), act_type="relu")
    b = m.layer("Convolution", "dw", a, {"weight": draw(4, 1, 3, 3), "bias": draw(4)}, kernel=(3, 3), pad=(1, 1), num_group=4, num_filter=4)
    b = m.layer("BatchNorm", "bn1", b, statistics(4))
    a = m.node("elemwise_add", "sum", (a, b))
    a = m.node("Pooling", "pool", (m.node("LeakyReLU", "leaky", (a,), slope=0.1),), kernel=(2, 2), stride=(2, 2), pool_type="avg")
    a = m.layer("FullyConnected", "fc", a, {"weight": draw(5, 16), "bias": draw(5)}, num_hidden=5)
    m.node("null", "softmax_label")
    m.node("SoftmaxOutput", "softmax", (a, "softmax_label"))
    return m


def seeds(folder: Path) -> list[Path]:
    made = [small_network().written(folder, "softmax")]
    for generation in (0, 1):
        made.append(folder / f"gluon{generation}.params")
        arrays = {"features.0.weight": draw(4, 3, 3, 3), **{f"features.1.{name}": held for name, held in statistics(4).items()}}
        made[-1].write_bytes(params(arrays, generation))
    return made
