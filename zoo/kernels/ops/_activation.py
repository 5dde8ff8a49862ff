"""Activations that epilogues and prologues apply, in PyTorch and in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from zoo.kernels import activations

ACTIVATIONS = {name: one.function for name, one in activations.ACTIVATIONS.items()}
"""Activation by name; the kernels know the same names."""


def affine(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return ``x * scale + shift`` of a map in its dtype, a number for each channel; either part is optional."""
    x = x if scale is None else x * scale.to(x.dtype)[:, None, None]
    return x if shift is None else x + shift.to(x.dtype)[:, None, None]


@triton.jit
def below(z):
    """Return the share of a normal distribution that is below `z`, and its density there times the square root of 2 pi.

    By Abramowitz and Stegun, 7.1.26, to 1e-7: one exponential and a short polynomial, where the library's erf takes as long as memory does.
    """
    e = tl.exp(-0.5 * z * z)
    t = 1.0 / (1.0 + 0.3275911 * 0.7071067811865476 * tl.abs(z))
    tail = 0.5 * e * t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return tl.where(z < 0.0, tail, 1.0 - tail), e


@triton.jit
def activate(x, ACT: tl.constexpr):
    """Apply the activation ACT, a name of `ACTIVATIONS`, to a float32 block; NaN stays NaN, as in PyTorch."""
    if ACT == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "relu6":
        x = tl.minimum(tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACT == "hardsigmoid":
        x = tl.minimum(tl.maximum(x + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0
    elif ACT == "hardswish":
        x = x * tl.minimum(tl.maximum(x + 3.0, 0.0, propagate_nan=tl.PropagateNan.ALL), 6.0, propagate_nan=tl.PropagateNan.ALL) / 6.0
    elif ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "sigmoid":
        x = tl.sigmoid(x)
    elif ACT == "leaky_relu_0.1":
        x = tl.where(x < 0.0, x * 0.1, x)
    elif ACT == "leaky_relu_0.01":
        x = tl.where(x < 0.0, x * 0.01, x)
    elif ACT == "gelu":
        share, _ = below(x)
        x = x * share
    elif ACT == "gelu_tanh":
        x = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
    return x


SLOPES = {name: one.slope for name, one in activations.ACTIVATIONS.items() if one.slope is not None}
"""Derivatives by name; those that the kernels know."""

BY_OUTPUT = ("none", "relu", "relu6", "leaky_relu_0.1", "leaky_relu_0.01")
"""Those whose gradient their output tells as well as their input."""


@triton.jit
def slope(z, gradient, ACT: tl.constexpr):
    """Return the gradient before the activation ACT at `z`, at the borders as PyTorch chooses."""
    if ACT == "relu":
        gradient = tl.where(z <= 0.0, 0.0, gradient)
    elif ACT == "relu6":
        gradient = tl.where((z <= 0.0) | (z >= 6.0), 0.0, gradient)
    elif ACT == "hardswish":
        gradient = tl.where(z <= -3.0, 0.0, tl.where(z < 3.0, gradient * (z / 3.0 + 0.5), gradient))
    elif ACT == "silu":
        s = tl.sigmoid(z)
        gradient = gradient * s * (1.0 + z * (1.0 - s))
    elif ACT == "gelu":
        share, e = below(z)
        gradient = gradient * (share + 0.3989422804014327 * z * e)
    elif ACT == "gelu_tanh":
        s = tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
        gradient = gradient * s * (1.0 + 1.5957691216057308 * z * (1.0 + 0.134145 * z * z) * (1.0 - s))
    elif ACT == "quick_gelu":
        s = tl.sigmoid(1.702 * z)
        gradient = gradient * s + 1.702 * (gradient * z * (s * (1.0 - s)))
    elif ACT == "leaky_relu_0.1":
        gradient = tl.where(z > 0.0, gradient, gradient * 0.1)
    elif ACT == "leaky_relu_0.01":
        gradient = tl.where(z > 0.0, gradient, gradient * 0.01)
    else:
        tl.static_assert(ACT == "none", "unknown activation")
    return gradient
