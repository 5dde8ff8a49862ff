"""MAT files of version 7.3, which are HDF5: cells and arrays of structs are references, text is numbers, axes are reversed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from convert._guard import MAX_DEPTH
from convert.formats._hdf5 import Dataset, Group, Hdf5
from convert.formats._mat import MAX_VALUES, Matrix, Value
from weights.errors import LimitExceeded

HIDDEN = ("#refs#", "#subsystem#")
WORDS = 2**20


def variables(path: Path) -> tuple[dict[str, Value], Hdf5]:
    """Read every variable of a file, and return the file, which they are views of."""
    file = Hdf5(path, "MAT file")
    reader = _Reader(file)
    return {name: reader.value(file.root[name], name, 0) for name in file.root if name not in HIDDEN}, file


class _Reader:
    def __init__(self, file: Hdf5) -> None:
        self.file, self.values = file, 0

    def value(self, node: Any, origin: str, depth: int) -> Value:
        self.values += 1
        if self.values > MAX_VALUES or depth > MAX_DEPTH:
            raise LimitExceeded(f"more than {MAX_VALUES} values, or more than {MAX_DEPTH} levels of them")
        if isinstance(node, Group):
            return self.struct(node, origin, depth)
        if not isinstance(node, Dataset):
            return None
        kind = node.attrs.get("MATLAB_class")
        if node.attrs.get("MATLAB_empty"):
            return [] if str(kind) in ("cell", "struct") else "" if str(kind) == "char" else None
        if node.type.kind == "reference":
            return [self.value(item, f"{origin}{{{n + 1}}}", depth + 1) for n, item in enumerate(self.referred(node))]
        if node.type.kind != "number":
            return None
        if kind == "char":
            return self.text(node)
        return Matrix(origin, node.shape[::-1], node.dtype, node.load, reverse=True)

    def struct(self, node: Group, origin: str, depth: int) -> Value:
        """Read a struct; in an array of structs every field is an array of references, and those have no class."""
        fields = {name: node[name] for name in node}
        if fields and all(isinstance(f, Dataset) and f.type.kind == "reference" and "MATLAB_class" not in f.attrs for f in fields.values()):
            columns = {name: self.referred(field) for name, field in fields.items()}
            count = min(len(column) for column in columns.values())
            return [
                {name: self.value(column[n], f"{origin}({n + 1}).{name}", depth + 1) for name, column in columns.items()}
                for n in range(count)
            ]
        return {name: self.value(field, f"{origin}.{name}", depth + 1) for name, field in fields.items()}

    def referred(self, node: Dataset) -> list[Any]:
        addresses = np.asarray(node.load()).reshape(-1)
        if len(addresses) > MAX_VALUES:
            raise LimitExceeded(f"more than {MAX_VALUES} references in one place")
        return [self.file.at(int(address)) for address in addresses]

    def text(self, node: Dataset) -> str:
        codes = node.load()
        if codes.size > WORDS or codes.dtype.kind != "u":
            return ""
        return codes.reshape(-1).astype("<u2").tobytes().decode("utf-16-le", "replace")
