"""BSON as BSON.jl writes it: Flux.jl's parameter lists, states and whole models, and Metalhead.jl's files.

An array's axes come reversed, which costs nothing: Julia keeps the first axis nearest together, NumPy the last. So a kernel
(W, H, I, O) lies here as (O, I, H, W), if its network was fed (W, H, C, N); the file does not say whether it was, and
`Source.spatial` is "unknown". Flux's Conv is a true convolution, its CrossCor is not; a list of parameters names no layers, and
its convention is "unknown".

Written files hold `:model_state`, nested like a `Flux.state`. They are read back here; that Julia reads them follows from the
format's rules and is not verified: `docs/from-metalhead.md` shows how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import check, reading
from convert.formats import _bsondoc, _flux
from convert.formats._bsonjl import Reader
from convert.formats._fluxgraph import build
from convert.formats._julia import DTYPES, Struct
from convert.formats._juliatree import document, fill, naming
from convert.formats._mapped import mapped
from convert.source import Convention, Part, Source, Stored
from weights.errors import UnsupportedFormat

SUFFIXES = (".bson",)
WRITES = True


def sniff(path: Path, head: bytes) -> bool:
    """Tell by the length that a document begins with, and by its first element; a cut file is known by its ending."""
    if len(head) < 5 or not path.is_file():
        return False
    size, length = path.stat().st_size, int.from_bytes(head[:4], "little", signed=True)
    if length == 5 == size:
        return head[4] == 0
    plausible = head[4] in _bsondoc.TYPES and b"\0" in head[5:]
    return plausible and length >= 5 and (length == size or path.suffix in SUFFIXES)


def read(path: Path) -> Source:
    """Open a BSON.jl file; its bytes are mapped, and a tensor is a view of them.

    Raises:
        ConvertError: as `convert.formats.read` says.
    """
    with reading(path, "BSON.jl file"), naming(path):
        data = mapped(path)
        root = _bsondoc.parse(data)
        reader = Reader(root)
        top = {key: reader.value(item) for key, item in root.items() if key != "_backrefs"}
        source = Source(path, "bson", "BSON.jl", {}, facts=_flux.facts(top), spatial="unknown")
        root = fill(source, top, reader.types, state_only=True)
        source.graph = build(root) if isinstance(root, Struct) else None
        if reader.skipped:
            kinds = ", ".join(sorted(set(reader.skipped))[:5])
            source.notes.append(f"{len(reader.skipped)} arrays of {kinds} are left out: NumPy has no such type")
        check(path, source.tensors.values(), len(data))
    return source


def write(parts: Sequence[Part], path: Path, *, convention: Convention = "convolution", metadata: Mapping[str, str] | None = None) -> None:
    """Write the modules as the nested state of a Flux model under `model_state`.

    Args:
        parts: the modules; their names nest by dots and count from 1, "layers.1.layers.3".
        path: the file.
        convention: "convolution" is Flux's Conv, and what a file says for itself; "correlation" is CrossCor's.
        metadata: words that are kept beside the network, under `kernelzoo`.

    Raises:
        UnsupportedFormat: the tensors take 2 GiB or more, a dtype is not Julia's, or names contradict each other.
    """
    made = document(parts, convention, metadata, _leaf)
    with path.open("wb") as file:
        for piece in _bsondoc.encode(made):
            file.write(piece)


JULIA_NAMES = {np.dtype(code).str[1:]: name for name, code in DTYPES.items()}


def _leaf(array: Stored) -> dict[str, Any]:
    """Describe an array, whose shape is NumPy's, reversed."""
    code = array.dtype.str[1:]
    if code not in JULIA_NAMES:
        raise UnsupportedFormat(f"{array.origin}: BSON.jl has no {array.dtype}; cast it to float32 first")
    little = array.dtype.newbyteorder("<")
    size = math.prod(array.shape) * array.dtype.itemsize
    return {
        "tag": "array",
        "type": {"tag": "datatype", "name": ["Core", JULIA_NAMES[code]], "params": []},
        "size": list(reversed(array.shape)),
        "data": _bsondoc.Blob(size, lambda: array.load().astype(little, copy=False).data if size else b""),
    }
