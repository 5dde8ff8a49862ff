"""What the processes of a group tell each other of their pixels, three floats a channel, without waiting on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def gathered(row: Tensor, group: Any) -> Tensor:
    """Return every process's row of statistics (1, 3, C) as (processes, 3, C), in the order of their ranks."""
    every = row.new_empty((dist.get_world_size(group), *row.shape[1:]))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the same call: torch 2.14 has renamed it
    gather(every, row.contiguous(), group=group)
    return every


def added(sums: Tensor, group: Any) -> Tensor:
    """Return the sum over all processes; `sums` stay as they are."""
    total = sums.clone()
    dist.all_reduce(total, group=group)
    return total


def row_of(x: Tensor) -> Tensor:
    """Return (1, 3, C) of a map: counts, means, sums of squared deviations; in float32, or float64 for float64."""
    wide, count = x.to(torch.promote_types(x.dtype, torch.float32)), x.numel() // x.shape[1]
    mean = wide.mean((0, 2, 3)) if count else wide.new_zeros(x.shape[1])
    squares = (wide - mean[:, None, None]).square().sum((0, 2, 3))
    return torch.stack([torch.full_like(mean, count), mean, squares])[None]


def joined(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and sum of squared deviations, each (C,), of all pixels of rows (R, 3, C)."""
    count, means, squares = rows.unbind(1)
    number = count.sum(0)
    mean = (count * means).sum(0) / number
    return number, mean, (squares + count * (means - mean).square()).sum(0)
