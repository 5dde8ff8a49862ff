"""What a Parquet file takes in memory, known before a library makes room for it: its pages' own headers say how long they are.

A dictionary of one long value and a million references to it, pages that unpack a thousandfold, and values that repeat their
neighbours' beginnings make gigabytes of kilobytes, and the file's own totals may lie.

Source:
    Parquet's format, https://github.com/apache/parquet-format; Thrift's compact protocol
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

SPARE_BYTES = 48 << 20
"""That a column of a small file may unpack to, beside the file's own size."""
ROW_BYTES, SPARE_ROWS = 150, 1_000_000
"""That a row costs, its name and label; and the rows that a small file may have, beside those that twice its size explains."""
DELTA_BYTE_ARRAY = 7
"""The encoding in which a value repeats the beginning of the one before."""
FOOTER_BYTES = 64 << 20
DEPTH = 16
DATA, DICTIONARY, DATA_2 = 5, 7, 8
"""Fields of a page's header that say what it holds."""


class Page(NamedTuple):
    """A page: bytes unpacked, values, and how they are encoded."""

    size: int
    values: int
    encoding: int


class Group(NamedTuple):
    """A row group: its rows, and the first byte and size of each column that holds values, by its path."""

    rows: int
    columns: dict[str, tuple[int, int]]


class TooMuch(ValueError):
    """A file would take more memory than its size explains."""


class Held(io.RawIOBase):
    """A file of which one range was read already, and is not read again.

    Args:
        file: open for reading.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._at, self._start, self._data = file, 0, 0, b""
        self.size = file.seek(0, io.SEEK_END)

    def hold(self, start: int, size: int) -> bytes:
        """Read a range, and keep it instead of the one before."""
        self._file.seek(start)
        self._start, self._data = start, self._file.read(size)
        return self._data

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        self._at = max(0, offset + (0, self._at, self.size)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read from what is held, or else from the file."""
        size = max(0, self.size - self._at) if size is None or size < 0 else size
        begin = self._at - self._start
        if begin >= 0 and begin + size <= len(self._data):
            found = self._data[begin : begin + size]
        else:
            self._file.seek(self._at)
            found = self._file.read(size)
        self._at += len(found)
        return found


def limits(file: IO[bytes]) -> dict[str, int]:
    """Return what Arrow is told of the longest list and text of a file's footer: an element takes four bytes, and text its own."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - 8))
    tail = file.read(8)
    footer = min(struct.unpack("<I", tail[:4])[0], size) if len(tail) == 8 else size
    file.seek(0)
    return {"thrift_string_size_limit": max(1000, footer), "thrift_container_size_limit": max(1000, min(footer // 4, 1_000_000))}


def check_rows(count: int, size: int, what: str) -> None:
    """Refuse more rows than a file of that size can have images for; TooMuch says so."""
    if count < 0 or count > 2 * size // ROW_BYTES + SPARE_ROWS:
        raise TooMuch(f"{what} has {size:,} bytes and claims {count:,} rows; it is damaged, or no file of images")


def groups(file: Held, what: str) -> list[Group]:
    """Read from a file's footer where its columns are. pyarrow ends the process where it reads the statistics of some damaged ones.

    Raises:
        ValueError: the footer is damaged, or longer than any.
    """
    file.seek(max(0, file.size - 8))
    tail = file.read(8)
    length = struct.unpack("<I", tail[:4])[0] if len(tail) == 8 else 0
    if tail[4:] != b"PAR1" or length + 8 > file.size or length > FOOTER_BYTES:
        raise ValueError(f"{what} can't be read as Parquet: it has no footer of at most {FOOTER_BYTES:,} bytes; get it again")
    file.seek(file.size - 8 - length)
    data = file.read(length)
    try:
        return [_group(one) for one in _struct(data, 0, 0)[0][4]]
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{what} can't be read as Parquet: its footer is damaged; get it again") from error


def _group(told: dict[int, Any]) -> Group:
    columns: dict[str, tuple[int, int]] = {}
    for chunk in told[1]:
        column = chunk[3]
        start, first = column[9], column.get(11, 0)
        if not all(type(number) is int and number >= 0 for number in (start, first, column[7])):
            raise ValueError("a column is nowhere")
        columns[".".join(bytes(name).decode() for name in column[3])] = (min(start, first) if first else start, column[7])
    if type(told[3]) is not int or told[3] < 0:
        raise ValueError("a row group has no number of rows")
    return Group(told[3], columns)


def check_column(file: Held, place: tuple[int, int], column: str, what: str) -> None:
    """Refuse a column of a row group that takes more memory than its file explains; what was read of it is held.

    Args:
        file: the Parquet file.
        place: of the column in it: its first byte, and its size.
        column: its name, for the message.
        what: the file's name, for the message.

    Raises:
        TooMuch: its pages unpack, or its values add up, to more than the file's size and `SPARE_BYTES`.
        ValueError: they can't be read.
    """
    start, length = place
    if start + length > file.size:
        raise ValueError(f"{what} is cut off: a column ends behind the file's {file.size:,} bytes; get it again")
    room = file.size + SPARE_BYTES
    left, rows = room, 2 * file.size // ROW_BYTES + SPARE_ROWS
    for page in pages(file.hold(start, length)):
        if page.encoding == DELTA_BYTE_ARRAY:
            left -= page.size * page.values
        left -= page.size
        rows -= page.values
        if left < 0 or rows < 0:
            kind = "unpacks" if rows >= 0 else "has more values than rows can have, or unpacks"
            raise TooMuch(
                f"{what} has {file.size:,} bytes, and its column {column} {kind} to more than {room:,}; "
                "it is damaged or hostile. Write it anew, in Parquet's plain encoding, if you trust it"
            )


def pages(data: bytes) -> Iterator[Page]:
    """Go through the pages of a column, by their headers.

    Raises:
        ValueError: a header can't be read, or a page ends behind the data.
    """
    at = 0
    while at < len(data):
        try:
            header, at = _struct(data, at, 0)
            told = next((header[field] for field in (DATA, DICTIONARY, DATA_2) if field in header), {})
            size, packed = header[2], header[3]
            page = Page(size, told.get(1, 0), told.get(4 if DATA_2 in header else 2, 0))
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the header of a page at byte {at} is damaged") from error
        if not all(type(number) is int and number >= 0 for number in (*page, packed)) or at + packed > len(data):
            raise ValueError(f"a page at byte {at} is damaged")
        at += packed
        yield page


def _number(data: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while shift < 64:
        byte = data[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
        shift += 7
    raise LookupError("a number of more than 64 bits")


def _struct(data: bytes, at: int, depth: int) -> tuple[dict[int, Any], int]:
    """Read a struct of Thrift's compact protocol: values by the numbers of their fields; maps and fractions are passed over."""
    if depth > DEPTH:
        raise LookupError("structs in structs")
    found: dict[int, Any] = {}
    field = 0
    while kind := data[at]:
        at += 1
        if kind >> 4:
            field += kind >> 4
        else:
            zigzag, at = _number(data, at)
            field = (zigzag >> 1) ^ -(zigzag & 1)
        found[field], at = _value(data, at, kind & 15, depth)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    match kind:
        case 1 | 2:  # true and false, which are their type
            return kind == 1, at
        case 3:
            return None, at + 1
        case 4 | 5 | 6:
            zigzag, at = _number(data, at)
            return (zigzag >> 1) ^ -(zigzag & 1), at
        case 7:
            return None, at + 8
        case 8:
            size, at = _number(data, at)
            return data[at : at + size], at + size
        case 9 | 10:
            count, inner = data[at] >> 4, data[at] & 15
            at += 1
            if count == 15:
                count, at = _number(data, at)
            if count > len(data) - at:  # an element takes a byte at least, but for structs of nothing, of which there are none
                raise LookupError("a list that is longer than the file")
            found: list[Any] = []
            for _ in range(count):
                value, at = (None, at + 1) if inner in (1, 2) else _value(data, at, inner, depth + 1)
                found.append(value)
            return found, at
        case 12:
            return _struct(data, at, depth + 1)
        case _:
            raise LookupError(f"a field of type {kind}")
