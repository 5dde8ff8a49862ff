"""Non-maximum suppression: of boxes of a class that overlap, the most probable stays. On the device, for a whole batch at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torchvision.ops import nms

MOST_PAIRS = 1 << 24
"""Pairs of boxes that are compared at once: 64 MiB a number."""
AT_ONCE = 64
"""Stretches of so many pairs, 16 MiB each, that are settled together: how often that waits for the device hangs on the boxes alone."""
Overlap = Callable[[Tensor, Tensor], Tensor]


def overlap(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of boxes (…, 4), left, top, right, bottom; 0 where either has no area."""
    corner = torch.maximum(first[..., :2], second[..., :2])
    sides = (torch.minimum(first[..., 2:], second[..., 2:]) - corner).clamp_min(0)
    inside = sides[..., 0] * sides[..., 1]
    union = _area(first) + _area(second) - inside
    return torch.where((inside > 0) & (union > 0), inside / union, torch.zeros_like(inside))


def _area(boxes: Tensor) -> Tensor:
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def distant_overlap(beta: float) -> Overlap:
    """Return Darknet's overlap that forgives distance: that of `overlap` less (d / c)^beta.

    d is the squared distance of the boxes' middles, c the squared diagonal of what holds both.
    """

    def measured(first: Tensor, second: Tensor) -> Tensor:
        sides = torch.maximum(first[..., 2:], second[..., 2:]) - torch.minimum(first[..., :2], second[..., :2])
        diagonal = (sides**2).sum(-1)
        apart = (((first[..., :2] + first[..., 2:]) - (second[..., :2] + second[..., 2:])) / 2).square().sum(-1)
        share = torch.where(diagonal > 0, apart / diagonal, torch.zeros_like(apart))
        return overlap(first, second) - share**beta

    return measured


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, limit: float, measure: Overlap = overlap) -> Tensor:
    """Choose the boxes that stay, greedily: the most probable first, and none that overlaps one that stays in its group.

    Args:
        boxes: (N, 4), left, top, right, bottom.
        scores: (N,).
        groups: int64 (N,); boxes of different groups, classes of different images say, never meet.
        limit: overlap above which a box goes.
        measure: of two boxes' overlap.

    Returns:
        Indices of those that stay, by falling score, the first of equals first.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(groups[order], stable=True).indices]  # by group, and by score within
    sorted_groups = groups[order]
    _, sizes = torch.unique_consecutive(sorted_groups, return_counts=True)
    if boxes.device.type == "cpu" and measure is overlap:
        chosen = order[_stay_on_a_cpu(boxes[order], sizes.tolist(), limit)].sort().values
        return chosen[torch.sort(scores[chosen], descending=True, stable=True).indices]
    stretches, ordered = _stretches(sizes.tolist()), boxes[order]  # one synchronisation for all
    of_each = list(ordered.split([sum(stretch) for stretch in stretches]))
    parts: list[Tensor] = []
    for first in range(0, len(stretches), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        parts += _stay(of_each[some], stretches[some], limit, measure)
    chosen = order[torch.cat(parts)] if parts else order
    chosen = chosen[torch.sort(chosen).indices]
    return chosen[torch.sort(scores[chosen], descending=True, stable=True).indices]


def _stay_on_a_cpu(boxes: Tensor, sizes: list[int], limit: float) -> Tensor:
    """Do the same as `_stay` by torchvision's own loop, which compares a box with those alone that are left."""
    stays = torch.zeros(len(boxes), dtype=torch.bool)
    start = 0
    for size in sizes:
        ranks = torch.arange(size, 0, -1, dtype=boxes.dtype)
        stays[start + nms(boxes[start : start + size], ranks, limit)] = True
        start += size
    return stays


def _stretches(sizes: list[int]) -> list[list[int]]:
    """Divide groups into stretches whose pairs are compared at once."""
    found: list[list[int]] = []
    for size in sizes:
        if found and (len(found[-1]) + 1) * max(*found[-1], size) ** 2 <= MOST_PAIRS:
            found[-1].append(size)
        else:
            found.append([size])
    return found


def _stay(boxes: list[Tensor], sizes: list[list[int]], limit: float, measure: Overlap) -> list[Tensor]:
    """Tell for the boxes of each stretch, one group behind the other and by falling score, which stay."""
    stays: list[Tensor] = []
    open_ones: dict[int, tuple[Tensor, Tensor]] = {}  # of a stretch: which places of its groups are taken, and which box beats which
    for index, (where, groups) in enumerate(zip(boxes, sizes, strict=True)):
        if max(groups) == 1:
            stays.append(torch.ones(len(where), dtype=torch.bool, device=where.device))
        elif max(groups) ** 2 > MOST_PAIRS:
            stays.append(_one_by_one(where, limit, measure))
        else:
            there, beats = _beats(where, groups, limit, measure)
            open_ones[index] = there, beats
            stays.append(there)
    settled = not open_ones
    while not settled:  # the greedy choice is the only one that reproduces itself, and each round settles at least the next box of a group
        changed: list[Tensor] = []
        for index, (there, beats) in open_ones.items():
            now = there & ~(beats & stays[index][:, :, None]).any(1)
            changed.append((now != stays[index]).any())
            stays[index] = now
        settled = not bool(torch.stack(changed).any())  # one synchronisation a round, of all stretches
    return [each[open_ones[index][0]] if index in open_ones else each for index, each in enumerate(stays)]


def _beats(boxes: Tensor, sizes: list[int], limit: float, measure: Overlap) -> tuple[Tensor, Tensor]:
    """Lay groups beside each other, and tell which places (G, W) hold a box, and which box of a group (G, W, W) would make which one go."""
    widest, device = max(sizes), boxes.device
    there = torch.arange(widest, device=device) < torch.tensor(sizes).to(device, non_blocking=True)[:, None]
    padded = boxes.new_zeros((len(sizes), widest, 4))
    padded[there] = boxes
    beats = measure(padded[:, :, None], padded[:, None]) > limit
    beats &= there[:, :, None] & there[:, None] & torch.ones(widest, widest, dtype=torch.bool, device=device).triu(1)
    return there, beats


def _one_by_one(boxes: Tensor, limit: float, measure: Overlap) -> Tensor:
    """Do the same for one group of very many boxes."""
    stays = torch.ones(len(boxes), dtype=torch.bool, device=boxes.device)
    for place in range(len(boxes)):
        if stays[place]:
            stays[place + 1 :] &= ~(measure(boxes[place], boxes[place + 1 :]) > limit)
    return stays
