"""What is compiled already: noted beside it in Triton's cache, so that a later start begins no processes to find that out."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch

NAME = "kernelzoo-compiled.txt"
"""The file in Triton's cache: who empties that one takes the notes along."""

_log = logging.getLogger("zoo.kernels")


class Compiled:
    """The notes: a line for each kernel, a hash of what it was made of, behind a "!" where that can't be compiled; and "@" with the folder.

    A note that is wrong, because somebody took single kernels out of the cache, costs time only: the first call compiles. Triton notes
    the path of each file, and finds none in a folder that was moved, or came from another machine: there they are written anew.

    Args:
        target: what kernels are compiled for.
    """

    def __init__(self, target: str) -> None:
        import triton
        from triton import knobs

        self._about = f"{target} triton {triton.__version__} torch {torch.__version__} {_settings(target)} {_sources()}"
        self._file = Path(knobs.cache.dir) / NAME
        self._known: set[str] = set()
        self._place = f"@{self._file.parent.absolute()}"
        try:
            lines = self._file.read_text(errors="replace").splitlines()
        except OSError as error:
            _log.debug("no notes of compiled kernels: %s", error)
            return
        self._known.update(lines)
        if [line for line in lines if line.startswith("@")][-1:] != [self._place]:
            try:
                _found_here(self._file.parent.absolute())
                self._write([self._place])
            except OSError as error:
                _log.debug("Triton finds no kernels in a folder that was moved: %s", error)

    def has(self, key: str) -> bool:
        """Tell whether a kernel of this key was compiled."""
        return self._line(key) in self._known

    def knows(self, key: str) -> bool:
        """Tell whether it was compiled, or can't be."""
        return self.has(key) or f"!{self._line(key)}" in self._known

    def add(self, keys: Iterable[str], failed: Iterable[str] = ()) -> None:
        """Note what was compiled and what can't be; where nothing can be written, that is known here alone."""
        lines = {self._line(key) for key in keys} | {f"!{self._line(key)}" for key in failed}
        new = sorted(lines - self._known)
        if not new:
            return
        self._known.update(new)
        try:
            self._write(new if self._file.exists() else [self._place, *new])
        except OSError as error:
            _log.debug("compiled kernels are not noted: %s", error)

    def _write(self, lines: list[str]) -> None:
        with self._file.open("a", encoding="utf-8") as file:  # as one piece: other processes append too
            file.write("".join(f"{line}\n" for line in lines))

    def _line(self, key: str) -> str:
        return hashlib.sha256(f"{self._about} {key}".encode()).hexdigest()


def _found_here(folder: Path) -> None:
    """Let Triton's lists of files name those that lie beside them."""
    for group in folder.glob("*/__grp__*.json"):
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # damaged: Triton compiles anew
            there = json.loads(group.read_text("utf-8"))
            paths = {name: str(group.parent / name) for name in there["child_paths"]}
            if paths != there["child_paths"]:
                written = group.with_name(f"{group.name}.{os.getpid()}")
                written.write_text(json.dumps({"child_paths": paths}), "utf-8")
                written.replace(group)


def _settings(target: str) -> str:
    """Return what else Triton compiles otherwise by: variables of the environment, and its assembler."""
    from triton import knobs

    found: list[object] = []
    with contextlib.suppress(ImportError):  # elsewhere in another version
        from triton._C.libtriton import get_cache_invalidating_env_vars

        found += sorted(get_cache_invalidating_env_vars().items())
    with contextlib.suppress(RuntimeError):  # there is none
        blackwell = getattr(knobs.nvidia, "ptxas_blackwell", None) if int(target) >= 100 else None
        found.append((blackwell or knobs.nvidia.ptxas).version)  # wherever it lies: the cache may have come from another machine
    return str(found)


@functools.cache
def _sources() -> str:
    """Return a hash of all that says what is compiled: this package's files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's lock looks like one
            digest.update(path.read_bytes())
    return digest.hexdigest()
