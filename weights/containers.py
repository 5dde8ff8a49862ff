"""The same weights in several containers: the Hub's safetensors, and the pickle that they were made of, each with a hash of its own."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from weights.cache import Cache, Installed
from weights.delivery import OURS
from weights.errors import HashMismatch, ProtocolError, SourceUnavailable, WeightsError
from weights.header import entries
from weights.install import Converter, get, open_weights
from weights.pinning import admit
from weights.reading import load
from weights.record import Checkpoint

log = logging.getLogger("weights")
T = TypeVar("T")


def get_any(
    checkpoint: Checkpoint, *, to_safetensors: Converter | None = None, progress: bool = True, frozen: bool | None = None
) -> tuple[Checkpoint, Installed]:
    """Get a checkpoint in its own container, or, where that can't be reached, in the first alternative that can.

    The own container is fetched even where another is installed. The numbers of whatever is fetched are compared with those of the
    containers that are installed.

    Returns:
        The record of the container that was used, and what `get` returns.

    Raises:
        HashMismatch: a container holds other bytes than it should, or two of them hold other numbers.
        WeightsError: whatever `get` raises; of several that can't be reached, the error of the first.
    """
    return _first(list(checkpoint.containers()), lambda row: get(row, to_safetensors=to_safetensors, progress=progress, frozen=frozen))


def open_any(checkpoint: Checkpoint, *, verify: str = "load", **how: Any) -> tuple[Checkpoint, memoryview]:
    """Do as `get_any` does, and load it as `open_weights` does; where only an alternative is installed, nothing is asked of the network.

    Args:
        checkpoint: a record.
        verify: as for `open_weights`.
        **how: `to_safetensors`, `progress` and `frozen`, as for `get_any`.
    """
    rows = list(checkpoint.containers())
    if rows[1:] and not _installed(checkpoint):
        rows = [row for row in rows[1:] if _installed(row)][:1] or rows
    return _first(rows, lambda row: open_weights(row, verify=verify, **how))


def _installed(row: Checkpoint) -> bool:
    """Whether a row's sources gave something that the cache has still; whether it is whole is seen when it is opened."""
    cache = Cache()
    notes = (note for source in row.sources if (note := cache.ref(source)))
    return any(cache.blob(note["sha256"]).exists() for note in notes)


def _first(rows: list[Checkpoint], take: Callable[[Checkpoint], T]) -> tuple[Checkpoint, T]:
    """Take the first container that can be had."""
    failed: SourceUnavailable | ProtocolError | None = None
    for row in rows:
        new = len(rows) > 1 and not _installed(row)
        try:
            taken = take(row)
        except OURS:
            raise
        except (SourceUnavailable, ProtocolError) as error:
            failed = failed or error
            if row is not rows[-1]:
                log.warning("%s Trying the same weights in another container.", error)
            continue
        if new:
            _compare(rows, row)
        return row, taken
    assert failed is not None
    raise failed


def _compare(rows: list[Checkpoint], row: Checkpoint) -> None:
    """Refuse a container whose numbers are not those of another one that is installed, whatever its tensors are called."""
    cache = Cache()
    found: dict[str, Installed] = {}
    for one in rows:
        with contextlib.suppress(WeightsError):  # a lock that is against another container says so when that is asked for
            if there := cache.lookup(admit(cache, one, frozen=False)[0]):
                found[one.sources[0]] = there
    if len(found) < 2 or row.sources[0] not in found:
        return
    numbers = {source: _numbers(load(there)) for source, there in found.items()}
    for source in numbers:
        if numbers[source] != numbers[row.sources[0]]:
            todo = "One of the publishers changed its file: find out which, and name the other by its address"
            cache.forget(row.sources)  # so that the next call does not take it for installed
            raise HashMismatch(f"{row.sources[0]} and {source} should hold the same weights, and don't. {todo}.")


def _numbers(data: memoryview) -> Counter[str]:
    """Count the hashes of all tensors of floating-point numbers, without their names and shapes: those belong to the container."""
    found = (entry for entry in entries(data).values() if entry.dtype[0] in "FB" and entry.dtype != "BOOL")
    return Counter(hashlib.sha256(data[entry.start : entry.stop]).hexdigest() for entry in found)
