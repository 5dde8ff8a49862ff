"""Files that appear whole or not at all: written beside their place, and moved there when all went well."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Generator
from pathlib import Path

from weights.errors import NoSpace, WeightsError
from weights.part import FULL, OWNER, free_bytes, lives, owner

MOST_NAME = 120
"""Characters of a file's name that its unfinished one begins with."""


@contextlib.contextmanager
def whole(path: Path, *, sync: bool = False, by: Path | None = None) -> Generator[Path]:
    """Give a path on the disk of `path` to write to. It becomes `path` when the body ends, and is deleted when the body fails.

    What processes left that were killed meanwhile is deleted by the next call for the same file.

    Args:
        path: the place of the file, in a folder that exists.
        sync: whether the bytes are on the disk before the file moves.
        by: the path to write to, where a killed process's is found again; left out, one beside `path`.

    Raises:
        NoSpace: the disk is full.
        OSError: the file can't be moved or put on the disk, and names it; `path` is as it was.

    Example:
        >>> with whole(Path("figures.json")) as unfinished:  # doctest: +SKIP
        ...     unfinished.write_text("{}")
    """
    unfinished = by or beside(path)
    try:
        with room(path, unfinished):
            yield unfinished
            if sync:
                sync_file(unfinished)
            unfinished.replace(path)
            if sync:
                sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def room(path: Path, unfinished: Path | None = None, needs: int | None = None) -> Generator[None]:
    """Say of a disk that fills up which file it was for, what that needs and what is free; other errors name the file at least.

    Args:
        path: what is being written, a file or a folder, for the message.
        unfinished: where it is written first, which tells what it needs at least.
        needs: bytes that it takes, where that is known.

    Raises:
        NoSpace: the body failed because the disk is full, also where a library said so in an error of its own.
        OSError: whatever else the system refused, with the path.
    """
    try:
        yield
    except (WeightsError, MemoryError):
        raise
    except Exception as error:
        if is_full(error):
            raise full(path, unfinished, needs, error) from error
        if isinstance(error, OSError) and error.errno is not None and error.filename in (None, str(unfinished), unfinished):
            said = error.strerror or "it can't be written"
            if error.errno == errno.ENOENT and not path.parent.exists():
                said = f"there is no folder '{path.parent}'; make it first"
            raise OSError(error.errno, said, str(path)) from error
        raise


def is_full(error: BaseException) -> bool:
    """Tell an error that a full disk causes; libraries in other languages only quote the system's words."""
    if isinstance(error, OSError):
        return error.errno in FULL
    return any(os.strerror(number) in str(error) for number in FULL)


def full(path: Path, unfinished: Path | None, needs: int | None, error: BaseException) -> NoSpace:
    """Make the error of a full disk."""
    place, written = path.parent, 0
    with contextlib.suppress(OSError):
        written = unfinished.stat().st_size if unfinished is not None else 0
    wants = f"'{path}' needs {needs:,} bytes" if needs else f"'{path}' needs more than the {written:,} bytes that were written"
    said = error.strerror if isinstance(error, OSError) and error.strerror else os.strerror(errno.ENOSPC)
    return NoSpace(
        f"the disk of {place} is full ({said}): {wants}, {free_bytes(place)} are free. "
        "Free some, or write elsewhere. Nothing half-written was kept; what was there before is as it was."
    )


def beside(path: Path) -> Path:
    """Name an unfinished file or folder beside `path` by this process, and delete those of processes that are dead."""
    start = f".{path.name}." if len(os.fsencode(path.name)) <= MOST_NAME else f".{hashlib.sha256(os.fsencode(path.name)).hexdigest()}."
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            told = re.fullmatch(OWNER, entry.name.removeprefix(start)) if entry.name.startswith(start) else None
            if told and not lives(Path(entry.path), told):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    Path(entry.path).unlink(missing_ok=True)
    return path.with_name(f"{start}{owner()}")


def sync_file(path: Path) -> None:
    """Put a file's bytes on the disk; OSError names it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk, where the system can."""
    with contextlib.suppress(OSError):  # Windows can't, and some network disks won't
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_whole(path: Path, text: str, *, sync: bool = False, by: Path | None = None) -> None:
    """Write a text file in UTF-8, its lines as they are, whole or not at all; the rest and errors as for `whole`.

    Example:
        >>> write_whole(Path("figures.json"), "{}")  # doctest: +SKIP
    """
    with whole(path, sync=sync, by=by) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
