"""A file for libraries that don't survive an error while they write: HDF5 crashes, PyTorch says something else."""

from __future__ import annotations

import io
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Outlet(io.RawIOBase):
    """Writes into a file until that fails, and takes the rest without a word; `error` says what happened.

    Args:
        file: open for reading and writing.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.error: OSError | None = None

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def writable(self) -> bool:
        """Say that it can be written."""
        return True

    def seekable(self) -> bool:
        """Say that it has places."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a byte."""
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        """Return the byte that is written next."""
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        """Read what was written before."""
        return self._file.readinto(buffer)

    def write(self, data: Any) -> int:
        """Write, or do as if."""
        view = memoryview(data).cast("B")
        self._tried(lambda: self._whole(view))
        if self.error is not None:
            self._file.seek(len(view), io.SEEK_CUR)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        """Set the length."""
        at = self.tell() if size is None else size
        self._tried(lambda: self._file.truncate(at))
        return at

    def _whole(self, view: memoryview) -> None:
        while view:
            view = view[self._file.write(view) :]

    def _tried(self, action: Callable[[], object]) -> None:
        if self.error is None:
            try:
                action()
            except OSError as error:
                self.error = error


@contextmanager
def outlet(path: Path) -> Generator[Outlet]:
    """Open a new file for such a library.

    Raises:
        OSError: it could not be written, whatever the library made of that.
    """
    with path.open("w+b", buffering=0) as file:
        made = Outlet(file)
        try:
            yield made
        except Exception:  # a library has its own word for what the system refused, whose error is told below
            if made.error is None:
                raise
        if made.error is not None:
            with suppress(OSError):
                file.truncate(0)
            raise OSError(made.error.errno, made.error.strerror, str(path)) from made.error
