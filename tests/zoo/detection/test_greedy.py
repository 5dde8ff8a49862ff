"""Suppression is the greedy loop of Darknet's source, whatever the device does at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zoo.detection.greedy import suppress
from zoo.kernels import boxes as plain
from zoo.kernels.boxes import overlap


def looped(boxes: Tensor, scores: Tensor, groups: Tensor, limit: float, power: float | None) -> list[int]:
    """Loop as Darknet's do_nms_sort does."""
    kept: list[int] = []
    for at in sorted(range(len(scores)), key=lambda one: -float(scores[one])):
        if all(groups[at] != groups[other] or float(overlap(boxes[other], boxes[at], power)) <= limit for other in kept):
            kept.append(at)
    return kept


def boxes_of(seed: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=drawn) * 20
    sides = torch.rand(count, 2, generator=drawn) * 10
    sides[::17] = 0
    scores = (torch.rand(count, generator=drawn) * 50).round() / 50  # with ties
    return torch.cat([corner, corner + sides], 1), scores, torch.randint(0, 5, (count,), generator=drawn)


@pytest.mark.parametrize("most", [4, 200, 1 << 24])
@pytest.mark.parametrize("power", [None, 0.6], ids=["iou", "diou"])
def test_what_stays_is_what_the_loop_keeps(power: float | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "MOST_PAIRS", most)
    for seed, count in enumerate((0, 1, 2, 40, 70)):
        boxes, scores, groups = boxes_of(seed, count)
        for limit in (0.0, 0.2, 0.45, 1.0):
            found = suppress(boxes, scores, groups, limit, power)
            wanted = looped(boxes, scores, groups, limit, power)
            assert found.tolist() == wanted


def test_overlaps_of_known_boxes() -> None:
    one, other = torch.tensor([0.0, 0, 10, 10]), torch.tensor([5.0, 0, 15, 10])
    assert float(overlap(one, other)) == pytest.approx(1 / 3)
    assert float(overlap(one, torch.tensor([10.0, 0, 12, 10]))) == 0
    assert float(overlap(one, torch.tensor([3.0, 3, 3, 3]))) == 0
    assert float(overlap(one, other, 0.6)) == pytest.approx(1 / 3 - (25 / 325) ** 0.6)
    assert float(overlap(one, one, 0.6)) == 1
