"""Which checkpoints are compared: those on this machine, and a few that may be fetched, from small and quick to large and accurate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import weights
from weights import Cache, Checkpoint, UnknownWeights
from weights.places import SCHEMES
from zoo.networks.model import Model
from zoo.pretrained.names import named
from zoo.pretrained.offline import places
from zoo.pretrained.records import find_record, restriction
from zoo.pretrained.search import IMAGENET
from zoo.pretrained.trained import trained
from zoo.variants import variants

MOST = 12
"""Checkpoints on this machine that are compared where nobody names some."""
FETCHED = 4
"""Of the others, how many are fetched."""
FETCHED_MB = 120.0
"""Megabytes of a file that is fetched unasked, at most."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that may be compared.

    Attributes:
        record: of it.
        network: the network with its weights, where the caller gave that; else None, and `trained` loads it.
        here: where it is on this machine; "" if it has to be fetched.
    """

    record: Checkpoint
    network: Model | None = None
    here: str = ""

    @property
    def name(self) -> str:
        """NETWORK:TAG."""
        return f"{self.record.model}:{self.record.tag}"

    @property
    def mb(self) -> float:
        """Megabytes of its file, or of its parameters in float32 where nobody states that."""
        if self.record.size_bytes:
            return self.record.size_bytes / 1e6
        if self.network is not None:
            return sum(value.numel() * value.element_size() for value in self.network.state_dict().values()) / 1e6
        known = variants().get(self.record.model)
        return 4 * known.params / 1e6 if known else 0.0

    @property
    def restriction(self) -> str:
        """What its licence may forbid."""
        return restriction(self.record)


def named_candidates(models: Iterable[Any]) -> list[Candidate]:
    """Return the candidates that a caller names: "resnet50", "resnet50:imagenet1k_v2", or networks that have a checkpoint.

    Raises:
        UnknownWeights, NoPretrainedWeights: there is no such network or checkpoint.
        ValueError: a network is untrained, is no classifier, or one is named twice.
    """
    found: list[Candidate] = []
    cache = Cache()
    for model in models:
        if isinstance(model, Model):
            if model.checkpoint is None:
                raise ValueError(f"this {type(model).__name__} is untrained, so no preprocessing belongs to it; use trained(NETWORK)")
            found.append(Candidate(model.checkpoint, model, "given"))
            continue
        if not isinstance(model, str) and not isinstance(model, type):
            raise TypeError(f"models are names, NETWORK or NETWORK:TAG, classes of the catalogue, or trained networks; got {model!r}")
        name, tag = named(model if isinstance(model, str) else model.__name__, None)
        if name not in variants():
            raise UnknownWeights(f"{name} is no classifier, and only these are compared; zoo list --task classification shows them")
        if tag is not None and tag not in {row.tag for row in weights.checkpoints(name)}:  # a run's folder
            network = trained(name, tag)
            assert network.checkpoint is not None
            found.append(Candidate(network.checkpoint, network, f"from {tag}"))
            continue
        record = find_record(name, tag)
        found.append(Candidate(record, here=next(places(cache, record), "")))
    names = [one.name for one in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{', '.join(twice)} is named twice among the models; take one out")
    return found


def usual_candidates(
    offline: bool, most: int = MOST, fetched: int = FETCHED, max_mb: float | None = None, license: Callable[[str], bool] | None = None
) -> list[Candidate]:
    """Choose candidates where nobody names some.

    Args:
        offline: whether nothing may be fetched.
        most: checkpoints that are on this machine.
        fetched: of the others; each is one of those that no smaller checkpoint beats by its published ImageNet top-1.
        max_mb: megabytes of a file that is fetched; None takes `FETCHED_MB`.
        license: tells whether the budget allows a licence; None allows all.
    """
    cache = Cache()
    rows = [row for row in weights.checkpoints() if row.model in variants() and row.preprocessing.crop is not None]
    here = [Candidate(row, here=place) for row in rows if (place := next(places(cache, row), ""))]
    if len(here) > most:  # those that are no ImageNet networks come first, for nothing published compares them with the others
        others = [one for one in here if not _published(one.record)][:most]
        front = shortlist([one for one in here if _published(one.record)], most - len(others))
        here = [one for one in here if one in [*others, *front]]
    if offline or not fetched:
        return here
    there = {one.name for one in here}
    absent = [
        Candidate(row)
        for row in rows
        if f"{row.model}:{row.tag}" not in there and _published(row) and _has_address(row) and (license is None or license(row.license))
    ]
    absent = [one for one in absent if one.mb <= (FETCHED_MB if max_mb is None else max_mb)]
    return [*here, *shortlist(absent, fetched)]


def shortlist(found: Sequence[Candidate], count: int) -> list[Candidate]:
    """Take so many, spread over the sizes, of those that no smaller one beats; then of those that only the taken ones beat, and so on."""
    left = sorted(found, key=lambda one: (one.mb, -_published(one.record), one.name))
    taken: list[Candidate] = []
    while left and len(taken) < count:
        front: list[Candidate] = []
        for one in left:
            if not front or _published(one.record) > _published(front[-1].record):
                front.append(one)
        taken += _spread(front, count - len(taken))
        left = [one for one in left if one not in front]
    return sorted(taken, key=lambda one: one.mb)


def _spread(front: list[Candidate], count: int) -> list[Candidate]:
    """Take so many of a front, their sizes as evenly apart as they can be on a logarithmic scale, the ends among them."""
    if len(front) <= count:
        return front
    low, high = (math.log(max(end.mb, 1e-3)) for end in (front[0], front[-1]))
    left, taken = list(front), []
    for step in range(count):
        wanted = low + (high - low) * (step / (count - 1) if count > 1 else 1)
        nearest = min(left, key=lambda one: abs(math.log(max(one.mb, 1e-3)) - wanted))
        taken.append(nearest)
        left.remove(nearest)
    return taken


def _published(row: Checkpoint) -> float:
    """Return the published ImageNet top-1; 0 where there is none."""
    return row.metrics.get("top1", 0.0) if (row.metrics_data or "").startswith(IMAGENET) else 0.0


def _has_address(row: Checkpoint) -> bool:
    return any(source.partition(":")[0] in SCHEMES and not source.startswith(("file:", "package:")) for source in row.sources)
