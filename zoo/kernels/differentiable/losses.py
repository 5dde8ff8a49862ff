"""Cross-entropy, differentiably: the pass that computes it leaves the gradient too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import cross_entropy as _op
from zoo.kernels.ops._overlap import kernels_run


def _entropy_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    # Scaled before it is rounded: without the factor of a GradScaler most of it would be below what float16 holds.
    of_sum, share = ctx.saved_tensors
    return torch.mul(of_sum, gradient * share, out=torch.empty_like(of_sum, dtype=ctx.kind)), None, None


@node(_entropy_back)
def _entropy(ctx: Any, logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    loss, gradient, share = _op.launch(logits, target, smoothing=smoothing)
    ctx.save_for_backward(gradient, share)
    ctx.kind = logits.dtype
    return loss


def cross_entropy(logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of the images that count, differentiably in the logits.

    Args:
        logits: (N, K), any floating dtype.
        target: int64 (N,), a class each, -100 for an image that doesn't count; or shares of all classes (N, K), which have no gradient.
        label_smoothing: this share of each label is spread evenly over all classes, 0 to 1.

    Returns:
        A scalar, float32 (float64 for float64). Kept for the way back is the gradient, which the same pass has computed.
    """
    if kernels_run(logits) and not target.requires_grad and not _op.supports(logits, target, smoothing=label_smoothing):
        return _entropy(logits, target, label_smoothing)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target, label_smoothing=label_smoothing)
