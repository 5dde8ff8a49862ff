"""GELU, global response normalisation and the product behind it, differentiably: nothing is kept but what GELU reads.

The way there is PyTorch's own: its compiler, which is given this, makes two passes of it. Those back are two kernels, operators that the
compiler leaves as they are: one sums over each image, one writes the gradient, what the product behind reads, and sums for the bias before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import as_map
from zoo.kernels.ops import response_norm_grad, response_sums
from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._overlap import kernels_run


@torch.library.custom_op("kernelzoo::response_sums", mutates_args=())
def _summed(gradient: Tensor, before: Tensor, act: str) -> Tensor:
    """Run the op of tokens (N, ..., C), as maps."""
    maps = as_map(gradient), as_map(before)
    ours = kernels_run(before) and not response_sums.supports(*maps, act=act)
    return (response_sums.launch if ours else response_sums.reference)(*maps, act=act)


@_summed.register_fake
def _(gradient: Any, before: Any, act: str) -> Tensor:
    return gradient.new_empty((2, before.shape[0], before.shape[-1]), dtype=torch.promote_types(gradient.dtype, torch.float32))


@torch.library.custom_op("kernelzoo::response_norm_grad", mutates_args=())
def _through_response(
    gradient: Tensor, before: Tensor, gate: Tensor, tilt: Tensor, shift: Tensor, act: str, again: bool
) -> list[Tensor]:  # fmt: skip
    """Return the sums for the bias, the gradient before the activation and, if asked for again, what was made, of tokens (N, ..., C)."""
    given = as_map(gradient), as_map(before), gate.contiguous(), tilt.contiguous(), shift.contiguous()
    ours = kernels_run(before) and not response_norm_grad.supports(*given, act=act, again=again)
    sums, *made = (response_norm_grad.launch if ours else response_norm_grad.reference)(*given, act=act, again=again)
    return [sums, *(one.permute(0, 2, 3, 1).contiguous().view(before.shape) for one in made)]


@_through_response.register_fake
def _(gradient: Any, before: Any, gate: Any, tilt: Any, shift: Any, act: str, again: bool) -> list[Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return [before.new_empty(before.shape[-1:], dtype=wide), *(gradient.new_empty(before.shape) for _ in range(1 + again))]


class _ResponseLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, before: Tensor, bias: Tensor, scale: Tensor, offset: Tensor, weight: Tensor, shift: Tensor | None, act: str, eps: float
    ) -> Tensor:
        wide, between = torch.promote_types(before.dtype, torch.float32), tuple(range(1, before.dim() - 1))
        y = ACTIVATIONS[act](before)
        norm = torch.linalg.vector_norm(y, dim=between, keepdim=True, dtype=wide)
        gate = 1 + scale * (norm / (norm.mean(-1, keepdim=True) + eps))
        ctx.save_for_backward(before, norm, scale, offset, weight)
        ctx.type, ctx.act, ctx.eps = bias.dtype, act, eps
        return F.linear((y * gate + offset).to(before.dtype), weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        before, norm, scale, offset, weight = ctx.saved_tensors
        learns, shifts = ctx.needs_input_grad[4:6]
        rows = gradients[0].reshape(-1, weight.shape[0]).to(before.dtype)
        of_output = (rows @ weight).view(before.shape)
        products, sums = _summed(of_output, before, ctx.act).unbind(0)
        norm = norm.view(products.shape)
        level = norm.mean(-1, keepdim=True) + ctx.eps
        share, of_share = norm / level, products * scale
        of_norm = of_share / level - (of_share * norm).mean(-1, keepdim=True) / level.square()
        tilt = torch.where(norm > 0, of_norm / norm, 0.0)  # a channel that is zero everywhere has no slope, as in PyTorch
        bias_sums, of_before, *z = _through_response(of_output, before, 1 + scale * share, tilt, offset, ctx.act, learns)
        of_weight = rows.t() @ z[0].view(-1, weight.shape[1]) if learns else None
        of_scale, of_offset = (products * share).sum(0).to(scale.dtype), sums.sum(0).to(offset.dtype)
        return of_before, bias_sums.to(ctx.type), of_scale, of_offset, of_weight, rows.sum(0) if shifts else None, None, None


def response_linear(
    before: Tensor, bias: Tensor, scale: Tensor, offset: Tensor, weight: Tensor, shift: Tensor | None, *,
    eps: float, act: str = "gelu", learns: bool = True,
) -> Tensor:  # fmt: skip
    """Compute a product of an activation's global response normalisation, differentiably.

    Of ``y = act(before)`` it is ``y * (1 + scale * n) + offset``, where n is
    the norm of a channel of an image over the mean norm of its channels.

    Args:
        before: (N, ..., C), a product's result with its bias.
        bias: (C,), that bias, whose gradient is wanted here and not of the product.
        scale: float32 with C numbers, the paper's gamma.
        offset: float32 with C numbers, the paper's beta.
        weight: (K, C), of the product behind; it is rounded to the dtype of `before`.
        shift: (K,), a bias of it, or None.
        eps: added to the mean norm.
        act: "gelu", or another name of `ACTIVATIONS` whose gradient its input tells.
        learns: whether the gradient of `shift` is wanted here.

    Returns:
        (N, ..., K), of the dtype of `before`.

    Source:
        Woo et al. 2023, https://arxiv.org/abs/2301.00808, section 3.2.
    """
    shift = None if shift is None else (shift if learns else shift.detach()).to(before.dtype)
    given = before, bias, scale.reshape(-1), offset.reshape(-1), weight.to(before.dtype), shift
    made: Tensor = _ResponseLinear.apply(*given, act, eps)  # pyright: ignore[reportAssignmentType]
    return made
