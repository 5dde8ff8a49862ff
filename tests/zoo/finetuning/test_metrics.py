"""Figures against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from zoo.finetuning.metrics import measure

PROBABILITIES = np.array([[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.8, 0.1], [0.4, 0.35, 0.25], [0.5, 0.4, 0.1]])
TARGETS = np.array([0, 0, 1, 1, 1, 0])


def test_figures_are_those_of_the_definitions() -> None:
    metrics = measure(PROBABILITIES, TARGETS)
    assert metrics.confusion.tolist() == [[3, 0, 0], [1, 2, 0], [0, 0, 0]]
    assert metrics.accuracy == pytest.approx(5 / 6)
    assert metrics.precision.tolist() == pytest.approx([3 / 4, 1, 0])
    assert metrics.recall.tolist() == pytest.approx([1, 2 / 3, 0])
    assert metrics.f1.tolist() == pytest.approx([6 / 7, 4 / 5, 0])
    assert metrics.balanced_accuracy == pytest.approx(5 / 6)  # of the classes that occur
    assert metrics.macro_f1 == pytest.approx((6 / 7 + 4 / 5) / 2)
    assert metrics.kappa == pytest.approx((5 / 6 - 1 / 2) / (1 - 1 / 2))  # by chance: (4 x 3 + 2 x 3) / 36
    own = [0.7, 0.6, 0.5, 0.8, 0.35, 0.5]
    assert metrics.loss == pytest.approx(-np.log(own).mean())
    assert metrics.top5 is None


def test_top5_counts_what_is_more_probable() -> None:
    probabilities = np.tile(np.array([0.3, 0.2, 0.15, 0.12, 0.1, 0.08, 0.05]), (2, 1))
    assert measure(probabilities, np.array([4, 5])).top5 == 0.5


def test_agreement_that_chance_would_give_too_is_no_kappa() -> None:
    metrics = measure(np.tile([0.9, 0.1], (4, 1)), np.zeros(4, dtype=np.int64))
    assert (metrics.accuracy, metrics.kappa) == (1, 0)
