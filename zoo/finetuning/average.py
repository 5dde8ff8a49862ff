"""The running mean of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zoo.finetuning.distributed import own


class Average:
    """An exponential mean of a network's parameters and statistics, which is often better than the last weights.

    In the first steps the decay is (1 + t) / (10 + t), so that the beginning is forgotten sooner.

    Args:
        model: the network; the mean begins with its tensors.
        decay: what stays of the mean at each step.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        self.tensors: dict[str, Tensor] = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take in the weights after `step` (from 0)."""
        weight = 1 - min(self._decay, (1 + step) / (10 + step))
        means, values = [], []
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                means.append(own(self.tensors[name]))
                values.append(own(value))
            else:
                self.tensors[name].copy_(value)
        torch._foreach_lerp_(means, values, weight)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def inside(self, model: nn.Module) -> Iterator[None]:
        """Let the network compute with the mean for a while."""
        with torch.no_grad():
            before = {name: value.detach().clone() for name, value in model.state_dict().items()}
            _copy(model, self.tensors)
        try:
            yield
        finally:
            with torch.no_grad():
                _copy(model, before)


def _copy(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    for name, value in model.state_dict().items():
        value.copy_(tensors[name])
