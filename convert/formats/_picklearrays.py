"""What the records of a pickle say of arrays: a dtype, a shape and bytes, as NumPy of any time wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert._guard import MAX_RANK
from convert.formats._mapped import stored
from convert.kinds import is_tuple, is_view
from weights.errors import MalformedFile

SHORT_BYTES = 1024
"""Strings up to this length are words; longer ones are contents of arrays."""


@dataclass(slots=True, eq=False)
class Name:
    """A class or function that a pickle names."""

    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}.{self.attribute}"


@dataclass(slots=True, eq=False)
class Call:
    """What a pickle would call or make: by what, of which arguments, with which state, and what is put into it."""

    what: Any
    arguments: Any
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict[Any, Any])
    elements: list[Any] = field(default_factory=list[Any])


def is_array(record: Call) -> bool:
    """Tell the record of an array: made empty, its state is the array."""
    return isinstance(record.what, Name) and record.what.attribute == "_reconstruct"


def encoded(arguments: tuple[Any, ...]) -> Any:
    """Read bytes that Python 3 wrote for Python 2: text, each letter a byte."""
    text = arguments[0] if arguments else ""
    if is_view(text):
        text = str(text, "utf-8")
    if not isinstance(text, str):
        raise MalformedFile("bytes are encoded from what is no text")
    data = text.encode("latin-1")
    return data if len(data) <= SHORT_BYTES else memoryview(data)


def dtype_of(record: Any) -> np.dtype[Any] | None:
    """Read the record of a dtype: its code, and the byte order in its state; None if it is none of numbers."""
    if not isinstance(record, Call) or str(record.what) != "numpy.dtype" or not is_tuple(record.arguments) or not record.arguments:
        return None
    code = record.arguments[0]
    code = code.decode("latin-1") if isinstance(code, bytes) else code
    if not isinstance(code, str) or not re.fullmatch(r"[fiub]\d{1,2}", code):
        return None
    order = record.state[1] if is_tuple(record.state) and len(record.state) > 1 else "<"
    order = order.decode("latin-1") if isinstance(order, bytes) else order
    return np.dtype((order if order in ("<", ">") else "<") + code)


def _shape(value: Any) -> tuple[int, ...] | None:
    if is_tuple(value) and len(value) <= MAX_RANK and all(type(dim) is int and dim >= 0 for dim in value):
        return value
    return None


def filled(data: Any, dtype: Any, shape: Any, order: str, origin: str) -> Any:
    """Describe the array of these bytes; None if the records say nothing of the kind."""
    described, dims = dtype_of(dtype), _shape(shape)
    if described is None or dims is None:
        return None
    if isinstance(data, str):  # a short string of Python 2
        data = data.encode("latin-1")
    if not isinstance(data, bytes) and not is_view(data):
        return None
    return stored(origin, memoryview(data), described, dims, order)


def from_buffer(arguments: Any, origin: str) -> Any:
    """Describe the array that protocol 5 makes of a buffer."""
    if not is_tuple(arguments) or len(arguments) != 4:
        raise MalformedFile(f"{origin}: an array of a buffer needs four arguments")
    data, dtype, shape, order = arguments
    return filled(data, dtype, shape, "F" if order == "F" else "C", "array")


def scalar(arguments: Any) -> Any:
    """Read one number of NumPy's."""
    match arguments:
        case (dtype, bytes() | str() as data) if (described := dtype_of(dtype)) is not None:
            raw = data.encode("latin-1") if isinstance(data, str) else data
            return np.frombuffer(raw, described)[0].item() if len(raw) == described.itemsize else None
        case _:
            return None
