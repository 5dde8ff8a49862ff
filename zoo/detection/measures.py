"""How well a detector does: COCO's mean average precision as its own tools reckon it, and Pascal VOC's.

Source: https://cocodataset.org/#detection-eval, and cocoapi's PythonAPI/pycocotools/cocoeval.py, whose conventions these are;
http://host.robots.ox.ac.uk/pascal/VOC/, VOCdevkit's VOCevaldet.m.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

OVERLAPS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST = (1, 10, 100)
"""Detections of an image and class that count."""
AREAS: Mapping[str, tuple[float, float]] = {"all": (0, 1e10), "small": (0, 32**2), "medium": (32**2, 96**2), "large": (96**2, 1e10)}
"""In pixels."""
ALMOST = 1 - 1e-10


@dataclass(frozen=True, slots=True, eq=False)
class Truth:
    """What is on one photograph.

    Attributes:
        boxes: float64 (N, 4), left, top, right and bottom in pixels.
        classes: int64 (N,).
        areas: float64 (N,), of the things' own outlines in pixels, where they are known; of the boxes else.
        crowds: bool (N,), boxes around many things that nobody has counted; VOC's difficult things.
    """

    boxes: np.ndarray
    classes: np.ndarray
    areas: np.ndarray
    crowds: np.ndarray

    @classmethod
    def of(cls, boxes: object, classes: object, areas: object = None, crowds: object = None) -> Truth:
        """Make one of sequences of numbers; `areas` are the boxes' and `crowds` False if left out."""
        found = np.asarray(boxes, np.float64).reshape(-1, 4)
        own = (found[:, 2] - found[:, 0]) * (found[:, 3] - found[:, 1])
        marked = np.zeros(len(found), bool) if crowds is None else np.asarray(crowds, bool)
        return cls(found, np.asarray(classes, np.int64).reshape(-1), own if areas is None else np.asarray(areas, np.float64), marked)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a network finds on one photograph.

    Attributes:
        boxes: float64 (N, 4), left, top, right and bottom in pixels.
        classes: int64 (N,), of the same numbering as the truth's.
        scores: float64 (N,).
    """

    boxes: np.ndarray
    classes: np.ndarray
    scores: np.ndarray

    @classmethod
    def of(cls, boxes: object, classes: object, scores: object) -> Answer:
        """Make one of sequences of numbers."""
        numbers = np.asarray(boxes, np.float64).reshape(-1, 4)
        return cls(numbers, np.asarray(classes, np.int64).reshape(-1), np.asarray(scores, np.float64).reshape(-1))


@dataclass(frozen=True, slots=True)
class Precision:
    """COCO's numbers, 0 to 1; -1 where there is nothing to measure.

    Attributes:
        ap: mean average precision over overlaps of .50 to .95.
        ap50: at an overlap of .50.
        ap75: at .75.
        ap_small, ap_medium, ap_large: of things of less than 32², of up to 96², and of more pixels.
        ar1, ar10, ar100: mean recall with so many detections an image and class.
        ar_small, ar_medium, ar_large: of things of these sizes, with 100.
        classes: average precision of each class that is on some photograph.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    ar1: float
    ar10: float
    ar100: float
    ar_small: float
    ar_medium: float
    ar_large: float
    classes: Mapping[int, float] = field(default_factory=dict[int, float])

    def numbers(self) -> dict[str, float]:
        """Return the twelve numbers by their names, in COCO's order."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "classes"}


def coco_precision(truths: Sequence[Truth], answers: Sequence[Answer]) -> Precision:
    """Measure answers as COCO's tools do: at most 100 detections of an image and class, crowds match any number of them and count as none.

    Args:
        truths: of the photographs, in the order of their ids.
        answers: of the same photographs.

    Raises:
        ValueError: there are not as many answers as photographs.

    Example:
        >>> coco_precision([Truth.of([[0, 0, 9, 9]], [3])], [Answer.of([[0, 0, 9, 7]], [3], [0.8])]).ap50
        1.0
    """
    _alike(truths, answers)
    classes = sorted({int(one) for truth in truths for one in truth.classes} | {int(one) for answer in answers for one in answer.classes})
    precision = np.full((len(OVERLAPS), len(RECALLS), len(classes), len(AREAS), len(MOST)), -1.0)
    recall = np.full((len(OVERLAPS), len(classes), len(AREAS), len(MOST)), -1.0)
    for place, kind in enumerate(classes):
        pairs = [_Pair.of(truth, answer, kind) for truth, answer in zip(truths, answers, strict=True)]
        pairs = [pair for pair in pairs if len(pair.crowds) or len(pair.scores)]
        for size, span in enumerate(AREAS.values()):
            matched = [pair.matched(span) for pair in pairs]
            for most, count in enumerate(MOST):
                found = _curve(matched, count)
                if found is not None:
                    precision[:, :, place, size, most], recall[:, place, size, most] = found
    everything, few, last = list(AREAS).index("all"), range(len(MOST)), len(MOST) - 1
    half, three_quarters = (int(np.flatnonzero(np.isclose(OVERLAPS, one))[0]) for one in (0.5, 0.75))
    each = {kind: _mean(precision[:, :, place, everything, last]) for place, kind in enumerate(classes)}
    return Precision(
        _mean(precision[:, :, :, everything, last]),
        _mean(precision[half, :, :, everything, last]),
        _mean(precision[three_quarters, :, :, everything, last]),
        *(_mean(precision[:, :, :, size, last]) for size in range(1, len(AREAS))),
        *(_mean(recall[:, :, everything, most]) for most in few),
        *(_mean(recall[:, :, size, last]) for size in range(1, len(AREAS))),
        classes={kind: value for kind, value in each.items() if value > -1},
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Matched:
    """What became of an image's detections of a class: scores (D,), whether each met a thing and whether it counts, both (T, D), and
    whether each thing is left out of the count (G,).
    """

    scores: np.ndarray
    met: np.ndarray
    ignored: np.ndarray
    uncounted: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """Truth and answer of one image and class: the detections by falling score, 100 at most."""

    areas: np.ndarray
    crowds: np.ndarray
    scores: np.ndarray
    sizes: np.ndarray
    overlaps: np.ndarray

    @classmethod
    def of(cls, truth: Truth, answer: Answer, kind: int) -> _Pair:
        here, there = truth.classes == kind, np.flatnonzero(answer.classes == kind)
        there = there[np.argsort(-answer.scores[there], kind="mergesort")][: MOST[-1]]
        boxes, crowds = answer.boxes[there], truth.crowds[here]
        sizes = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
        return cls(truth.areas[here], crowds, answer.scores[there], sizes, overlaps(boxes, truth.boxes[here], crowds))

    def matched(self, span: tuple[float, float]) -> _Matched:
        """Match detections to things greedily, at each overlap; things outside of a span of areas are left out of the count."""
        uncounted = self.crowds | (self.areas < span[0]) | (self.areas > span[1])
        order = np.argsort(uncounted, kind="mergesort")
        uncounted, crowds, overlap = uncounted[order], self.crowds[order], self.overlaps[:, order]
        count, things = len(OVERLAPS), len(order)
        met, ignored = np.zeros((count, len(self.scores)), bool), np.zeros((count, len(self.scores)), bool)
        taken = np.zeros((count, things), bool)
        rows = np.arange(count)
        for place in range(len(self.scores) if things else 0):
            free = (overlap[place] >= np.minimum(OVERLAPS, ALMOST)[:, None]) & (~taken | crowds)
            counted = free & ~uncounted
            free = np.where(counted.any(1)[:, None], counted, free)
            value = np.where(free, overlap[place], -1.0)
            best = things - 1 - np.argmax(value[:, ::-1], 1)  # of equals the last, as COCO's loop takes it
            hit = free[rows, best]
            met[hit, place] = True
            ignored[hit, place] = uncounted[best[hit]]
            taken[rows[hit], best[hit]] = True
        outside = (self.sizes < span[0]) | (self.sizes > span[1])
        return _Matched(self.scores, met, ignored | (~met & outside), uncounted)


def _curve(matched: Sequence[_Matched], most: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the precision at each recall (T, R), and the last recall (T,); None where no thing counts."""
    things = sum(int((~one.uncounted).sum()) for one in matched)
    if not things:
        return None
    scores = np.concatenate([one.scores[:most] for one in matched])
    order = np.argsort(-scores, kind="mergesort")
    met = np.concatenate([one.met[:, :most] for one in matched], 1)[:, order]
    ignored = np.concatenate([one.ignored[:, :most] for one in matched], 1)[:, order]
    right, wrong = np.cumsum(met & ~ignored, 1, dtype=np.float64), np.cumsum(~met & ~ignored, 1, dtype=np.float64)
    precision, recall = np.zeros((len(OVERLAPS), len(RECALLS))), np.zeros(len(OVERLAPS))
    for row, (hits, misses) in enumerate(zip(right, wrong, strict=True)):
        reached = hits / things
        exact = hits / (misses + hits + np.spacing(1))
        exact = np.maximum.accumulate(exact[::-1])[::-1]
        recall[row] = reached[-1] if len(reached) else 0
        places = np.searchsorted(reached, RECALLS, side="left")
        there = places < len(exact)
        precision[row, there] = exact[places[there]]
    return precision, recall


def _mean(values: np.ndarray) -> float:
    there = values[values > -1]
    return float(there.mean()) if there.size else -1.0


def overlaps(boxes: np.ndarray, things: np.ndarray, crowds: np.ndarray, pixel: float = 0.0) -> np.ndarray:
    """Return the intersection over union of boxes (D, 4) and things (G, 4), float64 (D, G); over the box alone where the thing is a crowd.

    Args:
        boxes: left, top, right, bottom.
        things: likewise.
        crowds: bool (G,).
        pixel: what a side has beyond the difference of its edges: 1 where edges are pixels that belong to it, as VOC's do.
    """
    low = np.maximum(boxes[:, None, :2], things[None, :, :2])
    sides = np.maximum(np.minimum(boxes[:, None, 2:], things[None, :, 2:]) - low + pixel, 0)
    inside = sides[..., 0] * sides[..., 1]
    own, theirs = (np.prod(one[:, 2:] - one[:, :2] + pixel, axis=1) for one in (boxes, things))
    both = np.where(crowds[None], own[:, None], own[:, None] + theirs[None] - inside)
    return np.divide(inside, both, out=np.zeros_like(inside), where=(both > 0) & (inside > 0))


def voc_precision(truths: Sequence[Truth], answers: Sequence[Answer], overlap: float = 0.5, points: int | None = None) -> dict[int, float]:
    """Measure answers as Pascal VOC's kit does: the average precision of each class that is on some photograph.

    A thing that is found twice counts as found and as wrong; a detection of a difficult thing counts as nothing. Edges are pixels that
    belong to a box.

    Args:
        truths: of the photographs; `crowds` are difficult things.
        answers: of the same photographs.
        overlap: that a detection needs more than.
        points: 11 for the mean of eleven recalls, as VOC 2007 has it; None for the area under the curve, as later years.

    Raises:
        ValueError: there are not as many answers as photographs, or `points` is neither.
    """
    _alike(truths, answers)
    if points not in (None, 11):
        raise ValueError(f"points is 11 or None, got {points!r}")
    kinds = sorted({int(kind) for truth in truths for kind in truth.classes[~truth.crowds]})
    return {kind: _voc_class(truths, answers, kind, overlap, points) for kind in kinds}


def _voc_class(truths: Sequence[Truth], answers: Sequence[Answer], kind: int, overlap: float, points: int | None) -> float:
    rows: list[tuple[float, int]] = []  # score, and 1 for right, 0 for wrong, -1 for nothing
    things = 0
    for truth, answer in zip(truths, answers, strict=True):
        here, there = truth.classes == kind, np.flatnonzero(answer.classes == kind)
        there = there[np.argsort(-answer.scores[there], kind="mergesort")]
        difficult = truth.crowds[here]
        things += int((~difficult).sum())
        shared = overlaps(answer.boxes[there], truth.boxes[here], np.zeros(len(difficult), bool), 1.0)
        taken = np.zeros(len(difficult), bool)
        for place, score in enumerate(answer.scores[there]):
            best = int(shared[place].argmax()) if len(difficult) else -1
            if best < 0 or shared[place, best] <= overlap:
                rows.append((float(score), 0))
            elif difficult[best]:
                rows.append((float(score), -1))
            else:
                rows.append((float(score), int(not taken[best])))
                taken[best] = True
    order = np.argsort([-score for score, _ in rows], kind="mergesort")
    told = np.array([rows[place][1] for place in order], int)
    right, wrong = np.cumsum(told == 1), np.cumsum(told == 0)
    recall, precision = right / things, right / np.maximum(right + wrong, np.finfo(np.float64).tiny)
    if points == 11:
        return float(np.mean([precision[recall >= at].max(initial=0.0) for at in np.linspace(0, 1, 11)]))
    recall, precision = np.concatenate([[0.0], recall, [1.0]]), np.concatenate([[0.0], precision, [0.0]])
    precision = np.maximum.accumulate(precision[::-1])[::-1]
    steps = np.flatnonzero(recall[1:] != recall[:-1]) + 1
    return float(((recall[steps] - recall[steps - 1]) * precision[steps]).sum())


def _alike(truths: Sequence[Truth], answers: Sequence[Answer]) -> None:
    if len(truths) != len(answers):
        raise ValueError(f"{len(answers)} answers are given for {len(truths)} photographs: each has one, which may be empty")
