"""From a record to a verified safetensors file in the cache."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from weights import patience as limits
from weights.cache import Cache, Installed, key, read_json, stamp_of
from weights.collecting import keep_projects
from weights.elsewhere import elsewhere
from weights.errors import (
    CacheNotWritable,
    ChangedUpstream,
    CorruptCache,
    HashMismatch,
    MalformedFile,
    NoSpace,
    Offline,
    RateLimited,
    ReaderUnavailable,
    SourceUnavailable,
    UnsupportedFormat,
    WeightsError,
)
from weights.fetch import Expected, changed_upstream, fetch
from weights.part import disk
from weights.patience import patiently
from weights.pinning import Pin, admit, check_fingerprint, frozen_by, key_of, remember
from weights.progress import bar
from weights.reading import hashes, load
from weights.record import Checkpoint
from weights.registry import checkpoints
from weights.sources import Gone, Remote, candidates, check_announced, local_path, mirror_note, offline, resolve

log = logging.getLogger("weights")
Converter = Callable[[Path, Path], None]
"""Reads a foreign file and writes the safetensors; its attribute `version`, if it has one, says which way of doing so it is."""

OF_THIS_MACHINE = (NoSpace, CacheNotWritable, ReaderUnavailable)
"""Errors that another source would meet as well."""
HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header, as its own library limits them."""


def get(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True, frozen: bool | None = None) -> Installed:
    """Make sure that a checkpoint lies in the cache; when it does, nothing is asked of the network and nothing is hashed.

    Args:
        checkpoint: a record of the registry, or of `adhoc`.
        to_safetensors: converts (source, destination); needed for a format other than "safetensors", which is never opened here.
        progress: whether a bar may be shown, on a terminal.
        frozen: whether only what a record or a lock has a full hash of is admitted; None does as ZOO_FROZEN says. What is admitted for
            the first time is pinned in the project's lock, the nearest `weights.lock` upwards, or else in the user's own.

    Returns:
        What `load` reads.

    Raises:
        NotLocked: it is not, and `frozen`; nothing was fetched.
        ChangedUpstream: a source serves other bytes than those that a lock, or the first install here, holds it to.
        BadLock: a lock file is damaged, edited, or, if `frozen`, older than one that was seen here.
        Offline: it is not in the cache, and ZOO_OFFLINE or HF_HUB_OFFLINE is set.
        CorruptCache: so it is, but its file in the cache was damaged.
        HashMismatch, SizeMismatch, ProtocolError, InsecureSource, SourceUnavailable: no source delivered; the message has them all.
        MalformedFile: the file is no safetensors, or can't be converted.
        UnsupportedFormat: it must be converted and `to_safetensors` is missing.
        NoSpace, CacheNotWritable: the cache can't take it.
    """
    cache = Cache()
    installed, pin = _obtain(cache, checkpoint, to_safetensors, progress, frozen)
    if not frozen_by(frozen):
        remember(cache, checkpoint, installed, pin)
    return installed


def obtain(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True) -> Installed:
    """Do as `get` does, and pin nothing: whoever writes a lock writes all of it, or nothing."""
    return _obtain(Cache(), checkpoint, to_safetensors, progress, None)[0]


def _obtain(
    cache: Cache, checkpoint: Checkpoint, to_safetensors: Converter | None, progress: bool, frozen: bool | None
) -> tuple[Installed, Pin | None]:
    checkpoint, pin = admit(cache, checkpoint, frozen)
    keep_projects(cache)
    if found := cache.lookup(checkpoint):
        cache.sweep()
        cache.touch(found)
        return found, pin
    if checkpoint.format != "safetensors" and to_safetensors is None:
        raise UnsupportedFormat(f"{_title(checkpoint)} is a {checkpoint.format} file: pass to_safetensors to have it converted.")
    try:
        return _install(cache, checkpoint, to_safetensors, progress, pin), pin
    except Offline as error:
        if cache.quarantined:
            raise CorruptCache(f"{'; '.join(cache.quarantined)}. {error}") from error
        raise


def renew(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True) -> Installed:
    """Fetch what the sources serve today, whatever was pinned before; the record's own hash still holds.

    Raises:
        WeightsError: whatever `get` raises but for `ChangedUpstream`.
    """
    return _install(Cache(), checkpoint, to_safetensors, progress, None, anew=True)


def open_weights(
    checkpoint: Checkpoint,
    *,
    to_safetensors: Converter | None = None,
    verify: str = "load",
    progress: bool = True,
    frozen: bool | None = None,
) -> memoryview:
    """Get a checkpoint and load it; a file that was damaged in the cache is moved aside and fetched again, once.

    Returns:
        The bytes of its safetensors file, in private, writable memory, as `load` returns them.

    Raises:
        CorruptCache: the damaged file can't be replaced, since it is offline, read-only, or part of the package.
        WeightsError: whatever `get` and `load` raise.
    """
    installed = get(checkpoint, to_safetensors=to_safetensors, progress=progress, frozen=frozen)
    try:
        return load(installed, verify)
    except CorruptCache as damage:
        try:
            installed = get(checkpoint, to_safetensors=to_safetensors, progress=progress, frozen=frozen)
        except Offline as error:
            raise CorruptCache(f"{damage} {error}") from error
        return load(installed, verify)


def verify(what: Installed | Checkpoint) -> tuple[str, bool, str]:
    """Re-hash one installed file with SHA-256; a damaged one is moved aside, so that the next use fetches it again.

    Returns:
        Its name, whether it is what was installed, and what was found.
    """
    cache = Cache()
    name = _title(what) if isinstance(what, Checkpoint) else what.source
    installed = cache.lookup(what) if isinstance(what, Checkpoint) else what
    if installed is None:
        return name, not cache.quarantined, "; ".join(cache.quarantined) or "not installed"
    return _rehash(cache, name, installed.path, installed.sha256)


def verify_all() -> list[tuple[str, bool, str]]:
    """Re-hash everything in the cache, and the checkpoints that ship with the package, with SHA-256.

    Returns:
        For each file what `verify` returns, sorted by name.

    Raises:
        CacheNotWritable: ZOO_CACHE names no folder, or one that can't be read.
    """
    cache = Cache()
    cache.check_folder()
    refs = map(read_json, sorted((cache.root / "refs").glob("*.json")))
    names = {ref.get("sha256"): ref.get("source") for ref in refs if ref}
    files = [(str(names.get(path.name) or path.name), path, path.name) for path in (cache.root / "blobs" / "sha256").glob("*/*")]
    shipped = (row for row in checkpoints() if row.sources[0].startswith("package:"))
    files += [(_title(row), found.path, found.sha256) for row in shipped if (found := cache.lookup(row))]
    return [_rehash(cache, *file) for file in sorted(files)]


def _rehash(cache: Cache, name: str, path: Path, sha256: str) -> tuple[str, bool, str]:
    try:
        found = hashes(path)[0]
    except CorruptCache as error:
        found, detail = "", str(error)
    else:
        detail = f"sha256 {found}" if found == sha256 else f"expected sha256 {sha256}, got {found}"
    if found != sha256 and path == cache.blob(path.name):
        cache.quarantine(path, detail)
    return name, found == sha256, detail


def _install(
    cache: Cache, checkpoint: Checkpoint, convert: Converter | None, progress: bool, pin: Pin | None, anew: bool = False
) -> Installed:
    others, places = list(elsewhere(checkpoint)), list(candidates(checkpoint))
    if anew:  # what the sources themselves serve today
        others, places = [], [(place, source) for place, source in places if place == source]
    if (switch := offline()) and not any(place.startswith(("file:", "package:")) for place, _ in [*others, *places]):
        todo = f"Unset it to fetch the file once.{mirror_note(checkpoint)}"
        raise Offline(f"{_title(checkpoint)} is not in {cache.root}, and {switch} forbids the network. {todo}")
    cache.prepare()
    keep_projects(cache)
    name = checkpoint.sha256 or key(checkpoint.sources[0])
    failures: list[WeightsError] = []
    with cache.lock(name):
        if not anew and (found := cache.lookup(checkpoint)):
            return found
        cache.sweep(spare=name)
        deadline = time.monotonic() + limits.PATIENCE.deadline_s
        for place, source in others:
            try:
                return _install_from(cache, checkpoint, name, place, source, convert, progress, pin, anew, deadline)
            except OF_THIS_MACHINE:
                raise
            except WeightsError as error:
                log.info("another tool's cache holds something else: %s", error)
        for number, (place, source) in enumerate(places, 1):
            try:
                return _install_from(cache, checkpoint, name, place, source, convert, progress, pin, anew, deadline)
            except OF_THIS_MACHINE:
                raise
            except WeightsError as error:
                failures.append(error)
                if number < len(places):
                    log.warning("%s Trying %s next.", error, places[number][0])
    raise _together(checkpoint, failures)


def _install_from(
    cache: Cache,
    checkpoint: Checkpoint,
    name: str,
    place: str,
    source: str,
    convert: Converter | None,
    progress: bool,
    pin: Pin | None,
    anew: bool,
    deadline: float,
) -> Installed:
    ref = None if anew or source.startswith("file:") else cache.ref(source)
    before = (ref or {}).get("source_sha256")
    if before and not before.startswith(checkpoint.sha256 or checkpoint.sha256_prefix or ""):
        ref = before = None  # the record was corrected since: it outranks what an older one led to
    expected = _expected(checkpoint, pin, before)
    if place != source:  # a mirror that lies is no change upstream
        expected = replace(expected, sha256=expected.sha256 or expected.installed, installed=None)
    pinned = (pin.commit(source) if pin else None) or (ref or {}).get("commit")
    remote = _resolve(place, pinned, expected, deadline)
    stamp = _stamp(place)
    cache.require(checkpoint.size_bytes or remote.size_bytes or 0, copies=1 if checkpoint.format == "safetensors" else 2)
    part, ready = cache.part(name), None
    try:
        with bar(_title(checkpoint), progress) as shown:
            fetch(remote, part, expected, shown, deadline)
        if checkpoint.format == "safetensors":
            check_complete(part.path, part.size, place)
            sha256, blake3, size_bytes, ready = part.sha256, part.blake3, part.size, part.path
        else:
            ready = cache.temporary(name)
            sha256, blake3, size_bytes = _converted(convert, part.path, ready, place)
            check_fingerprint(checkpoint, pin, ready, place)
        part.close()
        installed = Installed(cache.publish(ready, sha256), sha256, blake3, size_bytes, remote.url, part.sha256)
        if convert and checkpoint.format != "safetensors":
            cache.derive(installed, re.sub(r"[^\w-]", "_", str(getattr(convert, "version", 1)))[:32])
        told = "" if place == source or checkpoint.sha256 else "another place"
        cache.record(source, installed, remote.commit or pinned, stamp, part.size, told)
    except (SourceUnavailable, KeyboardInterrupt):
        part.release()
        raise
    except BaseException:
        part.discard()
        if ready is not None:
            with contextlib.suppress(OSError):
                ready.unlink(missing_ok=True)
        raise
    part.discard()
    cache.touch(installed)
    cache.sweep(done=name)
    log.info("installed %s from %s, sha256 %s", _title(checkpoint), remote.url, part.sha256)
    return installed


def _expected(checkpoint: Checkpoint, pin: Pin | None, before: str | None) -> Expected:
    """Say who holds the file to which hash; a lock that knows more than the record has lent it its hash."""
    facts = checkpoint.sha256_prefix, checkpoint.size_bytes
    if pin and not pin.recorded:
        return Expected(None, *facts, checkpoint.sha256, str(pin.path), key_of(checkpoint))
    return Expected(checkpoint.sha256, *facts, before, name=key_of(checkpoint))


def _resolve(place: str, commit: str | None, expected: Expected, deadline: float) -> Remote:
    """Resolve a source at its pinned commit; where that is gone, the same bytes may still stand on the branch."""
    try:
        remote = patiently(lambda: resolve(place, commit), place, deadline=deadline)
    except Gone as gone:
        if not expected.installed:
            raise
        try:
            remote = patiently(lambda: resolve(place), place, deadline=deadline)
        except Gone as error:
            raise changed_upstream(place, expected, None, str(error).removeprefix(f"{place}: ")) from gone
    if expected.installed and remote.sha256 and remote.sha256 != expected.installed:
        raise changed_upstream(place, expected, remote.sha256)
    check_announced(remote, expected.sha256)
    return remote


def _converted(convert: Converter | None, source: Path, made: Path, place: str) -> tuple[str, str, int]:
    """Have the verified bytes converted; an error of the converter is one of the file, and one of the system is one of this machine."""
    assert convert is not None  # get() has seen to it
    try:
        convert(source, made)
        check_complete(made, made.stat().st_size, place)
        return hashes(made)
    except WeightsError as error:
        made.unlink(missing_ok=True)
        told = type(error)(str(error).replace(str(source), place))
        told.__dict__.update(error.__dict__)
        raise told from error  # the user knows the place, not our temporary file
    except Exception as error:
        made.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            with disk(made.parent):
                raise
        raise MalformedFile(f"{place} can't be converted to safetensors: {type(error).__name__}: {error}") from error


def _stamp(place: str) -> list[int] | None:
    """Tell a local file from what it may become later; None of another source, or where there is no such file."""
    if not place.startswith("file:"):
        return None
    try:
        return stamp_of(local_path(place).stat())
    except (OSError, ValueError):
        return None


def check_complete(path: Path, size_bytes: int, place: str) -> None:
    """See that the header describes all of the file: where no hash is known, nothing else tells a file that was cut short."""
    with disk(path.parent), path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head = file.read(length) if length <= min(size_bytes, HEADER_LIMIT) else b""
    try:
        entries = [entry for name, entry in json.loads(head).items() if name != "__metadata__"]
        end = 8 + length + max((entry["data_offsets"][1] for entry in entries), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise MalformedFile(f'{place} is no safetensors file; for a .pth, say format = "pytorch".') from error
    if end != size_bytes:
        raise MalformedFile(f"{place}: its header describes {end:,} bytes, it has {size_bytes:,}.")


def _together(checkpoint: Checkpoint, failures: list[WeightsError]) -> WeightsError:
    """Make one error of those of all sources; wrong bytes are the gravest, and a switch the easiest to mend."""
    note = mirror_note(checkpoint)
    if len(failures) == 1 and not note:
        return failures[0]
    kinds = [type(failure) for failure in failures]
    gravest = [k for k in (ChangedUpstream, HashMismatch, Offline) if k in kinds]
    kind = gravest[0] if gravest else kinds[0] if len(set(kinds)) == 1 else SourceUnavailable
    lines = "".join(f"\n  {type(failure).__name__}: {failure}" for failure in failures)
    error = kind(f"no source delivered {_title(checkpoint)}:{lines}" + (f"\n {note}" if note else ""))
    if isinstance(error, RateLimited):
        error.retry_at = min((f.retry_at for f in failures if isinstance(f, RateLimited) and f.retry_at), default=None)
    return error


def _title(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.model} {checkpoint.tag}"
