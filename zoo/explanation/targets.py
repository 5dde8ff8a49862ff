"""What is explained: a class, several as one, the difference of two, or how alike an embedding is to another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import did_you_mean
from zoo.explanation.program import CannotExplain
from zoo.labels import Label
from zoo.pretrained.classes import AmbiguousClass, origin


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """One number of a network's answer.

    Attributes:
        label: what it is called, "tabby", "dog (118 classes)", "cat - dog".
        wnid: WordNet id of a class or of what stands above several; None elsewhere.
        weights: of the logits, {index: weight}; empty for an embedding.
        vector: an embedding (C,) whose cosine with the image's is explained; None for classes.
    """

    label: str
    wnid: str | None = None
    weights: dict[int, float] = field(default_factory=dict)
    vector: Tensor | None = None

    def probability(self, chances: Tensor) -> float | None:
        """Return the probability of the class, or of any of several; None of a difference and of an embedding."""
        if not self.weights or min(self.weights.values()) < 0:
            return None
        return float(chances[list(self.weights)].sum())

    def score(self, outputs: Tensor) -> Tensor:
        """Return the number (N,) of what the network answers (N, classes) or embeds (N, C)."""
        if self.vector is not None:
            return F.cosine_similarity(outputs.float(), self.vector.to(outputs.device)[None], dim=1)
        return outputs.float() @ self.row(outputs.shape[1]).to(outputs.device)

    def row(self, classes: int) -> Tensor:
        """Return the weights of all logits, float32 (classes,), on the CPU."""
        found = torch.zeros(classes)
        for index, weight in self.weights.items():
            found[index] = weight
        return found


def targets(wanted: Any, names: Sequence[Label], classes: int) -> tuple[list[Target], bool]:
    """Turn what a user asks for into targets.

    Args:
        wanted: an index, a class's name, a WordNet id, the name of a synset ("dog"); a pair of these as a tuple, for the difference; an
            embedding (C,) as an array or a tensor; or a list of these.
        names: of the classes; empty where they have none.
        classes: how many there are.

    Returns:
        The targets, and whether several were asked for.

    Raises:
        CannotExplain: there is no such class, or the name is ambiguous.
        TypeError: it is none of these.
    """
    if isinstance(wanted, list):
        if not wanted:
            raise CannotExplain("target is an empty list; leave it out to explain the most probable class")
        return [_one(each, names, classes) for each in wanted], True
    return [_one(wanted, names, classes)], False


def _one(wanted: Any, names: Sequence[Label], classes: int) -> Target:
    if isinstance(wanted, np.ndarray | Tensor) and wanted.ndim == 1:
        vector = torch.as_tensor(wanted).detach().float()
        if not vector.norm() > 0:
            raise CannotExplain("an embedding of zeros is like nothing; give the vector of an image, features(model, 'embedding')")
        return Target("similarity", vector=vector)
    if isinstance(wanted, tuple):
        if len(wanted) != 2:
            raise CannotExplain(f"a difference is of two classes, ('cat', 'dog'), got {len(wanted)}: {wanted!r}")
        one, other = (_one(each, names, classes) for each in wanted)
        weights = dict(one.weights)
        for index, weight in other.weights.items():
            weights[index] = weights.get(index, 0.0) - weight
        return Target(f"{one.label} - {other.label}", weights=weights)
    if isinstance(wanted, str):
        return _named(wanted, names, classes)
    index = getattr(wanted, "__index__", None)
    if index is None or isinstance(wanted, bool):
        raise TypeError(f"a target is a class's index, name or WordNet id, a pair of these, or an embedding, not {wanted!r:.60}")
    number = int(index())
    if not 0 <= number < classes:
        raise CannotExplain(f"there is no class {number}; the network has {classes}, 0 to {classes - 1}", "target")
    return single(number, names)


def single(index: int, names: Sequence[Label]) -> Target:
    """Return the target of one class."""
    label = names[index] if names else Label(f"class {index}")
    return Target(label.name, label.wnid, {index: 1.0})


def _named(wanted: str, names: Sequence[Label], classes: int) -> Target:
    if wanted.isdecimal():
        return _one(int(wanted), names, classes)
    if not names:
        raise CannotExplain(
            f"this network's classes have no names, so there is no {wanted!r}; give the index, 0 to {classes - 1}", "target"
        )
    try:
        found = origin(wanted.strip(), tuple(names))
    except AmbiguousClass as error:
        raise CannotExplain(str(error), "target") from None
    if not found.rows:
        near = did_you_mean(wanted, [label.name for label in names], count=3)
        pair = f"; a difference is a pair, {tuple(part.strip() for part in wanted.split('-', 1))}" if "-" in wanted else ""
        raise CannotExplain(f"the network has no class {wanted!r}; names, WordNet ids and indices are taken{pair}{near}", "target")
    if len(found.rows) == 1:
        return single(found.rows[0], names)
    share = 1 / len(found.rows)
    return Target(f"{found.label.name} ({len(found.rows)} classes)", found.label.wnid, dict.fromkeys(found.rows, share))
