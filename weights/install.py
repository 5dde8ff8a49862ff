"""From a record to a verified safetensors file in the cache."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from weights.cache import Cache, Installed, key, read_json, same_file, stamp_of
from weights.collecting import keep_projects
from weights.delivery import Arrived, Delivery
from weights.errors import (
    CorruptCache,
    HashMismatch,
    MalformedFile,
    NotLocked,
    Offline,
    SourceUnavailable,
    UnsupportedFormat,
    WeightsError,
)
from weights.finite import check_file
from weights.part import Part, disk
from weights.pinning import Pin, admit, check_fingerprint, frozen_by, hearsay, key_of, remember, same_tensors
from weights.places import ELSEWHERE
from weights.reading import hashes, load
from weights.record import KEPT, Checkpoint
from weights.registry import checkpoints, recognise
from weights.sources import local_path

log = logging.getLogger("weights")
Converter = Callable[[Path, Path, Checkpoint], str | None]
"""Reads a foreign file and writes the safetensors; its attribute `version`, if it has one, says which way of doing so it is.

The record says in which format the file is, and of which network, where that matters to what is written. It returns the SHA-256 of the
bytes that it converted, so that a file which changed after its proof is found; None is taken on trust.
"""


class Verified(NamedTuple):
    """What `verify` found of one file.

    Attributes:
        name: of the record or of the source.
        ok: whether the file is what was installed.
        detail: in words: its hash, or what is wrong and what to do.

    Example:
        >>> verify(find("ResNet20")).ok
        True
    """

    name: str
    ok: bool
    detail: str


def get(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True, frozen: bool | None = None) -> Installed:
    """Make sure that a checkpoint lies in the cache; when it does, nothing is asked of the network and nothing is hashed.

    Args:
        checkpoint: a record of the registry, or of `adhoc`.
        to_safetensors: converts (source, destination, record); needed for a format other than "safetensors", which is never opened here.
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

    Example:
        >>> installed = get(find("ResNet20"))
        >>> installed.size_bytes
        1094304
    """
    cache = Cache()
    installed, pin = _obtain(cache, checkpoint, to_safetensors, progress, frozen)
    if frozen_by(frozen):
        return replace(installed, frozen=True)
    remember(cache, checkpoint, installed, pin)
    return installed


def obtain(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True) -> Installed:
    """Do as `get` does for whoever writes a lock: nothing is pinned here, and the sources are asked for what only others told."""
    cache = Cache()
    installed, pin = _obtain(cache, checkpoint, to_safetensors, progress, None)
    if checkpoint.sha256 or pin or not hearsay(cache, checkpoint):
        return installed
    log.warning("%s came from another place than its sources, which proves no more than a prefix: asking them", _title(checkpoint))
    return renew(checkpoint, to_safetensors=to_safetensors, progress=progress)


def _obtain(
    cache: Cache, checkpoint: Checkpoint, to_safetensors: Converter | None, progress: bool, frozen: bool | None
) -> tuple[Installed, Pin | None]:
    checkpoint, pin = admit(cache, checkpoint, frozen)
    keep_projects(cache)
    if found := _warm(cache, checkpoint, pin, frozen):
        if pin and not pin.recorded:
            _tell_of_changes(cache, checkpoint, found, pin)
        cache.sweep()
        cache.touch(found)
        return found, pin
    if checkpoint.format != "safetensors" and to_safetensors is None:
        raise UnsupportedFormat(f"{_title(checkpoint)} is a {checkpoint.format} file: pass to_safetensors to have it converted.")
    try:
        return _install(cache, checkpoint, to_safetensors, progress, pin, frozen=frozen), pin
    except SourceUnavailable as error:
        if cache.quarantined and isinstance(error, Offline):
            raise CorruptCache(f"{'; '.join(cache.quarantined)}. {error}") from error
        if (switch := frozen_by(frozen)) and cache.lookup(checkpoint):
            name = key_of(checkpoint)
            what = f"no lock has the fingerprint of {name}, whose tensors in this cache are a bundle's word, and {switch} takes none"
            todo = f"On a machine that can fetch the file: zoo lock {name}; then bring its weights.lock here, into your project's folder"
            anew = "" if all(source.startswith(ELSEWHERE) for source in checkpoint.sources) else f" To make them anew failed: {error}"
            raise NotLocked(f"{what}. {todo}.{anew}") from error
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

    Frozen, what is in the cache is hashed with SHA-256, whatever `verify` says: its notes are not believed, see `load`.

    Args:
        checkpoint: a record of the registry, or of `adhoc`.
        to_safetensors: as for `get`.
        verify: "load" or "stamp", as for `load`.
        progress: whether a bar may be shown, on a terminal.
        frozen: as for `get`.

    Returns:
        The bytes of its safetensors file, in private, writable memory, as `load` returns them.

    Raises:
        CorruptCache: the damaged file can't be replaced, since it is offline, read-only, or part of the package.
        WeightsError: whatever `get` and `load` raise.

    Example:
        >>> len(open_weights(find("ResNet20")))
        1094304
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


def verify(what: Installed | Checkpoint) -> Verified:
    """Re-hash one installed file with SHA-256; a damaged one is moved aside, so that the next use fetches it again.

    Returns:
        What was found; of a checkpoint that is not installed too, which is no damage.

    Example:
        >>> verify(find("ResNet20")).name
        'ResNet20:cifar10'
    """
    cache = Cache()
    if isinstance(what, Installed):
        return _rehash(cache, what.source, what.path, what.sha256)
    if (installed := cache.lookup(what)) is not None:
        return _rehash(cache, _title(what), installed.path, installed.sha256)
    aside, gave = cache.aside(), map(cache.ref, what.sources)
    lost = next((_lost(aside[ref["sha256"]], ref["source_sha256"]) for ref in gave if ref and ref["sha256"] in aside), "")
    return Verified(_title(what), not cache.quarantined and not lost, "; ".join(cache.quarantined) or lost or "not installed")


def verify_all() -> list[Verified]:
    """Re-hash everything in the cache, and the checkpoints that ship with the package, with SHA-256.

    Damage that an earlier call or a load found is told again as long as the damaged file lies in quarantine: where its place is still
    empty as something that is wrong, else as a note.

    Returns:
        For each file what `verify` returns, sorted by name.

    Raises:
        CacheNotWritable: ZOO_CACHE names no folder, or one that can't be read.

    Example:
        >>> all(one.ok for one in verify_all())
        True
    """
    cache = Cache()
    cache.check_folder()
    refs = [ref for path in sorted((cache.root / "refs").glob("*.json")) if (ref := read_json(path))]
    names = {str(ref.get("sha256")): str(ref.get("source")) for ref in refs}
    aside = cache.aside()
    files = [(names.get(path.name, path.name), path, path.name) for path in (cache.root / "blobs" / "sha256").glob("*/*")]
    shipped = (row for row in checkpoints() if row.sources[0].startswith("package:"))
    files += [(_title(row), found.path, found.sha256) for row in shipped if (found := cache.lookup(row))]
    results: list[Verified] = []
    for name, path, sha256 in files:
        name, ok, detail = _rehash(cache, name, path, sha256)
        if before := aside.pop(sha256, None):
            detail = f"{detail}; a damaged one was moved to {before} earlier: look at it, or delete it"
        results.append(Verified(name, ok, detail))
    sources = {str(ref.get("sha256")): str(ref.get("source_sha256")) for ref in refs}
    for sha256, path in aside.items():
        results.append(Verified(names.get(sha256, sha256), False, _lost(path, sources.get(sha256, sha256))))
    return sorted(results)


def _lost(aside: Path, source_sha256: str) -> str:
    """Say of a file that was moved aside and not replaced how it comes back."""
    row = recognise(source_sha256)
    again = "load it once more from where it came"
    if row is not None and row.sources[0].startswith("file:"):
        again = f"zoo add it again, as {_title(row)}"
    elif row is not None:
        again = f"zoo pull {row.model} --weights {row.tag} fetches it again"
    return f"it was damaged, was moved aside earlier, and is missing since: {again}; or delete {aside}"


def _rehash(cache: Cache, name: str, path: Path, sha256: str) -> Verified:
    try:
        found = hashes(path)[0]
    except CorruptCache as error:
        found, detail = "", str(error)
    else:
        detail = f"sha256 {found}" if found == sha256 else f"expected sha256 {sha256}, got {found}"
    if found != sha256 and path == cache.blob(path.name):
        cache.quarantine(path, detail)
    return Verified(name, found == sha256, detail)


def _install(
    cache: Cache,
    checkpoint: Checkpoint,
    convert: Converter | None,
    progress: bool,
    pin: Pin | None,
    *,
    frozen: bool | None = None,
    anew: bool = False,
) -> Installed:
    copies = 1 if checkpoint.format == "safetensors" else 2
    delivery = Delivery(cache, checkpoint, pin, cache.partial, copies=copies, progress=progress, anew=anew)
    cache.prepare()
    keep_projects(cache)
    with cache.lock(delivery.name):
        if not anew and (found := _warm(cache, checkpoint, pin, frozen)):
            return found
        cache.sweep(spare=delivery.name)
        installed = delivery.take(lambda arrived: _kept(cache, checkpoint, convert, pin, arrived))
        cache.touch(installed)
        cache.sweep(done=delivery.name)
    log.info("installed %s from %s, sha256 %s", _title(checkpoint), installed.source, installed.source_sha256)
    return installed


def _warm(cache: Cache, checkpoint: Checkpoint, pin: Pin | None, frozen: bool | None) -> Installed | None:
    """Find what is installed; a conversion with other tensors than a lock names is passed over, and made anew."""
    found, switch = cache.lookup(checkpoint), frozen_by(frozen)
    if found and switch:
        found = replace(found, frozen=True)
    if found is None or same_tensors(cache, checkpoint, found, pin, switch):
        return found
    log.warning("%s: %s is not known to have the tensors of the right file: making it anew", _title(checkpoint), found.path)
    return None


def _tell_of_changes(cache: Cache, checkpoint: Checkpoint, found: Installed, pin: Pin) -> None:
    """Say that a file of this machine is no longer what a lock pins: whoever writes to it may wait for what is in it now."""
    for source in checkpoint.sources:
        if not source.startswith("file:") or source.startswith(ELSEWHERE) or same_file(source, cache.ref(source) or {}):
            continue
        with contextlib.suppress(OSError, ValueError):  # where it is gone, or can't be read, or no note can be written
            path = local_path(source)
            stamp = stamp_of(path.stat())
            if hashes(path)[0] == found.source_sha256:  # only its times are others, and the next call need not read it
                cache.record(source, found, None, stamp, stamp[2], kept=checkpoint.format in KEPT)
            else:
                todo = f"what was pinned is loaded. If you trust what the file has now: zoo lock --update {key_of(checkpoint)}"
                log.warning("%s is no longer the file that %s pins: %s", path, pin.path, todo)


def _kept(cache: Cache, checkpoint: Checkpoint, convert: Converter | None, pin: Pin | None, arrived: Arrived) -> Installed:
    """Give a proven file, or what is made of it, its name in the cache, and note where it came from."""
    part, made = arrived.part, None
    try:
        if checkpoint.format == "safetensors":
            ready, sha256, blake3, size_bytes = part.path, part.sha256, part.blake3, part.size
        else:
            ready = made = cache.temporary(checkpoint.sha256 or key(checkpoint.sources[0]))
            sha256, blake3, size_bytes = _converted(convert, part, made, arrived.remote.source, checkpoint)
            check_fingerprint(checkpoint, pin, made, arrived.remote.source)
        check_file(ready, arrived.remote.source)
        part.close()
        installed = Installed(cache.publish(ready, sha256), sha256, blake3, size_bytes, arrived.remote.url.noted, part.sha256)
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
    kept = checkpoint.format in KEPT
    if made is not None:
        cache.derive(installed, re.sub(r"[^\w-]", "_", str(getattr(convert, "version", 1)))[:32], kept)
    cache.record(arrived.source, installed, arrived.commit, arrived.stamp, part.size, arrived.by, digest=part.digest, kept=kept)
    return installed


def _converted(convert: Converter | None, part: Part, made: Path, place: str, checkpoint: Checkpoint) -> tuple[str, str, int]:
    """Have the verified bytes converted; an error of the converter is one of the file, and one of the system is one of this machine."""
    assert convert is not None  # get() has seen to it
    source = part.path
    try:
        read = convert(source, made, checkpoint)
        if read is not None and read != part.sha256:
            raise HashMismatch(f"{place} changed on this disk after it had come: expected sha256 {part.sha256}, got {read}. Is it shared?")
        return hashes(made)
    except WeightsError as error:
        told = type(error)(str(error).replace(str(source), place))
        told.__dict__.update(error.__dict__)
        raise told from error  # the user knows the place, not our temporary file
    except Exception as error:
        made.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            with disk(made.parent):
                raise
        raise MalformedFile(f"{place} can't be converted to safetensors: {type(error).__name__}: {error}") from error


def _title(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.model}:{checkpoint.tag}"
