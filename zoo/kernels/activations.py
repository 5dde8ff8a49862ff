"""Activations by one name in every room: the function, the layer, and the derivative where kernels know it. It needs no Triton."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation.

    Attributes:
        function: of a tensor.
        layer: makes a fresh module, never in place.
        slope: the gradient before it, of the gradient behind it and its input, at the borders and for NaN as PyTorch chooses; None
            where kernels don't know it.
    """

    function: Callable[[Tensor], Tensor]
    layer: Callable[[], nn.Module]
    slope: Callable[[Tensor, Tensor], Tensor] | None = None


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), by which OpenAI's CLIP approximates GELU."""

    def forward(self, x: Tensor) -> Tensor:
        """Return it, of the shape and dtype of `x`."""
        return x * torch.sigmoid(QUICK * x)


QUICK = 1.702
"""The factor of `QuickGELU`, of Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2."""


def _quick_slope(g: Tensor, z: Tensor) -> Tensor:
    share = torch.sigmoid(QUICK * z)
    return g * share + QUICK * (g * z * (share * (1 - share)))


def _leaky(slope: float) -> Activation:
    return Activation(lambda x: F.leaky_relu(x, slope), lambda: nn.LeakyReLU(slope), lambda g, z: torch.where(z > 0, g, g * slope))


ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda x: x, nn.Identity, lambda g, z: g),
    "relu": Activation(torch.relu, nn.ReLU, lambda g, z: torch.where(z <= 0, 0, g)),
    "relu6": Activation(F.relu6, nn.ReLU6, lambda g, z: torch.where((z <= 0) | (z >= 6), 0, g)),
    "leaky_relu_0.1": _leaky(0.1),
    "leaky_relu_0.01": _leaky(0.01),
    "hardswish": Activation(F.hardswish, nn.Hardswish, lambda g, z: torch.where(z <= -3, 0, torch.where(z < 3, g * (z / 3 + 0.5), g))),
    "silu": Activation(F.silu, nn.SiLU, lambda g, z: g * torch.sigmoid(z) * (1 + z * (1 - torch.sigmoid(z)))),
    "hardsigmoid": Activation(F.hardsigmoid, nn.Hardsigmoid),
    "sigmoid": Activation(torch.sigmoid, nn.Sigmoid),
    "gelu": Activation(F.gelu, nn.GELU, lambda g, z: torch.ops.aten.gelu_backward(g, z)),
    "gelu_tanh": Activation(
        partial(F.gelu, approximate="tanh"), partial(nn.GELU, "tanh"), lambda g, z: torch.ops.aten.gelu_backward(g, z, approximate="tanh")
    ),
    "quick_gelu": Activation(lambda x: x * torch.sigmoid(QUICK * x), QuickGELU, _quick_slope),
}
"""Every activation that a checkpoint's record, a pass or a kernel may name."""
