"""Checkpoints as Chainer's save_npz and save_hdf5 write them, from their sources; for tests and the fuzzer."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def small() -> dict[str, np.ndarray]:
    """A convolution that is neither square nor symmetric, a BatchNorm, a depthwise convolution, and a dense layer behind 2 x 3 pixels."""
    return {
        "conv/W": draw(4, 3, 3, 5), "conv/b": draw(4, seed=1), "block/0/bn/gamma": draw(4, seed=2), "block/0/bn/beta": draw(4, seed=3),
        "block/0/bn/avg_mean": draw(4, seed=4), "block/0/bn/avg_var": np.abs(draw(4, seed=5)) + 0.5, "block/0/bn/N": np.array(7),
        "dw/W": draw(2, 4, 3, 3, seed=6), "dw/b": draw(8, seed=7), "fc/W": draw(5, 48, seed=8), "fc/b": draw(5, seed=9),
    }  # fmt: skip


def snapshot() -> dict[str, np.ndarray]:
    """What a trainer saves: the model in a classifier, the optimizer's state and its own."""
    model = {f"updater/model:main/predictor/{name}": array for name, array in small().items()}
    return {
        **model,
        "updater/optimizer:main/t": np.array(3),
        "updater/optimizer:main/predictor/conv/W/m": draw(4, 3, 3, 5),
        "updater/iteration": np.array(3),
    }


def hdf5(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(f"/{name}", data=array, compression="gzip" if array.ndim else None)
    return path


def seeds(folder: Path) -> list[Path]:
    np.savez_compressed(folder / "small.npz", **small())
    return [hdf5(folder / "small.h5", small()), hdf5(folder / "snapshot.h5", snapshot()), folder / "small.npz"]
