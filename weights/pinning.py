"""Trust on first use: what a name gave at its first install is written into a lock, and is all that the name may give from then on.

The notes in the cache's `refs/` are what one machine has seen. A lock is what a project or a user holds to, on every machine and with an
empty cache; it is asked first, and its hash stands in for the one that a record lacks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from weights.addresses import Address
from weights.cache import Cache, Installed, read_json
from weights.digests import contradict, in_words
from weights.errors import CacheNotWritable, ChangedUpstream, CorruptCache, HashMismatch, MalformedFile, NoSpace, NotLocked
from weights.fingerprint import fingerprint
from weights.lock import SHIPPED_LOCK, Entry, Lock, project_lock, user_lock
from weights.places import Place, asked_at, hub_parts, pinned_at, place_of
from weights.reading import load, read_file
from weights.record import Checkpoint
from weights.registry import located, user_folder
from weights.serials import check_serial, shipped_serial, update
from weights.sources import switched_on

log = logging.getLogger("weights")


@dataclass(frozen=True, slots=True)
class Pin:
    """What a lock holds a checkpoint to.

    Attributes:
        entry: with a full hash.
        path: of the lock.
        recorded: whether the record has the full hash itself, so that nothing rests on a first sight.
        settled: whether it stands in the lock that a first sight would be written to.
    """

    entry: Entry
    path: Path
    recorded: bool
    settled: bool

    def commit(self, source: str) -> str | None:
        """The commit at which this source of the Hub was first seen."""
        places = (hub_parts(one) for one in self.entry.sources)
        same = (parts[1] for parts in places if parts and parts[0] == place_of(source))
        return next((revision[1:] for revision in same if re.fullmatch(r"@[0-9a-f]{40}", revision)), None)


def frozen_by(wanted: bool | None = None) -> str | None:
    """Name what admits no new entries, "ZOO_FROZEN=1" for example; None if they are admitted.

    Args:
        wanted: True or False decides; None asks the environment.
    """
    if wanted is not None:
        return "frozen" if wanted else None
    return switched_on("ZOO_FROZEN")


def key_of(checkpoint: Checkpoint) -> str:
    """Name a checkpoint as locks do: "ResNet50:imagenet1k_v2", or the source that somebody named instead of a tag."""
    return Address(checkpoint.tag).noted if "://" in checkpoint.tag else f"{checkpoint.model}:{checkpoint.tag}"


def pins(entries: Mapping[str, Entry], checkpoint: Checkpoint) -> list[Entry]:
    """List what holds a checkpoint, entries with full hashes: that of its name first, then those of other names for one of its sources."""
    name = key_of(checkpoint)
    asked = {place for source in checkpoint.sources if (place := asked_at(source))}
    own, rest = entries.get(name), (entry for entry in entries.values() if entry.key != name and entry.sha256)
    others = [entry for entry in rest if not asked.isdisjoint(pinned_at(entry.key, entry.sources, _recorded(entry, asked)))]
    return [own, *others] if own and own.sha256 else others


def _recorded(entry: Entry, asked: Iterable[Place]) -> tuple[str, ...]:
    """Name the sources of an entry's record, where only they tell which revision of a Hub's repository was asked for."""
    repositories = {place[1] for place in asked if place[0] == "hf"}
    if not repositories or "://" in entry.key or repositories.isdisjoint(map(place_of, entry.sources)):
        return ()
    model, _, tag = entry.key.partition(":")
    return next((one.row.sources for one in located(model) if one.row.tag == tag), ())


def admit(cache: Cache, checkpoint: Checkpoint, frozen: bool | None = None) -> tuple[Checkpoint, Pin | None]:
    """Ask the locks what a checkpoint has to be, before anything is fetched.

    Returns:
        The record, with the lock's full hash where it has none of its own, and what holds it to that.

    Raises:
        NotLocked: nothing new is admitted, and no lock has a full hash of it.
        ChangedUpstream: the project's lock and the record name different bytes.
        BadLock: a lock is damaged, or older than one that was seen here, where that matters.
        CacheNotWritable: the cache's folder can't be looked at.
    """
    switch, name = frozen_by(frozen), key_of(checkpoint)
    known = checkpoint.sha256 or checkpoint.sha256_prefix or ""
    project, pin = project_lock(), None
    doubted = switch is not None and cache.root in user_lock().parents  # whoever may write there could have changed the file too
    for path in (project, None if checkpoint.sha256 or doubted else user_lock()):  # a record's own hash outranks the first sight
        if path is None or pin or not path.is_file():
            continue
        lock = Lock.read(path)
        check_serial(cache, path, lock.serial, switch)
        held = pins(lock.entries, checkpoint)
        if path != project and (outdated := [entry for entry in held if _stale(entry, checkpoint)]):
            log.info("%s has %s as it was before its record was changed", path, ", ".join(entry.key for entry in outdated))
            held = [entry for entry in held if entry not in outdated]
        if held:
            _agree(path, held, known, name)
            _agree_on_digests(path, held, checkpoint)
            pin = Pin(held[0], path, checkpoint.sha256 is not None, path == (project or path))
    if cache.exists() and (serial := shipped_serial()):
        check_serial(cache, SHIPPED_LOCK, serial, switch)
    if doubted and pin is None and _own(checkpoint):
        raise NotLocked(
            f"the record of {name} lies in the cache's own folder, and {switch} believes nothing that lies there. "
            f"Once without it: zoo lock {name}; or set ZOO_USER_REGISTRY to a folder elsewhere."
        )
    if switch and pin is None and checkpoint.sha256_reported:
        return checkpoint.hashed(checkpoint.sha256_reported), None
    if switch and pin is None and checkpoint.sha256 is None:
        part = f", only the prefix {checkpoint.sha256_prefix}" if checkpoint.sha256_prefix else ""
        part = part or (f", only the {in_words(checkpoint.digest)}" if checkpoint.digest else "")
        raise NotLocked(f"no lock has a full hash of {name}{part}, and {switch} admits nothing new. Once without it: zoo lock {name}")
    return (checkpoint.hashed(pin.entry.sha256) if pin and pin.entry.sha256 else checkpoint), pin


def _own(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint's record is one of the user's own."""
    return any(one.row.tag == checkpoint.tag and one.path.parent == user_folder() for one in located(checkpoint.model))


def _agree(path: Path, held: list[Entry], known: str, name: str) -> None:
    """Refuse a record, or a second entry, that says something else of one source; whichever name is asked for, it has one content."""
    for entry in held:
        if not (entry.sha256 or "").startswith(known):
            who = "its record says" if entry.key == name else f"and the record of {name}, which has the same source, says"
            raise changed(f"{path} pins {entry.key} to", entry.sha256 or "", known, who, entry.key)
    for entry in held[1:]:
        if entry.sha256 != held[0].sha256:
            now = f"and {entry.key}, which has the same source, to"
            raise changed(f"{path} pins {held[0].key} to", held[0].sha256 or "", entry.sha256, now, name)


def _agree_on_digests(path: Path, held: list[Entry], checkpoint: Checkpoint) -> None:
    """Refuse a record whose digest is another than the one with which an entry was pinned."""
    for entry in held:
        if contradict(entry.digest, checkpoint.digest):
            now = f"which has the {in_words(entry.digest or '')} {entry.digest}, and the record of {key_of(checkpoint)} says"
            raise changed(f"{path} pins {entry.key} to", entry.sha256 or "", checkpoint.digest, now, entry.key)


def remember(cache: Cache, checkpoint: Checkpoint, installed: Installed, pin: Pin | None) -> None:
    """Write what was seen for the first time into the project's lock, where there is one, else into the user's.

    Args:
        cache: where `installed` lies.
        checkpoint: the record as the registry has it.
        installed: what it gave.
        pin: what a lock knew of it before.

    Raises:
        ChangedUpstream: another process has pinned the name to other bytes meanwhile.
        BadLock: the lock is damaged.
    """
    if _settled(checkpoint, pin) or (not pin and hearsay(cache, checkpoint)):
        return
    _write(cache, checkpoint, installed.source_sha256, lambda: entry_of(cache, checkpoint, installed), pin)


def remember_served(
    cache: Cache, checkpoint: Checkpoint, sha256: str, size: int, gave: tuple[str, str | None, str], pin: Pin | None
) -> None:
    """Do as `remember` does for a file that is kept as it was served, so that nobody has counted its tensors.

    Args:
        cache: has the notes of locks.
        checkpoint: the record as the registry has it.
        sha256: of the file that came.
        size: of the same, in bytes.
        gave: which source, of which commit, by which URL.
        pin: what a lock knew of it before.
    """
    if _settled(checkpoint, pin):
        return
    sources = tuple(at_commit(source, gave[1] if source == gave[0] else None, gave[2]) for source in checkpoint.sources)
    entry = Entry(key_of(checkpoint), checkpoint.format, sources, checkpoint.license, sha256, size_bytes=size, digest=checkpoint.digest)
    _write(cache, checkpoint, sha256, lambda: entry, pin)


def _settled(checkpoint: Checkpoint, pin: Pin | None) -> bool:
    """Whether nothing is to be pinned: a hash is known or pinned already, or it is a file of this machine's that has no record."""
    if checkpoint.sha256 or (pin and pin.settled):
        return True
    if not all(source.startswith(("file:", "package:")) for source in checkpoint.sources):
        return False
    rows = (one.row for one in located(checkpoint.model) if one.row.tag == checkpoint.tag)
    return not any(row.sources == checkpoint.sources and row.sha256 is None for row in rows)


def _write(cache: Cache, checkpoint: Checkpoint, sha256: str, describe: Callable[[], Entry], pin: Pin | None) -> None:
    places = [path for path in (project_lock(), user_lock()) if path is not None]
    path = next((path for path in places if (pin and path == pin.path) or _writable(path)), None)
    if path is None:
        log.info("%s is not pinned: none of %s can be written", key_of(checkpoint), ", ".join(map(str, places)))
    if path is None or (pin and path == pin.path):
        return
    try:
        there = Lock.read(path).entries.get(key_of(checkpoint)) if path.is_file() else None
        if there and there.sha256 == sha256:  # another process of many that began together was faster
            return
        entry = pin.entry if pin and pin.entry.key == key_of(checkpoint) else describe()
        update(cache, path, lambda entries: _added(entries, entry, checkpoint, path))
        log.info("pinned %s to sha256 %s in %s", entry.key, entry.sha256, path)
    except CorruptCache:  # whoever loads it finds that out, and says so
        return
    except OSError as error:
        log.warning("%s is not pinned: %s can't be written (%s)", key_of(checkpoint), path, error)


def hearsay(cache: Cache, checkpoint: Checkpoint) -> bool:
    """Whether a bundle or a mirror says what is installed: that is no first sight of what the source has."""
    return any((cache.ref(source) or {}).get("by") for source in checkpoint.sources)


def entry_of(cache: Cache, checkpoint: Checkpoint, installed: Installed) -> Entry:
    """Describe an installed checkpoint as locks do, without the tensors where a bundle says what they were made of.

    Raises:
        CorruptCache: its file changed since.
        MalformedFile: its tensors can't be counted.
    """
    sources: list[str] = []
    size = checkpoint.size_bytes
    for source in checkpoint.sources:
        note = cache.ref(source)
        gave = note if note and note["source_sha256"] == installed.source_sha256 else {}
        size = gave.get("source_size") or size
        sources.append(at_commit(source, gave.get("commit"), installed.source))
    if installed.sha256 == installed.source_sha256:
        size = installed.size_bytes
    own = installed.sha256 == installed.source_sha256 or cache.converted_here(installed)
    count, tensors = _tensors(cache, installed) if own else (None, None)
    return Entry(
        key_of(checkpoint),
        checkpoint.format,
        tuple(sources),
        checkpoint.license,
        installed.source_sha256,
        size_bytes=size,
        tensors=count,
        fingerprint=tensors,
        digest=checkpoint.digest,
    )


def repinned(entries: Mapping[str, Entry], made: Iterable[tuple[Checkpoint, Entry]]) -> dict[str, Entry]:
    """Put what sources give today into the entries that hold them, under whichever names, so that a lock does not contradict itself.

    Args:
        entries: of the lock.
        made: records, and the entries of what their sources gave.
    """
    new = dict(entries)
    for row, entry in made:
        at = {place_of(source): source for source in entry.sources}
        for one in pins(entries, row):
            sources = tuple(at.get(place_of(source), source) for source in one.sources)
            other = replace(entry, key=one.key, format=one.format, sources=sources, license=one.license)
            new[one.key] = entry if one.key == entry.key else other
    return new


def check_fingerprint(checkpoint: Checkpoint, pin: Pin | None, made: Path, place: str) -> bool:
    """Compare what was made of a foreign file with the tensors that a lock says are in it.

    Returns:
        Whether a lock says so.

    Raises:
        HashMismatch: they are others.
        ConvertError: it is no safetensors file.
    """
    wanted = _locked_tensors(checkpoint, pin)
    if wanted is None:
        return False
    count, found = fingerprint(read_file(made)[1], place)
    if found != wanted[0].fingerprint:
        raise HashMismatch(
            f"{place}: {wanted[1]} says that its {wanted[0].tensors} tensors have the fingerprint {wanted[0].fingerprint}, and "
            f"what was made of it has {count} with {found}. Nothing was installed. Is the converter another version?"
        )
    return True


def same_tensors(cache: Cache, checkpoint: Checkpoint, installed: Installed, pin: Pin | None, switch: str | None) -> bool:
    """Whether an installed file has the tensors that a lock names.

    The lock's hash is that of the file as it was served. Where that very file is installed, its tensors follow from its hash; where
    another was made of it, only a note of this cache says so, and an older converter or a bundle may have written it. Frozen, they are
    counted anew, and where no lock names them, a bundle's word is not enough.
    """
    if installed.sha256 == installed.source_sha256 or not (switch or (pin and pin.entry.fingerprint)):
        return True
    wanted = _locked_tensors(checkpoint, pin)
    if wanted is None:
        return cache.converted_here(installed)
    try:
        return _tensors(cache, installed, noted=not switch) == (wanted[0].tensors, wanted[0].fingerprint)
    except CorruptCache:  # whoever loads it finds that out, and has it fetched again
        return True
    except MalformedFile:
        return False


def _locked_tensors(checkpoint: Checkpoint, pin: Pin | None) -> tuple[Entry, Path] | None:
    if pin and pin.entry.fingerprint:
        return pin.entry, pin.path
    shipped = Lock.read(SHIPPED_LOCK).entries.get(key_of(checkpoint)) if SHIPPED_LOCK.is_file() else None
    return (shipped, SHIPPED_LOCK) if shipped and shipped.fingerprint and shipped.sha256 == checkpoint.sha256 else None


def changed(who: str, pinned: str, found: str | None, now: str, name: str) -> ChangedUpstream:
    """Make the error of bytes that differ from the pinned ones; its message has both hashes and what to do."""
    todo = f"If you trust the new bytes: zoo lock --update {name}"
    error = ChangedUpstream(f"{who} sha256 {pinned}, {now} {found}. {todo}" if found else f"{who} sha256 {pinned}, and {now}. {todo}")
    error.pinned, error.found = pinned, found
    return error


def _tensors(cache: Cache, installed: Installed, noted: bool = True) -> tuple[int, str]:
    """Count and hash the tensors of an installed file, once for its content where the cache's note of them will do."""
    note = cache.root / "tensors" / f"{installed.sha256}.json"
    known = (noted and read_json(note)) or {}
    if isinstance(count := known.get("tensors"), int) and isinstance(found := known.get("fingerprint"), str):
        return count, found
    count, found = fingerprint(load(installed), str(installed.path))
    with contextlib.suppress(CacheNotWritable, NoSpace):
        cache.prepare()
        cache.write_json(note, {"tensors": count, "fingerprint": found})
    return count, found


def _added(entries: Mapping[str, Entry], entry: Entry, checkpoint: Checkpoint, path: Path) -> Mapping[str, Entry]:
    """Add an entry; one that is there gives way only if it is no pin, or of a record that was changed since."""
    there = entries.get(entry.key)
    if there is not None and there.sha256 == entry.sha256:
        return entries
    for one in pins(entries, checkpoint):
        if one.sha256 != entry.sha256 and not _stale(one, checkpoint):
            raise changed(f"{path} pins {one.key} to", one.sha256 or "", entry.sha256, "and now came", one.key)
    return {**entries, entry.key: entry}


def at_commit(source: str, commit: str | None, served: str) -> str:
    """Write the commit and the file into a source of the Hub, so that it names one thing for ever."""
    parts = hub_parts(source)
    if not parts or not commit:
        return Address(source).noted
    found = re.search(rf"/resolve/{commit}/(.+)$", urlsplit(served).path)
    return f"{parts[0]}@{commit}{parts[2] or (f'/{found[1]}' if found else '')}"


def _stale(entry: Entry, checkpoint: Checkpoint) -> bool:
    """Whether the record was changed since: it says another hash, or names none of the places any more."""
    contradicts = not (entry.sha256 or "").startswith(checkpoint.sha256 or checkpoint.sha256_prefix or "")
    contradicts = contradicts or contradict(entry.digest, checkpoint.digest)
    elsewhere = {place_of(source) for source in entry.sources}.isdisjoint(map(place_of, checkpoint.sources))
    return contradicts or (elsewhere and entry.key == key_of(checkpoint))


def _writable(path: Path) -> bool:
    folder = next(parent for parent in path.parents if parent.exists())
    return folder.is_dir() and os.access(folder, os.W_OK)
