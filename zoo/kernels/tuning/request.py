"""A plan that is asked for: of which network, for arguments of which shapes, on which device, by what was found before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choices import Choices


@dataclass(frozen=True, slots=True)
class Options:
    """What a plan needs to know of the fast network; see `fast`."""

    device: torch.device
    dtype: torch.dtype
    tune: Any
    tf32: bool
    progress: bool


@dataclass(frozen=True, slots=True)
class Request:
    """What every maker of plans is given.

    Attributes:
        network: any module.
        args: positional arguments; of tensors only shape and dtype matter.
        kwargs: keyword arguments, likewise.
        options: device, dtype and how much is tuned.
        weights: where packed weights are kept.
        choices: what was found before.
    """

    network: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Options
    weights: Weights
    choices: Choices
