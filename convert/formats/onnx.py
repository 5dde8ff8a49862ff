"""ONNX: an operator graph and its constants. Reading needs no library; writing is exporting a network, with torch and onnx.

Kernels are OIHW and always of cross-correlation. A module is called what its initialisers are called where those have a state
dict's names ("layer1.0.conv1.weight"), else by its place in the graph ("Conv_12"): then topology and shapes must find it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from convert.formats import _guard, _onnx_graph, _onnx_ops, _onnx_proto, _wire
from convert.formats._onnx_export import export
from convert.graph import Graph
from convert.source import Convention, Part, Source, Stored
from weights.errors import ConvertError, MalformedFile

__all__ = ["EXPORTS", "SUFFIXES", "WEAK", "WRITES", "export", "read", "sniff", "write"]

SUFFIXES = (".onnx",)
WRITES = True
WEAK = True
EXPORTS = True
"""A file is written from a network by `export`, not from its parts by `write`: ONNX holds the whole computation."""

FIRST_FIELDS = {2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""The fields that may follow the version, and how each is written."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell whether it begins as ONNX files do: a version of the format, then another field of a model."""
    del path
    try:
        at, view = 0, memoryview(head)
        key, at = _wire.varint(view, at)
        version, at = _wire.varint(view, at)
        follows, at = _wire.varint(view, at)
    except MalformedFile:
        return False
    return key == 8 and 0 < version < 64 and FIRST_FIELDS.get(follows >> 3) == follows & 7


def read(path: Path) -> Source:
    """Open an ONNX file.

    Weights that lie in other files are read only from inside its folder, and never through a link.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "ONNX file"):
        model = _onnx_proto.parse(path)
        builder = _onnx_graph.Builder(model)
        graph = builder.build(_onnx_ops.HANDLERS)
        if not builder.tensors:
            raise MalformedFile(f"{path} holds no weights" + (f": {', '.join(model.left_out[:5])}" if model.left_out else ""))
        _guard.check(path, builder.tensors.values(), model.size_bytes)
    flattened: set[str] = {str(node.attrs["order"]) for node in graph.nodes if node.op == "flatten"} if graph is not None else set()
    return Source(
        path,
        "onnx",
        f"ONNX opset {model.opset}" + (f", {model.producer}" if model.producer else ""),
        {name: _guarded(path, stored) for name, stored in builder.tensors.items()},
        graph=graph,
        flatten="hwc" if flattened == {"hwc"} else "chw",
        facts={"opset": str(model.opset), **{key: entry[: _guard.MAX_FACT] for key, entry in list(model.metadata.items())[:100]}},
        preprocessing=_preprocessing(graph),
        notes=builder.notes + (["some dense layers read maps in CHW order, some in HWC"] if len(flattened) > 1 else []),
        close=model.close,
    )


def write(parts: Sequence[Part], path: Path, *, convention: Convention, metadata: Mapping[str, str]) -> NoReturn:
    """Refuse: parts say what the layers are, not how they are joined.

    Raises:
        ConvertError: always; `export` writes a network.
    """
    del parts, metadata
    if convention == "convolution":
        raise ConvertError(f"{path}: an ONNX Conv computes cross-correlation, whatever is asked; leave the kernel convention out")
    raise ConvertError(f"{path}: an ONNX file holds the whole computation; export(network, path, input_shape=...) writes it")


def _guarded(path: Path, stored: Stored) -> Stored:
    def load() -> np.ndarray:
        with _guard.reading(path, "ONNX file"):
            return stored.load()

    return replace(stored, load=load)


def _preprocessing(graph: Graph | None) -> dict[str, Any]:
    """Read mean and deviation from what the graph does to its pixels before the first layer."""
    if graph is None or not graph.nodes or graph.nodes[0].op != "input":
        return {}
    readers: dict[str, list[int]] = {}
    for place, node in enumerate(graph.nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(place)
    scale, offset, order = np.ones(1), np.zeros(1), "rgb"
    node = graph.nodes[0]
    while len(after := readers.get(node.name, [])) == 1 and (node := graph.nodes[after[0]]).op in ("affine", "permute_channels"):
        if node.op == "affine":
            scale, offset = scale * node.attrs["scale"], offset * node.attrs["scale"] + node.attrs["offset"]
        else:
            order = {"rgb": "bgr", "bgr": "rgb"}[order] if tuple(node.attrs["order"]) == (2, 1, 0) else order
            scale, offset = (a[list(node.attrs["order"])] if a.size > 1 else a for a in (scale, offset))
    if not (np.isfinite(scale).all() and (scale > 0).all() and np.isfinite(offset).all()) or (scale == 1).all():
        return {}
    scale, offset = np.broadcast_arrays(scale, offset)
    most = 255 if scale.max() < 0.1 else 1
    return {
        "mean": tuple(float(n) for n in -offset / scale / most),
        "std": tuple(float(n) for n in 1 / scale / most),
        "range": f"0..{most}",
        "channel_order": order,
    }
