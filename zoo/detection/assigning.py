"""Which true box a box of the network learns, and which boxes learn that there is nothing."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.ops import box_iou

NOTHING, UNSURE = -1, -2
"""What a box has in place of the number of a true one: it learns that there is nothing, or it learns nothing."""


def assign(boxes: Tensor, true: Tensor, least: float, most: float, every: str = "") -> Tensor:
    """Return (N,): the number of the true box that each box overlaps most, `NOTHING` or `UNSURE`.

    Args:
        boxes: (N, 4), those of the network.
        true: (M, 4); there may be none.
        least: the overlap below which a box learns that there is nothing.
        most: the overlap from which on it learns the true one. Between the two it is `UNSURE`.
        every: what becomes of a true box that no box overlaps so far. "ties": all boxes that overlap it most learn the true box that they
            overlap most; "best": one of them learns it; "": nobody does.

    Source:
        Ren et al. 2015, section 3.1.2; Liu et al. 2015, section 2.2 ("best").
    """
    if not len(true):
        return torch.full((len(boxes),), NOTHING, dtype=torch.int64, device=boxes.device)
    overlap = box_iou(true, boxes)
    highest, number = overlap.max(0)
    found = number.masked_fill(highest < most, UNSURE).masked_fill(highest < least, NOTHING)
    if every == "ties":
        nearest = (overlap == overlap.amax(1, keepdim=True)).any(0)
        found = torch.where(nearest, number, found)
    elif every == "best":
        found[overlap.max(1).indices] = torch.arange(len(true), device=boxes.device)
    return found


def sample(labels: Tensor, count: int, part: float) -> tuple[Tensor, Tensor]:
    """Draw boxes that learn, and return the numbers of those with a true box and of those without, in order.

    Args:
        labels: (N,): positive with a true box, 0 without, negative where nothing is learnt.
        count: how many to draw.
        part: at most this part of them has a true box.
    """
    drawn: list[Tensor] = []
    wanted = int(count * part)
    for kind in (labels >= 1, labels == 0):
        there = kind.nonzero()[:, 0]
        few = there[torch.randperm(len(there), device=labels.device)[:wanted]]
        drawn.append(few.sort().values)
        wanted = count - len(few)
    return drawn[0], drawn[1]
