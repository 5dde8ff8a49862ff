"""What is made small: the cross-entropy of a batch, weighted, of mixed images and of auxiliary heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from zoo.finetuning.batches import Batch

AUXILIARY = 0.3
"""Weight of an auxiliary head's loss (Szegedy et al. 2014, https://arxiv.org/abs/1409.4842, section 5)."""


def loss_of(outputs: Any, batch: Batch, smoothing: float) -> Tensor:
    """Return the mean weighted cross-entropy of a batch; mixed images count for both of their classes."""
    logits, *others = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = _cross_entropy(logits, batch, smoothing)
    for auxiliary in others:
        if auxiliary is not None:
            loss = loss + AUXILIARY * _cross_entropy(auxiliary, batch, smoothing)
    return loss


def _cross_entropy(logits: Tensor, batch: Batch, smoothing: float) -> Tensor:
    logits = logits.float()
    own = F.cross_entropy(logits, batch.targets, reduction="none", label_smoothing=smoothing) * batch.weights
    if batch.partners is None or batch.share is None:
        return own.mean()
    targets, weights = batch.targets[batch.partners], batch.weights[batch.partners]
    other = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing) * weights
    return (batch.share * own + (1 - batch.share) * other).mean()
