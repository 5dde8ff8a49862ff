"""What a network's vectors know: with labels by a linear probe and neighbours, without them by how consistent neighbourhoods are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.documents import table
from zoo.embedding.classifiers import BLOCK, NEAREST, by_neighbours, fitted, folds_of, logits, scaled

PENALTIES = (1.0, 1e-1, 1e-2, 1e-3, 1e-4)
"""Of the squared weights, beside the mean loss, the strongest first: each fit begins where the one before ended."""
INNER = 3
"""Folds within the images that a fold of the probe learns from, which choose the penalty."""
NEIGHBOURS = 20
"""Of an image, where there are no labels."""
APART = 2.0
"""Standard errors by which two figures must differ before one counts as better."""


@dataclass(frozen=True)
class Score:
    """How well one network's vectors do, image by image.

    Attributes:
        each: float64 (N,): with labels 1 where the probe was right and else 0; without labels the consistency of the neighbourhood.
        knn: percent that the k-NN has right; None without labels.
        penalties: of the probe, fold by fold.
    """

    each: np.ndarray
    knn: float | None = None
    penalties: tuple[float, ...] = ()

    @property
    def percent(self) -> float:
        """The mean over the images, in percent."""
        return 100 * float(self.each.mean())

    @property
    def error(self) -> float:
        """Return the standard error of `percent`, in points, over the images.

        Of right and wrong answers it is that of a share after Agresti and Coull, so that 30 right of 30 have an error too. How much
        another draw of training images would change is not in it: no unbiased estimate of that exists for one cross-validation.

        Source:
            Agresti and Coull 1998, https://doi.org/10.2307/2685469, with two successes and two failures added; Bengio and Grandvalet 2004,
            https://www.jmlr.org/papers/v5/grandvalet04a.html, for what is not in it.
        """
        count = len(self.each)
        if self.knn is not None:
            share = (self.each.sum() + 2) / (count + 4)
            return 100 * math.sqrt(share * (1 - share) / (count + 4))
        return 100 * float(self.each.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf

    def facts(self) -> dict[str, Any]:
        """Return what a file keeps."""
        return {"each": self.each.tolist(), "knn": self.knn, "penalties": list(self.penalties)}

    @classmethod
    def of(cls, told: Any) -> Score:
        """Read what a file kept.

        Raises:
            TypeError, KeyError, ValueError: it holds something else.
        """
        facts = table(told, {"each": list, "knn": (int, float, NoneType), "penalties": list})
        return cls(np.array(facts["each"], np.float64), facts["knn"], tuple(map(float, facts["penalties"])))


def behind(first: Score, other: Score) -> tuple[float, float]:
    """Return by how many points one score is behind another, and the standard error of that, both over the same images.

    For right and wrong answers only images count on which the two differ: it is McNemar's test, whose statistic is the ratio of the two.

    Source:
        McNemar 1947, https://doi.org/10.1007/BF02295996.
    """
    difference = first.each - other.each
    count = len(difference)
    if first.knn is not None:
        return 100 * float(difference.mean()), 100 * math.sqrt(float(np.abs(difference).sum())) / count
    return 100 * float(difference.mean()), 100 * float(difference.std(ddof=1)) / math.sqrt(count)


def ranks(scores: Sequence[Score]) -> list[int]:
    """Give scores, the best first, their ranks: whoever is not `APART` standard errors behind the first of a rank shares it.

    Example:
        1, 1, 3 says that the first two can't be told apart, and that the third is behind the first.
    """
    found: list[int] = []
    leader = 0
    for place, score in enumerate(scores):
        points, error = behind(scores[leader], score)
        if place and points > APART * error:
            leader = place
        found.append(leader + 1)
    return found


def probe(x: Tensor, y: Tensor, classes: int, folds: int) -> Score:
    """Measure softmax regression on frozen vectors by cross-validation.

    In each fold the vectors are standardised by what is learnt from, and the penalty is chosen by cross-validation within that, by the
    loss. So no image has a part in the classifier that is measured on it. All is deterministic.

    Args:
        x: vectors, float32 (N, D).
        y: classes, int64 (N,).
        classes: how many there are.
        folds: as many as the smallest class has images at most.

    Returns:
        Whether each image was right, and the k-NN's accuracy, leave one out.
    """
    fold = folds_of(y, folds)
    right = torch.zeros(len(y), dtype=torch.bool)
    penalties = []
    for number in range(folds):
        held = fold == number
        learnt, asked = narrowed(*scaled(x[~held], x[held]))
        penalty, start = _chosen(learnt, y[~held], classes)
        weights = fitted(learnt, y[~held], classes, penalty, start)
        right[held] = logits(weights, asked).argmax(1) == y[held]
        penalties.append(penalty)
    near = by_neighbours(x, y, x, min(NEAREST, len(y) - 1), classes, same=True)
    return Score(right.double().numpy(), 100 * float((near == y).double().mean()), tuple(penalties))


def narrowed(x: Tensor, tx: Tensor) -> tuple[Tensor, Tensor]:
    """Turn vectors with more columns than rows into the space that the rows of `x` span.

    The best weights under a squared penalty lie in it, and lengths stay, so no answer changes.
    """
    if x.shape[1] <= x.shape[0]:
        return x, tx
    basis = torch.linalg.svd(x, full_matrices=False).Vh
    return x @ basis.T, tx @ basis.T


def _chosen(x: Tensor, y: Tensor, classes: int) -> tuple[float, Tensor | None]:
    """Choose the penalty whose loss on held-out images is least, and give weights to begin with."""
    inner = min(INNER, int(torch.bincount(y, minlength=classes).min()))
    if inner < 2:
        return PENALTIES[len(PENALTIES) // 2], None
    fold = folds_of(y, inner)
    losses = dict.fromkeys(PENALTIES, 0.0)
    starts: dict[float, Tensor] = {}
    for number in range(inner):
        held = fold == number
        weights = None
        for penalty in PENALTIES:
            weights = fitted(x[~held], y[~held], classes, penalty, weights)
            losses[penalty] += float(F.cross_entropy(logits(weights, x[held]), y[held], reduction="sum"))
            starts[penalty] = weights
    best = min(PENALTIES, key=lambda penalty: (losses[penalty], -penalty))
    return best, starts[best]


def consistency(x: Tensor, k: int = NEIGHBOURS) -> Score:
    """Measure how consistent neighbourhoods are, without labels.

    Of each image it is the mean over its nearest neighbours of the share of neighbours that the two have in common, where each has the
    other among its own, and else nought. Shared neighbours alone reward vectors in which a few images are near to all; being near each
    other alone rewards vectors that tell copies of the same colours.

    Args:
        x: vectors, float32 (N, D).
        k: neighbours, fewer where there are fewer images.
    """
    k = min(k, max(1, (len(x) - 1) // 2))
    x = F.normalize(x - x.mean(0), dim=1)
    near = torch.empty(len(x), k, dtype=torch.long)
    for start in range(0, len(x), BLOCK):
        similar = x[start : start + BLOCK] @ x.T
        rows = torch.arange(len(similar))
        similar[rows, start + rows] = -torch.inf
        near[start : start + BLOCK] = similar.topk(k, dim=1).indices
    linked = torch.zeros(len(x), len(x)).scatter_(1, near, 1.0)
    both = linked * linked.T * (linked @ linked.T)
    return Score((both.double().sum(1) / k**2).numpy())
