"""Small files of NumPy's of every dialect, for the fuzzer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np


def arrays() -> list[np.ndarray]:
    """A convolution, a BatchNorm's four and a dense layer, in Lasagne's order."""
    draw = np.random.default_rng(0)
    shapes = [(4, 3, 3, 3), (4,), (4,), (4,), (4,), (16, 2), (2,)]
    return [draw.uniform(0.5, 1.5, shape).astype(np.float32) for shape in shapes]


def seeds(folder: Path) -> list[Path]:
    made = [
        folder / name
        for name in ("list.npz", "packed.npz", "torch.npz", "keras.npz", "flax.npz", "object.npz", "array.npy", "layers.npy", "blobs.npz")
    ]
    values = arrays()
    names = ["conv.weight", "bn.bias", "bn.weight", "bn.running_mean", "bn.running_var", "fc.weight", "fc.bias"]
    np.savez(made[0], *values)
    np.savez_compressed(made[1], *values)
    np.savez(made[2], **dict(zip(names, values, strict=True)))
    np.savez(
        made[3], **{"conv1/kernel:0": np.zeros((3, 3, 3, 4), "f4"), "bn/gamma:0": np.ones(4, "f4"), "bn/moving_mean:0": np.ones(4, ">f8")}
    )
    np.savez(made[4], **{"params/Conv_0/kernel": np.asfortranarray(np.ones((3, 3, 3, 4), "f4")), "params/Conv_0/bias": np.ones(4, "f2")})
    listed = np.empty(len(values), object)
    listed[:] = values
    objects: dict[str, Any] = {"arr_0": listed}
    np.savez(made[5], **objects)
    np.save(made[6], values[0])
    layers: Any = {"conv1_1": [np.zeros((3, 3, 3, 8), "f4"), np.zeros(8, "f4")], "fc": {"weights": np.zeros((8, 2), "f4")}}
    np.save(made[7], layers, allow_pickle=True)
    blobs = {
        "conv1": [values[0], values[1]],
        "bn_conv1": [values[2], values[3], np.array([2], "f4")],
        "scale_conv1": [values[1], values[4]],
    }
    np.savez(made[8], **{f"{layer}/{place}": blob for layer, held in blobs.items() for place, blob in enumerate(held)})
    return made
