"""Factors for channels and for images, differentiably: squeeze-and-excite's product, and stochastic depth's with the sum behind it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from zoo.kernels.differentiable.maps import rows
from zoo.kernels.differentiable.nodes import node
from zoo.kernels.ops import pointwise, scale_channels_grad
from zoo.kernels.ops._overlap import kernels_run


def _scale_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, gate = ctx.saved_tensors
    of_x, of_gate = scale_channels_grad.launch(rows(gradient), rows(x), gate)
    return of_x, of_gate.to(gate.dtype)


@node(_scale_back)
def _scale(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
    ctx.save_for_backward(x, gate)
    return pointwise.launch(x, gate=gate)


def scale_channels(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply each image's channels by factors of their own, differentiably.

    Args:
        x: map (N, C, H, W).
        gate: (N, C) or (N, C, 1, 1), any floating dtype.

    Returns:
        The map in the dtype of `x`. Kept for the way back are `x` and `gate`, both of whose gradients come from one pass.
    """
    x, factors = rows(x), gate.flatten(1).contiguous()
    if kernels_run(x) and not refused(x, factors):
        return _scale(x, factors)
    return x * factors[:, :, None, None].to(x.dtype)


def refused(x: Tensor, gate: Tensor) -> str:
    """Return "" where the kernels do this, else the reason why not; of shapes and dtypes alone."""
    return scale_channels_grad.supports(x, x, gate.flatten(1).contiguous())


def _branch_back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor]:
    (gate,) = ctx.saved_tensors
    of_branch = pointwise.launch(rows(gradient), gate=gate) if ctx.needs_input_grad[0] else None
    return of_branch, None, gradient


@node(_branch_back)
def _add_branch(ctx: Any, branch: Tensor, gate: Tensor, x: Tensor) -> Tensor:
    ctx.save_for_backward(gate)
    return pointwise.launch(branch, gate=gate, residual=x)


def add_branch(branch: Tensor, share: Tensor, x: Tensor) -> Tensor:
    """Add a branch times a factor for each image, differentiably: a residual block with stochastic depth.

    Args:
        branch: map (N, C, H, W).
        share: (N, 1, 1, 1), which has no gradient.
        x: what the branch is added to, a map of its shape and dtype.

    Returns:
        ``branch * share + x``, added in float32 and rounded once. Kept for the way back is the factor.

    Raises:
        ValueError: somebody asks a gradient of the factor.
    """
    if share.requires_grad:
        raise ValueError("add_branch takes a share without a gradient; for one that learns, write branch * share + x")
    branch, x = rows(branch), rows(x)
    gate = share.view(-1, 1).expand(branch.shape[:2]).contiguous()
    if kernels_run(branch) and not pointwise.supports(branch, gate=gate, residual=x):
        return _add_branch(branch, gate, x)
    return pointwise.reference(branch, gate=gate, residual=x)


def add_branch_refused(branch: Tensor, share: Tensor, x: Tensor) -> str:
    """Return "" where the kernels do this, else the reason why not; of shapes and dtypes alone."""
    return pointwise.supports(branch, gate=share.view(-1, 1).expand(branch.shape[:2]).contiguous(), residual=x)
