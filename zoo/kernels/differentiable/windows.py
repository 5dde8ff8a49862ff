"""Attention inside windows, differentiably: logits are computed once more on the way back, and nothing of their size is kept.

Both ways are operators that PyTorch's compiler leaves as they are, in stretches that it is given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.ops import window_attention as there
from zoo.kernels.ops import window_attention_grad as back
from zoo.kernels.ops._overlap import kernels_run


@torch.library.custom_op("kernelzoo::window_attention", mutates_args=())
def _attended(tokens: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, factor: float) -> Tensor:
    """Run the op of tokens (windows, T, 3 C), as maps."""
    x, how = _map(tokens, mask), _how(tokens, heads, factor)
    given = (x, bias, None, None, mask)
    ours = kernels_run(x) and not there.supports(*given, **how)
    return _tokens((there.launch if ours else there.reference)(*given, **how), tokens)


@_attended.register_fake
def _(tokens: Any, bias: Any, mask: Any, heads: int, factor: float) -> Tensor:
    return tokens.new_empty((*tokens.shape[:2], tokens.shape[2] // 3))


@torch.library.custom_op("kernelzoo::window_attention_grad", mutates_args=())
def _through(
    gradient: Tensor, tokens: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, factor: float, learns: bool
) -> list[Tensor]:
    """Return the gradients of the tokens and, where that `learns`, of the bias."""
    x, how = _map(tokens, mask), {**_how(tokens, heads, factor), "learns": learns}
    given = (_map(gradient.to(tokens.dtype), mask), x, bias, None, mask)
    ours = kernels_run(x) and not back.supports(*given, **how)
    made = (back.launch if ours else back.reference)(*given, **how)
    of_x, *of_bias = made if isinstance(made, tuple) else (made,)
    return [_tokens(of_x, tokens), *of_bias]


@_through.register_fake
def _(gradient: Any, tokens: Any, bias: Any, mask: Any, heads: int, factor: float, learns: bool) -> list[Tensor]:
    return [tokens.new_empty(tokens.shape), *([bias.new_empty(bias.shape)] if learns and bias is not None else [])]


def _map(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Return tokens (N windows, T, C), of which the windows of an image lie behind each other, as a map (N, C, windows T, 1)."""
    windows = 1 if mask is None else mask.shape[0]
    count, t, c = tokens.shape
    return tokens.contiguous().view(count // windows, windows * t, 1, c).permute(0, 3, 1, 2)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().view(*like.shape[:2], x.shape[1])


def _how(tokens: Tensor, heads: int, factor: float) -> dict[str, Any]:
    t, c = tokens.shape[1], tokens.shape[2] // 3
    return {
        "heads": heads, "window": (t, 1), "step": (1, 1), "stride": (t, 1), "first": (0, c, 2 * c), "factor": factor,
    }  # fmt: skip


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, bias: Tensor | None, mask: Tensor | None, heads: int, factor: float) -> Tensor:
        ctx.save_for_backward(tokens, bias, mask)
        ctx.how = heads, factor
        return _attended(tokens, bias, mask, heads, factor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        tokens, bias, mask = ctx.saved_tensors
        of_tokens, *of_bias = _through(gradients[0].contiguous(), tokens, bias, mask, *ctx.how, ctx.needs_input_grad[1])
        return of_tokens, of_bias[0] if of_bias else None, None, None, None


def window_attention(tokens: Tensor, bias: Tensor | None, mask: Tensor | None, *, heads: int, factor: float) -> Tensor:
    """Compute ``softmax(q @ k.T * factor + bias + mask) @ v`` of each window and head, differentiably.

    Args:
        tokens: (N windows, T, 3 C), queries, keys and values of all heads beside each other; an image's windows behind each other.
        bias: (heads, T, T), added to the logits of all windows.
        mask: (windows, T, T), added to those of all heads; it has no gradient.
        heads: how many; each has C / heads channels.
        factor: of all logits.

    Returns:
        The tokens (N windows, T, C) in the dtype of `tokens`. Kept for the way back are the tokens, and bias and mask in float32.

    Raises:
        ValueError: somebody asks a gradient of the mask.
    """
    if mask is not None and mask.requires_grad:
        raise ValueError("window_attention takes a mask without a gradient; what learns and is the same for all windows is a bias")
    made: Tensor = _Attention.apply(tokens, *(None if t is None else t.float().contiguous() for t in (bias, mask)), heads, factor)  # pyright: ignore[reportAssignmentType]
    return made


def refused(tokens: Tensor, heads: int, windows: int) -> str:
    """Return "" where the kernels do this, there and back, else the reason why not; of shapes and dtypes alone."""
    count, t, c = tokens.shape
    x = tokens.new_empty((count // windows, 1, windows * t, c), device="meta").permute(0, 3, 2, 1)
    gradient = x[:, : c // 3].contiguous(memory_format=torch.channels_last)
    return back.supports(gradient, x, None, None, None, **_how(tokens, heads, 1.0))
