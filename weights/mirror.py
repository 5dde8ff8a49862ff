"""A mirror: static files that any web server, bucket or folder can hold, named as ZOO_MIRROR asks for them.

    index.json      what is here: names, sizes, hashes, of which checkpoints
    <64 hex>        a file whose full SHA-256 is recorded, or was seen
    <name>          one of which only the first digits are: as its source's path ends, resnet50-11ad3fa6.pth

They are the publisher's own bytes, .pth among them, since only those can be compared with the recorded hash. Nothing here opens them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from weights.archive import atomic
from weights.cache import Cache, key
from weights.errors import BadRecord, CorruptCache, NoSpace, SourceUnavailable, WeightsError
from weights.fetch import Expected, fetch
from weights.install import check_complete
from weights.part import Part, disk, sweep
from weights.patience import patiently
from weights.progress import bar
from weights.reading import hashes
from weights.record import Checkpoint
from weights.sources import candidates, check_announced, resolve

log = logging.getLogger("weights")
INDEX = "index.json"
VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,199}")


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One file of a mirror.

    Attributes:
        name: in the mirror's folder.
        size: in bytes.
        sha256: of the file.
        format: "safetensors" or "pytorch".
        license: SPDX identifier, or "unstated".
        weights: the checkpoints that it serves, "ResNet50:imagenet1k_v1".
    """

    name: str
    size: int
    sha256: str
    format: str
    license: str
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a call of `mirror` found and did: all files now, the names of new ones, and of those that had changed and were moved aside."""

    files: tuple[Mirrored, ...]
    new: tuple[str, ...]
    damaged: tuple[str, ...]


def mirror(folder: str | Path, rows: Sequence[Checkpoint], *, progress: bool = True) -> Report:
    """Verify a mirror's files and add those of further checkpoints.

    Args:
        folder: made if it is missing.
        rows: records of the registry; none only verifies.
        progress: whether bars may be shown, on a terminal.

    Raises:
        BadRecord: the folder has files under that name that are not a mirror's, or two checkpoints need one name for two files.
        WeightsError: a file could not be had; what was finished before stays, and is in the index.
    """
    folder = Path(folder).expanduser().absolute()
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files, damaged, new = {}, [], []
    for one in index(folder):
        if _proven(folder / one.name, one):
            files[one.name] = one
        else:
            damaged.append(one.name)
            with contextlib.suppress(OSError):
                (folder / one.name).rename(folder / f".damaged.{one.name}")
    try:
        for row in rows:
            title, name = f"{row.model}:{row.tag}", _name(row)
            there = files.get(name) if name else next((one for one in files.values() if title in one.weights), None)
            if there is None:
                there = _fetched(folder, row, name, files, progress)
                new += [] if there.name in files else [there.name]
            elif not there.sha256.startswith(row.sha256 or row.sha256_prefix or ""):
                raise BadRecord(f"{folder / there.name} is of {', '.join(there.weights)}, and {title} needs another file of that name.")
            files[there.name] = replace(there, weights=tuple(sorted({*files.get(there.name, there).weights, title})))
    finally:
        _write(folder, files.values())
    return Report(tuple(sorted(files.values(), key=lambda one: one.name)), tuple(new), tuple(damaged))


def index(folder: Path) -> list[Mirrored]:
    """Read a mirror's index; nothing where there is none.

    Raises:
        BadRecord: it is no index.
    """
    try:
        facts = json.loads((folder / INDEX).read_bytes())
        if facts["kernelzoo_mirror"] != VERSION:
            raise ValueError(f"its layout is {facts['kernelzoo_mirror']!r}, this version writes {VERSION}")
        files = [Mirrored(**{**one, "weights": tuple(one["weights"])}) for one in facts["files"]]
        for one in files:
            if not NAME.fullmatch(one.name) or one.name == INDEX or not re.fullmatch(r"[0-9a-f]{64}", one.sha256) or not one.size > 0:
                raise ValueError(f"{one.name!r} is no file of a mirror")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadRecord(
            f"{folder / INDEX} is no index of a mirror ({type(error).__name__}: {error}): delete it, or name another folder."
        ) from error
    return files


def _write(folder: Path, files: Any) -> None:
    ordered = sorted(files, key=lambda one: one.name)
    facts = {"kernelzoo_mirror": VERSION, "files": [asdict(one) for one in ordered]}
    with atomic(folder / INDEX) as file:
        file.write(json.dumps(facts, indent=1).encode() + b"\n")
    with contextlib.suppress(OSError):
        (folder / INDEX).chmod(0o644)


def _proven(path: Path, one: Mirrored) -> bool:
    try:
        sha256, _, size = hashes(path)
    except CorruptCache:
        return False
    return (sha256, size) == (one.sha256, one.size)


def _name(row: Checkpoint) -> str | None:
    """Name a file as a client will ask for it; None where only its bytes can tell."""
    last = urlsplit(row.sources[0]).path.rpartition("/")[2]
    if row.sha256 or not row.sha256_prefix or not NAME.fullmatch(last) or last == INDEX:
        return row.sha256
    return last


def _fetched(folder: Path, row: Checkpoint, name: str | None, files: dict[str, Mirrored], progress: bool) -> Mirrored:
    """Receive the publisher's bytes from the first source that has them; the cache is one, if it holds them unconverted."""
    incoming = folder / ".incoming"
    cache = Cache()
    places = list(candidates(row))
    installed = cache.lookup(row)
    if installed and installed.sha256 == installed.source_sha256:
        places.insert(0, (installed.path.as_uri(), row.sources[0]))
    before = next((ref["source_sha256"] for source in row.sources if (ref := cache.ref(source))), None)
    if before and not before.startswith(row.sha256 or row.sha256_prefix or ""):
        before = None
    expected = Expected(row.sha256, row.sha256_prefix, row.size_bytes, before)
    failures: list[WeightsError] = []
    with disk(folder):
        incoming.mkdir(exist_ok=True)
        sweep(incoming, spare=key(row.sources[0]))
    try:
        for place, source in places:
            commit = (cache.ref(source) or {}).get("commit")
            try:
                with _received(incoming, row, place, commit, expected, progress) as part:
                    return _kept(folder, row, name or part.sha256, part, files)
            except (NoSpace, BadRecord):
                raise
            except WeightsError as error:
                failures.append(error)
                log.warning("%s", error)
    finally:
        with contextlib.suppress(OSError):  # a part that can be resumed stays
            incoming.rmdir()
    lines = "".join(f"\n  {type(failure).__name__}: {failure}" for failure in failures)
    kinds = {type(failure) for failure in failures}
    raise (kinds.pop() if len(kinds) == 1 else SourceUnavailable)(f"no source delivered {row.model} {row.tag}:{lines}")


@contextlib.contextmanager
def _received(folder: Path, row: Checkpoint, place: str, commit: str | None, expected: Expected, progress: bool) -> Iterator[Part]:
    """Fetch and prove a file; the part is the caller's to move away, and what is left of it goes when he is done."""
    remote = patiently(lambda: resolve(place, commit), place)
    check_announced(remote, expected.sha256 or expected.installed)
    part = Part(folder, key(row.sources[0]))
    try:
        with bar(f"{row.model} {row.tag}", progress) as shown:
            fetch(remote, part, expected, shown)
        if row.format == "safetensors":
            check_complete(part.path, part.size, place)
        yield part
    except (SourceUnavailable, KeyboardInterrupt):
        part.release()
        raise
    finally:
        if part.fd >= 0:
            part.discard()


def _kept(folder: Path, row: Checkpoint, name: str, part: Part, files: dict[str, Mirrored]) -> Mirrored:
    made = Mirrored(name, part.size, part.sha256, row.format, row.license, (f"{row.model}:{row.tag}",))
    if name in files and files[name].sha256 != made.sha256:
        raise BadRecord(f"{folder / name} is another file, and {row.model} {row.tag} needs one of that name.")
    if name not in files and (folder / name).exists() and not _proven(folder / name, made):
        raise BadRecord(f"{folder / name} lies there and is no file of this mirror: move it away.")
    with disk(folder):
        os.fsync(part.fd)
        part.path.chmod(0o644)
        part.path.replace(folder / name)
    return made
