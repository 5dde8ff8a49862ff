"""What is compiled already: noted beside it in Triton's cache, so that a later start begins no processes to find that out."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from zoo.kernels.compilation import fingerprint

NAME = "kernelzoo-compiled.txt"
"""The file in Triton's cache: who empties that one takes the notes along."""

_log = logging.getLogger("zoo.kernels")


def expected_place() -> Path:
    """Return where the notes should lie, by the rules that Triton has, without importing it."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")  # noqa: PTH111 - as Triton; Path.home() raises without a home
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")).absolute() / NAME


class Compiled:
    """The notes: a line for each kernel, a hash of what it was made of, behind a "!" where that can't be compiled; and "@" with the folder.

    A note that is wrong, because somebody took single kernels out of the cache, costs time only: the first call compiles. Triton notes
    the path of each file, and finds none in a folder that was moved, or came from another machine: there they are written anew.

    Args:
        target: what kernels are compiled for.
    """

    def __init__(self, target: str) -> None:
        from triton import knobs

        self._about = f"{target} triton {_build()} torch {torch.__version__} {_settings(target)} {_sources()}"
        folder = Path(knobs.cache.dir).absolute()
        if knobs.cache.dir != str(folder) and os.environ.get("TRITON_CACHE_DIR"):  # Triton would note paths that hold from here only
            os.environ["TRITON_CACHE_DIR"] = str(folder)
        self._file = folder / NAME
        self._known: set[str] = set()
        try:
            lines = self._file.read_text("utf-8", "surrogateescape").splitlines()
        except OSError as error:
            _log.debug("no notes of compiled kernels: %s", error)
            return
        self._known.update(lines)
        if [line for line in lines if line.startswith("@")][-1:] != [f"@{folder}"]:
            self._write(self._settled())

    def empty(self) -> bool:
        """Tell whether nothing is noted of any kernel, for whatever GPU."""
        return all(line.startswith("@") for line in self._known)

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
        self._write(new if self._file.exists() else [*self._settled(), *new])

    def _settled(self) -> list[str]:
        """Let Triton find what lies in this folder, and return the note of that."""
        groups: list[Path] = []
        with contextlib.suppress(OSError):  # somebody empties it meanwhile
            groups.extend(self._file.parent.glob("*/__grp__*.json"))
        for group in groups:
            with contextlib.suppress(
                ValueError, AttributeError, TypeError, LookupError, RecursionError, OSError
            ):  # Triton compiles this one anew
                _found_here(group)
        return [f"@{self._file.parent}"]

    def _write(self, lines: list[str]) -> None:
        try:
            with self._file.open("a", encoding="utf-8", errors="surrogateescape") as file:  # as one piece: other processes append too
                file.write("".join(f"{line}\n" for line in lines))
        except OSError as error:
            _log.debug("compiled kernels are not noted: %s", error)

    def _line(self, key: str) -> str:
        return hashlib.sha256(f"{self._about} {key}".encode()).hexdigest()


def _found_here(group: Path) -> None:
    """Let a list of Triton's name the files that lie beside it."""
    there = json.loads(group.read_text("utf-8"))["child_paths"]
    here = {name: str(group.parent / name) for name in there}
    if here != there:
        written = group.with_name(f"{group.name}.{os.getpid()}")
        written.write_text(json.dumps({"child_paths": here}), "utf-8")
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


def _build() -> str:
    """Return what tells Triton's builds apart, as its cache does: one for another Python finds nothing of this one's."""
    fingerprint.finish()
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # elsewhere in another version
        import triton

        return f"{triton.__version__} for {sys.implementation.cache_tag}"
    return triton_key()


@functools.cache
def _sources() -> str:
    """Return a hash of all that says what is compiled: this package's files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        with contextlib.suppress(OSError):  # an editor's lock looks like one
            digest.update(path.read_bytes())
    return digest.hexdigest()
