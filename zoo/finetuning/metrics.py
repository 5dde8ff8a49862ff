"""How right a classifier is: in all, and class by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Metrics:
    """What was measured on one set of images, or of groups of images.

    Attributes:
        confusion: int64 (classes, classes); row is the truth, column the decision.
        loss: mean cross-entropy in nats.
        top5: share whose class is among the five most probable; None for five classes or fewer.
    """

    confusion: np.ndarray
    loss: float
    top5: float | None

    @property
    def count(self) -> int:
        """How many were measured."""
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        """Share of right decisions."""
        return float(np.trace(self.confusion)) / max(1, self.count)

    @property
    def support(self) -> np.ndarray:
        """How many there are of each class."""
        return self.confusion.sum(1)

    @property
    def precision(self) -> np.ndarray:
        """Of each class: the share of its decisions that are right; 0 where there are none."""
        return _share(np.diag(self.confusion), self.confusion.sum(0))

    @property
    def recall(self) -> np.ndarray:
        """Of each class: the share that is found; 0 where there is none of it."""
        return _share(np.diag(self.confusion), self.support)

    @property
    def f1(self) -> np.ndarray:
        """Of each class: the harmonic mean of precision and recall."""
        return _share(2 * np.diag(self.confusion), self.confusion.sum(0) + self.support)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that occur."""
        return self._mean(self.recall)

    @property
    def macro_f1(self) -> float:
        """Mean F1 of the classes that occur."""
        return self._mean(self.f1)

    @property
    def kappa(self) -> float:
        """Cohen's kappa: agreement beyond chance; 0 where truth and decisions are all of one class."""
        total = max(1, self.count)
        by_chance = float(self.confusion.sum(0) @ self.support) / total**2
        return (self.accuracy - by_chance) / (1 - by_chance) if by_chance < 1 else 0.0

    def figure(self, name: str) -> float:
        """Return one figure by its name in `Settings.monitor`."""
        return self.macro_f1 if name == "f1" else getattr(self, name)

    def summary(self) -> dict[str, Any]:
        """Return the figures that are no lists, shares as percentages."""
        found = {
            "images": self.count,
            "loss": round(self.loss, 6),
            "accuracy": round(100 * self.accuracy, 4),
            "balanced_accuracy": round(100 * self.balanced_accuracy, 4),
            "f1": round(100 * self.macro_f1, 4),
            "kappa": round(self.kappa, 6),
        }
        return found if self.top5 is None else found | {"top5": round(100 * self.top5, 4)}

    def rows(self, classes: list[str]) -> list[dict[str, Any]]:
        """Return the figures of each class, as fractions."""
        columns = zip(classes, self.support, self.precision, self.recall, self.f1, strict=True)
        return [
            {"class": name, "images": int(n), "precision": float(p), "recall": float(r), "f1": float(f)} for name, n, p, r, f in columns
        ]

    def _mean(self, values: np.ndarray) -> float:
        there = self.support > 0
        return float(values[there].mean()) if there.any() else 0.0


def measure(probabilities: np.ndarray, targets: np.ndarray) -> Metrics:
    """Compare decisions with the truth.

    Args:
        probabilities: float64 (N, classes).
        targets: int64 (N,).
    """
    classes = probabilities.shape[1]
    decided = probabilities.argmax(1) if len(targets) else np.zeros(0, dtype=np.int64)
    confusion = np.bincount(targets * classes + decided, minlength=classes * classes).reshape(classes, classes)
    own = probabilities[np.arange(len(targets)), targets]
    loss = float(-np.log(np.maximum(own, 1e-12)).mean()) if len(targets) else 0.0
    top5 = None
    if classes > 5 and len(targets):
        top5 = float(((probabilities > own[:, None]).sum(1) < 5).mean())
    return Metrics(confusion, loss, top5)


def _share(part: np.ndarray, of: np.ndarray) -> np.ndarray:
    return np.divide(part, of, out=np.zeros(len(part)), where=of > 0)
