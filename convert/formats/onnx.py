"""ONNX: an operator graph and its constants. Reading needs no library; writing is exporting a network, with torch and onnx.

Kernels are OIHW and always of cross-correlation. A module is called what its initialisers are called where those have a state
dict's names ("layer1.0.conv1.weight"), else by its place in the graph ("Conv_12"): then topology and shapes must find it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from convert import _guard
from convert.formats import _exporting, _onnx_export, _onnx_graph, _onnx_ops, _onnx_proto, _wire
from convert.formats._onnx_pixels import preparation
from convert.source import Convention, Part, Source
from weights.errors import MalformedFile

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("convert")

__all__ = ["EXPORTS", "SUFFIXES", "TAKES_PIXELS", "WEAK", "WRITES", "export", "read", "sniff", "write"]

SUFFIXES = (".onnx",)
WRITES = True
WEAK = True
EXPORTS = True
"""A file is written from a network by `export`, not from its parts by `write`: ONNX holds the whole computation."""
TAKES_PIXELS = True
"""`export` can put the preprocessing into the file, which then takes uint8 pixels."""

FIRST_FIELDS = {2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
"""The fields that may follow the version, and how each is written."""


GRAPH_FIRST = 7 << 3 | 2
"""What a file begins with whose writer, pnnx for one, puts the graph in front of the version."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell whether it begins as ONNX files do: a version of the format, then another field of a model."""
    try:
        at, view = 0, memoryview(head)
        key, at = _wire.varint(view, at)
        if key == GRAPH_FIRST and path.suffix in SUFFIXES:
            size, at = _wire.varint(view, at)
            return 0 < size <= path.stat().st_size - at and head[at : at + 1] in (b"\n", b"\x12", b"\x2a")
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
        {name: _guard.guarded(stored, path, "ONNX file") for name, stored in builder.tensors.items()},
        graph=graph,
        flatten="hwc" if flattened == {"hwc"} else "chw",
        facts={"opset": str(model.opset), **{key: entry[: _guard.MAX_FACT] for key, entry in list(model.metadata.items())[:100]}},
        preprocessing=preparation(graph),
        notes=builder.notes + (["some dense layers read maps in CHW order, some in HWC"] if len(flattened) > 1 else []),
        beside=model.beside,
        close=model.close,
    )


def write(parts: Sequence[Part], path: Path, *, convention: Convention, metadata: Mapping[str, str]) -> NoReturn:
    """Refuse: parts say what the layers are, not how they are joined.

    Raises:
        ConvertError: always; `export` writes a network.
    """
    del parts, metadata
    _exporting.refuse(path, "ONNX", convention)


def export(
    network: nn.Module,
    path: Path,
    *,
    input_shape: Sequence[int],
    metadata: Mapping[str, str],
    preprocessing: Any = None,
    opset: int = _onnx_export.OPSET,
    verify: bool = True,
) -> float | None:
    """Write a network as an ONNX file.

    The initialisers have the names of the state dict, and each BatchNorm stays one, so that `read` gives every bit back. The same
    network gives the same bytes. The batch is free; height and width are those of `input_shape`.

    Args:
        network: any module that PyTorch can trace; it is not changed, and is exported in eval mode.
        path: the file to write, in place.
        input_shape: of one image, (C, H, W).
        metadata: free-form notes, the file's metadata_props.
        preprocessing: a record with mean, std (per channel, on 0..1) and channel_order, or None. With one, the file's input
            "pixels" is uint8 (batch, H, W, C) in RGB, as an image decoder gives it, and the graph normalises it; resizing and
            cropping stay outside. Without, the input "images" is float32 (batch, C, H, W), normalised already.
        opset: the operator set.
        verify: whether to run the file with onnxruntime, if it is installed, and compare.

    Returns:
        The largest relative difference between onnxruntime's logits and PyTorch's on random images; None if it was not run.

    Raises:
        MissingLibrary: onnx is not installed.
        ConvertError: PyTorch can't export this network, the file would be larger than ONNX allows, or it computes something else.
    """
    twin, example = _onnx_export.write(
        network, Path(path), input_shape=input_shape, metadata=metadata, preprocessing=preprocessing, opset=opset
    )
    return _proved(Path(path), twin, example, preprocessing) if verify else None


def _proved(path: Path, network: nn.Module, example: Any, preprocessing: Any) -> float | None:
    """Run the file with onnxruntime and compare its logits with PyTorch's."""
    import torch

    try:
        import onnxruntime  # pyright: ignore[reportMissingTypeStubs]  # it has none
    except ImportError:
        log.info("%s: onnxruntime is not installed, so the file was not run", path)
        return None
    runtime: Any = onnxruntime
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    _exporting.answered(path, network, example[:1])
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    fed = example
    if preprocessing is not None:
        random = torch.Generator().manual_seed(0)
        pixels = torch.randint(0, 256, (2, *example.shape[2:], example.shape[1]), dtype=torch.uint8, generator=random)
        fed, images = pixels, pixels.permute(0, 3, 1, 2)
        images = (images.flip(1) if preprocessing.channel_order == "bgr" else images).float()
        mean, std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in (preprocessing.mean, preprocessing.std))
        example = images.div(255).sub(mean).div(std)
    (logits,) = session.run(None, {session.get_inputs()[0].name: fed.numpy()})
    return _exporting.judged(path, "onnxruntime", np.asarray(logits), network, example, read, prepared=preprocessing is None)
