"""What vectors know of labels: a k-NN and a linear classifier, measured on images that they were not fitted to."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from weights.arguments import forgiving
from weights.documents import read_json
from zoo.embedding.classifiers import NEAREST, TEMPERATURE, by_neighbours, fitted, folds_of, logits, scaled
from zoo.embedding.reading import Embeddings, as_embeddings

FOLDS = 10
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Of the squared weights, as a share of the mean loss; the best on held-out images of the training folds is taken."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What two classifiers reach on vectors.

    Attributes:
        tap: whose vectors.
        images: that had a label.
        classes: how many.
        chance: percent that the most frequent class alone has right.
        knn: percent that the k-NN has right.
        linear: percent that the linear classifier has right; None where it was not asked for.
        k: neighbours that voted.
        penalty: of the linear classifier.
        how: what was done, in words.
    """

    tap: str
    images: int
    classes: int
    chance: float
    knn: float
    linear: float | None
    k: int
    penalty: float | None
    how: str


@forgiving
def knn(
    embeddings: Embeddings | str | os.PathLike[str],
    labels: str | os.PathLike[str] | Mapping[str, str] | None = None,
    *,
    at: str | None = None,
    k: int = NEAREST,
    test: Embeddings | str | os.PathLike[str] | None = None,
    folds: int = FOLDS,
    linear: bool = True,
) -> Probed:
    """Measure how well vectors tell labels apart, by a k-NN and by logistic regression.

    The k-NN compares by cosine, and its neighbours vote with the weight exp(cosine / 0.07). Without test images every image is classified
    by all others (leave one out), and the linear classifier by cross-validation in folds with the same share of every class. Both
    give the same result every time.

    Args:
        embeddings: what `read` returns, or the file that `embed` wrote.
        labels: None takes those that the embeddings have; else {key: label}, or a file of it: JSON, or lines of key, tab or comma, label.
        at: the tap; None where there is one.
        k: neighbours that vote.
        test: measure on these instead, likewise, and learn from all of `embeddings`.
        folds: of the cross-validation.
        linear: whether to fit the linear classifier too.

    Raises:
        ValueError: no labels, one class only, too few images, a tap is missing, or the file's ending is none of embeddings.
        FileNotFoundError, DamagedEmbeddings: as `read`, of a file.
        TypeError: embeddings are neither.

    Source:
        Wu et al. 2018, section 3.4, for the weighted vote and its temperature (https://arxiv.org/abs/1805.01978).
    """
    if k < 1 or folds < 2:
        raise ValueError(f"k is at least 1 and folds at least 2, got {k} and {folds}")
    embeddings, test = as_embeddings(embeddings), None if test is None else as_embeddings(test)
    tap = embeddings.tap(at)
    told = told_labels(labels)
    x, names = _labelled(embeddings, tap, told)
    classes = sorted(set(names))
    if len(classes) < 2:
        raise ValueError(f"labels must be of two classes at least, and every image of {embeddings.path} is {classes[0]!r}")
    y, voting = _numbers(names, classes), f"cosine, neighbours weighted by exp(cosine / {TEMPERATURE})"
    if test is None:
        k = min(k, len(y) - 1)
        right, asked = _vote(x, y, x, y, k, len(classes), same=True), y
        how = f"k-NN: leave one out over {len(y):,} images, {voting}"
        fitted = _cross_validated(x, y, folds, len(classes)) if linear else (None, None)
        how += (
            f"; linear: logistic regression by L-BFGS, {folds} folds, penalty chosen within the first fold's training images"
            if linear
            else ""
        )
    else:
        tx, asked = _asked(test, tap, told, classes, x.shape[1], embeddings)
        k = min(k, len(y))
        right = _vote(x, y, tx, asked, k, len(classes), same=False)
        how = f"learnt from {len(y):,} images, measured on {len(asked):,} others; k-NN: {voting}"
        fitted = _held_out(x, y, tx, asked, len(classes)) if linear else (None, None)
        how += "; linear: logistic regression by L-BFGS, penalty chosen on a tenth of what it learns from" if linear else ""
    chance = 100 * torch.bincount(asked).max().item() / len(asked)
    return Probed(tap, len(asked), len(classes), chance, right, fitted[0], k, fitted[1], how)


def _asked(
    test: Embeddings, tap: str, told: Mapping[str, str] | None, classes: list[str], width: int, learnt: Embeddings
) -> tuple[Tensor, Tensor]:
    """Return the vectors and classes of test images."""
    ours, theirs = learnt.about.get("weights"), test.about.get("weights")
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(f"{test.path} was computed with other weights than {learnt.path}; two networks' vectors can't be compared")
    x, names = _labelled(test, tap, told)
    if unknown := sorted(set(names) - set(classes)):
        raise ValueError(f"{test.path} has labels that {learnt.path} has not: {', '.join(unknown[:5])}")
    if x.shape[1] != width:
        raise ValueError(
            f"the vectors of {test.path} have {x.shape[1]} numbers, those of {learnt.path} {width}: two networks' can't be compared"
        )
    return x, _numbers(names, classes)


def _numbers(names: Sequence[str], classes: Sequence[str]) -> Tensor:
    place = {name: number for number, name in enumerate(classes)}
    return torch.tensor([place[name] for name in names])


def told_labels(labels: str | os.PathLike[str] | Mapping[str, str] | None) -> Mapping[str, str] | None:
    """Read {key: label} from a file, JSON or lines of key, tab or comma, label; what is no file is returned as it is.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds something else.
    """
    if labels is None or isinstance(labels, Mapping):
        return labels
    path = Path(labels)
    if not path.is_file():
        raise FileNotFoundError(f"{path} is no file; labels are in one of key, tab or comma, label a line, or JSON {{key: label}}")
    text = path.read_text(encoding="utf-8-sig")
    if path.suffix == ".json":
        told = read_json(text, path, "Mend it, or write lines of key, tab, label")
        if not isinstance(told, dict):
            raise ValueError(f"{path} holds no {{key: label}}")
        return {str(key): str(label) for key, label in told.items() if label is not None}  # null: it has none
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        key, separator, label = line.partition("\t") if "\t" in line else line.rpartition(",")
        if not separator:
            raise ValueError(f"{path}, line {number}: expected a key, a tab or comma, and a label; got {line[:60]!r}")
        found[key.strip()] = label.strip()
    return found


def _labelled(embeddings: Embeddings, tap: str, told: Mapping[str, str] | None) -> tuple[Tensor, list[str]]:
    if tap not in embeddings.vectors:
        raise ValueError(f"{embeddings.path} has no vectors of {tap}")
    labels = embeddings.labels if told is None else [told.get(key) for key in embeddings.keys]
    rows = [row for row, label in enumerate(labels) if label is not None]
    if len(rows) < 2:
        todo = (
            "give them with --labels FILE"
            if told is None
            else f"none of its keys is like {embeddings.keys[0]!r}"
            if embeddings.keys
            else ""
        )
        raise ValueError(f"{len(rows)} of {len(labels)} images of {embeddings.path} have a label; {todo}")
    vectors = torch.from_numpy(np.array(embeddings.vectors[tap][rows], np.float32))
    return vectors, [str(labels[row]) for row in rows]


def _vote(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, k: int, classes: int, same: bool) -> float:
    """Return the percentage of `tx` that its nearest of `x` name rightly."""
    return 100 * int((by_neighbours(x, y, tx, k, classes, same) == ty).sum()) / len(tx)


def _cross_validated(x: Tensor, y: Tensor, folds: int, classes: int) -> tuple[float, float]:
    fold = folds_of(y, folds)
    penalty = _penalty(x[fold != 0], y[fold != 0], classes)
    parts = [fold == number for number in range(folds) if (fold == number).any()]
    right = sum(_learnt(x[~held], y[~held], x[held], y[held], classes, penalty) * int(held.sum()) for held in parts)
    return 100 * right / len(y), penalty


def _held_out(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, classes: int) -> tuple[float, float]:
    penalty = _penalty(x, y, classes)
    return 100 * _learnt(x, y, tx, ty, classes, penalty), penalty


def _penalty(x: Tensor, y: Tensor, classes: int) -> float:
    held = folds_of(y, FOLDS) == 0
    if not held.any() or held.all():
        return PENALTIES[len(PENALTIES) // 2]
    scores = {penalty: _learnt(x[~held], y[~held], x[held], y[held], classes, penalty) for penalty in PENALTIES}
    return max(PENALTIES, key=lambda penalty: (scores[penalty], penalty))


def _learnt(x: Tensor, y: Tensor, tx: Tensor, ty: Tensor, classes: int, penalty: float) -> float:
    """Return the share of `tx` that is right by what is learnt from `x`, both scaled as `x` is."""
    x, tx = scaled(x, tx)
    return float((logits(fitted(x, y, classes, penalty), tx).argmax(1) == ty).float().mean())
