"""Zip archives of weights: the directory within limits, members found in the file's own bytes, and unpacked into the room they need."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import Any

from weights.errors import LimitExceeded, MalformedFile

LAST, ENTRY = b"PK\5\6", b"PK\1\2"
"""How the record at the end begins, and each member's in the directory."""
LAST_BYTES, WIDER_BYTES, COMMENT_BYTES = 22, 76, 2**16
"""Of the record at the end, of what may stand before it in a large archive, and of the comment behind it at most."""
PIECE, PACKED = 2**20, 2**16
"""Bytes that are unpacked at a time, and given to zlib at a time: it holds what it returns twice for a moment, and copies what is left."""


def listed(data: memoryview, most: int) -> list[zipfile.ZipInfo]:
    """List an archive's members, after counting them: a member's entry takes twenty times its bytes.

    Raises:
        MalformedFile, LimitExceeded: it is no archive, or has more than `most` members.
    """
    tail = bytes(data[-LAST_BYTES - COMMENT_BYTES :])
    at = tail.rfind(LAST)
    if at >= 0 and len(tail) - at >= LAST_BYTES:
        end = len(data) - len(tail) + at
        size = min(struct.unpack_from("<I", tail, at + 12)[0], end)  # the largest says that the record before it has the size
        begin = max(0, end - size - WIDER_BYTES)
        pieces = (bytes(data[start : min(start + PIECE + len(ENTRY) - 1, end)]) for start in range(begin, end, PIECE))
        if sum(piece.count(ENTRY) for piece in pieces) > most:
            raise LimitExceeded(f"it is an archive of more than {most} files")
    try:
        with zipfile.ZipFile(io.BufferedReader(Window(data))) as archive:
            return archive.infolist()
    # What zipfile was seen to raise of damaged directories.
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError, struct.error, LookupError) as error:
        raise MalformedFile(f"it is cut short, or no zip archive: {error}") from error


def member(data: memoryview, info: zipfile.ZipInfo) -> memoryview:
    """Return a member's bytes, packed as they are: its own header stands where the directory says, and says how long it is.

    Raises:
        MalformedFile: it isn't there, is cut short or encrypted.
    """
    head = bytes(data[info.header_offset : info.header_offset + 30])
    if len(head) < 30 or head[:4] != b"PK\3\4":
        raise MalformedFile(f"member {info.filename!r:.100} is not at byte {info.header_offset}, where the archive's directory says")
    if info.flag_bits & 1:
        raise MalformedFile(f"member {info.filename!r:.100} is encrypted")
    name, extra = struct.unpack("<HH", head[26:])
    start = info.header_offset + 30 + name + extra
    found = data[start : start + info.compress_size]
    if len(found) != info.compress_size:
        raise MalformedFile(f"member {info.filename!r:.100} is cut short")
    return found


def contents(data: memoryview, info: zipfile.ZipInfo, most: int | None = None) -> memoryview:
    """Return what is in a member: a view where it is stored as it is, else unpacked into room of its size.

    Args:
        data: the archive.
        info: of the member, whose size was found acceptable.
        most: bytes that are wanted of its beginning; left out, all of them, and their checksum is compared.

    Raises:
        MalformedFile: it is damaged, has another size than the directory says, or is packed otherwise than by deflate.
    """
    raw = member(data, info)
    if info.compress_type == zipfile.ZIP_STORED:
        if len(raw) != info.file_size:
            raise MalformedFile(f"member {info.filename!r:.100} is cut short")
        return raw if most is None else raw[:most]
    if info.compress_type != zipfile.ZIP_DEFLATED:
        raise MalformedFile(f"member {info.filename!r:.100} is packed by method {info.compress_type}; stored and deflated ones are read")
    try:
        found = inflated(raw, info.file_size if most is None else min(most, info.file_size), -15, whole=most is None)
        if most is None and zlib.crc32(found) != info.CRC:
            raise MalformedFile(f"member {info.filename!r:.100} has another checksum than the archive's directory says")
    except (zlib.error, EOFError) as error:
        raise MalformedFile(f"member {info.filename!r:.100} can't be unpacked: {error}") from error
    return found


def inflated(raw: memoryview, size: int, window: int = 15, *, whole: bool = True) -> memoryview:
    """Unpack a stream of zlib's into room that is taken once.

    Args:
        raw: the stream.
        size: bytes that it unpacks to, or that are wanted of it.
        window: zlib's wbits; -15 for a stream without a header and checksum.
        whole: whether the stream must end there; its checksum is compared then.

    Raises:
        zlib.error: the stream is damaged.
        EOFError: it ends before, or goes on.
    """
    engine, at, taken = zlib.decompressobj(window), 0, 0
    room = memoryview(bytearray(size))
    left = b""
    while at < size or (whole and not engine.eof):
        if not left:
            left = bytes(raw[taken : taken + PACKED])
            taken += len(left)
        ended = not left
        piece = engine.decompress(left, min(PIECE, size - at) or 1)
        left = engine.unconsumed_tail
        if len(piece) > size - at:
            raise EOFError(f"it goes on behind {size} bytes")
        if (engine.eof and at + len(piece) < size) or (ended and not piece):
            raise EOFError(f"it ends after {at + len(piece)} of {size} bytes")
        room[at : at + len(piece)] = piece
        at += len(piece)
    return room.toreadonly()


class Window(io.RawIOBase):
    """Bytes as a file, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.at = data, 0

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def seekable(self) -> bool:
        """Say that it can be read anywhere."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte; OSError before the first."""
        self.at = offset + (0, self.at, len(self.data))[whence]
        if self.at < 0:
            raise OSError("before the beginning")
        return self.at

    def tell(self) -> int:
        """Return the byte that is read next."""
        return self.at

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer as far as the bytes go."""
        taken = self.data[self.at : self.at + len(buffer)]
        buffer[: len(taken)] = taken
        self.at += len(taken)
        return len(taken)
