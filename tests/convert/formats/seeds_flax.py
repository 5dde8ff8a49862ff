"""Small Flax checkpoints of every dialect, for the fuzzer: MessagePack whole and in chunks, Orbax in one store and in folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


def tree() -> dict[str, Any]:
    """A convolution, a BatchNorm and a dense layer."""
    draw = np.random.default_rng(0)
    return {
        "params": {
            "Conv_0": {"kernel": draw.standard_normal((3, 3, 3, 4)).astype("f4"), "bias": np.ones(4, "f4")},
            "BatchNorm_0": {"scale": np.ones(4, "f4"), "bias": np.zeros(4, "f4")},
            "ConvTranspose_0": {"kernel": draw.standard_normal((2, 2, 4, 3)).astype(ml_dtypes.bfloat16)},
            "Dense_0": {"kernel": draw.standard_normal((16, 2)).astype("f2")},
        },
        "batch_stats": {"BatchNorm_0": {"mean": np.zeros(4, "f4"), "var": np.ones(4, "f4")}},
    }


def orbax(folder: Path, *, one_store: bool) -> Path:
    """Write the tree as Orbax lays it out, without Orbax: zarr arrays in an OCDBT store or in folders."""
    import json

    import tensorstore as ts

    folder.mkdir()
    places: dict[tuple[str, ...], np.ndarray] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, (*path, key))
        else:
            places[path] = node

    walk(tree(), ())
    for path, value in places.items():
        key = ".".join(path)
        store = (
            {"driver": "ocdbt", "base": folder.as_uri(), "path": f"{key}/"} if one_store else {"driver": "file", "path": f"{folder}/{key}/"}
        )
        array = np.ascontiguousarray(value)
        spec = {"driver": "zarr", "kvstore": store, "metadata": {"compressor": {"id": "zstd", "level": 1}, "chunks": list(array.shape)}}
        ts.open(spec, create=True, dtype=array.dtype.name, shape=array.shape).result().write(array).result()
    metadata = {"tree_metadata": {str(path): {"key_metadata": []} for path in places}, "use_zarr3": False}
    (folder / "_METADATA").write_text(json.dumps(metadata))
    return folder


def seeds(folder: Path) -> list[Path]:
    from convert.formats import _msgpack, flax

    def packed(node: Any) -> bytes:
        if isinstance(node, dict):
            return _msgpack.header("map", len(node)) + b"".join(_msgpack.pack(key) + packed(value) for key, value in node.items())
        if not isinstance(node, np.ndarray):
            return _msgpack.pack(node)
        data = _msgpack.pack([list(node.shape), node.dtype.name, node.tobytes()])
        return _msgpack.header("ext", len(data), flax.ARRAY) + data

    plain, state, chunks = folder / "plain.msgpack", folder / "state.msgpack", folder / "chunks.msgpack"
    plain.write_bytes(packed(tree()))
    state.write_bytes(packed({"step": 7, **tree(), "opt_state": {"0": {"mu": tree()["params"]}}}))
    halves = {"0": np.ones(50, "f4"), "1": np.ones(58, "f4")}
    large = {flax.CHUNKED: True, "shape": {"0": 3, "1": 3, "2": 3, "3": 4}, "chunks": halves}
    chunks.write_bytes(packed({"params": {"Conv_0": {"kernel": large}}}))
    return [plain, state, chunks, orbax(folder / "store", one_store=True), orbax(folder / "folders", one_store=False)]
