"""Non-maximum suppression: a program settles a group of boxes, tile by tile, so that the host hears of it once."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels import boxes as plain
from zoo.kernels.ops._arguments import Drawing, launches, of
from zoo.kernels.ops._layout import DTYPES, LARGEST
from zoo.kernels.ops._overlap import begin, overlap

TOLERANCE = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 0.0}
"""A box stays or goes."""


def reference(boxes: Tensor, starts: Tensor, *, limit: float, power: float | None = None) -> Tensor:
    """Tell which boxes of each group stay, greedily: the first, and each that overlaps none before it that stays.

    Args:
        boxes: (N, 4), left, top, right, bottom; group behind group, the best of a group first.
        starts: int64 (groups + 1,): where each group begins, and N.
        limit: overlap above which the later of two boxes goes.
        power: None, or the power of a distance that is taken off the overlap; see `zoo.kernels.boxes.overlap`.

    Returns:
        int8 (N,): 1 where a box stays, 0 where it goes.
    """
    return plain.staying(boxes, starts, limit, power)


@of(reference)
def supports(boxes, starts, power, **_) -> str:
    """Return "" where the kernel takes these arguments, else the reason why not."""
    if boxes.dim() != 2 or boxes.shape[1] != 4 or boxes.dtype not in DTYPES or not boxes.is_contiguous():
        return "boxes that are no contiguous rows of four numbers of float32, bfloat16 or float16"
    if starts.dim() != 1 or starts.dtype != torch.int64 or not starts.is_contiguous():
        return "starts that are no int64 numbers"
    if power is not None and power <= 0:
        return f"a power of {power}"
    return "" if boxes.numel() <= LARGEST else "larger than 32-bit indices reach"


@triton.jit
def _load(boxes, rows, live):
    left = tl.load(boxes + rows * 4, mask=live, other=0.0).to(tl.float32)
    top = tl.load(boxes + rows * 4 + 1, mask=live, other=0.0).to(tl.float32)
    right = tl.load(boxes + rows * 4 + 2, mask=live, other=0.0).to(tl.float32)
    bottom = tl.load(boxes + rows * 4 + 3, mask=live, other=0.0).to(tl.float32)
    return left, top, right, bottom


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _above(l1, t1, r1, b1, l2, t2, r2, b2, limit, power, DISTANCE: tl.constexpr):
    """Tell of each of the first boxes, down, and each of the second, across, whether they overlap by more than the limit."""
    across = _larger(_smaller(r1[:, None], r2[None, :]) - _larger(l1[:, None], l2[None, :]), 0.0)
    down = _larger(_smaller(b1[:, None], b2[None, :]) - _larger(t1[:, None], t2[None, :]), 0.0)
    inside = across * down
    union = ((r1 - l1) * (b1 - t1))[:, None] + ((r2 - l2) * (b2 - t2))[None, :] - inside
    shared = tl.where((inside > 0.0) & (union > 0.0), tl.div_rn(inside, tl.where(union > 0.0, union, 1.0)), 0.0)
    if DISTANCE:
        wide = _larger(r1[:, None], r2[None, :]) - _smaller(l1[:, None], l2[None, :])
        high = _larger(b1[:, None], b2[None, :]) - _smaller(t1[:, None], t2[None, :])
        diagonal = wide * wide + high * high
        x = ((l1 + r1)[:, None] - (l2 + r2)[None, :]) / 2
        y = ((t1 + b1)[:, None] - (t2 + b2)[None, :]) / 2
        share = tl.where(diagonal > 0.0, tl.div_rn(x * x + y * y, tl.where(diagonal > 0.0, diagonal, 1.0)), 0.0)
        shared -= tl.where(share > 0.0, tl.exp2(power * tl.log2(tl.where(share > 0.0, share, 1.0))), share)
    return shared > limit


@triton.jit
def _suppress(boxes, starts, stays, limit, power, BLOCK: tl.constexpr, DISTANCE: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    group = tl.program_id(0)
    first = tl.load(starts + group).to(tl.int32)
    last = tl.load(starts + group + 1).to(tl.int32)
    place = tl.arange(0, BLOCK)
    for here in range(first, last, BLOCK):
        rows = here + place
        live = rows < last
        l2, t2, r2, b2 = _load(boxes, rows, live)
        stay = live.to(tl.int32)
        for before in range(first, here, BLOCK):  # settled already
            l1, t1, r1, b1 = _load(boxes, before + place, before + place < last)
            winner = tl.load(stays + before + place).to(tl.int32)
            above = _above(l1, t1, r1, b1, l2, t2, r2, b2, limit, power, DISTANCE)
            beaten = tl.max(above.to(tl.int32) * winner[:, None], axis=0)
            stay = stay * (1 - beaten)
        # Of these, the greedy choice alone reproduces itself, and each round settles at least the next box.
        above = _above(l2, t2, r2, b2, l2, t2, r2, b2, limit, power, DISTANCE)
        beats = (above & (place[:, None] < place[None, :])).to(tl.int32)
        open_ones = stay
        changed = 1
        while changed > 0:
            now = open_ones * (1 - tl.max(beats * stay[:, None], axis=0))
            changed = tl.max((now != stay).to(tl.int32), axis=0)
            stay = now
        tl.store(stays + rows, stay.to(tl.int8), mask=live)
        tl.debug_barrier()  # the next tiles read it, by other threads


@of(reference)
def configs(**_) -> list[dict[str, int]]:
    """Return launch parameters, the best guess first: boxes of a tile, and warps."""
    return [{"block": block, "warps": warps} for block, warps in ((64, 4), (32, 2), (64, 8), (128, 8), (32, 1))]


@launches(reference, configs)
def launch(boxes, starts, limit, power, config, out: Tensor | None = None) -> Tensor:
    """Run the kernel; see `reference`."""
    if out is None:
        out = torch.empty(len(boxes), dtype=torch.int8, device=boxes.device)
    if len(starts) > 1 and len(boxes):
        _suppress[(len(starts) - 1,)](
            boxes, starts, out, float(limit), float(power or 0), BLOCK=config["block"], DISTANCE=power is not None,
            num_warps=config["warps"], **overlap(boxes),
        )  # fmt: skip
    return out


@of(reference)
def cost(boxes, starts, **_) -> tuple[int, int]:
    """Return (floating-point operations, bytes that must move); how many pairs have to be compared hangs on the boxes."""
    return 0, boxes.numel() * boxes.element_size() + len(boxes) + starts.numel() * 8


CASES: list[dict[str, Any]] = [
    {"name": "one group", "groups": (33,), "limit": 0.45},
    {"name": "several, some longer than a tile", "groups": (3, 0, 150, 64, 1, 65), "limit": 0.3},
    {"name": "distance", "groups": (70, 20), "limit": 0.2, "power": 0.6},
    {"name": "none goes", "groups": (9, 9), "limit": 1.0},
    {"name": "any overlap", "groups": (40, 40), "limit": 0.0},
    {"name": "one box", "groups": (1,), "limit": 0.5},
    {"name": "batch 0", "groups": (), "limit": 0.5},
    {"name": "a row of boxes, each beaten by the last", "groups": (130,), "limit": 0.1, "chain": True},
]
"""`groups`: how many boxes each has; `chain`: each box overlaps the one before it, and no other."""

LARGE_CASES: list[dict[str, Any]] = [
    {"name": "32 images, 90 classes of 300", "groups": (300,) * 2880, "limit": 0.55},
    {"name": "8 images, 5 levels of 1000", "groups": (1000,) * 40, "limit": 0.7},
    {"name": "8 images, one class", "groups": (5000,) * 8, "limit": 0.5},
]


def make(case: dict[str, Any], *how: Any) -> dict[str, Any]:
    """Return the arguments of a case."""
    draw = Drawing(*how)
    count = sum(case["groups"])
    corner, sides = draw.normal(count, 2) * 8, draw.normal(count, 2).abs() * 8
    sides[::17] = 0
    if case.get("chain"):
        corner, sides = torch.arange(count, device=draw.device)[:, None] * torch.tensor([6.0, 0.0], device=draw.device), sides * 0 + 8
    starts = torch.tensor((0, *case["groups"]), device=draw.device).cumsum(0)
    boxes = torch.cat([corner, corner + sides], 1).to(draw.dtype)
    return {"boxes": boxes, "starts": starts, "limit": case["limit"], "power": case.get("power")}
