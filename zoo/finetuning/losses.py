"""What is made small: the cross-entropy of a batch, weighted, of mixed images and of auxiliary heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from zoo.finetuning.batches import Target

AUXILIARY = 0.3
"""Weight of an auxiliary head's loss (Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 5)."""


def loss_of(outputs: Any, target: Target, smoothing: float) -> Tensor:
    """Return the mean weighted cross-entropy of a batch; mixed images count for both of their classes."""
    logits, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = _cross_entropy(logits, target, smoothing)
    for auxiliary in others:
        if auxiliary is not None:
            loss = loss + AUXILIARY * _cross_entropy(auxiliary, target, smoothing)
    return loss


def _cross_entropy(logits: Tensor, target: Target, smoothing: float) -> Tensor:
    logits = logits.float()
    own = F.cross_entropy(logits, target.classes, reduction="none", label_smoothing=smoothing) * target.weights
    if target.partners is None or target.share is None:
        return own.mean()
    classes, weights = target.classes[target.partners], target.weights[target.partners]
    other = F.cross_entropy(logits, classes, reduction="none", label_smoothing=smoothing) * weights
    return (target.share * own + (1 - target.share) * other).mean()
