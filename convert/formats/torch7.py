"""Torch7's .t7 and .th7, binary: Lua's objects one in the other, networks of `nn` and tables of tensors.

Kernels are OIHW and of cross-correlation, maps are flattened CHW, and modules are counted from 0, as PyTorch's own reader of these files
counted them. Functions are passed over; nothing of Lua's is run.
"""

from __future__ import annotations

from pathlib import Path

from convert import _guard
from convert.formats import _torch7_nn, _torch7_objects
from convert.formats._mapped import mapped
from convert.source import Source

SUFFIXES = (".t7", ".th7")
WRITES = False

TABLE, OBJECT = b"\3\0\0\0\1\0\0\0", b"\4\0\0\0\1\0\0\0"


def sniff(path: Path, head: bytes) -> bool:
    """Tell an object by its version, and a table by its first key, a number or a text."""
    if head.startswith(OBJECT):
        return head[8:14] == b"\3\0\0\0V " or path.suffix in SUFFIXES
    return head.startswith(TABLE) and head[12:16] in (b"\1\0\0\0", b"\2\0\0\0") and head[8:12] != b"\0\0\0\0"


def read(path: Path) -> Source:
    """Open a file of Torch7's.

    Raises:
        ConvertError: as `convert.formats.read`.
    """
    path = Path(path)
    with _guard.reading(path, "file of Torch7's"):
        data = mapped(path)
        return _torch7_nn.source(path, _torch7_objects.parse(data), len(data))
