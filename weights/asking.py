"""What the Hub says of its files without sending them, and what this machine has seen, for rows that lack a hash."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from weights.cache import Cache
from weights.errors import SourceUnavailable, UnsupportedFormat
from weights.fetch import Expected, check_reported
from weights.lock import Entry, quoted
from weights.patience import patiently
from weights.pinning import at_commit, key_of
from weights.record import Checkpoint
from weights.sources import check_announced, resolve


def announced(checkpoint: Checkpoint) -> Entry:
    """Ask the Hub for commit, SHA-256 and size of a checkpoint's file by one HEAD request; no byte of the file comes.

    Returns:
        An entry for a lock, whose tensors nobody has seen yet.

    Raises:
        UnsupportedFormat: none of its sources is on the Hub.
        SourceUnavailable: the Hub has no such file, can't be reached, or announces no SHA-256.
        HashMismatch: it announces another file than the record says.
    """
    source = next((source for source in reversed(checkpoint.sources) if source.startswith("hf://")), None)
    if source is None:
        raise UnsupportedFormat(f"{key_of(checkpoint)} is not on the Hub: {', '.join(checkpoint.sources)}. zoo lock fetches and hashes it.")
    remote = patiently(lambda: resolve(source), source)
    check_announced(remote, checkpoint.sha256)
    if checkpoint.sha256_reported and checkpoint.reported_by and remote.sha256:
        reported = (checkpoint.sha256_reported, checkpoint.reported_by)
        check_reported(source, Expected(prefix=checkpoint.sha256_prefix, reported=reported, name=key_of(checkpoint)), remote.sha256)
    if remote.sha256 is None or remote.commit is None:
        raise SourceUnavailable(f"{source}: the Hub announces no SHA-256 and commit of it. zoo lock {key_of(checkpoint)} fetches it.")
    pinned = at_commit(source, remote.commit, remote.url)
    sources = tuple(dict.fromkeys(pinned if one == source else one for one in checkpoint.sources))
    return Entry(key_of(checkpoint), checkpoint.format, sources, checkpoint.license, remote.sha256, size_bytes=remote.size_bytes)


@dataclass(frozen=True, slots=True)
class Seen:
    """What this machine got from a checkpoint's own source.

    Attributes:
        key: of the checkpoint, "ResNet50:a1_in1k".
        sha256: of the file.
        size_bytes: of the file.
        sources: of its record; a source of the Hub stands at the commit that was seen, too.
        when: the day, "2026-11-26".
    """

    key: str
    sha256: str
    size_bytes: int
    sources: tuple[str, ...]
    when: str


def seen_here(rows: Iterable[Checkpoint]) -> Iterator[Seen]:
    """List what this cache got of rows that lack a full hash; what only a mirror or a bundle told is left out."""
    cache = Cache()
    for row in rows:
        found = ((source, note) for source in row.sources if (note := cache.ref(source)) and not note.get("by"))
        if row.sha256 is None and (one := next(found, None)):
            source, note = one
            sources = dict.fromkeys((at_commit(source, note.get("commit"), note["source"]), *row.sources))
            yield Seen(key_of(row), note["source_sha256"], note["source_size"], tuple(sources), str(note["seen"])[:10])


def contribution(seen: Iterable[Seen], by: str) -> str:
    """Write what was seen as a table for each checkpoint, with keys of the registry, for its keepers."""
    by = " ".join(by.split())
    text = f"# Seen by {by}. Put these keys into the rows of the registry.\n"
    for one in seen:
        model, _, tag = one.key.partition(":")
        facts = {"sources": list(one.sources), "sha256_reported": one.sha256}
        facts |= {"reported_by": f"{by}, {one.when}", "size_bytes": one.size_bytes}
        rows = (f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in facts.items())
        text += f"\n[{model}.{quoted(tag)}]\n" + "".join(rows)
    return text
