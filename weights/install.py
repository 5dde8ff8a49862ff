"""From a record to a verified safetensors file in the cache."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

from weights.cache import Cache, Installed, key, read_json, stamp_of
from weights.errors import (
    CacheNotWritable,
    CorruptCache,
    HashMismatch,
    MalformedFile,
    NoSpace,
    Offline,
    SourceUnavailable,
    UnsupportedFormat,
    WeightsError,
)
from weights.fetch import Expected, fetch
from weights.part import FULL, disk
from weights.patience import patiently
from weights.progress import bar
from weights.reading import hashes, load
from weights.record import Checkpoint
from weights.registry import checkpoints
from weights.sources import candidates, check_announced, local_path, mirror_note, offline, resolve

log = logging.getLogger("weights")
Converter = Callable[[Path, Path], None]
"""Reads a foreign file and writes the safetensors; its attribute `version`, if it has one, says which way of doing so it is."""

HEADER_LIMIT = 100_000_000
"""Bytes of a safetensors header, as its own library limits them."""


def get(checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True) -> Installed:
    """Make sure that a checkpoint lies in the cache; when it does, nothing is asked of the network and nothing is hashed.

    Args:
        checkpoint: a record of the registry, or of `adhoc`.
        to_safetensors: converts (source, destination); needed for a format other than "safetensors", which is never opened here.
        progress: whether a bar may be shown, on a terminal.

    Returns:
        What `load` reads.

    Raises:
        Offline: it is not in the cache, and ZOO_OFFLINE or HF_HUB_OFFLINE is set.
        CorruptCache: so it is, but its file in the cache was damaged.
        HashMismatch, SizeMismatch, ProtocolError, InsecureSource, SourceUnavailable: no source delivered; the message has them all.
        MalformedFile: the file is no safetensors, or can't be converted.
        UnsupportedFormat: it must be converted and `to_safetensors` is missing.
        NoSpace, CacheNotWritable: the cache can't take it.
    """
    cache = Cache()
    if found := cache.lookup(checkpoint):
        cache.sweep()
        return found
    if checkpoint.format != "safetensors" and to_safetensors is None:
        raise UnsupportedFormat(f"{_title(checkpoint)} is a {checkpoint.format} file: pass to_safetensors to have it converted.")
    try:
        return _install(cache, checkpoint, to_safetensors, progress)
    except Offline as error:
        if cache.quarantined:
            raise CorruptCache(f"{'; '.join(cache.quarantined)}. {error}") from error
        raise


def open_weights(
    checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, verify: str = "load", progress: bool = True
) -> memoryview:
    """Get a checkpoint and load it; a file that was damaged in the cache is moved aside and fetched again, once.

    Returns:
        The bytes of its safetensors file, in private, writable memory, as `load` returns them.

    Raises:
        CorruptCache: the damaged file can't be replaced, since it is offline, read-only, or part of the package.
        WeightsError: whatever `get` and `load` raise.
    """
    installed = get(checkpoint, to_safetensors=to_safetensors, progress=progress)
    try:
        return load(installed, verify)
    except CorruptCache as damage:
        try:
            installed = get(checkpoint, to_safetensors=to_safetensors, progress=progress)
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


def _install(cache: Cache, checkpoint: Checkpoint, convert: Converter | None, progress: bool) -> Installed:
    places = list(candidates(checkpoint))
    if (switch := offline()) and not any(place.startswith(("file:", "package:")) for place, _ in places):
        todo = f"Unset it to fetch the file once.{mirror_note(checkpoint)}"
        raise Offline(f"{_title(checkpoint)} is not in {cache.root}, and {switch} forbids the network. {todo}")
    cache.prepare()
    name = checkpoint.sha256 or key(checkpoint.sources[0])
    failures: list[WeightsError] = []
    with cache.lock(name):
        if found := cache.lookup(checkpoint):
            return found
        cache.sweep(spare=name)
        for number, (place, source) in enumerate(places, 1):
            try:
                return _install_from(cache, checkpoint, name, place, source, convert, progress)
            except (NoSpace, CacheNotWritable):
                raise
            except WeightsError as error:
                failures.append(error)
                if number < len(places):
                    log.warning("%s Trying %s next.", error, places[number][0])
    raise _together(checkpoint, failures)


def _install_from(
    cache: Cache, checkpoint: Checkpoint, name: str, place: str, source: str, convert: Converter | None, progress: bool
) -> Installed:
    ref = None if place.startswith("file:") else cache.ref(source)
    before = (ref or {}).get("source_sha256")
    if before and not before.startswith(checkpoint.sha256 or checkpoint.sha256_prefix or ""):
        ref = before = None  # the record was corrected since: it outranks what an older one led to
    remote = patiently(lambda: resolve(place, (ref or {}).get("commit")), place)
    check_announced(remote, checkpoint.sha256 or before)
    stamp = stamp_of(local_path(place).stat()) if place.startswith("file:") and local_path(place).exists() else None
    expected = Expected(checkpoint.sha256, checkpoint.sha256_prefix, checkpoint.size_bytes, before)
    cache.require(checkpoint.size_bytes or remote.size_bytes or 0, copies=1 if checkpoint.format == "safetensors" else 2)
    part = cache.part(name)
    try:
        with bar(_title(checkpoint), progress) as shown:
            fetch(remote, part, expected, shown)
        if checkpoint.format == "safetensors":
            _check_complete(part.path, part.size, place)
            sha256, blake3, size_bytes, ready = part.sha256, part.blake3, part.size, part.path
        else:
            ready = cache.temporary(name)
            sha256, blake3, size_bytes = _converted(convert, part.path, ready, place)
        part.close()
        installed = Installed(cache.publish(ready, sha256), sha256, blake3, size_bytes, remote.url, part.sha256)
        if convert and checkpoint.format != "safetensors":
            cache.derive(installed, re.sub(r"[^\w-]", "_", str(getattr(convert, "version", 1)))[:32])
        cache.record(source, installed, remote.commit, stamp)
    except (SourceUnavailable, KeyboardInterrupt):
        part.release()
        raise
    except BaseException:
        part.discard()
        raise
    part.discard()
    cache.sweep(done=name)
    log.info("installed %s from %s, sha256 %s", _title(checkpoint), remote.url, part.sha256)
    return installed


def _converted(convert: Converter | None, source: Path, made: Path, place: str) -> tuple[str, str, int]:
    """Have the verified bytes converted; an error of the converter is an error of the file."""
    assert convert is not None  # get() has seen to it
    try:
        convert(source, made)
        _check_complete(made, made.stat().st_size, place)
        return hashes(made)
    except WeightsError as error:
        made.unlink(missing_ok=True)
        told = type(error)(str(error).replace(str(source), place))
        told.__dict__.update(error.__dict__)
        raise told from error  # the user knows the place, not our temporary file
    except Exception as error:
        made.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in FULL:
            with disk(made.parent):
                raise
        raise MalformedFile(f"{place} can't be converted to safetensors: {type(error).__name__}: {error}") from error


def _check_complete(path: Path, size_bytes: int, place: str) -> None:
    """See that the header describes all of the file: where no hash is known, nothing else tells a file that was cut short."""
    with path.open("rb") as file:
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
    kind = next((k for k in (HashMismatch, Offline) if k in kinds), kinds[0] if len(set(kinds)) == 1 else SourceUnavailable)
    lines = "".join(f"\n  {type(failure).__name__}: {failure}" for failure in failures)
    return kind(f"no source delivered {_title(checkpoint)}:{lines}" + (f"\n {note}" if note else ""))


def _title(checkpoint: Checkpoint) -> str:
    return f"{checkpoint.model} {checkpoint.tag}"
