"""Pickles of Theano and Lasagne: lists of arrays, the model zoo's dicts, nolearn's layers, shared variables; read as data, never run."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from convert._guard import reading
from convert.formats import _lasagne, _pickles
from convert.formats._mapped import mapped
from convert.formats._torchpickle import STREAM
from convert.source import Part, Source
from weights.errors import ConvertError, UnsupportedFormat

SUFFIXES = (".pkl", ".pickle")
WRITES = True
WEAK = True

BEGINNING = re.compile(
    rb"\x80[\x02-\x05]|\((lp?|dp?|i|c)\d*\s?|c(numpy|theano|copy_reg|copyreg|collections)\b|\]q?[\x00-\xff]?\(|\}q?[\x00-\xff]?\("
)


def sniff(path: Path, head: bytes) -> bool:
    """Tell a pickle by its first operations; PyTorch's own are told apart by their number."""
    del path
    return BEGINNING.match(head) is not None and not head.startswith(STREAM)


def read(path: Path) -> Source:
    """Open a pickle of arrays.

    Raises:
        UnsafeFormat: it names what no file of weights needs.
        MalformedFile, LimitExceeded: it is damaged, or holds no arrays.
        UnsupportedFormat: it is a file of PyTorch's.
    """
    with reading(path, "pickle"):
        buffer = mapped(path)
        if bytes(buffer[: len(STREAM)]) == STREAM:
            raise UnsupportedFormat(f"{path} is a file of PyTorch's; read it as pytorch")
        return _lasagne.from_pickle(path, "theano", _pickles.load(buffer, path), len(buffer))


def write(parts: Sequence[Part], path: Path, *, convention: str | None = None, metadata: Mapping[str, str]) -> None:
    """Write the list of Lasagne's `get_all_param_values`, protocol 2, as Python 2 and NumPy of its time read it.

    Args:
        parts: the modules in Lasagne's order.
        path: the file.
        convention: "convolution" writes flipped kernels, for Conv2DLayer; else they are for Conv2DDNNLayer, as the model zoo's are.
        metadata: not kept: a list has no place for it.
    """
    del metadata
    with path.open("wb") as file:
        file.write(b"\x80\x02](")
        for tensor in _lasagne.listed(parts, convention):
            _put(file, np.ascontiguousarray(tensor.array()).reshape(tensor.shape))
        file.write(b"e.")


def _put(file: BinaryIO, array: np.ndarray) -> None:
    """Write the operations that make an array: an empty one, which then gets its state."""
    if array.dtype.type.__module__ != "numpy":
        raise ConvertError(f"Theano has no {array.dtype.name}: cast to float32 first")
    if array.nbytes >= 2**31:
        raise ConvertError(f"an array of {array.nbytes} bytes does not fit into a pickle of protocol 2")
    code = array.dtype.newbyteorder("<").str
    file.write(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01(")
    file.write(b"".join(b"J" + struct.pack("<i", dim) for dim in array.shape) + b"t")
    file.write(b"cnumpy\ndtype\nU" + _short(code[1:]) + b"K\x00K\x01\x87R(K\x03U" + _short("|" if code[0] == "|" else "<"))
    file.write(b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", array.nbytes))
    file.write(array.astype(code, copy=False).reshape(-1).view(np.uint8).data)
    file.write(b"tb")


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")
