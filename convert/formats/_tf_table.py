"""Sorted string tables, TensorFlow's index files: blocks of keys with shared beginnings; and the checksum that guards them, CRC-32C."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from convert.formats import _wire
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

MAGIC = 0xDB4775248B80FB57
FOOTER_BYTES = 48
MAX_KEY_BYTES = 16_384
MAX_KEYS = 200_000
MAX_UNPACKED_BYTES = 64 * 2**20
"""Of compressed blocks in one table; an index of a thousand tensors has a tenth of a megabyte."""
CHECKED_AT_ONCE = 2**20
"""A larger block holds a tensor, and is checked when that is read."""

LANES, LANE_BYTES = 32_768, 512
POLYNOMIAL = 0x82F63B78


@dataclass(frozen=True, slots=True)
class Item:
    """A key and its value; `check` raises MalformedFile when the block that holds them is damaged."""

    key: bytes
    value: memoryview
    check: Callable[[], None]


def is_table(tail: bytes) -> bool:
    """Tell by its last 8 bytes whether a file is a table."""
    return len(tail) >= 8 and struct.unpack("<Q", tail[-8:])[0] == MAGIC


def items(data: memoryview) -> Iterator[Item]:
    """Read a table's keys and values in their order; the values are views.

    Raises:
        MalformedFile: it is cut off or damaged.
        LimitExceeded: it unpacks to more, or has more keys, than any checkpoint's.
        UnsupportedFormat: it is compressed in another way than Snappy's.
    """
    if len(data) < FOOTER_BYTES or not is_table(bytes(data[-8:])):
        raise MalformedFile("it does not end as a table does")
    footer = data[-FOOTER_BYTES:]
    _, at = _handle(footer, 0)
    index, _ = _handle(footer, at)
    spent, count = [0, 0], 0  # bytes of blocks, and of what compressed ones unpack to
    for entry in _entries(*_block(data, *index, spent)):
        handle, _ = _handle(entry.value, 0)
        for item in _entries(*_block(data, *handle, spent)):
            count += 1
            if count > MAX_KEYS:
                raise LimitExceeded(f"it has more than {MAX_KEYS} keys")
            yield item


def _handle(data: memoryview, at: int) -> tuple[tuple[int, int], int]:
    offset, at = _wire.varint(data, at)
    size, at = _wire.varint(data, at)
    return (offset, size), at


def _block(data: memoryview, offset: int, size: int, spent: list[int]) -> tuple[memoryview, Callable[[], None]]:
    """Find a block's bytes, and what checks them when they are read."""
    if offset + size + 5 > len(data):
        raise MalformedFile(f"a block of {size} bytes from {offset} reaches beyond its {len(data)} bytes")
    spent[0] += size
    if spent[0] > 2 * len(data):
        raise LimitExceeded("its blocks overlap")
    whole, compression = data[offset : offset + size + 1], data[offset + size]
    (expected,) = struct.unpack("<I", data[offset + size + 1 : offset + size + 5])

    def check() -> None:
        if masked(crc32c(whole)) != expected:
            raise MalformedFile(f"the block at {offset} is damaged: its checksum differs")

    if size <= CHECKED_AT_ONCE or compression:
        check()
    if compression == 0:
        return whole[:-1], check if size > CHECKED_AT_ONCE else lambda: None
    if compression != 1:
        raise UnsupportedFormat(f"its blocks are compressed in way {compression}; Snappy (1) and none (0) are read")
    unpacked = snappy(whole[:-1], MAX_UNPACKED_BYTES - spent[1])
    spent[1] += len(unpacked)
    return memoryview(unpacked), lambda: None


def _entries(data: memoryview, check: Callable[[], None]) -> Iterator[Item]:
    if len(data) < 4:
        raise MalformedFile("a block is cut off")
    (restarts,) = struct.unpack("<I", data[-4:])
    end = len(data) - 4 - 4 * restarts
    if end < 0:
        raise MalformedFile(f"a block of {len(data)} bytes claims {restarts} restarts")
    at, key = 0, b""
    while at < end:
        shared, at = _wire.varint(data, at)
        added, at = _wire.varint(data, at)
        length, at = _wire.varint(data, at)
        if shared > len(key) or at + added + length > end:
            raise MalformedFile("an entry reaches beyond its block")
        if shared + added > MAX_KEY_BYTES:
            raise LimitExceeded(f"a key of {shared + added} bytes; at most {MAX_KEY_BYTES} are read")
        key = key[:shared] + bytes(data[at : at + added])
        at += added
        yield Item(key, data[at : at + length], check)
        at += length


def snappy(data: memoryview, limit: int) -> bytes:
    """Unpack Snappy's raw format to at most `limit` bytes.

    Raises:
        MalformedFile, LimitExceeded: it is damaged, or unpacks to more.
    """
    size, at = _wire.varint(data, 0)
    if size > limit:
        raise LimitExceeded(f"a compressed block unpacks to {size} bytes; {limit} are left")
    out = bytearray()
    while at < len(data):
        tag = data[at]
        at += 1
        kind = tag & 3
        if kind == 0:
            length = (tag >> 2) + 1
            if length > 60:
                more = length - 60
                length = int.from_bytes(data[at : at + more], "little") + 1
                at += more
            if at + length > len(data) or len(out) + length > size:
                raise MalformedFile("a compressed block is damaged")
            out += data[at : at + length]
            at += length
            continue
        width = (1, 2, 4)[kind - 1]
        if at + width > len(data):
            raise MalformedFile("a compressed block is cut off")
        offset = int.from_bytes(data[at : at + width], "little")
        at += width
        if kind == 1:
            length, offset = (tag >> 2 & 7) + 4, offset | tag >> 5 << 8
        else:
            length = (tag >> 2) + 1
        if not 0 < offset <= len(out) or len(out) + length > size:
            raise MalformedFile("a compressed block is damaged")
        begin = len(out) - offset
        piece = bytes(out[begin : begin + length])
        while len(piece) < length:  # a copy may reach into what it writes itself
            piece += piece[: length - len(piece)]
        out += piece
    if len(out) != size:
        raise MalformedFile(f"a compressed block unpacks to {len(out)} bytes, not to {size}")
    return bytes(out)


def masked(crc: int) -> int:
    """Turn a checksum into what is stored: checksums of checksums would be weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: memoryview | bytes, crc: int = 0) -> int:
    """Compute the CRC-32C of bytes, behind others whose checksum is `crc`.

    Long data is computed in lanes side by side, whose remainders are then joined: half a gigabyte a second without a library.
    """
    view = memoryview(data)
    state = crc ^ 0xFFFFFFFF
    while len(view) >= 8 * LANE_BYTES:
        lanes = min(LANES, 1 << (len(view) // LANE_BYTES).bit_length() - 1)
        lane = lanes * LANE_BYTES
        words = np.ascontiguousarray(np.frombuffer(view[:lane], "<u2").reshape(lanes, -1).T)
        remainders, found, place = np.zeros(lanes, np.uint32), np.empty(lanes, np.uint32), np.empty(lanes, np.uint16)
        for row in words:
            np.bitwise_xor(remainders.astype(np.uint16), row, out=place)
            _words().take(place, out=found, mode="wrap")
            remainders >>= np.uint32(16)
            remainders ^= found
        power = LANE_BYTES.bit_length() - 1
        while len(remainders) > 1:
            remainders = _moved(remainders[::2], power) ^ remainders[1::2]
            power += 1
        state = int(_moved(np.array([state], np.uint32), power)[0] ^ remainders[0])
        view = view[lane:]
    table = _bytes_list()
    for byte in view.tobytes():
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


@cache
def _bytes_list() -> list[int]:
    table: list[int] = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


@cache
def _words() -> np.ndarray:
    table = np.array(_bytes_list(), np.uint32)
    values = np.arange(65536, dtype=np.uint32)
    for _ in range(2):
        values = table[values & 0xFF] ^ values >> np.uint32(8)
    return values


@cache
def _mover(power: int) -> tuple[np.ndarray, ...]:
    """Tables, one for each byte of a remainder, of what it becomes when 2 ** power zero bytes follow."""
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    byte_by_byte = np.array(_bytes_list(), np.uint32)[bits & 0xFF] ^ bits >> np.uint32(8)
    images = _moved(_moved(bits, power - 1), power - 1) if power else byte_by_byte
    values = np.arange(256, dtype=np.uint32)
    tables: list[np.ndarray] = []
    for byte in range(4):
        table = np.zeros(256, np.uint32)
        for bit in range(8):
            table ^= np.where(values >> np.uint32(bit) & 1, images[8 * byte + bit], np.uint32(0))
        tables.append(table)
    return tuple(tables)


def _moved(remainders: np.ndarray, power: int) -> np.ndarray:
    moved = np.zeros_like(remainders)
    for byte, table in enumerate(_mover(power)):
        moved ^= table[remainders >> np.uint32(8 * byte) & 0xFF]
    return moved
