"""The loss of a step: PyTorch's cross-entropy in one pass over the logits, which leaves the gradient too, once it was compared."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from weights.callers import stacklevel
from zoo.kernels.errors import first_line
from zoo.kernels.training import kernels

ALLOWED = 1e-4
"""Relative difference of loss and gradient from PyTorch's in float32: both add thousands of float32 numbers, in another order."""
IGNORED = -100
KEPT_SHAPES = 64
"""Shapes whose comparison is remembered; the one that came first goes first."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def is_plain(loss: Any) -> bool:
    """Tell whether a loss is, at this moment, PyTorch's mean cross-entropy without weights, other marks or hooks."""
    if type(loss) is not nn.CrossEntropyLoss or loss.weight is not None or loss.ignore_index != IGNORED or loss.reduction != "mean":
        return False
    return not any(getattr(loss, name) for name in _HOOKS) and not any(getattr(module_hooks, name, None) for name in _GLOBAL_HOOKS)


class OnePass:
    """Losses of batches: cross-entropy by kernels, for shapes of logits whose first loss and gradient were PyTorch's; else by PyTorch."""

    def __init__(self) -> None:
        self.agrees: OrderedDict[Any, bool] = OrderedDict()
        """By what a comparison holds for, whether it agreed."""

    def __call__(self, loss: Callable[[Any, Any], Tensor], outputs: Any, target: Any) -> Tensor:
        """Return the loss of a batch."""
        if not is_plain(loss) or not self._fits(outputs, target):
            return loss(outputs, target)
        smoothing: float = loss.label_smoothing  # pyright: ignore[reportFunctionMemberAccess]
        key = outputs.shape, outputs.dtype, target.shape, target.dtype, smoothing
        agrees = self.agrees.get(key)
        captures = outputs.is_cuda and torch.cuda.is_current_stream_capturing()  # in which no comparison can be waited for
        if agrees is None and not captures:
            agrees = self._compared(loss, outputs.detach(), target, smoothing)
            if agrees is not None:
                self.agrees[key] = agrees
                while len(self.agrees) > KEPT_SHAPES:
                    self.agrees.popitem(last=False)
        if not agrees:
            return loss(outputs, target)
        with torch.cuda.device_of(outputs):
            return kernels.cross_entropy(outputs, target, smoothing)

    def _fits(self, outputs: Any, target: Any) -> bool:
        """Tell what PyTorch's loss would give a number of float32 for, as the kernels do, and the kernels take as it lies."""
        if type(outputs) is not Tensor or not isinstance(target, Tensor) or outputs.dim() != 2 or target.requires_grad:
            return False
        if not kernels.on_kernels(outputs.device) or not outputs.is_contiguous() or not target.is_contiguous():
            return False
        casts = torch.is_autocast_enabled(outputs.device.type)
        return outputs.dtype == torch.float32 or (casts and outputs.dtype in kernels.HALF)

    def _compared(self, loss: Callable[[Any, Any], Tensor], logits: Tensor, target: Tensor, smoothing: float) -> bool | None:
        """Tell whether loss and gradient are PyTorch's; None where PyTorch has none, or they are no numbers, which says nothing.

        Where the kernel fails a warning says so, the first time, and PyTorch computes the loss.
        """
        found: list[list[Tensor]] = []
        target = target.clone()  # where a graph's own will lie: at an even address
        try:
            with torch.enable_grad(), torch.cuda.device_of(logits):
                for compute in (lambda z: loss(z.float(), target), lambda z: kernels.cross_entropy(z, target, smoothing)):
                    given = logits.clone().requires_grad_()
                    value = compute(given)
                    found.append([value.detach().float(), *(g.float() for g in torch.autograd.grad(value, given))])
                if not all(bool(right.isfinite().all()) for right in found[0]):
                    return None
                allowed = [ALLOWED, max(ALLOWED, torch.finfo(logits.dtype).eps)]
                fits = all(
                    bool((mine - right).norm() <= most * right.norm() + 1e-30) for right, mine, most in zip(*found, allowed, strict=True)
                )
                reason = "" if fits else "its first result differed"
        except Exception as error:  # the compiler of kernels has errors of its own
            if not found:  # it is the loss's, and comes again when that is called
                return None
            reason = f"{type(error).__name__}: {first_line(error)}"
        if reason:
            warnings.warn(f"cross-entropy is computed by PyTorch and not in one pass by a kernel: {reason}", stacklevel=stacklevel())
        return not reason
