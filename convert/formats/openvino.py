"""OpenVINO's IR, version 10 and later: layers and their joints in an .xml, their constants in the .bin beside it.

Kernels are OIHW and of cross-correlation. Weights in half precision or in whole numbers are read as the reals that they stand for.
"""

from __future__ import annotations

import re
from pathlib import Path

from convert import _guard
from convert.formats import _openvino_ops, _openvino_xml
from convert.source import Source
from weights.errors import MalformedFile

SUFFIXES = (".xml",)
WRITES = False

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
            facts={"layers": str(len(net.layers))},
            notes=said.notes,
            close=net.files.close,
        )
