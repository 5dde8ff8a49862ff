"""Factors for channels, differentiably: squeeze-and-excite's product."""

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
