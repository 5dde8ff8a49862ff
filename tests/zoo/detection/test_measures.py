"""COCO's numbers are those of its own tools, and VOC's those of its kit's loop, on random answers."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import numpy as np
import pytest

from zoo.detection.measures import Answer, Truth, coco_precision, overlaps, voc_precision


def drawn(seed: int, images: int, kinds: int, spread: float = 3.0) -> tuple[list[Truth], list[Answer]]:
    """Draw things of all sizes, crowds among them, and answers near a thing, anywhere, or of another class; many scores are equal."""
    random = np.random.default_rng(seed)
    truths, answers = [], []
    for _ in range(images):
        count = random.integers(0, 9)
        corner = random.uniform(0, 300, (count, 2))
        side = np.exp(random.uniform(1.5, 5.5, (count, 2)))
        boxes = np.concatenate([corner, corner + side], 1)
        classes = random.integers(0, kinds, count)
        areas = side.prod(1) * random.uniform(0.3, 1, count)
        truths.append(Truth.of(boxes, classes, areas, random.random(count) < 0.2))
        near = np.repeat(np.arange(count), random.integers(0, 4, count))
        moved = boxes[near] + random.normal(0, spread, (len(near), 4))
        far = random.uniform(0, 200, (random.integers(0, 130), 4))
        far[:, 2:] = far[:, :2] + random.uniform(1, 90, (len(far), 2))
        found = np.concatenate([moved, far])
        found[:, 2:] = np.maximum(found[:, 2:], found[:, :2] + 1)
        kind = np.concatenate([np.where(random.random(len(near)) < 0.9, classes[near], 0), random.integers(0, kinds + 1, len(far))])
        score = np.concatenate([random.integers(25, 60, len(near)), random.integers(0, 35, len(far))])
        answers.append(Answer.of(found, kind, score / 60))
    return truths, answers


def cocos_own(truths: list[Truth], answers: list[Answer]) -> Any:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def wide(box: np.ndarray) -> list[float]:
        return [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]

    kinds = sorted({int(k) for one in (*truths, *answers) for k in one.classes})
    annotations: list[dict[str, Any]] = []
    for image, truth in enumerate(truths):
        for box, kind, area, crowd in zip(truth.boxes, truth.classes, truth.areas, truth.crowds, strict=True):
            row = {"id": len(annotations) + 1, "image_id": image, "category_id": int(kind), "bbox": wide(box)}
            annotations.append(row | {"area": float(area), "iscrowd": int(crowd)})
    rows = [
        {"image_id": image, "category_id": int(kind), "bbox": wide(box), "score": float(score)}
        for image, answer in enumerate(answers)
        for box, kind, score in zip(answer.boxes, answer.classes, answer.scores, strict=True)
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        ground = COCO()
        images = [{"id": number} for number in range(len(truths))]
        ground.dataset = {"images": images, "annotations": annotations, "categories": [{"id": kind} for kind in kinds]}
        ground.createIndex()
        run = COCOeval(ground, ground.loadRes(rows), "bbox")
        run.evaluate()
        run.accumulate()
        run.summarize()
    return run


@pytest.mark.reference
@pytest.mark.parametrize("seed", range(4))
def test_the_twelve_numbers_are_those_of_cocos_tools(seed: int) -> None:
    truths, answers = drawn(seed, images=12, kinds=3)
    found, run = coco_precision(truths, answers), cocos_own(truths, answers)
    assert list(found.numbers().values()) == pytest.approx(list(run.stats), abs=1e-6)
    assert 0.05 < found.ap < 0.9
    precision = run.eval["precision"][:, :, :, 0, 2]
    each = {kind: precision[:, :, place].mean() for place, kind in enumerate(run.params.catIds) if precision[:, :, place].max() > -1}
    assert found.classes == pytest.approx(each, abs=1e-6)


@pytest.mark.reference
def test_more_detections_than_count_and_photographs_of_nothing() -> None:
    truths, answers = drawn(9, images=3, kinds=1)
    again = 1 + 120 // len(answers[0].scores)
    scores = np.linspace(0, 1, again * len(answers[0].scores))
    many = Answer.of(np.tile(answers[0].boxes, (again, 1)), np.zeros(len(scores)), scores)
    truths, answers = [*truths, Truth.of([], [])], [many, *answers[1:], answers[0]]
    assert len(many.scores) > 100
    assert list(coco_precision(truths, answers).numbers().values()) == pytest.approx(list(cocos_own(truths, answers).stats), abs=1e-6)


def test_a_perfect_answer_and_none() -> None:
    truth = Truth.of([[0, 0, 10, 10], [20, 20, 150, 150]], [0, 5])
    perfect = coco_precision([truth], [Answer.of(truth.boxes, truth.classes, [0.5, 0.9])])
    assert (perfect.ap, perfect.ap_small, perfect.ap_medium, perfect.ap_large, perfect.ar100) == pytest.approx((1, 1, -1, 1, 1))
    nothing = coco_precision([truth], [Answer.of([], [], [])])
    assert (nothing.ap, nothing.ar1, nothing.classes) == (0, 0, {0: 0, 5: 0})
    assert coco_precision([Truth.of([], [])], [Answer.of([], [], [])]).ap == -1
    with pytest.raises(ValueError, match="1 answers are given for 2 photographs"):
        coco_precision([truth, truth], [Answer.of([], [], [])])


def kits_own(truths: list[Truth], answers: list[Answer], kind: int, limit: float) -> tuple[np.ndarray, np.ndarray]:
    """Loop as VOCevaldet.m does, over all detections by falling score, pixels included."""
    ids = [(i, k) for i, answer in enumerate(answers) for k in np.flatnonzero(answer.classes == kind)]
    ids.sort(key=lambda one: -answers[one[0]].scores[one[1]])
    detected = [np.zeros(len(truth.classes), bool) for truth in truths]
    count = sum(int(((truth.classes == kind) & ~truth.crowds).sum()) for truth in truths)
    tp, fp = np.zeros(len(ids)), np.zeros(len(ids))
    for d, (i, k) in enumerate(ids):
        box, best, most = answers[i].boxes[k], -1, -np.inf
        for j in np.flatnonzero(truths[i].classes == kind):
            thing = truths[i].boxes[j]
            inner = max(box[0], thing[0]), max(box[1], thing[1]), min(box[2], thing[2]), min(box[3], thing[3])
            width, height = inner[2] - inner[0] + 1, inner[3] - inner[1] + 1
            if width > 0 and height > 0:
                own, theirs = ((b[2] - b[0] + 1) * (b[3] - b[1] + 1) for b in (box, thing))
                value = width * height / (own + theirs - width * height)
                if value > most:
                    most, best = value, j
        if most > limit:
            if not truths[i].crowds[best]:
                tp[d], fp[d] = (1, 0) if not detected[i][best] else (0, 1)
                detected[i][best] = True
        else:
            fp[d] = 1
    tp, fp = np.cumsum(tp), np.cumsum(fp)
    return tp / count, tp / np.maximum(fp + tp, 1e-300)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("points", [None, 11])
def test_vocs_precision_is_that_of_its_kits_loop(seed: int, points: int | None) -> None:
    truths, answers = drawn(seed + 20, images=10, kinds=2)
    answers = [Answer.of(a.boxes, a.classes, np.random.default_rng(i).permutation(len(a.scores)) + i / 100) for i, a in enumerate(answers)]
    found = voc_precision(truths, answers, points=points)
    assert set(found) == {0, 1}
    for kind, value in found.items():
        recall, precision = kits_own(truths, answers, kind, 0.5)
        if points:
            reached = [precision[recall >= at - 1e-12].max(initial=0) for at in np.arange(0, 1.1, 0.1)]
            wanted = np.mean(reached)
        else:
            mrec, mpre = np.concatenate([[0], recall, [1]]), np.concatenate([[0], precision, [0]])
            for i in range(len(mpre) - 2, -1, -1):
                mpre[i] = max(mpre[i], mpre[i + 1])
            wanted = sum((mrec[i] - mrec[i - 1]) * mpre[i] for i in range(1, len(mrec)))
        assert value == pytest.approx(wanted, abs=1e-9)
    with pytest.raises(ValueError, match="points is 11 or None"):
        voc_precision(truths, answers, points=5)


def test_overlaps_of_crowds_are_shares_of_the_box() -> None:
    found = overlaps(np.array([[0.0, 0, 10, 10]]), np.array([[5.0, 0, 105, 10], [5, 0, 15, 10]]), np.array([True, False]))
    assert found.tolist() == [[0.5, pytest.approx(1 / 3)]]
