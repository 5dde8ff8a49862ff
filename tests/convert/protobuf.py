"""Protocol Buffers, written: fields as (number, value) pairs; for files of formats whose libraries are not here."""

from __future__ import annotations

import struct
from typing import Any


def varint(value: int) -> bytes:
    """Write a whole number; a negative one in two's complement of 64 bits."""
    value &= 2**64 - 1
    parts: list[int] = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def packed(*values: int) -> bytes:
    """Write a list of whole numbers without their fields."""
    return b"".join(varint(value) for value in values)


def message(*fields: tuple[int, Any]) -> bytes:
    """Write whole numbers, floats, texts, bytes and messages, which are bytes already."""
    parts: list[bytes] = []
    for number, value in fields:
        if isinstance(value, bool | int):
            parts.append(varint(number << 3) + varint(int(value)))
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        else:
            content = value.encode() if isinstance(value, str) else bytes(value)
            parts.append(varint(number << 3 | 2) + varint(len(content)) + content)
    return b"".join(parts)
