"""Tensors that kernels are tried with, and how far a result is from what was expected."""

from __future__ import annotations

import torch
from torch import Tensor


def noise(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0) -> Tensor:
    """Draw the same normal numbers for the same shape and seed on any device; maps are in channels_last memory."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(device, dtype)
    return drawn.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else drawn


def off(result: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over the norm of what was expected."""
    assert result.shape == expected.shape
    return ((result.double() - expected.double()).norm() / expected.double().norm()).item()


def learning(*tensors: Tensor) -> list[Tensor]:
    """Return copies, laid out as the tensors are, that ask for gradients."""
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]
