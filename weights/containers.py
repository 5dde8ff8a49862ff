"""The same weights in several containers: the Hub's safetensors, and the pickle that they were made of, each with a hash of its own."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from weights.cache import Cache, Installed
from weights.delivery import OURS
from weights.errors import HashMismatch, ProtocolError, SourceUnavailable
from weights.header import entries
from weights.install import Converter, get, open_weights
from weights.reading import load
from weights.record import Checkpoint

log = logging.getLogger("weights")


def containers(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """List the record itself and one for each alternative, whose tag is its source: so locks pin each by its own name."""
    yield checkpoint
    for other in checkpoint.alternatives:
        yield replace(
            checkpoint,
            tag=other.source,
            sources=(other.source,),
            format=other.format,
            names="auto",
            sha256=other.sha256,
            sha256_prefix=other.sha256_prefix,
            size_bytes=other.size_bytes,
            sha256_reported=None,
            reported_by=None,
            alternatives=(),
            default=False,
        )


def get_any(
    checkpoint: Checkpoint,
    *,
    to_safetensors: Converter | None = None,
    progress: bool = True,
    frozen: bool | None = None,
    own_first: bool = False,
) -> tuple[Checkpoint, Installed]:
    """Get a checkpoint in its own container, or, where that can't be reached, in the first alternative that can.

    What is installed already comes first, so that nothing is asked of the network. With `own_first` the own container is fetched even where
    another is installed. The numbers of whatever is fetched are compared with those of the containers that are installed.

    Returns:
        The record of the container that was used, and what `get` returns.

    Raises:
        HashMismatch: a container holds other bytes than it should, or two of them hold other numbers.
        WeightsError: whatever `get` raises; of several that can't be reached, the error of the first.
    """
    rows, cache = list(containers(checkpoint)), Cache()
    here = next((row for row in rows if cache.lookup(row) and (row is checkpoint or not own_first)), None)
    failed: SourceUnavailable | ProtocolError | None = None
    for row in [here] if here else rows:
        try:
            installed = get(row, to_safetensors=to_safetensors, progress=progress, frozen=frozen)
        except OURS:
            raise
        except (SourceUnavailable, ProtocolError) as error:
            failed = failed or error
            if row is not rows[-1]:
                log.warning("%s Trying the same weights in another container.", error)
            continue
        if here is None:
            _compare(cache, rows, row, installed)
        return row, installed
    assert failed is not None
    raise failed


def open_any(
    checkpoint: Checkpoint,
    *,
    to_safetensors: Converter | None = None,
    verify: str = "load",
    progress: bool = True,
    frozen: bool | None = None,
) -> tuple[Checkpoint, memoryview]:
    """Do as `get_any` does, and load it as `open_weights` does."""
    row, _ = (
        get_any(checkpoint, to_safetensors=to_safetensors, progress=progress, frozen=frozen)
        if checkpoint.alternatives
        else (checkpoint, None)
    )
    return row, open_weights(row, to_safetensors=to_safetensors, verify=verify, progress=progress, frozen=frozen)


def _compare(cache: Cache, rows: list[Checkpoint], row: Checkpoint, installed: Installed) -> None:
    """Refuse a container whose numbers are not those of another one that is installed, whatever its tensors are called."""
    for other in rows:
        if other is row or (found := cache.lookup(other)) is None:
            continue
        if _numbers(load(installed)) != _numbers(load(found)):
            todo = "One of the publishers changed its file: find out which, and name the other by its address"
            raise HashMismatch(f"{row.sources[0]} and {other.sources[0]} should hold the same weights, and don't. {todo}.")


def _numbers(data: memoryview) -> Counter[str]:
    """Count the hashes of all tensors of floating-point numbers, without their names and shapes: those belong to the container."""
    found = (entry for entry in entries(data).values() if entry.dtype[0] in "FB" and entry.dtype != "BOOL")
    return Counter(hashlib.sha256(data[entry.start : entry.stop]).hexdigest() for entry in found)
