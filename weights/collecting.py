"""`gc`: what nobody used for long leaves the cache; what a lock names, and what can't be fetched again, stays."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from weights.arguments import forgiving
from weights.cache import Cache, key, read_json
from weights.errors import BadLock, CacheNotWritable
from weights.lock import Lock, project_lock
from weights.part import lives, owned
from weights.registry import SHIPPED, located
from weights.wording import clause

log = logging.getLogger("weights")
KEEP_DAYS = 30.0
QUARANTINE_DAYS = 7.0
DAY_S = 86_400.0
GRACE_S = 60.0
"""What was used so short a time ago may be about to be opened."""


@dataclass(frozen=True, slots=True)
class Removed:
    """One file that `gc` removed, or would.

    Attributes:
        path: where it lay.
        kind: "weights", "part" or "quarantine".
        size_bytes: of the file.
        why: in words.

    Example:
        >>> [(one.kind, one.size_bytes) for one in gc(dry_run=True).removed]
        []
    """

    path: Path
    kind: str
    size_bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class Collected:
    """What `gc` did.

    Attributes:
        removed: the files that are gone, or would be, the largest first.
        locked: how many files stay because a lock or a registry of the user's names them, whenever they were used.
        kept_bytes: of all files of weights that stay.
        locks: the lock files that were read.
        unreachable: lock files on disks that are not mounted now, each with the note that holds what it names; deleting the note lets go.

    Example:
        >>> gc(dry_run=True).removed
        ()
    """

    removed: tuple[Removed, ...]
    locked: int
    kept_bytes: int
    locks: tuple[Path, ...]
    unreachable: tuple[tuple[Path, Path], ...] = ()

    @property
    def freed_bytes(self) -> int:
        return sum(one.size_bytes for one in self.removed)


@forgiving
def gc(keep_days: float = KEEP_DAYS, *, dry_run: bool = False) -> Collected:
    """Remove from the cache what was not used for `keep_days`, parts whose owners died, and what lay in quarantine for a week.

    A file stays, however old, if its hash or that of the file it was made of stands in the project's `weights.lock`, in that of another
    project that used this cache (as it was last seen, if its disk is not mounted now), or in a registry that is not the shipped one: what
    `zoo add` copied from a file can't be fetched again. The shipped lock names every checkpoint that there is, and the user's every one
    that was ever used: they keep none. What a source gave is remembered by its note in `refs`, so that it must give the same when it is
    asked again.

    Args:
        keep_days: how long ago the last use may be; 0 removes everything that no lock names and nobody used within a minute.
        dry_run: say what would go, and remove nothing.

    Raises:
        BadLock, BadRecord: a lock or a registry can't be read, so nobody knows what it names; nothing was removed.
        CacheNotWritable: the cache can't be read or written.
        ValueError: `keep_days` is negative.

    Example:
        >>> gc(90, dry_run=True).removed
        ()
    """
    if not keep_days >= 0:
        raise ValueError(f"keep_days is at least 0, got {keep_days}")
    cache = Cache()
    cache.check_folder()
    projects = list(_projects(cache))
    locks = tuple(dict.fromkeys([*_locks(), *(one.path for one in projects if one.there)]))
    away = [one for one in projects if one.kept]
    own = {one.row.sha256 for one in located() if one.row.sha256 and one.path.parent != SHIPPED}  # of many this cache has the only copy
    named = own.union(*map(_hashes, locks), *(one.hashes for one in away))
    sources = made_of(cache)
    removed: list[Removed] = []
    now, locked, kept_bytes = time.time(), 0, 0
    outdated = _outdated(cache)
    for path in sorted((cache.root / "blobs" / "sha256").glob("*/*")):
        if (found := used(cache, path)) is None:
            continue
        last, size = found
        if path.name in named or named & sources.get(path.name, set()):
            locked, kept_bytes = locked + 1, kept_bytes + size
        elif now - last >= (GRACE_S if path.name in outdated else max(GRACE_S, keep_days * DAY_S)):
            newer = "a later version of the converter has made it anew"
            why = newer if path.name in outdated else f"not used for {(now - last) / DAY_S:.0f} days"
            removed.append(Removed(path, "weights", size, why))
        else:
            kept_bytes += size
    removed += _parts(cache)
    removed += _quarantined(cache, now)
    if not dry_run:
        removed = [one for one in removed if _remove(cache, one, keep_days)]
        for one in projects:
            if not one.there and not one.kept:
                with contextlib.suppress(OSError):
                    one.note.unlink()
        keep_projects(cache, locks)
    unreachable = tuple((one.path, one.note) for one in away)
    return Collected(tuple(sorted(removed, key=lambda one: -one.size_bytes)), locked, kept_bytes, locks, unreachable)


def keep_projects(cache: Cache, locks: Iterable[Path] | None = None) -> None:
    """Note where locks lie, the project's if none are given, and what they name, so that `gc` keeps it wherever it is called."""
    for path in _locks() if locks is None else locks:
        note = cache.root / "projects" / f"{key(str(path))}.json"
        with contextlib.suppress(OSError, BadLock):
            status = path.stat()
            stamp = [status.st_dev, status.st_size, status.st_mtime_ns]
            if (read_json(note) or {}).get("stamp") != stamp:
                facts = {"path": str(path), "stamp": stamp, "hashes": sorted(_hashes(path))}
                note.parent.mkdir(exist_ok=True)
                cache.write_json(note, facts)


def locks_that_keep(cache: Cache) -> dict[Path, frozenset[str]]:
    """Map each lock for which `gc` keeps something to the hashes that it names; raises as `gc` does."""
    projects = list(_projects(cache))
    here = dict.fromkeys([*_locks(), *(one.path for one in projects if one.there)])
    return {path: frozenset(_hashes(path)) for path in here} | {one.path: one.hashes for one in projects if one.kept}


def _locks() -> list[Path]:
    """Find the project's lock; the shipped one names every checkpoint, and the user's own every one that was ever used."""
    found = project_lock()
    return [] if found is None else [found]


def _hashes(lock: Path) -> set[str]:
    """Read which hashes a lock names."""
    try:
        return {entry.sha256 for entry in Lock.read(lock).entries.values() if entry.sha256}
    except (OSError, BadLock) as error:
        raise BadLock(f"{lock} can't be read ({clause(error)}), so nobody knows what it names. Nothing was removed.") from error


@dataclass(frozen=True, slots=True)
class _Project:
    """A lock that was seen beside this cache: whether it is there, else whether it may come back, and what it named."""

    note: Path
    path: Path
    there: bool
    kept: bool
    hashes: frozenset[str]


def _projects(cache: Cache) -> Iterator[_Project]:
    """List the projects that used this cache. A lock is deleted only where the disk that it lay on is there without it."""
    for note in sorted((cache.root / "projects").glob("*.json")):
        facts = read_json(note) or {}
        path, stamp, hashes = Path(str(facts.get("path") or "/")), _list(facts, "stamp"), _list(facts, "hashes")
        try:
            there = path.is_file()
            nearest = next(folder for folder in (path, *path.parents) if folder.exists())
            kept = not there and stamp is not None and stamp[:1] != [nearest.stat().st_dev]
        except OSError as error:  # in a folder that is not ours to look into
            raise BadLock(f"{path} can't be looked at ({error.strerror}), so nobody knows what it names. Nothing was removed.") from error
        yield _Project(note, path, there, kept, frozenset(map(str, hashes or ())))


def _list(facts: dict[str, Any], name: str) -> list[Any] | None:
    found = facts.get(name)
    return cast("list[Any]", found) if isinstance(found, list) else None


def made_of(cache: Cache) -> dict[str, set[str]]:
    """Map each file to the hashes of what it was made of, by all notes."""
    found: dict[str, set[str]] = {}
    for folder in ("refs", "derived"):
        for note in (cache.root / folder).glob("*.json"):
            facts = read_json(note) or {}
            if isinstance(facts.get("sha256"), str) and isinstance(facts.get("source_sha256"), str):
                found.setdefault(facts["sha256"], set()).add(facts["source_sha256"])
    return found


def _outdated(cache: Cache) -> set[str]:
    """Name the files that an earlier version of the converter made of what a later one has made anew."""
    versions: dict[str, list[str]] = {}
    for note, facts in cache.conversions():
        if cache.blob(facts["sha256"]).exists():
            versions.setdefault(note.name.partition(".")[0], []).append(facts["sha256"])
    return {sha256 for made in versions.values() for sha256 in made} - {made[0] for made in versions.values()}


def used(cache: Cache, blob: Path) -> tuple[float, int] | None:
    """Say when a file was last used, and its size: by its note, and at the latest when it got its name."""
    try:
        status = blob.lstat()
    except OSError:
        return None
    times = [status.st_ctime]
    with contextlib.suppress(OSError):
        times.append((cache.root / "used" / blob.name).stat().st_mtime)
    return max(times), status.st_size


def _parts(cache: Cache) -> Iterator[Removed]:
    """List what the dead left in `partial`: of this machine at once, of others after an hour without a write."""
    for path in sorted(cache.partial.glob("*")):
        if (name := owned(path)) and not name["note"] and not lives(path, name):
            for one in (path, path.with_name(path.name + ".json")):
                with contextlib.suppress(OSError):
                    yield Removed(one, "part", one.lstat().st_size, "its owner is dead")


def _quarantined(cache: Cache, now: float) -> Iterator[Removed]:
    for path in sorted((cache.root / "quarantine").glob("*")):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if now - status.st_ctime >= QUARANTINE_DAYS * DAY_S:
                yield Removed(path, "quarantine", status.st_size, "damaged, kept for a week to be looked at")


def _remove(cache: Cache, one: Removed, keep_days: float) -> bool:
    """Delete a file, unless somebody used it since it was listed."""
    if one.kind == "weights":
        found = used(cache, one.path)
        if found is None or time.time() - found[0] < (max(GRACE_S, keep_days * DAY_S) if "not used" in one.why else GRACE_S):
            return False
    try:
        if one.path.is_dir() and not one.path.is_symlink():
            import shutil

            shutil.rmtree(one.path)
        else:
            one.path.unlink(missing_ok=True)
    except OSError as error:
        raise CacheNotWritable(f"{one.path} can't be removed ({error.strerror}): the cache is not yours to clean.") from error
    if one.kind == "weights":
        notes = [cache.root / folder / f"{one.path.name}.json" for folder in ("stamps", "tensors")] + [cache.root / "used" / one.path.name]
        notes += [note for note in (cache.root / "derived").glob("*.json") if (read_json(note) or {}).get("sha256") == one.path.name]
        for note in notes:
            with contextlib.suppress(OSError):
                note.unlink(missing_ok=True)
    log.info("removed %s: %s", os.fspath(one.path), one.why)
    return True
