"""Files that appear whole or not at all: written beside their place, and moved there when all went well."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path, *, sync: bool = False, by: Path | None = None) -> Generator[Path]:
    """Give a path on the disk of `path` to write to. It becomes `path` when the body ends, and is deleted when the body fails.

    Args:
        path: the place of the file, in a folder that exists.
        sync: whether the bytes are on the disk before the file moves.
        by: the path to write to, where a killed process's is found again; left out, one beside `path`.

    Raises:
        OSError: the file can't be moved or put on the disk; `path` is as it was.

    Example:
        >>> with whole(Path("figures.json")) as unfinished:  # doctest: +SKIP
        ...     unfinished.write_text("{}")
    """
    unfinished = by or path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield unfinished
        if sync:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write_whole(path: Path, text: str, *, sync: bool = False, by: Path | None = None) -> None:
    """Write a text file in UTF-8, its lines as they are, whole or not at all; the rest and errors as for `whole`.

    Example:
        >>> write_whole(Path("figures.json"), "{}")  # doctest: +SKIP
    """
    with whole(path, sync=sync, by=by) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
