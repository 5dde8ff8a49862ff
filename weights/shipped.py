"""The lock that ships: made of the registry, and of the bytes that ship with it."""

from __future__ import annotations

from pathlib import Path

from weights.cache import PACKAGE
from weights.fingerprint import fingerprint
from weights.lock import NAME, Entry, Lock
from weights.pinning import key_of
from weights.reading import read_file
from weights.record import Checkpoint
from weights.registry import SHIPPED, located


def shipped() -> dict[str, Entry]:
    """Describe every checkpoint that ships, not those of ZOO_REGISTRY or the user's own, as a lock does."""
    rows = [one.row for one in located() if one.path.parent == SHIPPED]
    return {entry.key: entry for entry in map(entry_of_record, rows)}


def write_shipped(folder: Path) -> Lock:
    """Write the shipped lock into a folder; its serial grows only if something changed."""
    path = folder / NAME
    old = Lock.read(path) if path.is_file() else Lock({})
    entries = shipped()
    lock = old if old.path and dict(old.entries) == entries else Lock(entries, old.serial + 1, path)
    if lock is not old:
        lock.write(path)
    return lock


def entry_of_record(row: Checkpoint) -> Entry:
    """Turn a record into an entry, with the fingerprint of its tensors where the file itself ships."""
    tensors, found, size = None, None, row.size_bytes
    if row.sources[0].startswith("package:"):
        path = PACKAGE / row.sources[0].removeprefix("package:")
        _, data = read_file(path)
        tensors, found = fingerprint(data, str(path))
        size = len(data)
    prefix = None if row.sha256 else row.sha256_prefix
    known = (row.sha256, prefix, size, tensors, found, row.sha256_reported, row.digest)
    return Entry(key_of(row), row.format, row.sources, row.license, *known)
