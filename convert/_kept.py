"""A file that stays open, so that parts of it can be read or copied when they are asked for; nothing of it is mapped."""

from __future__ import annotations

import os
import threading
import weakref
from io import FileIO
from pathlib import Path

from weights.errors import ConvertError, MalformedFile

CHUNK = 1 << 20
"""Bytes that are copied at a time where the system doesn't copy from file to file itself."""
SETTLED_BYTES = 1 << 26
"""Bytes that are worth a call that puts them on the disk."""
SETTLING_S = 0.02
"""Between two looks at how much is written."""


class Kept:
    """An open file whose parts are read when they are asked for; dropped, it is closed.

    Attributes:
        close: closes it.
        size_bytes: of the file, when it was opened.
    """

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        self.close = weakref.finalize(self, os.close, fd)
        self._path = path
        self._file = open(fd, "rb", buffering=0, closefd=False)  # noqa: SIM115  `close` ends it
        self._turn = threading.Lock()
        status = os.fstat(fd)
        self.size_bytes = status.st_size
        self.identity = (status.st_dev, status.st_ino)

    def beginning(self, count: int) -> bytes:
        """Read so many bytes from the start, or as many as there are."""
        with self._turn:
            self._file.seek(0)
            return self._file.read(count) or b""

    def fill(self, memory: memoryview, start: int, name: str) -> None:
        """Read as much as there is room, from `start` of the file, of the tensor of this name.

        Raises:
            MalformedFile: the file ends before.
            ConvertError: it is closed.
        """
        done = 0
        with self._turn:
            self._alive()
            self._file.seek(start)
            while done < len(memory):
                if not (count := self._file.readinto(memory[done:])):
                    raise self._cut(name)
                done += count

    def pour(self, into: FileIO, start: int, count: int, name: str) -> None:
        """Copy a part to the end of another file, without memory of this process where the system can; errors as for `fill`."""
        with self._turn:
            self._alive()
            done = self._copied(into, start, count, name)
        chunk = memoryview(bytearray(min(CHUNK, count - done)))
        while done < count:
            part = chunk[: count - done]
            self.fill(part, start + done, name)
            write_all(into, part)
            done += len(part)

    def _copied(self, into: FileIO, start: int, count: int, name: str) -> int:
        """Let the system copy from file to file; returns how much it did before it refused."""
        done = 0
        while hasattr(os, "copy_file_range") and done < count:
            try:
                copied = os.copy_file_range(self._file.fileno(), into.fileno(), count - done, start + done)
            except OSError:  # of two disks, or of a kernel or a disk that has no such call; a full disk is told by the next write
                break
            if not copied:
                raise self._cut(name)
            done += copied
        return done

    def _alive(self) -> None:
        if not self.close.alive:
            raise ConvertError(f"{self._path} is closed; its tensors can't be read any more")

    def _cut(self, name: str) -> MalformedFile:
        what = f"the tensor {name!r}" if name else "its header"
        return MalformedFile(f"{self._path} was cut short while it was read, in {what}: is somebody writing it? Fetch it again")


class Settling:
    """Has a file that is being written put on its disk meanwhile, so that the end need not wait for all of it at once."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._written = threading.Event()
        self._error: OSError | None = None
        self._beside = threading.Thread(target=self._settle, name="zoo-settling", daemon=True)

    def __enter__(self) -> Settling:
        self._beside.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._written.set()
        self._beside.join()
        if self._error is not None and exception[0] is None:
            raise self._error  # a disk tells it once: who syncs the whole file would not hear it

    def _settle(self) -> None:
        done = 0
        try:
            while not self._written.wait(SETTLING_S):
                size = os.fstat(self._file.fileno()).st_size
                if size - done >= SETTLED_BYTES:
                    os.fsync(self._file.fileno())
                    done = size
        except OSError as error:
            self._error = error


def write_all(file: FileIO, content: memoryview) -> None:
    """Write all of some bytes: one call takes 2 GB at most."""
    while content:
        content = content[file.write(content) or 0 :]
