"""Files mapped into memory, arrays that are views of them, and what lies beside a file."""

from __future__ import annotations

import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np

from convert.source import Shape, Stored
from weights.errors import LimitExceeded, MalformedFile


def beside(path: Path, suffix: str) -> Path | None:
    """Find the file that belongs to this one: of the same name but its ending, or the only one of its kind in the folder."""
    same = path.with_suffix(suffix)
    if same.is_file():
        return same
    others = [other for other in path.parent.glob(f"*{suffix}") if other.is_file()]
    return others[0] if len(others) == 1 else None


def named_from(path: Path, other: Path) -> str:
    """Name a file as seen from the folder of another."""
    folder, place = path.absolute().parent.resolve(), other.absolute()
    place = place.parent.resolve() / place.name
    return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else place.name


def description(path: Path, most_bytes: int) -> str:
    """Read the text that describes a network; LimitExceeded if it has more bytes than that."""
    if path.stat().st_size > most_bytes:
        raise LimitExceeded(f"{path} has {path.stat().st_size} bytes; a description of a network has at most {most_bytes}")
    return path.read_text("utf-8", errors="replace")


def mapped(path: Path) -> memoryview:
    """Map a file; the map lives as long as a view of it. MalformedFile if there is nothing in it."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise MalformedFile(f"{path} is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


class Maps:
    """Files that are mapped, each when it is asked for, and let go of together.

    Attributes:
        size_bytes: of all of them.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._maps: list[mmap.mmap] = []
        self._views: dict[Path, memoryview] = {}

    def view(self, path: Path) -> memoryview:
        """Map a file, once; an empty one is no bytes."""
        if path not in self._views:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self.size_bytes += size
            self._views[path] = memoryview(self._maps[-1] if size else b"")
        return self._views[path]

    def others(self, path: Path) -> tuple[str, ...]:
        """Name the files that were mapped but this one, from its folder on."""
        return tuple(named_from(path, other) for other in self._views if other != path)

    def close(self) -> None:
        """Let go of the files; arrays that are still in use keep theirs."""
        self._views.clear()
        for mapped in self._maps:
            try:
                mapped.close()
            except BufferError:  # someone still holds a view, whose end will be the map's
                continue


def stored(origin: str, buffer: memoryview, dtype: np.dtype[Any], shape: Shape, order: str = "C") -> Stored:
    """Describe an array that fills a buffer; MalformedFile if it doesn't."""
    count = math.prod(shape)
    if count * dtype.itemsize != len(buffer) or min(shape, default=0) < 0:
        raise MalformedFile(f"{origin}: {dtype} of shape {shape} does not fill {len(buffer)} bytes")

    def load() -> np.ndarray:
        flat = np.frombuffer(buffer, dtype) if count else np.empty(0, dtype)
        return flat.reshape(shape, order="F" if order == "F" else "C")

    return Stored(origin, shape, dtype, load)
