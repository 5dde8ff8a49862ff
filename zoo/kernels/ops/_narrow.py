"""Types of 8 bits: what they hold, and how a number is rounded to them."""

from __future__ import annotations

import torch
from torch import Tensor

MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The largest number of each type that is used: of int8 as many on either side of 0."""


def narrowed(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to a type; what lies beyond the range of a narrow one becomes the end of that, but infinity NaN in fp8."""
    if dtype in MOST:
        y = y if dtype == torch.int8 else y + (y - y)
        y = y.clamp(-MOST[dtype], MOST[dtype])
    return (y.round() if dtype == torch.int8 else y).to(dtype)
