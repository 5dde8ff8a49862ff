"""OpenVINO's IR, version 10 and later: layers and their joints in an .xml, their constants in the .bin beside it.

Kernels are OIHW and of cross-correlation. Weights in half precision or in whole numbers are read as the reals that they stand for. Reading
needs no library; writing is exporting a network, with torch, onnx and openvino.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from convert import _guard
from convert.formats import _exporting, _openvino_export, _openvino_ops, _openvino_xml
from convert.source import Convention, Part, Source
from weights.errors import MalformedFile

if TYPE_CHECKING:
    from torch import nn

SUFFIXES = (".xml",)
SIDECARS = (".bin",)
WRITES = True
EXPORTS = True
"""A file is written from a network by `export`, not from its parts by `write`: an IR holds the whole computation."""
TAKES_PIXELS = True
"""`export` can put the preprocessing into the file, which then takes uint8 pixels."""

BEGINNING = re.compile(rb"\s*(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]{0,200}\?>)?\s*(?:<!--.{0,2000}?-->\s*)*<net\s[^>]*\bversion\s*=", re.DOTALL)


def sniff(path: Path, head: bytes) -> bool:
    """Tell it by its first element; its .bin, which says nothing, by the .xml beside it."""
    if path.suffix == ".bin" and not head.startswith((b"PK\3\4", b"\x80")) and path.with_suffix(".xml").is_file():
        with path.with_suffix(".xml").open("rb") as file:
            head = file.read(4096)
    return BEGINNING.match(head) is not None


def read(path: Path) -> Source:
    """Open an IR by its .xml or its .bin.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    described = path.with_suffix(".xml") if path.suffix == ".bin" else path
    with _guard.reading(path, "OpenVINO IR"):
        net = _openvino_xml.parse(described)
        if net.version < 10:
            raise MalformedFile(
                f"{described} is an IR of version {net.version}; those from 10 on (OpenVINO 2020.2) are read. Convert the network anew, "
                "or read the file that it was made from"
            )
        said = _openvino_ops.said(net)
        return said.finished(
            path,
            "openvino",
            f"OpenVINO IR version {net.version}" + (f", {net.name}" if net.name else ""),
            net.files.size_bytes,
            "OpenVINO IR",
            facts={"layers": str(len(net.layers)), **({_openvino_xml.NOTES: net.notes} if net.notes else {})},
            notes=said.notes,
            close=net.files.close,
            beside=net.files.others(path),
        )


def write(parts: Sequence[Part], path: Path, *, convention: Convention, metadata: Mapping[str, str]) -> NoReturn:
    """Refuse: parts say what the layers are, not how they are joined.

    Raises:
        ConvertError: always; `export` writes a network.
    """
    del parts, metadata
    _exporting.refuse(path, "OpenVINO's IR", convention)


def export(
    network: nn.Module,
    path: Path,
    *,
    input_shape: Sequence[int],
    metadata: Mapping[str, str],
    preprocessing: Any = None,
    verify: bool = True,
) -> float | None:
    """Write a network as an IR, `path` and the .bin beside it, in float32.

    The constants have the names of the state dict, and each BatchNorm stays one, so that `read` gives every bit back. The same network
    gives the same bytes. The batch is
    free; height and width are those of `input_shape`.

    Args:
        network: any module that PyTorch can trace; it is not changed, and is exported in eval mode.
        path: the .xml to write, in place.
        input_shape: of one image, (C, H, W).
        metadata: free-form notes, kept in the model's run-time information under "kernelzoo".
        preprocessing: as `convert.formats.onnx.export` takes it: pixels come in, and the graph normalises them.
        verify: whether to run the file with OpenVINO and compare.

    Returns:
        The largest relative difference between OpenVINO's outputs and PyTorch's on random images; None if it was not run.

    Raises:
        MissingLibrary: openvino or onnx is not installed.
        ConvertError: PyTorch or OpenVINO can't export this network, or the file computes something else.

    Example:
        >>> export(ResNet20(), Path("resnet20.xml"), input_shape=(3, 32, 32), metadata={})  # doctest: +SKIP
        3.1e-07
    """
    path = Path(path)
    twin, example = _openvino_export.write(network, path, input_shape=input_shape, metadata=metadata, preprocessing=preprocessing)
    return _proved(path, twin, example) if verify and preprocessing is None else None


def _proved(path: Path, network: nn.Module, example: Any) -> float:
    """Run the file with OpenVINO and compare its outputs with PyTorch's."""
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    openvino = _openvino_export.imported()
    compiled = openvino.Core().compile_model(path, "CPU", exact)
    made = np.asarray(next(iter(compiled(example.numpy()).values())))
    return _exporting.judged(path, "OpenVINO", made, network, example, read)
