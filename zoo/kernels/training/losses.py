"""The loss of a captured step: PyTorch's cross-entropy in one pass over the logits, which leaves the gradient too, once it was compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.training import kernels

ALLOWED = 1e-4
"""Relative difference of loss and gradient from PyTorch's in float32: both add thousands of float32 numbers, in another order."""
IGNORED = -100


def in_one_pass(loss: Callable[[Any, Any], Tensor], device: torch.device) -> Callable[[Any, Any], Tensor]:
    """Return a loss as kernels compute it where it is PyTorch's mean cross-entropy of rows of logits, else the loss itself."""
    if not isinstance(loss, nn.CrossEntropyLoss) or type(loss) is not nn.CrossEntropyLoss or not kernels.on_kernels(device):
        return loss
    plain = loss.weight is None and loss.ignore_index == IGNORED and loss.reduction == "mean"
    hooked = any(getattr(loss, name) for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"))
    return OnePass(loss) if plain and not hooked else loss


class OnePass:
    """Cross-entropy by kernels, for shapes of logits whose first loss and gradient were PyTorch's; by PyTorch for all others."""

    def __init__(self, loss: nn.CrossEntropyLoss) -> None:
        self.loss = loss
        self._agrees: dict[Any, bool] = {}

    def __call__(self, outputs: Any, target: Any) -> Tensor:
        """Return the loss of a batch."""
        if not self._fits(outputs, target):
            return self.loss(outputs, target)
        key = outputs.shape, outputs.dtype, target.dtype, self.loss.label_smoothing
        if key not in self._agrees:
            if outputs.is_cuda and torch.cuda.is_current_stream_capturing():
                return self.loss(outputs, target)  # no comparison can be waited for
            self._agrees[key] = self._compared(outputs.detach(), target)
        if not self._agrees[key]:
            return self.loss(outputs, target)
        return kernels.cross_entropy(outputs, target, self.loss.label_smoothing)

    def _fits(self, outputs: Any, target: Any) -> bool:
        """Tell what PyTorch's loss would give a number of float32 for, as the kernels do."""
        if not isinstance(outputs, Tensor) or not isinstance(target, Tensor) or outputs.dim() != 2 or target.requires_grad:
            return False
        casts = torch.is_autocast_enabled(outputs.device.type)
        return outputs.dtype == torch.float32 or (casts and outputs.dtype in kernels.HALF)

    def _compared(self, logits: Tensor, target: Tensor) -> bool:
        """Tell whether loss and gradient are PyTorch's."""
        with torch.enable_grad():
            found: list[list[Tensor]] = []
            for compute in (lambda z: self.loss(z.float(), target), lambda z: kernels.cross_entropy(z, target, self.loss.label_smoothing)):
                given = logits.clone().requires_grad_()
                value = compute(given)
                found.append([value.detach().float(), *(g.float() for g in torch.autograd.grad(value, given))])
        rounding = torch.finfo(logits.dtype).eps
        allowed = [ALLOWED, max(ALLOWED, rounding)]
        return all(bool((mine - right).norm() <= most * right.norm() + 1e-30) for right, mine, most in zip(*found, allowed, strict=True))
