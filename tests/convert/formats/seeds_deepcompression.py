"""A small Deep Compression container with its description, encoded here from a pruned network."""

from __future__ import annotations

from pathlib import Path

import numpy as np

PROTOTXT = """
input: "data" input_dim: 1 input_dim: 3 input_dim: 8 input_dim: 8
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1" convolution_param { num_output: 4 kernel_size: 3 } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "conv2" type: "Convolution" bottom: "conv1" top: "conv2"
        convolution_param { num_output: 6 kernel_h: 1 kernel_w: 5 group: 2 } }
"""
SHAPES = {"conv1": (4, 3, 3, 3), "conv2": (6, 2, 1, 5)}


def network(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Draw weights of a few values, most of them zero, with runs longer than half a byte can skip."""
    rng = np.random.default_rng(seed)
    values = np.concatenate([[0], rng.normal(0, 1, 5)]).astype("<f4")
    made = {}
    for name, shape in SHAPES.items():
        codes = np.where(rng.random(shape) < 0.08, rng.integers(1, 6, shape), 0)
        made[name] = values[codes], rng.normal(0, 1, shape[0]).astype("<f4")
    return made


def encode(layers: dict[str, tuple[np.ndarray, np.ndarray]]) -> bytes:
    """Write the container: counts, then for each layer its codebook, biases, codes and skips."""
    counts, bodies = [], []
    for weight, bias in layers.values():
        values = np.unique(weight[weight != 0])
        codebook = np.zeros(256, "<f4")
        codebook[1 : len(values) + 1] = values
        codes, skips, gap = [], [], 0
        for value in weight.reshape(-1):
            if value == 0 and gap < 15:
                gap += 1
                continue
            codes.append(0 if value == 0 else 1 + int(np.searchsorted(values, value)))
            skips.append(gap)
            gap = 0
        counts.append(len(codes))
        halves = [*skips, 0] if len(skips) % 2 else skips
        packed = bytes(low | high << 4 for low, high in zip(halves[::2], halves[1::2], strict=True))
        bodies.append(codebook.tobytes() + bias.tobytes() + bytes(codes) + packed)
    return np.array(counts, "<u4").tobytes() + b"".join(bodies)


def seeds(folder: Path) -> list[Path]:
    """Write one container with its description beside it."""
    path = folder / "pruned" / "pruned.net"
    path.parent.mkdir()
    path.write_bytes(encode(network()))
    path.with_suffix(".prototxt").write_text(PROTOTXT)
    return [path]
