"""A mirror: static files that any web server, bucket or folder can hold, named as ZOO_MIRROR asks for them.

    index.json      what is here: names, sizes, hashes, of which checkpoints; and what should be here and is missing
    <64 hex>        a file whose full SHA-256 is recorded, or was seen
    <name>          one of which only the first digits are, or an MD5 or SHA-1: as its source's path ends, resnet50-11ad3fa6.pth
    .damaged.<name> one that changed, moved aside to be looked at; the index lists it as missing

They are the publisher's own bytes, .pth among them, since only those can be compared with the recorded hash. Nothing here opens them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weights.archive import atomic
from weights.cache import Cache
from weights.delivery import Delivery
from weights.digests import of_file
from weights.documents import json_file, misread, table
from weights.errors import BadRecord, CorruptCache, UnknownWeights
from weights.part import Part, disk, sweep
from weights.pinning import Pin, admit, hearsay, remember_served
from weights.places import at_home, file_name
from weights.reading import hashes
from weights.record import Checkpoint
from weights.sources import Remote

INDEX = "index.json"
ASIDE = ".damaged."
"""What is put before the name of a file that changed, when it is moved aside."""
VERSION = 2
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,199}")


@dataclass(frozen=True, slots=True)
class Mirrored:
    """One file of a mirror.

    Attributes:
        name: in the mirror's folder.
        size_bytes: of the file.
        sha256: of the file.
        format: as the record has it.
        license: SPDX identifier, or "unstated".
        weights: the checkpoints that it serves, "ResNet50:imagenet1k_v1".
    """

    name: str
    size_bytes: int
    sha256: str
    format: str
    license: str
    weights: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a call of `mirror` found and did.

    Attributes:
        files: all that are here now, and proven.
        new: names of those that this call fetched.
        damaged: names of those that this call found changed, and moved aside.
        missing: what should be here and is not, this call's damaged ones and those of earlier calls.
        aside: names of files that this call or an earlier one moved aside and that lie there still, as ``.damaged.<name>``.
    """

    files: tuple[Mirrored, ...]
    new: tuple[str, ...]
    damaged: tuple[str, ...]
    missing: tuple[Mirrored, ...]
    aside: tuple[str, ...]


def mirror(folder: str | Path, rows: Sequence[Checkpoint], *, progress: bool = True, forget: bool = False) -> Report:
    """Verify a mirror's files and add those of further checkpoints.

    A file that changed is moved aside, and stays in the index as missing until it is fetched again, lies there again, or is given up.

    Args:
        folder: made if it is missing and `rows` are to be added.
        rows: records of the registry; none only verifies.
        progress: whether bars may be shown, on a terminal.
        forget: give up what earlier calls found damaged or missing, and delete what they moved aside.

    Raises:
        UnknownWeights: there is no mirror to verify at `folder`.
        BadRecord: the folder has files under that name that are not a mirror's, or others than a record or a lock names.
        NotLocked: a file has no full hash in a record or a lock, and ZOO_FROZEN is set. What is admitted for the first time is pinned.
        WeightsError: a file could not be had; what was finished before stays, and is in the index.
    """
    folder = at_home(folder).absolute()
    if not rows:
        _check_there(folder)
    with disk(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        return _brought_up(folder, rows, progress, forget)


@contextlib.contextmanager
def _alone(folder: Path) -> Generator[None]:
    """Wait while another process changes this mirror, so that neither's index forgets the other's files; nothing is left of the lock."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network disks have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _brought_up(folder: Path, rows: Sequence[Checkpoint], progress: bool, forget: bool) -> Report:
    known, lost = _index(folder)
    if forget:
        lost = []
        with disk(folder):
            for path in folder.glob(f"{ASIDE}*"):
                path.unlink()
    files: dict[str, Mirrored] = {}
    missing: dict[str, Mirrored] = {}
    damaged: list[str] = []
    new: list[str] = []
    for one in [*known, *lost]:
        if _proven(folder / one.name, one):
            files[one.name] = one
            continue
        missing[one.name] = one
        if one in known and os.path.lexists(folder / one.name):
            damaged.append(one.name)
            with contextlib.suppress(OSError):
                (folder / one.name).rename(folder / f"{ASIDE}{one.name}")
    try:
        for row in rows:
            title, name = f"{row.model}:{row.tag}", _name(row)
            held, pin = admit(Cache(), row)
            there = files.get(name) if name else next((one for one in files.values() if title in one.weights), None)
            if there is None:
                there = _fetched(folder, row, held, pin, files, progress)
                new += [] if there.name in files else [there.name]
                before = missing.pop(there.name, there)
                if before.sha256 == there.sha256:
                    there = replace(there, weights=tuple(sorted({*there.weights, *before.weights})))
            elif unlike := _unlike(folder / there.name, there, held):
                what = f"{folder / there.name} is of {', '.join(there.weights)} and has sha256 {there.sha256}"
                raise BadRecord(f"{what}; {title} needs {unlike}{f', as {pin.path} says' if pin else ''}. Move the file away.")
            files[there.name] = replace(there, weights=tuple(sorted({*files.get(there.name, there).weights, *there.weights, title})))
    finally:
        _write(folder, files.values(), missing.values())
    aside = sorted(path.name.removeprefix(ASIDE) for path in folder.glob(f"{ASIDE}*"))
    return Report(_ordered(files.values()), tuple(new), tuple(damaged), _ordered(missing.values()), tuple(aside))


def _check_there(folder: Path) -> None:
    """See that there is something to verify: a folder that is spelt wrong has nothing that could be wrong."""
    if not (folder / INDEX).exists():
        what = f"there is nothing at {folder}" if not folder.exists() else f"{folder} is no mirror, it has no {INDEX}"
        raise UnknownWeights(f"{what}, so there is nothing to verify: zoo mirror {folder} MODEL... makes one.")


def index(folder: Path) -> list[Mirrored]:
    """Read which files a mirror has; none where there is no index.

    Raises:
        BadRecord: it is no index.
    """
    return _index(folder)[0]


def _index(folder: Path) -> tuple[list[Mirrored], list[Mirrored]]:
    """Read which files a mirror has, and which it should have and has not."""
    what, todo = f"{folder / INDEX} is no index of a mirror", "Delete it, or name another folder"
    try:
        told = json_file(folder / INDEX, todo, refuse=BadRecord)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise BadRecord(f"{what} ({error.strerror}). {todo}.") from error
    with misread(what, todo, BadRecord):
        if (version := table(told)["kernelzoo_mirror"]) == VERSION:
            return [_mirrored(one) for one in told["files"]], [_mirrored(one) for one in told.get("missing", [])]
    todo = "delete it and make the mirror again with zoo mirror" if version in range(VERSION) else "update kernelzoo"
    raise BadRecord(f"{folder / INDEX} has layout {version!r} and this version reads {VERSION}: {todo}.")


def _mirrored(facts: Any) -> Mirrored:
    known = {"name": str, "size_bytes": int, "sha256": str, "format": str, "license": str, "weights": list}
    titles: tuple[Any, ...] = tuple(table(facts, known)["weights"])
    one = Mirrored(**(facts | {"weights": titles}))
    if not all(isinstance(title, str) for title in titles):
        raise ValueError(f"the weights of {one.name!r} are names, got {one.weights!r}")
    if not NAME.fullmatch(one.name) or one.name == INDEX or not re.fullmatch(r"[0-9a-f]{64}", one.sha256) or not one.size_bytes > 0:
        raise ValueError(f"{one.name!r} is no file of a mirror")
    return one


def _ordered(files: Iterable[Mirrored]) -> tuple[Mirrored, ...]:
    return tuple(sorted(files, key=lambda one: one.name))


def _write(folder: Path, files: Iterable[Mirrored], missing: Iterable[Mirrored]) -> None:
    facts: dict[str, Any] = {"kernelzoo_mirror": VERSION, "files": [asdict(one) for one in _ordered(files)]}
    if lost := [asdict(one) for one in _ordered(missing)]:
        facts["missing"] = lost
    text = json.dumps(facts, indent=1).encode() + b"\n"
    with contextlib.suppress(OSError):
        if (folder / INDEX).read_bytes() == text:  # so that a mirror that can't be written can be verified
            return
    with atomic(folder / INDEX) as file:
        file.write(text)
    with contextlib.suppress(OSError):
        (folder / INDEX).chmod(0o644)


def _proven(path: Path, one: Mirrored) -> bool:
    try:
        sha256, _, size = hashes(path)
    except CorruptCache:
        return False
    return (sha256, size) == (one.sha256, one.size_bytes)


def _name(row: Checkpoint) -> str | None:
    """Name a file as a client will ask for it; None where only its bytes can tell."""
    last = file_name(row.sources[0])
    if row.sha256 or not row.published or not NAME.fullmatch(last) or last == INDEX:
        return row.sha256
    return last


def _unlike(path: Path, there: Mirrored, held: Checkpoint) -> str:
    """Return the hash that a record or a lock wants of a file that is here, where the file has another; "" where it has that one."""
    wanted = held.sha256 or held.sha256_prefix or ""
    if not there.sha256.startswith(wanted):
        return wanted
    return held.digest if held.digest and not of_file(path, held.digest).startswith(held.digest) else ""


def _fetched(folder: Path, row: Checkpoint, held: Checkpoint, pin: Pin | None, files: dict[str, Mirrored], progress: bool) -> Mirrored:
    """Receive the publisher's bytes from the first place that has them; the cache is one, if it holds them unconverted."""
    cache, incoming = Cache(), folder / ".incoming"
    found = cache.lookup(held)
    unconverted = [(found.path.as_uri(), row.sources[0])] if found and found.sha256 == found.source_sha256 else []
    also = [(Remote.at(url, url), source) for url, source in unconverted]
    first_hand = {url for url, _ in unconverted if not hearsay(cache, row)}
    delivery = Delivery(cache, held, pin, incoming, progress=progress, also=also)
    with disk(folder):
        incoming.mkdir(exist_ok=True)
    sweep(incoming, spare=delivery.name)
    try:
        kept, arrived = delivery.take(lambda came: (_kept(folder, row, _name(row) or came.part.sha256, came.part, files), came))
        if not arrived.by or arrived.remote.url in first_hand:
            remember_served(cache, row, kept.sha256, kept.size_bytes, (arrived.source, arrived.commit, arrived.remote.url), pin)
        sweep(incoming, done=delivery.name)
    finally:
        with contextlib.suppress(OSError):  # a part that can be resumed stays
            incoming.rmdir()
    return kept


def _kept(folder: Path, row: Checkpoint, name: str, part: Part, files: dict[str, Mirrored]) -> Mirrored:
    made = Mirrored(name, part.size, part.sha256, row.format, row.license, (f"{row.model}:{row.tag}",))
    if name in files and files[name].sha256 != made.sha256:
        raise BadRecord(f"{folder / name} is another file, and {row.model}:{row.tag} needs one of that name.")
    if name not in files and (folder / name).exists() and not _proven(folder / name, made):
        raise BadRecord(f"{folder / name} lies there and is no file of this mirror: move it away.")
    with disk(folder):
        os.fsync(part.fd)
        part.path.chmod(0o644)
        part.path.replace(folder / name)
    return made
