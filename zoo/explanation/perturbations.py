"""Maps of the image's pixels by hiding parts of it: what the answer loses without them. No gradients are needed."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import number, whole
from zoo.explanation.table import Answer, Question, method


@method("occlusion", "Occlusion", "https://arxiv.org/abs/1311.2901", place="input", signed=True, options="window stride fill")
def occlusion(q: Question) -> Answer:
    """What the goal loses when a window is hidden, the mean over the windows on a pixel (section 4.2).

    Options: `window`, its side in pixels, a seventh of the image's by default; `stride`, half of the window; `fill`, what hides, in the
    network's units: 0, the mean colour, by default.
    """
    height, width = q.x.shape[-2:]
    window = whole("window", q.options.get("window", max(1, round(min(height, width) / 7))))
    stride = whole("stride", q.options.get("stride", max(1, window // 2)))
    fill = number("fill", q.options.get("fill", 0.0), -math.inf)
    places = [(top, left) for top in starts(height, window, stride) for left in starts(width, window, stride)]
    plain = q.scores(q.x, q.every)
    lost, seen = torch.zeros(len(q.x), height, width, device=q.x.device), torch.zeros(height, width, device=q.x.device)
    for top, left in places:
        seen[top : top + window, left : left + window] += 1
    hidden: list[Tensor] = []
    rows: list[int] = []
    spots: list[tuple[int, int]] = []

    def settle() -> None:
        for row, (top, left), score in zip(rows, spots, q.scores(torch.stack(hidden), q.every[rows]), strict=True):
            lost[row, top : top + window, left : left + window] += plain[row] - score
        hidden.clear()
        rows.clear()
        spots.clear()

    for row in range(len(q.x)):
        for top, left in places:
            image = q.x[row].clone()
            image[:, top : top + window, left : left + window] = fill
            hidden.append(image)
            rows.append(row)
            spots.append((top, left))
            if len(hidden) == q.rows:
                settle()
    if hidden:
        settle()
    colour = "the mean colour" if fill == 0 else f"{fill:g}"
    return Answer(lost / seen.clamp(min=1), note=f"windows of {window} pixels, {stride} apart, hidden by {colour}")


def starts(side: int, window: int, stride: int) -> list[int]:
    """Return where windows begin: every `stride` pixels, the last cut by the border as the side needs."""
    count = -(-max(side - window, 0) // stride) + 1
    return [stride * index for index in range(count)]


@method(
    "rise",
    "RISE",
    "https://arxiv.org/abs/1806.07421",
    place="input",
    signed=True,
    error="standard error of a pixel of the map over the map's range",
    options="masks cells share",
    long=True,
)
def rise(q: Question) -> Answer:
    """Mean of the random masks, each weighted by the goal on the image behind it, over the masks' mean (eq. 6).

    Masks are random grids of `cells` (7) by 7, kept with probability `share` (0.5), enlarged and shifted. Options: `masks` (2,000).
    The network's answer to the hidden images is its goal, not a probability, so the map is centred: the mean goal is subtracted.
    """
    count, cells = whole("masks", q.options.get("masks", 2000)), whole("cells", q.options.get("cells", 7))
    share = number("share", q.options.get("share", 0.5), 0.001, 0.999)
    generator, (height, width) = q.generator(), q.x.shape[-2:]
    total = torch.zeros(len(q.x), height, width, device=q.x.device)
    plain = torch.zeros(height, width, device=q.x.device)
    scores: list[Tensor] = []
    for start in range(0, count, q.rows):
        mask = masks(min(q.rows, count - start), cells, share, height, width, generator).to(q.x)
        plain += mask.sum((0, 1))
        each = torch.stack([q.scores(q.x[row] * mask, q.every[row].expand(len(mask))) for row in range(len(q.x))])
        scores.append(each)
        total += torch.einsum("bn,nhw->bhw", each, mask[:, 0])
    every = torch.cat(scores, 1)
    middle = every.mean(1)[:, None, None]
    found = total / plain.clamp(min=1e-6) - middle
    noise = every.std(1) / (share * count) ** 0.5
    spread = found.flatten(1).amax(1) - found.flatten(1).amin(1)
    return Answer(found, tuple((noise / spread.clamp(min=1e-12)).tolist()), f"{count:,} masks of {cells} by {cells} cells")


def masks(count: int, cells: int, share: float, height: int, width: int, generator: torch.Generator) -> Tensor:
    """Draw masks (count, 1, height, width) of 0..1: grids enlarged by lines, each cut at a random place within a cell."""
    down, across = -(-height // cells), -(-width // cells)
    grid = (torch.rand(count, 1, cells, cells, generator=generator) < share).float()
    large = F.interpolate(grid, size=((cells + 1) * down, (cells + 1) * across), mode="bilinear", align_corners=False)
    found = torch.empty(count, 1, height, width)
    tops, lefts = (torch.randint(0, side, (count,), generator=generator).tolist() for side in (down, across))
    for index, (top, left) in enumerate(zip(tops, lefts, strict=True)):
        found[index] = large[index, :, top : top + height, left : left + width]
    return found
