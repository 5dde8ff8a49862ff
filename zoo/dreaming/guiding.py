"""What pulls a picture: its own activations, or the most alike among those of another picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ROWS = 4096
"""Places of a picture that are compared with a guide at once."""


def own(a: Tensor) -> Tensor:
    """Return the gradient of half the sum of squares of a map: the map itself."""
    return a.detach()


def rows(a: Tensor, axis: int | None) -> Tensor:
    """Lay a map (B, C, H, W), tokens (B, L, C) or vectors (B, C) out as (places, C)."""
    a = a.detach().movedim(channels_axis(a, axis), -1)
    return a.reshape(-1, a.shape[-1])


def channels_axis(a: Tensor, axis: int | None) -> int:
    """Return which axis is the channels': what is known, else that of maps (B, C, H, W) and of tokens (B, L, C)."""
    return axis if axis is not None else 2 if a.dim() == 3 else 1


def guided(a: Tensor, guide: Tensor, axis: int | None) -> Tensor:
    """Return for each place the vector of a guide (places, C) that has the largest dot product with it, in the shape of `a`.

    Source: Mordvintsev, Olah & Tyka 2015, the notebook's last part (https://github.com/google/deepdream).
    """
    channels = channels_axis(a, axis)
    moved = a.detach().movedim(channels, -1)
    flat = moved.reshape(-1, moved.shape[-1])
    picked: Sequence[Tensor] = [guide[(part @ guide.T).argmax(1)] for part in flat.split(ROWS)]
    return torch.cat(list(picked)).view(moved.shape).movedim(-1, channels)
