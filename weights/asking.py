"""What the Hub says of its files without sending them, and what this machine has seen, for rows that lack a hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from weights.cache import Cache
from weights.errors import SourceUnavailable, UnsupportedFormat
from weights.lock import Entry
from weights.patience import patiently
from weights.pinning import key_of
from weights.places import hub_parts
from weights.record import Checkpoint
from weights.sources import resolve


def announced(checkpoint: Checkpoint) -> Entry:
    """Ask the Hub for commit, SHA-256 and size of a checkpoint's file by one HEAD request; no byte of the file comes.

    Returns:
        An entry for a lock, whose tensors nobody has seen yet.

    Raises:
        UnsupportedFormat: none of its sources is on the Hub.
        SourceUnavailable: the Hub has no such file, can't be reached, or announces no SHA-256.
        HashMismatch: it announces another file than the record says.
    """
    from weights.sources import check_announced

    source = next((source for source in reversed(checkpoint.sources) if source.startswith("hf://")), None)
    if source is None:
        raise UnsupportedFormat(f"{key_of(checkpoint)} is not on the Hub: {', '.join(checkpoint.sources)}. zoo lock fetches and hashes it.")
    remote = patiently(lambda: resolve(source), source)
    check_announced(remote, checkpoint.sha256)
    if remote.sha256 is None or remote.commit is None:
        raise SourceUnavailable(f"{source}: the Hub announces no SHA-256 and commit of it. zoo lock {key_of(checkpoint)} fetches it.")
    parts = hub_parts(source)
    assert parts is not None  # the Hub has resolved it
    name = parts[2] or "/" + remote.url.partition(f"/resolve/{remote.commit}/")[2]
    sources = tuple(f"{parts[0]}@{remote.commit}{name}" if one == source else one for one in checkpoint.sources)
    return Entry(key_of(checkpoint), checkpoint.format, sources, checkpoint.license, remote.sha256, size_bytes=remote.size_bytes)


@dataclass(frozen=True, slots=True)
class Seen:
    """What this machine got from a checkpoint's own source.

    Attributes:
        key: of the checkpoint, "ResNet50:a1_in1k".
        sha256: of the file.
        size_bytes: of the file.
        commit: of the Hub's repository, where it is of one.
        when: the day, "2026-11-26".
    """

    key: str
    sha256: str
    size_bytes: int
    commit: str | None
    when: str


def seen_here(rows: Iterable[Checkpoint]) -> Iterator[Seen]:
    """List what this cache got of rows that lack a full hash; what only a mirror or a bundle told is left out."""
    cache = Cache()
    for row in rows:
        if row.sha256:
            continue
        notes = (note for source in row.sources if (note := cache.ref(source)) and not note.get("by"))
        if note := next(notes, None):
            yield Seen(key_of(row), note["source_sha256"], note["source_size"], note.get("commit"), str(note["seen"])[:10])


def contribution(seen: Iterable[Seen], by: str) -> str:
    """Write what was seen as rows of the registry have it, one table a checkpoint, for whoever keeps the registry."""
    text = f"# Seen by {by}. Each table has what a row of the registry can take.\n".replace("\r", " ")
    for one in seen:
        model, _, tag = one.key.partition(":")
        facts = {"sha256_reported": one.sha256, "reported_by": f"{by}, {one.when}", "size_bytes": one.size_bytes}
        facts |= {"commit": one.commit} if one.commit else {}
        rows = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in facts.items())
        text += f"\n[{model}.{json.dumps(tag)}]\n" + "".join(rows)
    return text


def without_tensors(new: Entry, old: Entry | None) -> Entry:
    """Keep what a lock knew of the tensors, where the file is the same."""
    return replace(new, tensors=old.tensors, fingerprint=old.fingerprint) if old and old.sha256 == new.sha256 else new
