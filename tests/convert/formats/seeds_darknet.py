"""Small Darknet files: numbers in the order that its source reads them, written here section by section."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

VERSIONS = {"pjreddie": (0, 2, 0), "AlexeyAB": (0, 2, 5), "oldest": (0, 1, 0), "transposed": (1001, 2, 0)}

CFG = """[net]
width=12
height=10
channels=4

[convolutional]
batch_normalize=1
filters=6
size=3
stride=1
pad=1
activation=leaky

[maxpool]
size=2
stride=2

[convolutional]
filters=6
groups=3
size=3
pad=1
activation=linear

[shortcut]
from=-2
activation=relu

[route]
layers=-1,-3

[upsample]
stride=2

[maxpool]
size=2
stride=1

[route]
layers=-1
groups=2
group_id=1

[deconvolutional]
filters=3
size=2
stride=2
activation=logistic

[connected]
output=5
batch_normalize=1
activation=linear

[softmax]
"""
SHAPES = (
    ((6,), (6,), (6,), (6,), (6, 4, 3, 3)),
    ((6,), (6, 2, 3, 3)),
    ((3,), (6, 3, 2, 2)),
    ((5,), (5, 3 * 20 * 24), (5,), (5,), (5,)),
)
"""Of the numbers of `CFG`, a tuple a section: with BatchNorm beta, gamma, mean, variance, weights; a dense layer's weights come second."""


def numbers(shapes: Iterable[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """Draw the numbers; they are positive, as variances must be."""
    rng = np.random.default_rng(seed)
    return [rng.uniform(0.1, 1, shape).astype("<f4") for shape in shapes]


def encode(arrays: Iterable[np.ndarray], version: tuple[int, int, int] = VERSIONS["pjreddie"], seen: int = 64) -> bytes:
    """Write header and numbers."""
    wide = version[0] * 10 + version[1] >= 2 and version[0] < 1000
    header = np.array(version, "<i4").tobytes() + seen.to_bytes(8 if wide else 4, "little")
    return header + b"".join(array.astype("<f4").tobytes() for array in arrays)


def save(folder: Path, cfg: str, data: bytes) -> Path:
    """Write both files."""
    folder.mkdir(exist_ok=True)
    path = folder / "net.weights"
    path.write_bytes(data)
    path.with_suffix(".cfg").write_text(cfg)
    return path


def seeds(folder: Path) -> list[Path]:
    """Write a file of each version, one whose other sections have numbers, and one without a description."""
    arrays = numbers(shape for section in SHAPES for shape in section)
    written = [save(folder / name, CFG, encode(arrays, version)) for name, version in VERSIONS.items()]
    net = "[net]\nwidth=4\nheight=4\nchannels=2\n"
    shapes = [(2,), (2,), (2,), (2,), (3, 2, 2), (4, 3, 2, 3, 3)]
    cfg = net + "[batchnorm]\n[local]\nfilters=3\nsize=3\nactivation=relu\n"
    written.append(save(folder / "others", cfg, encode(numbers(shapes), VERSIONS["AlexeyAB"])))
    bare = save(folder / "bare", "", encode(arrays))
    bare.with_suffix(".cfg").unlink()
    return [*written, bare]
