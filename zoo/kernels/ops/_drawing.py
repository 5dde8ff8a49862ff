"""Random arguments of ops' cases, always the same ones from a seeded generator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def given(case: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return those arguments that a case has as they are; types are said by their names."""
    return {name: getattr(torch, case[name]) if name == "out_dtype" else case[name] for name in names if name in case}


def as_output(x: Tensor, act: str) -> Tensor:
    """Make a map of what such an activation gives, in place: ReLU no less than 0, ReLU6 no more than 6."""
    return x.clamp_(0) if act == "relu" else x.mul_(4).clamp_(0, 6) if act == "relu6" else x


@dataclass(frozen=True)
class Drawing:
    """What draws the arguments of a case.

    Attributes:
        dtype: of maps.
        device: where they lie.
        generator: of this device or of the CPU.
    """

    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator

    def normal(self, *size: int) -> Tensor:
        """Return float32 numbers around 0."""
        return torch.randn(size, generator=self.generator, device=self.generator.device).to(self.device)

    def between(self, shape: tuple[int, ...], before: int = 0, behind: int = 0) -> Tensor:
        """Return a channels_last map, or a slice of one with so many channels more before it and behind it."""
        n, c, h, w = shape
        return self.normal(n, h, w, before + c + behind).to(self.dtype).permute(0, 3, 1, 2)[:, before : before + c]

    def map(self, shape: tuple[int, ...], wide: int = 0) -> Tensor:
        """Return a channels_last map; where `wide` > 0, a slice from channel 8 on of a map with so many channels, NaN elsewhere."""
        n, c, h, w = shape
        whole = torch.full((n, h, w, wide or c), float("nan"), dtype=self.dtype, device=self.device).permute(0, 3, 1, 2)
        part = whole[:, 8 : 8 + c] if wide else whole
        return part.copy_(self.normal(*shape).to(self.dtype))
