"""A tar that can be written in one way only, so that reading it is a comparison and never an interpretation.

Every header is the one that `header(name, size)` makes: a plain file, mode 0644, no owner, no time, no link, no extension. Names are ours,
the reader knows each before it comes; nothing that stands in the archive ever becomes a path.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from weights.errors import (
    CacheNotWritable,
    CorruptCache,
    HashMismatch,
    MalformedFile,
    SizeMismatch,
    SourceUnavailable,
    WeightsError,
)
from weights.whole import room, whole

BLOCK = 512
CHUNK = 1 << 20
LARGEST = 8**11 - 1
"""Bytes of one member that the header's eleven octal digits can say, 8 GiB."""
KINDS = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a folder",
    b"6": "a pipe",
    b"x": "an extended header",
    b"g": "an extended header",
    b"L": "a GNU long name",
    b"K": "a GNU long link",
    b"S": "a sparse file",
}
Progress = Callable[[int, "int | None"], None]


def header(name: str, size: int) -> bytes:
    """Make the POSIX header of a plain file.

    Raises:
        ValueError: the name is not 1 to 100 plain characters, or the size does not fit.
    """
    encoded = name.encode("ascii")
    if not 0 < len(encoded) <= 100 or not 0 <= size <= LARGEST:
        raise ValueError(f"a member has a name of 1 to 100 characters and at most {LARGEST:,} bytes, not {name!r} with {size:,}")
    fields = [encoded.ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0", b"%011o\0" % size, b"%011o\0" % 0]
    tail = b"0" + bytes(100) + b"ustar\x0000" + bytes(32 + 32 + 8 + 8 + 155 + 12)
    checksum = sum(b"".join(fields)) + 8 * ord(" ") + sum(tail)
    return b"".join([*fields, b"%06o\0 " % checksum, tail])


def padding(size: int) -> int:
    """Count the zeros behind a member of this size."""
    return -size % BLOCK


def length(sizes: Iterable[int]) -> int:
    """Count the bytes of an archive whose members have these sizes."""
    return sum(BLOCK + size + padding(size) for size in sizes) + 2 * BLOCK


@contextlib.contextmanager
def atomic(path: Path, needs: int | None = None) -> Generator[IO[bytes]]:
    """Open a temporary file beside `path` that takes its place when all went well, and is gone when anything did not.

    Args:
        path: the file.
        needs: bytes that it takes, for the message where the disk is full.

    Raises:
        NoSpace, CacheNotWritable: the folder can't take it.
    """
    try:
        with whole(path, sync=True) as temporary, room(path, temporary, needs), temporary.open("xb") as file:
            yield file
    except WeightsError:
        raise
    except OSError as error:
        raise CacheNotWritable(f"{path} can't be written ({error.strerror or error}): name a place that can.") from error


class Writer:
    """Writes members one after the other, each proven while it passes; nothing is held in memory but one piece.

    Args:
        file: open for writing.
        total: bytes of the whole archive, for the progress.
        progress: called with (bytes done, bytes in total).
    """

    def __init__(self, file: IO[bytes], total: int, progress: Progress) -> None:
        self._file, self._total, self._progress = file, total, progress
        self._done = 0

    def _write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._done += len(data)
        self._progress(self._done, self._total)

    def small(self, name: str, data: bytes) -> None:
        self._write(header(name, len(data)) + data + bytes(padding(len(data))))

    def large(self, name: str, path: Path, size: int, sha256: str) -> None:
        """Write a member from its file.

        Raises:
            HashMismatch: the file is not what it was.
            CorruptCache: it can't be read.
        """
        hasher, left = hashlib.sha256(), size
        self._write(header(name, size))
        for data in _pieces(path, size):
            hasher.update(data)
            left -= len(data)
            self._write(data)
        if left or hasher.hexdigest() != sha256:
            raise HashMismatch(
                f"{path}: expected {size:,} bytes with sha256 {sha256}, and it changed: zoo verify moves it aside. Try again then."
            )
        self._write(bytes(padding(size)))

    def end(self) -> None:
        """Write what ends an archive."""
        self._write(bytes(2 * BLOCK))


class Reader:
    """Reads members of which the caller knows name, size and hash, and refuses everything else.

    Args:
        file: a regular file, open for reading without a buffer.
        place: what to call it in messages.
        progress: called with (bytes done, bytes in total).

    Attributes:
        size: bytes of the archive.
        sha256: of all bytes read so far; of the archive after `end`.
    """

    def __init__(self, file: IO[bytes], place: str, progress: Progress) -> None:
        self._file, self._place, self._progress = file, place, progress
        self.size = os.fstat(file.fileno()).st_size
        self._hash = hashlib.sha256()
        self._done = 0

    @property
    def sha256(self) -> str:
        """SHA-256 of everything read so far."""
        return self._hash.hexdigest()

    def _read(self, count: int, name: str) -> bytes:
        pieces: list[bytes] = []
        left = count
        try:
            while left and (data := self._file.read(left)):
                pieces.append(data)
                left -= len(data)
        except OSError as error:
            raise SourceUnavailable(f"{self._place} can't be read, in {name}: {error.strerror}.") from error
        whole = b"".join(pieces)
        if left:
            raise SizeMismatch(
                f"{self._place} is cut short: it ends in {name}, {left:,} bytes before the end of that piece. Copy it again."
            )
        self._hash.update(whole)
        self._done += len(whole)
        self._progress(self._done, self.size)
        return whole

    def first(self, name: str, limit: int) -> bytes:
        """Read the first member, whose size only its header knows.

        Raises:
            MalformedFile: it is another kind of file.
        """
        found, size = self._read(min(BLOCK, self.size), name), 0
        try:
            size = int(found[124:135], 8)
            same = found == header(name, size) and size <= limit
        except ValueError:
            same = False
        if not same:
            raise MalformedFile(f"{self._place} is no bundle of kernelzoo{_other(found)}: it begins with something else than {name}.")
        data = self._read(size, name)
        self._zeros(padding(size), f"the end of {name}")
        return data

    def member(self, name: str, size: int) -> Iterator[bytes]:
        """Read a member piece by piece.

        Raises:
            MalformedFile: another member stands there, or it is not as it was written.
            SizeMismatch: the archive ends here.
        """
        found = self._read(BLOCK, name)
        if found != header(name, size):
            raise MalformedFile(
                f"{self._place}: expected the plain file {name} with {size:,} bytes, got {_described(found)}. It was changed."
            )
        for start in range(0, size, CHUNK):
            yield self._read(min(CHUNK, size - start), name)
        self._zeros(padding(size), f"the end of {name}")

    def small(self, name: str, size: int, sha256: str) -> bytes:
        """Read a member into memory and prove it.

        Raises:
            HashMismatch: its bytes were changed.
            MalformedFile, SizeMismatch: as `member`.
        """
        data = b"".join(self.member(name, size))
        check(self._place, name, sha256, hashlib.sha256(data).hexdigest())
        return data

    def end(self) -> None:
        """See that nothing follows.

        Raises:
            MalformedFile: something does.
        """
        self._zeros(2 * BLOCK, "the end of the archive")
        if self._file.read(1):
            raise MalformedFile(f"{self._place} has more behind its end. It was changed.")

    def _zeros(self, count: int, where: str) -> None:
        if (found := self._read(count, where)).count(0) != count:
            raise MalformedFile(f"{self._place}: expected zeros at {where}, got {_described(found)}. It was changed.")


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Read a file of our own, up to one byte more than it should have."""
    try:
        with path.open("rb", buffering=0) as file:
            left = size + 1
            while left and (data := file.read(min(CHUNK, left))):
                left -= len(data)
                yield data
    except OSError as error:
        raise CorruptCache(f"{path} can't be read: {error.strerror}.") from error


def check(place: str, name: str, wanted: str, found: str) -> None:
    """Compare hashes of a member; HashMismatch if they differ."""
    if found != wanted:
        raise HashMismatch(f"{place}: {name} was changed: expected sha256 {wanted}, got {found}. Nothing was installed.")


def _described(block: bytes) -> str:
    """Say what a header claims, for a message; nothing else is ever made of it."""
    if block[257:262] != b"ustar":
        return "bytes that are no header"
    name: Any = block[:100].split(b"\0")[0].decode("utf-8", "replace")
    kind = KINDS.get(block[156:157])
    if kind:
        return f"{name!r}, {kind}"
    with contextlib.suppress(ValueError):
        return f"{name!r} with {int(block[124:135], 8):,} bytes, or with an owner, a time or a mode"
    return f"{name!r} of a strange size"


def _other(block: bytes) -> str:
    for sign, what in ((b"\x1f\x8b", "gzip"), (b"\xfd7zXZ", "xz"), (b"BZh", "bzip2"), (b"(\xb5/\xfd", "zstd"), (b"PK", "zip")):
        if block.startswith(sign):
            return f" but {what}; unpack it first"
    return ""
