"""What a network answers by itself, and what is the same answer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from zoo import plain


def eager(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        return copy.deepcopy(plain(model)).eval()(*args, **kwargs)


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
