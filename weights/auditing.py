"""Locks compared: with the registry and the cache, without any network, and with each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from weights.cache import PACKAGE, Cache, read_json
from weights.digests import contradict
from weights.errors import MalformedFile, SourceUnavailable
from weights.fingerprint import fingerprint
from weights.lock import SHIPPED_LOCK, Entry, Lock
from weights.pinning import frozen_by, key_of
from weights.places import ELSEWHERE, Place, asked_at, pinned_at, place_of
from weights.reading import read_file
from weights.record import Checkpoint
from weights.registry import checkpoints
from weights.serials import check_serial


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not as a lock says.

    Attributes:
        key: of the entry.
        what: is different, "sha256" or "record license" for example.
        locked: what the lock says; None if it says nothing.
        found: what is there; None if nothing is.
    """

    key: str
    what: str
    locked: str | None
    found: str | None


@dataclass(frozen=True, slots=True)
class Audit:
    """What `check` found.

    Attributes:
        path: of the lock.
        entries: how many were looked at, all of them if none were named.
        proven: keys of those whose bytes are in the cache, or in the package, and were hashed just now.
        absent: keys of those that are not in the cache, which is no difference.
        differences: what is not as it says.
    """

    path: Path
    entries: int
    proven: list[str]
    absent: list[str]
    differences: list[Difference]


def check(path: Path, keys: Collection[str] | None = None) -> Audit:
    """Compare entries of a lock with the records and with the content of the cache, which is hashed anew; nothing is changed.

    Args:
        path: of the lock.
        keys: of the entries; None means all.

    Raises:
        BadLock: the lock is damaged or was edited; the message names the line. Or it is older than one seen before, and nothing new
            is admitted.
    """
    lock, cache = Lock.read(path), Cache()
    check_serial(cache, path, lock.serial, frozen_by())
    records = {key_of(row): row for row in checkpoints()}
    claims = _claims(lock, records)
    chosen = {key: entry for key, entry in lock.entries.items() if keys is None or key in keys}
    proven: list[str] = []
    absent: list[str] = []
    differences: list[Difference] = []
    for key, entry in sorted(chosen.items()):
        row = records.get(key)
        found = [*_record(entry, row), *_others(entry, row, claims)]
        if entry.sha256 is None and path != SHIPPED_LOCK:
            found.append(Difference(key, "sha256", "a full hash", f"only {entry.known}" if entry.known else None))
        found += _notes(cache, entry, row)
        files = list(files_of(cache, entry))
        for file, sha256 in files:
            found += _content(entry, file, sha256)
        differences += found
        if not files:
            absent.append(key)
        elif not found:
            proven.append(key)
    return Audit(path, len(chosen), proven, absent, differences)


def diff(first: Lock, second: Lock) -> list[Difference]:
    """List what two locks say differently; `locked` is of the first, `found` of the second."""
    found: list[Difference] = []
    for key in sorted({*first.entries, *second.entries}):
        one, other = first.entries.get(key), second.entries.get(key)
        if one is None or other is None:
            found.append(Difference(key, "entry", _known(one), _known(other)))
            continue
        for field in fields(Entry):
            a, b = getattr(one, field.name), getattr(other, field.name)
            if a != b:
                found.append(Difference(key, field.name, _text(a), _text(b)))
    return found


def _known(entry: Entry | None) -> str | None:
    return None if entry is None else entry.known or "no hash"


def _text(value: object) -> str | None:
    return None if value is None else "\n".join(cast("tuple[str, ...]", value)) if isinstance(value, tuple) else str(value)


def _record(entry: Entry, row: Checkpoint | None) -> Iterator[Difference]:
    """Compare with the registry; a source that somebody named has no record."""
    if row is None:
        if "://" not in entry.key:
            yield Difference(entry.key, "record", "one in the registry", None)
        return
    known = row.sha256 or row.sha256_prefix
    if known and not (entry.sha256 or entry.sha256_prefix or "").startswith(known):
        yield Difference(entry.key, "record sha256", entry.sha256 or entry.sha256_prefix, known)
    pairs: Iterable[tuple[str, object, object]] = (
        ("record size", entry.size_bytes or row.size_bytes, row.size_bytes or entry.size_bytes),
        ("record format", entry.format, row.format),
        ("record digest", entry.digest, row.digest if contradict(entry.digest, row.digest) else entry.digest),
        ("record license", entry.license, row.license),
        ("record sources", tuple(map(place_of, entry.sources)), tuple(map(place_of, row.sources))),
    )
    carried = bool(row.sha256) and row.sha256 == entry.sha256 and any(source.startswith(ELSEWHERE) for source in row.sources)
    for what, locked, recorded in pairs:
        if locked != recorded and not (carried and what == "record sources"):  # a bundle tells no place of the machine that wrote it
            yield Difference(entry.key, what, _text(locked), _text(recorded))


def _claims(lock: Lock, records: Mapping[str, Checkpoint]) -> dict[Place, dict[tuple[str, str], str]]:
    """Map each place to what entries and records of any name say of its bytes: (name, "pinned" or "recorded") to hash or prefix."""
    found: dict[Place, dict[tuple[str, str], str]] = {}
    for key, entry in lock.entries.items():
        for place in pinned_at(key, entry.sources, records[key].sources if key in records else ()) if entry.sha256 else ():
            found.setdefault(place, {})[key, "pinned"] = entry.sha256 or ""
    for key, row in records.items():
        for source in row.sources if row.sha256 or row.sha256_prefix else ():
            if place := asked_at(source):
                found.setdefault(place, {})[key, "recorded"] = row.sha256 or row.sha256_prefix or ""
    return found


def _others(entry: Entry, row: Checkpoint | None, claims: Mapping[Place, Mapping[tuple[str, str], str]]) -> Iterator[Difference]:
    """Compare with what other names say of the same sources."""
    said: dict[tuple[str, str], str] = {}
    for place in pinned_at(entry.key, entry.sources, row.sources if row else ()):
        said |= claims.get(place, {})
    for (key, how), known in sorted(said.items()):
        if key != entry.key and entry.sha256 and not entry.sha256.startswith(known):
            yield Difference(entry.key, f"{how} for {key}, of the same source", entry.sha256, known)


def _notes(cache: Cache, entry: Entry, row: Checkpoint | None) -> Iterator[Difference]:
    """Compare with what the sources gave when they were last installed here."""
    for source in dict.fromkeys((*(row.sources if row else ()), *entry.sources, entry.key)):
        if entry.sha256 and (ref := cache.ref(source)) and ref["source_sha256"] != entry.sha256:
            yield Difference(entry.key, "installed here", entry.sha256, ref["source_sha256"])


def files_of(cache: Cache, entry: Entry) -> Iterator[tuple[Path, str]]:
    """List the safetensors files that the entry speaks of and that are here, with the hashes that they must have."""
    if entry.sha256 is None:
        return
    for source in entry.sources:
        if source.startswith("package:"):
            yield PACKAGE / source.removeprefix("package:"), entry.sha256
            return
    notes = map(read_json, sorted((cache.root / "derived").glob(f"{entry.sha256}.*.json")))
    made = {str(note["sha256"]) for note in notes if note and "sha256" in note}
    for sha256 in sorted({entry.sha256, *made}):
        if (path := cache.blob(sha256)).exists():
            yield path, sha256


def _content(entry: Entry, path: Path, sha256: str) -> Iterator[Difference]:
    try:
        found, data = read_file(path)
        if found != sha256:
            yield Difference(entry.key, "content", sha256, found)
        elif entry.fingerprint and (tensors := fingerprint(data, str(path))) != (entry.tensors, entry.fingerprint):
            yield Difference(entry.key, "fingerprint", f"{entry.fingerprint} of {entry.tensors}", f"{tensors[1]} of {tensors[0]}")
    except (SourceUnavailable, MalformedFile) as error:
        yield Difference(entry.key, "content", sha256, str(error))
