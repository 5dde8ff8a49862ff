"""What `zoo lock` writes and compares: names become records, records what their sources gave, and that goes into a lock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import weights
from weights import BadLock, Checkpoint, HashMismatch, UnknownWeights, WeightsError
from weights.addresses import Address
from weights.asking import announced, contribution, seen_here
from weights.auditing import Audit
from weights.auditing import check as check_lock
from weights.cache import Cache
from weights.delivery import OURS
from weights.install import obtain, renew
from weights.lock import SHIPPED_LOCK, Entry, Lock, user_lock
from weights.pinning import changed, entry_of, key_of, pins, repinned
from weights.serials import update
from weights.whole import write_whole
from zoo.pretrained.records import record_of, to_safetensors


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a lock.

    Attributes:
        entries: of the lock, by key.
        failed: names that stay as they were in it, each with the reason.
    """

    entries: Mapping[str, Entry]
    failed: Mapping[str, str]


def write(path: Path, names: Sequence[str] = (), *, renewed: bool = False, progress: bool = True) -> Written:
    """Install what names mean, and write down which bytes they are.

    Args:
        path: of the lock, which need not exist.
        names: networks, networks with tags, or sources: all of them, or the lock stays as it was. None takes what the lock has; then
            one that fails stays as it was, and the others are written.
        renewed: pin what the sources serve today instead of what was pinned, under whichever names.
        progress: whether a download may show a bar.

    Raises:
        UnknownWeights: a name means nothing, or is a path.
        ChangedUpstream: something else is pinned, and `renewed` is false.
        WeightsError: whatever `weights.get` raises.
    """
    cache, old = Cache(), Lock.read(path).entries if path.exists() else {}
    made: list[tuple[Checkpoint, Entry]] = []
    failed: dict[str, str] = {}
    for name in names or list(old):
        try:
            if not _hidden(name, old, renewed):
                made.append(_made(cache, path, _record(name, old), old, renewed, progress))
        except (*OURS, BadLock):
            raise
        except WeightsError as error:
            if names:
                raise
            failed[name] = f"{name} stays in {path} as it was: {error}"
    if renewed and user_lock().is_file():  # its older pins would hold wherever there is no project
        update(cache, user_lock(), lambda entries: repinned(entries, made))
    found = {entry.key: entry for _, entry in made}
    return Written(update(cache, path, lambda entries: {**(repinned(entries, made) if renewed else entries), **found}).entries, failed)


def ask_hub(path: Path, names: Sequence[str] = ()) -> Written:
    """Write into a lock what the Hub announces of its files, without fetching one.

    Args:
        path: of the lock, which need not exist.
        names: as `write` takes them; none takes every checkpoint of the registry that is on the Hub.

    Raises:
        UnknownWeights: a name means nothing.
        ChangedUpstream: the lock pins another file; it stays as it was.
        WeightsError: of a named checkpoint, whatever `weights.asking.announced` raises; of the rest it goes into `failed`.
    """
    old = Lock.read(path).entries if path.exists() else {}
    rows = [_record(name, old) for name in names] or [
        row for row in weights.checkpoints() if any(s.startswith("hf://") for s in row.sources)
    ]
    found: dict[str, Entry] = {}
    failed: dict[str, str] = {}
    for row in rows:
        try:
            entry = announced(row)
        except WeightsError as error:
            if names:
                raise
            failed[key_of(row)] = str(error)
            continue
        for one in pins(old, row):
            if one.sha256 != entry.sha256:
                raise changed(f"{path} pins {one.key} to", one.sha256 or "", entry.sha256, "and the Hub now announces", one.key)
        found[entry.key] = _with_tensors(entry, old.get(entry.key))
    return Written(update(Cache(), path, lambda entries: {**entries, **found}).entries, failed)


def contribute(path: Path, by: str) -> int:
    """Write what this machine has seen of checkpoints whose hash the registry lacks, as rows that the registry can take.

    Args:
        path: of the file, which is replaced.
        by: who saw it, a name or an address.

    Returns:
        How many checkpoints are in it.

    Raises:
        UnknownWeights: this machine has seen none; nothing is written.
        OSError: the file can't be written.
    """
    seen = list(seen_here(weights.checkpoints()))
    if not seen:
        raise UnknownWeights("this machine has fetched no checkpoint whose hash the registry lacks: zoo pull NAME fetches one")
    write_whole(path, contribution(seen, by))
    return len(seen)


def remove(path: Path, names: Sequence[str]) -> Written:
    """Take names out of a lock.

    Raises:
        UnknownWeights: it has no such name; it stays as it was.
    """
    old = Lock.read(path).entries if path.exists() else {}
    gone = {name if name in old else key_of(_record(name, old)) for name in names}
    if unknown := sorted(gone - old.keys()):
        raise UnknownWeights(f"{path} has no {', '.join(unknown)}; it has {', '.join(old) or 'nothing'}.")
    return Written(update(Cache(), path, lambda entries: {key: entry for key, entry in entries.items() if key not in gone}).entries, {})


def check(paths: Sequence[Path], names: Sequence[str] = ()) -> list[Audit]:
    """Compare locks with records and cache, offline.

    Args:
        paths: of the locks.
        names: what is compared; none means everything. Locks that have nothing of it are left out.

    Raises:
        UnknownWeights: no lock has a full hash of a name.
        NoSuchFile, BadLock: as `weights.lock.Lock.read`.
    """
    if not names:
        return [check_lock(path) for path in paths]
    locks = {path: Lock.read(path).entries for path in paths}
    chosen: dict[Path, set[str]] = {path: set() for path in paths}
    for name in names:
        found = {path: keys for path, entries in locks.items() if (keys := _keys(name, path, entries))}
        if not found:
            record = _record(name, {})
            found = {path: keys for path, entries in locks.items() if (keys := {one.key for one in pins(entries, record)})}
        if not found:
            raise UnknownWeights(f"none of {', '.join(map(str, paths))} has a full hash of {name}; zoo lock {name} writes it down")
        for path, keys in found.items():
            chosen[path] |= keys
    return [check_lock(path, keys) for path, keys in chosen.items() if keys]


def _keys(name: str, path: Path, entries: Mapping[str, Entry]) -> set[str]:
    """Find a name as it stands in a lock; the few digits that the shipped one has of most hold nobody to anything."""
    entry = entries.get(Address(name).noted)
    return set() if entry is None or (path == SHIPPED_LOCK and entry.sha256 is None) else {entry.key}


def _hidden(name: str, old: Mapping[str, Entry], renewed: bool) -> bool:
    """Tell what is in the lock by an address without its query, which nobody can ask for again; it stays as it is there."""
    hidden = name in old and "://" in name and "?" in name
    if hidden and renewed:
        todo = "name it as you first did, with the whole address"
        raise UnknownWeights(f"{name} can't be renewed, since a lock holds of an address's query no more than its hash: {todo}.")
    return hidden


def _made(
    cache: Cache, path: Path, record: Checkpoint, old: Mapping[str, Entry], renewed: bool, progress: bool
) -> tuple[Checkpoint, Entry]:
    """Install a record, and describe what came as a lock does."""
    held = pins(old, record)
    anew = renewed and (record.sha256 is None or any(one.sha256 != record.sha256 for one in held))
    installed = (renew if anew else obtain)(record, to_safetensors=to_safetensors, progress=progress)
    entry = entry_of(cache, record, installed)
    for one in held:
        if one.sha256 != entry.sha256 and not renewed:
            raise changed(f"{path} pins {one.key} to", one.sha256 or "", entry.sha256, f"and {entry.key}, of the same source, has", one.key)
    if renewed:
        _check_records(entry, held)
    before = old.get(entry.key)
    if before and before.sha256 == entry.sha256 and before.commit:  # seen at that commit first; a warm cache may not know it
        entry = replace(entry, sources=before.sources, size_bytes=entry.size_bytes or before.size_bytes)
    return record, _with_tensors(entry, before)


def _with_tensors(entry: Entry, before: Entry | None) -> Entry:
    """Keep what a lock knew of the tensors, where the file is the same and nobody has counted them anew."""
    if before and before.sha256 == entry.sha256 and not entry.fingerprint:
        return replace(entry, tensors=before.tensors, fingerprint=before.fingerprint)
    return entry


def _check_records(entry: Entry, held: Iterable[Entry]) -> None:
    """Refuse new bytes of a source where the record of another name has a hash for it: a lock can't make that right."""
    known = {key_of(row): row.sha256 or row.sha256_prefix or "" for row in weights.checkpoints()}
    for one in held:
        if not (entry.sha256 or "").startswith(recorded := known.get(one.key, "")):
            raise HashMismatch(
                f"{entry.key} now has sha256 {entry.sha256}, and {one.key}, which has the same source, {recorded} by its record. "
                "The lock stays as it was: correct that record, or take its table away, and do this again."
            )


def _record(name: str, old: Mapping[str, Entry]) -> Checkpoint:
    """Find the record of a name as locks have it: a network, a network and its tag, or a source."""
    if re.match(r"[a-z][a-z0-9+.-]*://", name):
        row = next((row for row in weights.checkpoints() if name in row.sources), None)
        if row is None:
            return weights.adhoc("weights", name)
        return replace(row, tag=name, sources=(name,), default=False) if Address(name).noted in old else row
    model, _, tag = name.partition(":")
    if re.search(r"[./\\~]", model) or (re.search(r"[/\\]", tag) and "://" not in tag):
        raise _is_path(tag or model)
    return record_of(name)


def _is_path(path: str) -> UnknownWeights:
    """Make the error of somebody who names a file: no network and no tag looks like one."""
    url = Path(os.path.expanduser(path)).resolve().as_uri()  # noqa: PTH111  Path's raises for a user who isn't there
    return UnknownWeights(
        f"{path} is a path, and a lock holds names and addresses: a file is read where it lies, and no lock is asked about it. "
        f"To have its bytes held, give it a name, zoo add {path} NETWORK:mine, which records its hash; "
        f"or call it {url}, here and in trained()."
    )
