"""Chainer's checkpoints: .npz, which NumPy's reader opens, and HDF5, which Keras's reader finds to be none of Keras's.

Reading needs no library. The file holds weights and no graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from convert import _guard
from convert.formats import _chainer, _hdf5
from convert.formats._hdf5 import Dataset, Group, Hdf5
from convert.source import Source, Stored
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

SUFFIXES = (".h5", ".hdf5", ".npz")
WRITES = False

WHAT = "HDF5 file of Chainer's"
DEEPEST = 60
"""Groups in groups; a link is one."""


def sniff(path: Path, head: bytes) -> bool:
    """Tell none: its containers are Keras's and NumPy's, whose readers look what is in them."""
    del path, head
    return False


def read(path: Path) -> Source:
    """Open a checkpoint in either container.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, WHAT):
        with path.open("rb") as file:
            head = file.read(8)
        if head != _hdf5.SIGNATURE:
            from convert.formats import npz

            return npz.read(path)
        found = Hdf5(path, WHAT)
        source = from_hdf5(path, found)
        if source is None:
            raise UnsupportedFormat(f"{path} is an HDF5 file and none of Chainer's: it has {', '.join(list(found.root)[:5]) or 'nothing'}")
        return source


def from_hdf5(path: Path, file: Hdf5) -> Source | None:
    """Take the arrays of an HDF5 file that has Chainer's names; None where it has others."""
    tensors = dict(_arrays(file.root))
    if not tensors or not _chainer.looks({name: stored.stored_shape for name, stored in tensors.items()}):
        return None
    source = _chainer.source(path, "chainer", tensors, {}, ())
    if not source.tensors:
        raise MalformedFile(f"{path} holds no tensors")
    source.close = file.close
    _guard.check(path, source.tensors.values(), path.stat().st_size)
    return source


def _arrays(root: Group) -> Iterator[tuple[str, Stored]]:
    """List the arrays of numbers in a group and those in it, in the file's order; links may lead round in circles, so they are counted."""
    left: list[tuple[str, Any]] = [("", root)]
    count = 0
    while left:
        place, found = left.pop()
        if (count := count + 1) > _guard.MAX_TENSORS:
            raise LimitExceeded(f"it has more than {_guard.MAX_TENSORS} groups and arrays")
        if isinstance(found, Group):
            if place.count("/") > DEEPEST:
                raise LimitExceeded(f"its groups nest deeper than {DEEPEST}")
            left += [(f"{place}/{name}" if place else name, found[name]) for name in reversed(list(found))]
        elif isinstance(found, Dataset):
            with suppress(UnsupportedFormat):  # it holds texts, or structures
                yield place, found.stored(place)
