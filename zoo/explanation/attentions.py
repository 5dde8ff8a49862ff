"""Where a vision transformer's answer comes from, by its attention: for networks whose every block attends over all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zoo.explanation.table import Answer, Question, method, refuse


class _Attentions:
    """A rule that computes attention in the open, and keeps its weights (B, heads, queries, keys) in order."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []

    def __call__(self, node: fx.Node, layer: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        del layer
        if node.target is not F.scaled_dot_product_attention or len(args) != 3 or set(kwargs) - {"scale"}:
            return NotImplemented
        query, key, value = args[0], args[1], args[2]
        scale = kwargs.get("scale") or query.shape[-1] ** -0.5
        weights = (query @ key.transpose(-2, -1) * scale).softmax(-1)
        if torch.is_grad_enabled() and not weights.requires_grad:
            weights.requires_grad_()
        self.weights.append(weights)
        return weights @ value


def _patches(q: Question, name: str, found: list[Tensor]) -> tuple[list[Tensor], Tensor | None]:
    """Divide attention into that of the blocks and that of a last pool, if there is one."""
    first = q.program.first_patch
    square = [one for one in found if one.shape[2] == one.shape[3] > 1]
    pool = found[-1] if found and found[-1].shape[2] == 1 else None
    tokens = {one.shape[2] for one in square}
    if first is None or not square or len(tokens) != 1 or len(square) + (pool is not None) != len(found):
        raise refuse(name, q.program, "it has no blocks that all attend over the same tokens, one for each patch")
    return square, pool


def _read(q: Question, flow: Tensor, pool: Tensor | None) -> Answer:
    """Return what the head's token, or the mean of the tokens that it reads, has of each patch: (B, h, w)."""
    first = q.program.first_patch or 0
    read = [flow[:, tokens].mean(1) for tokens in q.program.read] if pool is None else [(pool @ flow)[:, 0]]
    row = torch.stack(read).mean(0)
    cells = row[:, first:]
    rows = round((cells.shape[1] * q.ratio) ** 0.5)
    return Answer(cells.unflatten(1, (rows, -1)))


@method("attention-rollout", "Attention rollout", "https://arxiv.org/abs/2005.00928", place="input", exact=True)
def attention_rollout(q: Question) -> Answer:
    """Product over the blocks of half the heads' mean attention and half the identity, for the shortcut (section 3), whatever the class."""
    rule = _Attentions()
    with torch.no_grad():
        q.program.head([q.x], rule)
    square, pool = _patches(q, "attention rollout", rule.weights)
    flow = torch.eye(square[0].shape[2], device=q.x.device).expand(len(q.x), -1, -1)
    for weights in square:
        step = (weights.mean(1) + torch.eye(weights.shape[2], device=weights.device)) / 2
        flow = step / step.sum(-1, keepdim=True) @ flow
    return _read(q, flow, None if pool is None else pool.mean(1))


@method("gradient-attention", "Gradient-weighted attention", "https://arxiv.org/abs/2103.15679", place="input", exact=True)
def gradient_attention(q: Question) -> Answer:
    """R = R + mean over heads of relu(gradient times attention) R, block after block (eq. 5 and 6), from the identity."""
    rule = _Attentions()
    with torch.enable_grad():
        score = q.goal(q.program.head([q.x.detach().requires_grad_()], rule), q.every)
        square, pool = _patches(q, "gradient-weighted attention", rule.weights)
        slopes = torch.autograd.grad(score.sum(), rule.weights, allow_unused=True)
    flow = torch.eye(square[0].shape[2], device=q.x.device).expand(len(q.x), -1, -1)
    last = None
    for weights, slope in zip(rule.weights, slopes, strict=True):
        step = torch.zeros_like(weights[:, 0]) if slope is None else (slope * weights.detach()).relu().mean(1)
        if weights is pool:
            last = step
        else:
            flow = flow + step @ flow
    return _read(q, flow, last)
