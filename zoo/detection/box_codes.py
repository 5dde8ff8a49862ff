"""How networks write boxes: as offsets from the boxes that they start from, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Weights = tuple[float, float, float, float]
PLAIN: Weights = (1.0, 1.0, 1.0, 1.0)
WEIGHTED: Weights = (10.0, 10.0, 5.0, 5.0)
LARGEST = math.log(1000 / 16)
"""Of the logarithm of a size: a network that is wrong gives no box of infinite size."""


def encode(boxes: Tensor, start: Tensor, weights: Weights = PLAIN) -> Tensor:
    """Return (N, 4): how far the centres of `boxes` are from those of `start`, in sizes of the latter, and the logarithms of sizes.

    Source:
        Girshick et al. 2013, appendix C: https://arxiv.org/abs/1311.2524.
    """
    x, y, w, h = _centred(start)
    to_x, to_y, to_w, to_h = _centred(boxes)
    wx, wy, ww, wh = weights
    return torch.stack([wx * (to_x - x) / w, wy * (to_y - y) / h, ww * torch.log(to_w / w), wh * torch.log(to_h / h)], -1)


def decode(codes: Tensor, start: Tensor, weights: Weights = PLAIN) -> Tensor:
    """Return the boxes (..., 4) that `encode` would write as `codes`, (..., 4), from the boxes `start`, (..., 4)."""
    x, y, w, h = _centred(start.to(codes.dtype))
    dx, dy, dw, dh = (code / weight for code, weight in zip(codes.unbind(-1), weights, strict=True))
    x, y = dx * w + x, dy * h + y
    half_w = 0.5 * (torch.exp(dw.clamp(max=LARGEST)) * w)
    half_h = 0.5 * (torch.exp(dh.clamp(max=LARGEST)) * h)
    return torch.stack([x - half_w, y - half_h, x + half_w, y + half_h], -1)


def distances(boxes: Tensor, start: Tensor) -> Tensor:
    """Return (..., 4): how far the sides of `boxes` are from the centres of `start`, in sizes of the latter: left, top, right, bottom.

    Source:
        Tian et al. 2019, section 3.1: https://arxiv.org/abs/1904.01355.
    """
    x, y, w, h = _middle(start)
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack([(x - x1) / w, (y - y1) / h, (x2 - x) / w, (y2 - y) / h], -1)


def at_distances(codes: Tensor, start: Tensor) -> Tensor:
    """Return the boxes (..., 4) whose sides lie at the distances `codes`, (..., 4), that `distances` gives."""
    x, y, w, h = _middle(start.to(codes.dtype))
    left, top, right, bottom = codes.unbind(-1)
    return torch.stack([x - left * w, y - top * h, x + right * w, y + bottom * h], -1)


def _centred(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes.unbind(-1)
    w, h = x2 - x1, y2 - y1
    return x1 + 0.5 * w, y1 + 0.5 * h, w, h


def _middle(boxes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x1, y1, x2, y2 = boxes.unbind(-1)
    return 0.5 * (x1 + x2), 0.5 * (y1 + y2), x2 - x1, y2 - y1
