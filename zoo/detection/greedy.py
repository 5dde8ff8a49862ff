"""Non-maximum suppression: of boxes of a class that overlap, the most probable stays. On the device, for a whole batch at once."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor
from torchvision.ops import nms

from zoo.kernels.boxes import staying


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, limit: float, power: float | None = None) -> Tensor:
    """Choose the boxes that stay, greedily: the most probable first, and none that overlaps one that stays in its group.

    Args:
        boxes: (N, 4), left, top, right, bottom.
        scores: (N,).
        groups: int64 (N,); boxes of different groups, classes of different images say, never meet.
        limit: overlap above which a box goes.
        power: None, or by which power the distance of two boxes is taken off their overlap; see `zoo.kernels.boxes.overlap`.

    Returns:
        Indices of those that stay, by falling score, the first of equals first. On a GPU one kernel settles all groups.
    """
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[torch.sort(groups[order], stable=True).indices]  # by group, and by score within
    sizes = torch.unique_consecutive(groups[order], return_counts=True)[1]
    ordered = boxes[order].contiguous()
    if boxes.device.type == "cpu" and power is None:
        stays = _stay_on_a_cpu(ordered, sizes.tolist(), limit)
    else:
        stays = _stay(ordered, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]), limit, power)
    chosen = order[stays].sort().values
    return chosen[torch.sort(scores[chosen], descending=True, stable=True).indices]


def _stay(boxes: Tensor, starts: Tensor, limit: float, power: float | None) -> Tensor:
    if boxes.is_cuda and find_spec("triton") is not None:
        from zoo.kernels.ops import suppress as kernel

        if not kernel.supports(boxes, starts, limit=limit, power=power):
            return kernel.launch(boxes, starts, limit=limit, power=power).bool()
    return staying(boxes, starts, limit, power).bool()


def _stay_on_a_cpu(boxes: Tensor, sizes: list[int], limit: float) -> Tensor:
    """Do the same by torchvision's own loop, which compares a box with those alone that are left."""
    stays = torch.zeros(len(boxes), dtype=torch.bool)
    start = 0
    for size in sizes:
        ranks = torch.arange(size, 0, -1, dtype=boxes.dtype)
        stays[start + nms(boxes[start : start + size], ranks, limit)] = True
        start += size
    return stays
