"""Regular files only: what else may lie where a file should, a pipe or a device, is never read, and never waited for."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def open_regular(path: Path, follow: bool = False) -> int:
    """Open a regular file for reading; a pipe does not block us, and no link is followed unless `follow`.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    fd = os.open(path, flags | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "It is no regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Read a regular file whole, through links; raises as `open_regular` does."""
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        return file.read()
