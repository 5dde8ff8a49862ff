"""A lock changes in place: what several processes add stays, and each change has a higher serial, so that an older lock is noticed."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache as cache_once
from pathlib import Path

from weights.cache import Cache, key, read_json
from weights.collecting import keep_projects
from weights.errors import BadLock, CacheNotWritable, NoSpace
from weights.lock import SHIPPED_LOCK, Entry, Lock

log = logging.getLogger("weights")
TRIES = 20
_warned: set[tuple[Path, int]] = set()
_checked: dict[tuple[Path, Path], int] = {}


def update(cache: Cache, path: Path, change: Callable[[Mapping[str, Entry]], Mapping[str, Entry]]) -> Lock:
    """Change a lock that other processes may be changing too: what they add stays.

    Args:
        cache: has the file lock that saves a second try, where file locks work.
        path: of the lock, which need not exist.
        change: maps the entries that are there to those that shall be; it may be called several times.

    Raises:
        OSError: the folder can't be written.
        BadLock: what is there is damaged.
    """
    with cache.lock(key(str(path))):
        for _ in range(TRIES):
            lock = Lock.read(path) if path.is_file() else Lock({})
            entries = dict(change(lock.entries))
            if entries == lock.entries and lock.path is not None:
                keep_projects(cache)
                return lock
            new = Lock(entries, max(lock.serial, _seen(cache, path)) + 1, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            new.write(path)
            check_serial(cache, path, new.serial, None)  # and read again: where file locks don't work, another may have been faster
    raise BadLock(f"{path} was changed by others {TRIES} times while it was written; try again when they are done.")


def check_serial(cache: Cache, path: Path, serial: int, switch: str | None) -> None:
    """Notice a lock that is older than one seen at its place before.

    Raises:
        BadLock: it is, and nothing new is admitted; otherwise a warning says so.
    """
    if not switch and _checked.get((cache.root, path)) == serial:
        return
    note, seen = _note(cache, path), _seen(cache, path)
    if serial < seen:
        what = f"{path} has serial {serial}, {seen} was seen there before: somebody put an older lock back. If that is meant, delete {note}"
        if switch:
            raise BadLock(f"{what}; {switch} refuses it.")
        if (path, serial) not in _warned:
            _warned.add((path, serial))
            log.warning("%s.", what)
        return
    _checked[cache.root, path] = serial
    if serial > seen:
        with contextlib.suppress(CacheNotWritable, NoSpace):
            cache.prepare()
            cache.write_json(note, {"path": str(path), "serial": serial})


@cache_once
def shipped_serial() -> int:
    """Read no more of the shipped lock than its head: it is asked at every load, and has hundreds of rows."""
    with contextlib.suppress(OSError), SHIPPED_LOCK.open(encoding="utf-8") as file:
        found = re.search(r"^serial = (\d+)$", file.read(400), re.MULTILINE)
        return int(found[1]) if found else 0
    return 0


def _note(cache: Cache, path: Path) -> Path:
    return cache.root / "seen" / f"{key(str(path))}.json"


def _seen(cache: Cache, path: Path) -> int:
    serial = (read_json(_note(cache, path)) or {}).get("serial")
    return serial if isinstance(serial, int) else 0
