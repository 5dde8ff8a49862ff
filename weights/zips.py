"""One file in a zip: found by its path, bounded before it is unpacked, and unpacked piece by piece. Nothing else of the zip is read."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import IO

from weights import patience
from weights.errors import MalformedFile, SizeMismatch, SourceUnavailable

MOST_UNPACKED = 100
"""How many times its packed size a file may have: weights hardly shrink, so what unpacks to more is made to fill a disk."""


@contextlib.contextmanager
def opened(source: str, what: str, file: Path | IO[bytes]) -> Generator[zipfile.ZipFile]:
    """Open a zip, and turn what the standard library raises at a damaged, encrypted or strangely packed one into an error of the file.

    Args:
        source: whose it is, for the messages.
        what: it is, "the zip" for example.
        file: to read, or its path.

    Raises:
        MalformedFile: it is damaged, or packed in a way that is not read.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError, UnicodeDecodeError, RuntimeError) as error:
        raise MalformedFile(f"{source}: {what} is damaged ({error}). Nothing was installed.") from error


class Packed:
    """One file in an open zip.

    Args:
        source: whose it is, for the messages.
        what: the zip is, "the wheel" for example.
        archive: as `opened` gives it.
        path: in the zip.

    Attributes:
        what: as it was given.
        size_bytes: unpacked, as the zip states it.
        sha256: that the zip itself states of it.

    Raises:
        SourceUnavailable: the zip has no file of this path, or two.
        SizeMismatch: it unpacks to more than is accepted.
    """

    def __init__(self, source: str, what: str, archive: zipfile.ZipFile, path: str) -> None:
        self._source, self.what, self._archive = source, what, archive
        infos = [info for info in archive.infolist() if info.filename == path]
        if len(infos) != 1:
            near = [info.filename for info in archive.infolist() if info.filename.endswith(Path(path).suffix or "/")]
            has = f" It has {', '.join(near[:5])}." if near else ""
            raise SourceUnavailable(f"{source}: {what} has {'no' if not infos else 'more than one'} {path}.{has}")
        self._info = infos[0]
        self.size_bytes = self._info.file_size
        self.sha256: str | None = None
        limit = min(patience.PATIENCE.most_bytes, MOST_UNPACKED * self._info.compress_size + (1 << 20))
        if self.size_bytes > limit:
            raise SizeMismatch(f"{source}: the file unpacks to {self.size_bytes:,} bytes, more than the {limit:,} that are accepted.")

    def chunks(self) -> Generator[bytes]:
        """Unpack piece by piece, never more than the zip's own list says."""
        done = 0
        with self._archive.open(self._info) as file:
            while data := file.read(1 << 20):
                done += len(data)
                if done > self.size_bytes:
                    more = f"more than the {self.size_bytes:,} bytes that {self.what} states"
                    raise SizeMismatch(f"{self._source}: {more}. Nothing was installed.")
                yield data
