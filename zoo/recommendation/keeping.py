"""What an earlier call found, kept so that nothing is computed twice: vectors, latencies and scores, each under all that decides it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from weights.documents import MISREAD, read_json
from weights.whole import room, write_whole

FORMAT = 1
"""Changes where what is kept means something else."""


class Shelf:
    """A folder of kept results; deleting it costs nothing but time.

    Args:
        folder: it is made when something is first kept.
        restart: whether what is there is left aside and written anew.
    """

    def __init__(self, folder: Path, restart: bool) -> None:
        self.folder, self.restart = folder, restart
        self.reused = 0
        """Results that were there already."""

    def path(self, kind: str, name: str, facts: Any, suffix: str = ".json") -> Path:
        """Name the file of a result; `facts` are all that decides it."""
        digest = blake3(json.dumps([FORMAT, facts], sort_keys=True, default=str).encode()).hexdigest()[:20]
        return self.folder / kind / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}-{digest}{suffix}"

    def place(self, path: Path) -> Path:
        """Make the folder of a file, and return the file."""
        with room(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def kept(self, kind: str, name: str, facts: Any, read: Callable[[Any], Any], compute: Callable[[], Any]) -> tuple[Any, bool]:
        """Return a small result, and whether it was there; else compute it and keep it.

        Args:
            kind: the folder in the folder.
            name: of the file, for people.
            facts: all that decides the result.
            read: makes the result of what JSON gives, and raises one of `MISREAD` for something else: then it is computed anew.
            compute: gives the result; it has a method `facts`.
        """
        path = self.path(kind, name, facts)
        if path.is_file() and not self.restart:
            try:
                found = read(read_json(path.read_text(encoding="utf-8"), path))
            except MISREAD:
                path.unlink(missing_ok=True)
            else:
                self.reused += 1
                return found, True
        found = compute()
        write_whole(self.place(path), json.dumps(found.facts()))
        return found, False
