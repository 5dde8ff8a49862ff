"""Which published file a source is: it is hashed while it is read, and waited for only where a record could be of it."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

import weights
from convert import names
from convert.source import Source
from weights import Checkpoint
from weights.digests import of_file
from zoo.conversion.notes import NOTES, accepted, file_sha256
from zoo.networks.model import Model


class Hashes:
    """The hashes of one source, each computed in a thread of its own."""

    def __init__(self, path: Path, beside: ThreadPoolExecutor) -> None:
        self._path, self._beside = path, beside
        self._sha256 = beside.submit(file_sha256, path)

    @property
    def sha256(self) -> str:
        """The whole file's, waited for."""
        return self._sha256.result()

    def beside(self, source: Source) -> dict[str, str]:
        """Hash the other files that a source was read from; its own hash covers it alone."""
        there = {name: source.path.parent / name for name in source.beside}
        return {name: file_sha256(file) for name, file in there.items() if file.is_file()}

    def known(self, source: Source, model: type[Model]) -> Checkpoint | None:
        """Find the record whose file this is; where none of the network's can be, nothing is waited for.

        Args:
            source: the file, opened.
            model: the network that its weights are of.
        """
        likely = candidates(source, model)
        if not likely:
            return None
        algorithms = {row.digest.partition(":")[0] for row in likely if row.digest}
        others = {algorithm: self._beside.submit(of_file, self._path, f"{algorithm}:") for algorithm in algorithms}

        def other(digest: str) -> str:
            found = others.get(digest.partition(":")[0])
            return "" if found is None else found.result()

        return weights.recognise(self.sha256, other, model=model.variant().__name__, format=source.format)


@contextmanager
def hashing(path: Path) -> Generator[Hashes]:
    """Hash a file, or a folder that is a checkpoint, while its reader starts and its tensors are written."""
    with ThreadPoolExecutor(3, "zoo-hash") as beside:
        yield Hashes(path, beside)


def candidates(source: Source, model: type[Model]) -> list[Checkpoint]:
    """List the records of a network whose file this could be, by format and size, and by names where only a weak hash is public.

    MD5 and SHA-1 take as long as all else together. No publisher's file has the notes of `zoo convert`, nor lacks all names of its record's
    naming.
    """
    size = source.path.stat().st_size if source.path.is_file() else None
    found: list[Checkpoint] = []
    for row in weights.checkpoints(model.variant().__name__):
        if row.format != source.format or not (row.sha256 or row.sha256_prefix or row.digest) or row.size_bytes not in (None, size):
            continue
        if row.sha256 or row.sha256_prefix or (size is not None and NOTES not in source.facts and _named_so(source, model, row)):
            found.append(row)
    return found


def _named_so(source: Source, model: type[Model], row: Checkpoint) -> bool:
    """Whether any module of a file has the name that the record's naming gives it; True where names say nothing."""
    if source.positional or row.names not in names.NAMINGS:
        return True
    taken = accepted(model)
    with torch.device("meta"):
        network = model(**{name: value for name, value in row.options.items() if name in taken})
    shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    rows = names.rows(row.names, model, shapes)
    theirs = {name.rpartition(".")[0] for name in names.spelt(row.names, source.tensors, rows, shapes)}
    return not rows or any(one.theirs in theirs or one.pieces or one.cut or one.positions for one in rows)
