"""What a call is told apart by: which plan may answer it, and whether only the network itself can."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN = type(None) | bool | int | float | str | torch.dtype | torch.device
"""Arguments that a plan may be made for, one for each value."""


def special(tensors: list[Tensor]) -> str:
    """Say why no plan may answer a call, which has to be seen by PyTorch; "" of an ordinary one."""
    if torch._C._are_functorch_transforms_active():
        return "it is called inside a transform of torch.func, such as vmap"
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return "it is being exported or traced"
    if forward_ad._current_level >= 0:
        return "it is called inside forward-mode differentiation"
    for tensor in tensors:
        if type(tensor) is not Tensor and type(tensor) is not nn.Parameter:
            return f"it is given a {type(tensor).__name__}"
        if tensor.layout is not torch.strided or tensor.is_nested or tensor._is_zerotensor():  # no plain memory
            return f"it is given a tensor that is {'nested' if tensor.is_nested else 'lazy or of layout ' + str(tensor.layout)}"
    return ""


def one_key(image: Tensor) -> Any:
    """Return the key of a plan for a call with one tensor and nothing else."""
    return 1, key_of(image)


def key_of(leaf: Any) -> Any:
    """Return what distinguishes an argument from others that need another plan: 1, 1.0 and True do."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype.is_floating_point or leaf.dtype
    return type(leaf).__name__, repr(leaf)
