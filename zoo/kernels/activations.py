"""Activations by one name in every room: the function, the layer, and the derivative where kernels know it. It needs no Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation.

    Attributes:
        function: of a tensor.
        layer: makes a fresh module, never in place.
        slope: the derivative at a tensor of inputs, at the borders as PyTorch chooses; None where kernels don't know it.
    """

    function: Callable[[Tensor], Tensor]
    layer: Callable[[], nn.Module]
    slope: Callable[[Tensor], Tensor] | None = None


def _leaky(slope: float) -> Activation:
    return Activation(
        lambda x: F.leaky_relu(x, slope), lambda: nn.LeakyReLU(slope), lambda z: torch.where(z > 0, torch.ones_like(z), slope)
    )


ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda x: x, nn.Identity, torch.ones_like),
    "relu": Activation(torch.relu, nn.ReLU, lambda z: (z > 0).to(z.dtype)),
    "relu6": Activation(F.relu6, nn.ReLU6, lambda z: ((z > 0) & (z < 6)).to(z.dtype)),
    "leaky_relu_0.1": _leaky(0.1),
    "leaky_relu_0.01": _leaky(0.01),
    "hardswish": Activation(F.hardswish, nn.Hardswish, lambda z: torch.where(z <= -3, 0, torch.where(z < 3, z / 3 + 0.5, 1))),
    "silu": Activation(F.silu, nn.SiLU, lambda z: torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))),
    "hardsigmoid": Activation(F.hardsigmoid, nn.Hardsigmoid),
    "sigmoid": Activation(torch.sigmoid, nn.Sigmoid),
    "gelu": Activation(F.gelu, nn.GELU),
}
"""Every activation that a checkpoint's record, a pass or a kernel may name."""
