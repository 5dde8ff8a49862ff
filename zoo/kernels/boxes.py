"""Boxes that overlap: how much two share, and which of many stay. Plain PyTorch, which the kernel of `ops/suppress.py` is held against."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

MOST_PAIRS = 1 << 24
"""Pairs of boxes that are compared at once: 64 MiB a number."""


def overlap(first: Tensor, second: Tensor, power: float | None = None) -> Tensor:
    """Return how much boxes overlap.

    Args:
        first: (..., 4): left, top, right, bottom.
        second: (..., 4), alike.
        power: forgives distance, as Darknet does: (d / c)^`power` is taken off, d the squared distance of the boxes' middles, c the
            squared diagonal of what holds both. None takes nothing off.

    Returns:
        Intersection over union (...), 0 where either box has no area, less what distance takes off.
    """
    corner = torch.maximum(first[..., :2], second[..., :2])
    sides = (torch.minimum(first[..., 2:], second[..., 2:]) - corner).clamp_min(0)
    inside = sides[..., 0] * sides[..., 1]
    union = _area(first) + _area(second) - inside
    shared = torch.where((inside > 0) & (union > 0), inside / union, torch.zeros_like(inside))
    return shared if power is None else shared - _distance(first, second) ** power


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def _distance(first: Tensor, second: Tensor) -> Tensor:
    sides = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
    diagonal = (sides**2).sum(-1)
    apart = (((first[..., :2] + first[..., 2:]) - (second[..., :2] + second[..., 2:])) / 2).square().sum(-1)
    return torch.where(diagonal > 0, apart / diagonal, torch.zeros_like(apart))


def staying(boxes: Tensor, starts: Tensor, limit: float, power: float | None = None) -> Tensor:
    """Tell which boxes of each group stay, greedily: the first, and each that overlaps none before it that stays.

    Args:
        boxes: (N, 4), group behind group, the best of a group first.
        starts: int64 (groups + 1,): where each group begins, and N.
        limit: overlap above which the later of two boxes goes.
        power: of distance; see `overlap`.

    Returns:
        int8 (N,): 1 where a box stays, 0 where it goes.
    """
    stays = torch.ones(len(boxes), dtype=torch.int8, device=boxes.device)
    if boxes.is_meta:
        return stays
    for first, last in pairwise(starts.tolist()):
        some = boxes[first:last]
        chosen = _of_group if len(some) ** 2 <= MOST_PAIRS else _one_by_one
        stays[first:last] = chosen(some, limit, power)
    return stays


def _of_group(boxes: Tensor, limit: float, power: float | None) -> Tensor:
    """Compare all pairs at once: the greedy choice alone reproduces itself, and each round settles at least the next box."""
    beats = (overlap(boxes[:, None], boxes[None], power) > limit).triu(1)
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    while not torch.equal(stays, now := ~(beats & stays[:, None]).any(0)):
        stays = now
    return stays


def _one_by_one(boxes: Tensor, limit: float, power: float | None) -> Tensor:
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for place in range(len(boxes)):
        if stays[place]:
            stays[place + 1 :] &= ~(overlap(boxes[place], boxes[place + 1 :], power) > limit)
    return stays
