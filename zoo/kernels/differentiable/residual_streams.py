"""A transformer's stream, differentiably: a branch added to it with the layer norm that reads the sum, GELU or SwiGLU behind products.

The norm's way there is PyTorch's own: its compiler, which is given these, makes one kernel of it and what stands beside it. The ways back
are kernels, operators that the compiler leaves as they are. What it makes of them itself sums over all tokens in passes of their own: for a
norm's weight and bias, for the bias of the product before the sum or before GELU, and for a layer scale. GELU's way there is a kernel too,
for the library's erf takes longer than memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.kernels.differentiable.maps import as_map
from zoo.kernels.ops import bias_act_grad, glu_grad, layer_norm_grad, pointwise
from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._layout import unreadable
from zoo.kernels.ops._overlap import kernels_run


@torch.library.custom_op("kernelzoo::layer_norm_grad", mutates_args=())
def _through_norm(
    gradient: Tensor,
    total: Tensor,
    mean: Tensor,
    inverse: Tensor,
    factor: Tensor | None,
    beside: Tensor | None,
    branch: Tensor | None,
    scale: Tensor | None,
    share: Tensor | None,
    branch_dtype: torch.dtype | None,
) -> list[Tensor]:
    """Run the op of tokens (N, ..., C), as maps."""
    beside, branch = (None if t is None else as_map(t) for t in (beside, branch))
    given = (as_map(gradient), as_map(total), mean, inverse, factor, beside, branch, scale, share)
    ours = kernels_run(total) and not layer_norm_grad.supports(*given, branch_dtype=branch_dtype)
    sums, *made = (layer_norm_grad.launch if ours else layer_norm_grad.reference)(*given, branch_dtype=branch_dtype)
    if len(made) == 2 and made[1] is made[0]:  # the reference's, where nothing tells them apart
        made[1] = made[0].clone()
    return [sums, *(one.permute(0, 2, 3, 1).contiguous().view(total.shape) for one in made)]


@_through_norm.register_fake
def _(
    gradient: Any, total: Any, mean: Any, inverse: Any, factor: Any, beside: Any, branch: Any, scale: Any, share: Any, branch_dtype: Any
) -> list[Tensor]:
    rows = 2 if branch_dtype is None else 3 if scale is None else 4
    wide = torch.promote_types(torch.promote_types(gradient.dtype, total.dtype), torch.float32)
    made = [total.new_empty((rows, total.shape[-1]), dtype=wide), total.new_empty(total.shape)]
    return made if branch_dtype is None else [*made, total.new_empty(total.shape, dtype=branch_dtype)]


@torch.library.custom_op("kernelzoo::gelu", mutates_args=())
def _activated(before: Tensor, act: str) -> Tensor:
    """Compute an activation, GELU for one, of tokens (N, ..., C)."""
    read = as_map(before)
    if not kernels_run(read) or pointwise.supports(read, act=act):
        return ACTIVATIONS[act](before.contiguous())
    return pointwise.launch(read, act=act).permute(0, 2, 3, 1).view(before.shape)


@_activated.register_fake
def _(before: Any, act: str) -> Tensor:
    return before.new_empty(before.shape)


@torch.library.custom_op("kernelzoo::gelu_grad", mutates_args=())
def _through_gelu(gradient: Tensor, before: Tensor, act: str, again: bool) -> list[Tensor]:
    """Return the sums for the bias, the gradient before GELU and, if asked for again, GELU itself, of tokens (N, ..., C)."""
    gradient, read = as_map(gradient), as_map(before)
    ours = kernels_run(read) and not bias_act_grad.supports(gradient, read, act=act, again=again)
    sums, *made = (bias_act_grad.launch if ours else bias_act_grad.reference)(gradient, read, act=act, again=again)
    return [sums, *(one.permute(0, 2, 3, 1).contiguous().view(before.shape) for one in made)]


@_through_gelu.register_fake
def _(gradient: Any, before: Any, act: str, again: bool) -> list[Tensor]:
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return [before.new_empty(before.shape[-1:], dtype=wide), *(gradient.new_empty(before.shape) for _ in range(1 + again))]


@torch.library.custom_op("kernelzoo::glu_grad", mutates_args=())
def _through_glu(gradient: Tensor, first: Tensor, second: Tensor | None, act: str, last: bool, again: bool) -> list[Tensor]:
    """Return the sums for both biases (2, C), the gradients of `first` and `second` and, if asked for again, the output."""
    gate, value = _halves(first, second, last)
    maps = [*map(_readable, (gradient, gate, value))]
    sums = gradient.new_empty((2, gate.shape[-1]), dtype=torch.promote_types(gradient.dtype, torch.float32))
    made = [gradient.new_empty(t.shape) for t in (first, second) if t is not None]
    found = [sums, *map(_lying, _halves(made[0], made[1] if second is not None else None, last))]
    if again:
        made.append(gradient.new_empty(gate.shape))
        found.append(_lying(made[-1]))
    if kernels_run(gradient) and not glu_grad.supports(*maps, act=act, again=again):
        glu_grad.launch(*maps, act=act, again=again, out=tuple(found))
    else:
        for to, one in zip(found, glu_grad.reference(*maps, act=act, again=again), strict=True):
            to.copy_(one)
    return [sums, *made]


@_through_glu.register_fake
def _(gradient: Any, first: Any, second: Any, act: str, last: bool, again: bool) -> list[Tensor]:
    gate, _ = _halves(first, second, last)
    sums = gradient.new_empty((2, gate.shape[-1]), dtype=torch.promote_types(gradient.dtype, torch.float32))
    shapes = [first.shape, *([] if second is None else [second.shape]), *([gate.shape] if again else [])]
    return [sums, *(gradient.new_empty(shape) for shape in shapes)]


def _halves(first: Tensor, second: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
    """Return gate and value: both tensors, or without a second one the halves of the first; the gate is the `last` one if so."""
    one, other = first.chunk(2, -1) if second is None else (first, second)
    return (other, one) if last else (one, other)


def _readable(tokens: Tensor) -> Tensor:
    """Return tokens (N, ..., C), halves of wider ones too, as a map that kernels read: where they lie, if that can be."""
    seen = _lying(tokens)
    return as_map(tokens) if unreadable(seen) else seen


def _lying(tokens: Tensor) -> Tensor:
    """Return tokens (N, ..., C), halves of wider ones too, as a map (N, C, L, 1): the very memory, if they lie in one piece."""
    n, *between, c = tokens.shape
    return tokens.reshape(n, math.prod(between), 1, c).permute(0, 3, 1, 2)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, scale: Tensor | None, share: Tensor | None, weight: Tensor,
        shift: Tensor, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total = x.view_as(x)
        if branch is not None:
            scaled = branch if scale is None else branch * scale
            total = x + (scaled if share is None else scaled * share)
        y, mean, inverse = torch.native_layer_norm(total, (total.shape[-1],), weight, shift, eps)
        ctx.save_for_backward(total, mean, inverse, weight, None if scale is None else branch, scale, share)
        ctx.types = x.dtype, None if branch is None else branch.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return total, y.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        beside, gradient = gradients
        total, mean, inverse, weight, branch, scale, share = ctx.saved_tensors
        x_type, branch_type, bias_type = ctx.types
        gradient = torch.zeros_like(total) if gradient is None else gradient
        flat = (v.reshape(-1).float() for v in (mean, inverse))
        shares = None if share is None else share.reshape(-1).float()
        sums, of_total, *rest = _through_norm(gradient, total, *flat, weight, beside, branch, scale, shares, branch_type)
        of_branch = rest[0] if rest else None
        of_bias = of_scale = None
        if bias_type is not None:
            of_bias = (sums[2] if scale is None else sums[2] * scale).to(bias_type)
        if scale is not None:
            of_scale = sums[3]
        return of_total.to(x_type), of_branch, of_bias, of_scale, None, sums[0].to(weight.dtype), sums[1].to(weight.dtype), None, None


def add_layer_norm(
    x: Tensor, branch: Tensor | None, bias: Tensor | None, scale: Tensor | None, share: Tensor | None, weight: Tensor, shift: Tensor,
    eps: float, dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute ``total = x + branch * scale * share`` and ``layer_norm(total)`` over the last axis, differentiably.

    Args:
        x: the stream, (N, ..., C).
        branch: what is added to it, of its shape; None where nothing is.
        bias: (C,), one that `branch` holds as a summand already and whose gradient is wanted here; None where there is none.
        scale: float32 (C,), a layer scale, or None.
        share: (N, 1, ..., 1), stochastic depth's factor for each image, which has no gradient, or None.
        weight: float32 (C,), the norm's.
        shift: float32 (C,), the norm's.
        eps: added to the variance.
        dtype: of the norm's result. Half precision where what reads it rounds to that anyway.

    Returns:
        The total and the norm's result. What reads the stream behind the norm is to read this total, so that its gradient comes back here.
    """
    made: tuple[Tensor, Tensor] = _Stream.apply(x, branch, bias, scale, share, weight, shift, eps, dtype)  # pyright: ignore[reportAssignmentType]
    return made


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: Tensor, bias: Tensor, act: str) -> Tensor:
        ctx.save_for_backward(before)
        ctx.type, ctx.act = bias.dtype, act
        return _activated(before, act)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (before,) = ctx.saved_tensors
        sums, of_before = _through_gelu(gradients[0].to(before.dtype), before, ctx.act, False)
        return of_before, sums.to(ctx.type), None


def gelu(before: Tensor, bias: Tensor, *, act: str = "gelu") -> Tensor:
    """Compute GELU of a product's result, or an approximation, differentiably.

    Args:
        before: (N, ..., C), a product's result with its bias.
        bias: (C,), that bias, whose gradient is wanted here and not of the product.
        act: "gelu", "gelu_tanh" or "quick_gelu", a name of `ACTIVATIONS`.

    Returns:
        The activated tensor, of the dtype of `before`.
    """
    made: Tensor = _Gelu.apply(before, bias, act)  # pyright: ignore[reportAssignmentType]
    return made


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: Tensor, bias: Tensor, weight: Tensor, shift: Tensor | None, act: str) -> Tensor:
        ctx.save_for_backward(before, weight)
        ctx.type, ctx.act = bias.dtype, act
        return F.linear(_activated(before, act), weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        before, weight = ctx.saved_tensors
        learns, shifts = ctx.needs_input_grad[2:4]
        rows = gradients[0].reshape(-1, weight.shape[0]).to(before.dtype)
        sums, of_before, *y = _through_gelu((rows @ weight).view(before.shape), before, ctx.act, learns)
        of_weight = rows.t() @ y[0].view(-1, weight.shape[1]) if learns else None
        return of_before, sums.to(ctx.type), of_weight, rows.sum(0) if shifts else None, None


def gelu_linear(before: Tensor, bias: Tensor, weight: Tensor, shift: Tensor | None, *, act: str = "gelu", learns: bool = True) -> Tensor:
    """Compute a product of GELU, differentiably, which keeps what GELU reads alone: what it makes comes once more from its way back.

    Args:
        before: (N, ..., C), a product's result with its bias.
        bias: (C,), that bias, whose gradient is wanted here and not of the product.
        weight: (K, C), of the product behind; it is rounded to the dtype of `before`.
        shift: (K,), a bias of it, or None.
        act: "gelu", "gelu_tanh" or "quick_gelu", a name of `ACTIVATIONS`.
        learns: whether the gradient of `shift` is wanted here.

    Returns:
        ``linear(gelu(before), weight, shift)``, (N, ..., K), of the dtype of `before`.
    """
    shift = None if shift is None else (shift if learns else shift.detach()).to(before.dtype)
    made: Tensor = _GeluLinear.apply(before, bias, weight.to(before.dtype), shift, act)  # pyright: ignore[reportAssignmentType]
    return made


class _Glu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor | None, bias: Tensor, other_bias: Tensor | None, act: str, last: bool) -> Tensor:
        ctx.save_for_backward(first, second)
        ctx.types, ctx.act, ctx.last = _types(bias, other_bias), act, last
        gate, value = _halves(first, second, last)
        return ACTIVATIONS[act](gate) * value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first, second = ctx.saved_tensors
        sums, *made = _through_glu(gradients[0].to(first.dtype), first, second, ctx.act, ctx.last, False)
        return *_of_halves(ctx, sums, made, second is None), None, None


class _GluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor, second: Tensor | None, bias: Tensor, other_bias: Tensor | None, weight: Tensor, shift: Tensor | None,
        act: str, last: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(first, second, weight)
        ctx.types, ctx.act, ctx.last = _types(bias, other_bias), act, last
        gate, value = _halves(first, second, last)
        return F.linear(ACTIVATIONS[act](gate) * value, weight, shift)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        first, second, weight = ctx.saved_tensors
        learns, shifts = ctx.needs_input_grad[4:6]
        rows = gradients[0].reshape(-1, weight.shape[0]).to(first.dtype)
        of_output = (rows @ weight).view(*first.shape[:-1], weight.shape[1])
        sums, *made = _through_glu(of_output, first, second, ctx.act, ctx.last, learns)
        of_weight = rows.t() @ made.pop().view(-1, weight.shape[1]) if learns else None
        return *_of_halves(ctx, sums, made, second is None), of_weight, rows.sum(0) if shifts else None, None, None


def _types(*biases: Tensor | None) -> list[torch.dtype]:
    return [bias.dtype for bias in biases if bias is not None]


def _of_halves(ctx: Any, sums: Tensor, made: list[Tensor], packed: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of both tensors and both biases, in the order in which they were given."""
    sums = sums.flip(0) if ctx.last else sums
    if packed:
        return made[0], None, sums.reshape(-1).to(ctx.types[0]), None
    return made[0], made[1], sums[0].to(ctx.types[0]), sums[1].to(ctx.types[1])


def glu(first: Tensor, second: Tensor | None, bias: Tensor, other_bias: Tensor | None, *, act: str = "silu", last: bool = False) -> Tensor:
    """Compute a gated linear unit, ``act(gate) * value``, behind products with biases, differentiably.

    Args:
        first: (N, ..., C), a product's result with its bias; without a second one (N, ..., 2 C), whose halves both are.
        second: (N, ..., C), another product's with its own, or None.
        bias: of the first, whose gradient is wanted here and not of the product.
        other_bias: of the second, likewise.
        act: "silu", as SwiGLU has it, or another name of `ACTIVATIONS` whose gradient its input tells.
        last: whether the gate is the second, or the second half, and the value the first.

    Returns:
        (N, ..., C), of the dtype of `first`.
    """
    made: Tensor = _Glu.apply(first, second, bias, other_bias, act, last)  # pyright: ignore[reportAssignmentType]
    return made


def glu_linear(
    first: Tensor, second: Tensor | None, bias: Tensor, other_bias: Tensor | None, weight: Tensor, shift: Tensor | None, *,
    act: str = "silu", last: bool = False, learns: bool = True,
) -> Tensor:  # fmt: skip
    """Compute a product of a gated linear unit, differentiably, which keeps nothing but what that reads: `glu` and `gelu_linear` in one.

    Args:
        first: as `glu` takes it, and so are the three behind it.
        second: see there.
        bias: see there.
        other_bias: see there.
        weight: (K, C), of the product behind; it is rounded to the dtype of `first`.
        shift: (K,), a bias of it, or None.
        act: see there.
        last: see there.
        learns: whether the gradient of `shift` is wanted here.

    Returns:
        (N, ..., K), of the dtype of `first`.
    """
    shift = None if shift is None else (shift if learns else shift.detach()).to(first.dtype)
    made: Tensor = _GluLinear.apply(first, second, bias, other_bias, weight.to(first.dtype), shift, act, last)  # pyright: ignore[reportAssignmentType]
    return made
