"""The two classifiers that ask vectors what they know: a vote of neighbours, and softmax regression. Both give the same every time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

NEAREST = 20
TEMPERATURE = 0.07
BLOCK = 1024
"""Images that are compared with all others at once."""
STEPS = 200
"""Iterations of L-BFGS at most."""


def by_neighbours(x: Tensor, y: Tensor, tx: Tensor, k: int, classes: int, same: bool) -> Tensor:
    """Give each row of `tx` (M, D) the class for which its nearest rows of `x` (N, D) vote, with the weight exp(cosine / 0.07).

    Args:
        x: vectors with known classes.
        y: their classes, int64 (N,).
        tx: vectors that are asked about.
        k: neighbours that vote.
        classes: how many there are.
        same: whether `tx` is `x`, and no row may vote for itself.

    Returns:
        int64 (M,).
    """
    x, tx = F.normalize(x, dim=1), F.normalize(tx, dim=1)
    found = []
    for start in range(0, len(tx), BLOCK):
        similar = tx[start : start + BLOCK] @ x.T
        if same:
            rows = torch.arange(len(similar))
            similar[rows, start + rows] = -torch.inf
        best, place = similar.topk(k, dim=1)
        votes = torch.zeros(len(similar), classes).scatter_add_(1, y[place], ((best - 1) / TEMPERATURE).exp())
        found.append(votes.argmax(1))
    return torch.cat(found)


def folds_of(y: Tensor, folds: int) -> Tensor:
    """Give every image a fold, each fold the same share of every class, the same way every time; int64 (N,)."""
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    fold = torch.empty(len(y), dtype=torch.long)
    for number in y.unique():
        mine = order[y[order] == number]
        fold[mine] = torch.arange(len(mine)) % folds
    return fold


def scaled(x: Tensor, tx: Tensor) -> tuple[Tensor, Tensor]:
    """Return both, each column shifted and scaled to mean 0 and deviation 1 in `x`, which alone is learnt from."""
    mean, std = x.mean(0), x.std(0, correction=0).clamp_min(1e-6)
    return (x - mean) / std, (tx - mean) / std


def fitted(x: Tensor, y: Tensor, classes: int, penalty: float, start: Tensor | None = None) -> Tensor:
    """Fit softmax regression by L-BFGS; the bias carries no penalty.

    Args:
        x: float32 (N, D), scaled.
        y: int64 (N,).
        classes: how many there are.
        penalty: of the sum of squared weights, beside the mean loss.
        start: weights to begin with; None begins with zeros.

    Returns:
        Weights (D + 1, classes), the bias last.
    """
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    weights = (torch.zeros(x.shape[1], classes) if start is None else start.clone()).requires_grad_()
    optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, history_size=10, line_search_fn="strong_wolfe", tolerance_grad=1e-5)

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(x @ weights, y) + penalty * weights[:-1].square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimiser.step(loss)
    return weights.detach()


def logits(weights: Tensor, x: Tensor) -> Tensor:
    """Return what softmax regression gives for scaled vectors (N, D): (N, classes)."""
    return x @ weights[:-1] + weights[-1]
