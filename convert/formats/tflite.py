"""TensorFlow Lite's (LiteRT's) .tflite: operators and their constants in a FlatBuffer; float, half and whole numbers with their scales.

Kernels are of cross-correlation, with their channels last; a BatchNorm is part of the convolution before it since the file was made.
Whole numbers are read as the reals that they stand for, and the network is that of reals: what it rounds between its layers is left out.
"""

from __future__ import annotations

from pathlib import Path

from convert import _guard
from convert.formats import _flatbuffer, _tflite_model, _tflite_ops
from convert.formats._mapped import mapped
from convert.formats._wire import Budget
from convert.source import Source

SUFFIXES = (".tflite", ".lite")
WRITES = False

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
            facts={"schema version": str(model.version), **({"quantised": model.quantised} if model.quantised else {})},
            notes=model.notes,
        )
