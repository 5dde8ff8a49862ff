"""Small files beside a checkpoint in its repository of the Hub: what its authors say of images and classes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from weights.cache import Cache, key, read_json
from weights.errors import CacheNotWritable, NoSpace, WeightsError
from weights.fetch import Expected, fetch
from weights.part import Part
from weights.patience import patiently
from weights.pinning import frozen_by
from weights.places import hub_parts
from weights.record import Checkpoint
from weights.sources import Gone, offline, resolve

log = logging.getLogger("weights")
MOST_BYTES = 8 << 20
"""Size of the largest file that is read: a list of all of WordNet's nouns has a quarter of that."""


def files_beside(checkpoint: Checkpoint, names: Iterable[str], *, frozen: bool | None = None) -> dict[str, bytes]:
    """Read files that lie in a Hub repository beside the weights that were installed of it, at the same commit.

    They are asked for once; a note in the cache keeps them, and which are not there. Offline and frozen that note is all that is read.

    Args:
        checkpoint: a record whose weights are installed.
        names: of the files, "config.json".
        frozen: whether nothing new is admitted; None does as ZOO_FROZEN says.

    Returns:
        Those that are there, by name; none of a checkpoint of another source. What could not be had is missing, and a log line says so.
    """
    cache = Cache()
    for source in checkpoint.sources:
        parts, commit = hub_parts(source), (cache.ref(source) or {}).get("commit")
        if parts is None or commit is None:
            continue
        folder = f"{parts[0]}@{commit}{parts[2].rpartition('/')[0]}/"
        note = cache.root / "beside" / f"{key(folder)}.json"
        known = {name: text for name, text in (read_json(note) or {}).items() if text is None or isinstance(text, str)}
        wanted = [name for name in names if name not in known]
        if wanted and not offline() and not frozen_by(frozen):
            try:
                cache.prepare()
                known |= {name: _text(cache, f"{folder}{name}", commit) for name in wanted}
                note.parent.mkdir(exist_ok=True)
                cache.write_json(note, known)
            except (CacheNotWritable, NoSpace, OSError) as error:
                log.info("what is beside %s is not kept: %s", source, error)
            except WeightsError as error:
                log.warning("what is beside %s could not be read: %s", source, error)
        return {name: text.encode() for name in names if (text := known.get(name)) is not None}
    return {}


def local_files_beside(path: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Read files that lie beside a file of weights on this machine; none that is no regular file, or too large."""
    found: dict[str, bytes] = {}
    for name in names:
        file = path.parent / name
        if file.is_file() and file.stat().st_size <= MOST_BYTES:
            found[name] = file.read_bytes()
    return found


def _text(cache: Cache, source: str, commit: str) -> str | None:
    """Fetch one file; None where there is none of this name."""
    try:
        remote = patiently(lambda: resolve(source, commit), source)
    except Gone:
        return None
    part = Part(cache.partial, key(source), remote.url)
    try:
        fetch(remote, part, Expected(most_bytes=MOST_BYTES, by="the limit of what is read beside weights"))
        return part.path.read_text(encoding="utf-8", errors="replace")
    finally:
        part.discard()
