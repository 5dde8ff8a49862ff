"""What a disk says of a file while it is being written reaches who writes it."""

from __future__ import annotations

import errno
import os
import threading
from io import FileIO
from pathlib import Path

import pytest

from convert import _kept
from convert._kept import Settling


def written(path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Write a file onto a disk that fails meanwhile; `fails` says that the writer does, too."""
    asked = threading.Event()

    def broken(fd: int) -> None:
        asked.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(_kept, "SETTLED_BYTES", 1)
    monkeypatch.setattr(os, "fsync", broken)
    with FileIO(path, "w") as file, Settling(file):
        file.write(b"content")
        assert asked.wait(60)
        if fails:
            raise KeyError


@pytest.mark.parametrize(("fails", "error"), [(False, OSError), (True, KeyError)])
def test_an_error_of_the_disk_is_raised_at_the_end_and_the_writers_own_comes_first(
    fails: bool, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(error):
        written(tmp_path / "a", monkeypatch, fails)
