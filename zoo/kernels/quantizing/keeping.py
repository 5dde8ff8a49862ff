"""Networks in 8 bits are made once: a file of tensors and facts each, in a folder of those that were used last."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from zoo.kernels.errors import first_line
from zoo.kernels.tuning.choices import folder

DIGEST = "digest"
"""The name of the digest in a file's header."""
KEPT_FILES = 32
"""Files of a folder; the one that was not used for longest goes first."""


class Kept(Protocol):
    """What is kept."""

    @property
    def digest(self) -> str:
        """Its name: of all that it follows from."""
        ...

    def save(self, path: Path) -> None:
        """Write it."""
        ...


log = logging.getLogger("zoo")
K = TypeVar("K", bound=Kept)


def write(path: Path, kind: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write tensors and facts as one safetensors file, whole or not at all.

    Args:
        path: the file; its folder is made.
        kind: what it holds: the name of the facts in its header.
        tensors: by name, each with memory of its own.
        facts: what JSON holds, "format" among them.
    """
    from safetensors.torch import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, unfinished = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    os.close(handle)
    try:
        save_file(tensors, unfinished, {kind: json.dumps(facts), DIGEST: _digest(tensors, facts)})
        Path(unfinished).replace(path)
    finally:
        Path(unfinished).unlink(missing_ok=True)


@contextmanager
def read(path: Path, kind: str, format: int, what: str) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Yield the facts and tensors that `write` wrote, to a body that makes something of them.

    Args:
        path: the file.
        kind: as of `write`.
        format: the "format" that is read.
        what: it is, for the error.

    Raises:
        ValueError: the file is damaged, so that the body finds no sense in it, or of another format.
        OSError: it can't be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as opened:
            held = opened.metadata() or {}
            facts = json.loads(held[kind])
            names: Any = opened.keys()
            tensors = {name: opened.get_tensor(name) for name in names}
        if facts["format"] != format:
            raise ValueError(f"{path.name} is of format {facts['format']}, this version reads {format}")
        if held[DIGEST] != _digest(tensors, facts):
            raise ValueError(f"{path.name} is damaged: its bytes are not those that were written")
        yield facts, tensors
    except (SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path.name} is no {what}, or it is damaged: {first_line(error)}") from error


def _digest(tensors: dict[str, Tensor], facts: dict[str, Any]) -> str:
    """Return the BLAKE3 of all that a file holds, so that no damage is computed with."""
    made = blake3(json.dumps(facts, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def cached(kind: str, digest: str, load: Callable[[Path], K]) -> K | None:
    """Return what was kept under a digest; None where nothing was, or it can't be read. A damaged file is deleted with a warning."""
    path = _place(kind, digest)
    try:
        found = load(path)
        path.touch()
    except OSError:
        return None
    except ValueError as error:
        log.warning("%s; it is made anew", error)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return found if found.digest == digest else None


def keep(kind: str, made: Kept) -> None:
    """Write into the folder of a kind; a folder that can't be written is no error."""
    path = _place(kind, made.digest)
    with contextlib.suppress(OSError):
        made.save(path)
        old = sorted(path.parent.glob("*.safetensors"), key=lambda one: one.stat().st_mtime)
        for each in old[:-KEPT_FILES]:
            each.unlink()


def _place(kind: str, digest: str) -> Path:
    return folder() / kind / f"{digest}.safetensors"
