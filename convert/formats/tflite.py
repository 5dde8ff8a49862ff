"""TensorFlow Lite's (LiteRT's) .tflite: operators and their constants in a FlatBuffer; float, half and whole numbers with their scales.

Kernels are of cross-correlation, with their channels last; a BatchNorm is part of the convolution before it since the file was made.
Whole numbers are read as the reals that they stand for, and the network is that of reals: what it rounds between its layers is left out.
Reading needs no library; writing is exporting a network, with torch, onnx and ai-edge-litert.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from convert import _guard
from convert.formats import _exporting, _flatbuffer, _tflite_export, _tflite_model, _tflite_ops
from convert.formats._mapped import mapped
from convert.formats._wire import Budget
from convert.source import Convention, Part, Source
from weights.errors import ConvertError

if TYPE_CHECKING:
    from torch import nn

SUFFIXES = (".tflite", ".lite")
WRITES = True
EXPORTS = True
"""A file is written from a network by `export`, not from its parts by `write`: it holds the whole computation."""

MAGIC = b"TFL3"


def sniff(path: Path, head: bytes) -> bool:
    """Tell it by the identifier behind a FlatBuffer's first offset."""
    del path
    return head[4:8] == MAGIC


def read(path: Path) -> Source:
    """Open a TFLite file.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "TFLite file"):
        data = mapped(path)
        model = _tflite_model.parse(_flatbuffer.root(data, Budget()), data)
        said = _tflite_ops.said(model)
        return said.finished(
            path,
            "tflite",
            "TensorFlow Lite" + (f", {model.description}" if model.description else ""),
            len(data),
            "TFLite file",
            facts={"schema version": str(model.version), **({"quantised": model.quantised} if model.quantised else {}), **model.facts},
            notes=model.notes,
        )


def write(parts: Sequence[Part], path: Path, *, convention: Convention, metadata: Mapping[str, str]) -> NoReturn:
    """Refuse: parts say what the layers are, not how they are joined.

    Raises:
        ConvertError: always; `export` writes a network.
    """
    del parts, metadata
    _exporting.refuse(path, "TFLite", convention)


def export(
    network: nn.Module,
    path: Path,
    *,
    input_shape: Sequence[int],
    metadata: Mapping[str, str],
    preprocessing: Any = None,
    verify: bool = True,
) -> float | None:
    """Write a network of convolutions as a TFLite file, in float32, for images with their channels last.

    Layers have the names of the state dict. Each BatchNorm behind a convolution is folded into it, as TensorFlow's own converter does, so
    the network computes the same and has other numbers. The same network gives the same bytes. The batch is free; height and width are
    those of `input_shape`.

    Args:
        network: a module that PyTorch can trace; it is not changed, and is exported in eval mode.
        path: the file to write, in place.
        input_shape: of one image, (C, H, W).
        metadata: free-form notes, kept as the file's metadata.
        preprocessing: must be None: the file takes images that are prepared already.
        verify: whether to run the file with LiteRT and compare.

    Returns:
        The largest relative difference between LiteRT's outputs and PyTorch's on random images; None if it was not run.

    Raises:
        MissingLibrary: ai-edge-litert or onnx is not installed.
        ConvertError: PyTorch can't export this network, TFLite has no word for what it computes, or the file computes something else.

    Example:
        >>> export(ResNet20(), Path("resnet20.tflite"), input_shape=(3, 32, 32), metadata={})  # doctest: +SKIP
        2.4e-07
    """
    path = Path(path)
    if preprocessing is not None:
        raise ConvertError(f"{path}: a TFLite file is written without the preprocessing; ONNX and OpenVINO's IR take it inside")
    twin, example, written = _tflite_export.write(network, path, input_shape=input_shape, metadata=metadata)
    return _proved(path, twin, example, written) if verify else None


def _proved(path: Path, network: nn.Module, example: Any, written: nn.Module) -> float:
    """Run the file with LiteRT and compare its outputs with PyTorch's."""
    last = example.ndim == 4
    try:
        ran = _tflite_export.outputs(path, example.numpy(), last)
    except (RuntimeError, ValueError) as error:
        raise ConvertError(f"{path}: LiteRT does not run what was written: {str(error).strip().splitlines()[0][:200]}") from error
    if isinstance(ran, str):
        raise ConvertError(f"{path}: LiteRT does not run what was written: {ran}")
    made, by = ran
    outputs = made.transpose(0, 3, 1, 2) if last and made.ndim == 4 else made
    return _exporting.judged(path, by, outputs, network, example, read, written=written)
