"""ncnn's networks: layers and their joints as text in a .param, their weights in that order in the .bin beside it.

Kernels are OIHW, dense weights (out, in). Weights in half precision are read as such, those of a codebook as the reals in it.
"""

from __future__ import annotations

from pathlib import Path

from convert import _guard
from convert.formats import _ncnn_ops, _ncnn_param
from convert.formats._mapped import Maps
from convert.source import Source
from weights.errors import MalformedFile, UnsafeFormat, UnsupportedFormat

SUFFIXES = (".param",)
WRITES = False

MAGIC = b"7767517"


def sniff(path: Path, head: bytes) -> bool:
    """Tell it by the number in its first line; its .bin, which says nothing, by the .param beside it."""
    if path.suffix == ".bin" and path.with_suffix(".param").is_file():
        with path.with_suffix(".param").open("rb") as file:
            head = file.read(16)
    return head.split(b"\n", 1)[0].strip() == MAGIC


def read(path: Path) -> Source:
    """Open a network by its .param or its .bin.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    described, held = path.with_suffix(".param") if path.suffix == ".bin" else path, path.with_suffix(".bin")
    with _guard.reading(path, "ncnn network"):
        for file in (described, held):
            if not file.is_file():
                raise MalformedFile(f"{path.name} needs {file.name} beside it. Fetch it too")
            if file.is_symlink():
                raise UnsafeFormat(f"{file} is a link; only plain files are read")
        files = Maps()
        if b"\npnnx." in bytes(files.view(described)[:4096]):
            raise UnsupportedFormat(
                f"{described.name} is pnnx's own description, of PyTorch's modules: name the .ncnn.param that pnnx has written beside it, "
                "or the file that it was made from"
            )
        layers = _ncnn_param.parse(files.view(described))
        said = _ncnn_ops.said(layers, _ncnn_param.Numbers(files.view(held)))
        return said.finished(
            path,
            "ncnn",
            "ncnn",
            files.size_bytes,
            "ncnn network",
            facts={"layers": str(len(layers))},
            close=files.close,
            beside=files.others(path),
        )
