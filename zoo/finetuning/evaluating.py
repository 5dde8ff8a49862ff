"""Measuring a network on images that it did not learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from zoo.finetuning.batches import Batches
from zoo.finetuning.distributed import World
from zoo.finetuning.metrics import Metrics, measure
from zoo.finetuning.studies import one_decision


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation: the figures, and what they were computed from.

    Attributes:
        metrics: the figures.
        probabilities: float64 (N, classes), of images or groups.
        targets: int64 (N,).
        names: of the images or groups.
    """

    metrics: Metrics
    probabilities: np.ndarray
    targets: np.ndarray
    names: list[str]


def evaluate(model: nn.Module, val: Batches, here: World, size: int, lay_out: Callable[[Tensor], Tensor]) -> Measured:
    """Run a network over all images, each process over its share, and give every process all figures.

    Args:
        model: in eval mode.
        val: the images.
        here: the processes.
        size: images in a call.
        lay_out: gives a batch its memory format.
    """
    part, rows = val.part, []
    for images, places in val.measuring(size):
        logits = model(lay_out(images))
        rows.append((places.cpu().numpy(), logits.double().softmax(1).cpu().numpy()))
    told = here.gather((np.concatenate([r[0] for r in rows]), np.concatenate([r[1] for r in rows])))
    places, found = np.concatenate([t[0] for t in told]), np.concatenate([t[1] for t in told])
    order = [int(i) for i in np.argsort(places, kind="stable") if places[i] >= 0]  # padding and unreadable images have no place
    places, probabilities = places[order], found[order]
    targets, names = part.targets[places], [part.key(int(p)) for p in places]
    if part.groups is not None:
        probabilities, targets, names = one_decision(probabilities, targets, [part.groups[int(p)] for p in places])
    return Measured(measure(probabilities, targets), probabilities, targets, names)
