"""Small networks for the tests of engines."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAMES = ("openvino", "onnxruntime", "channels_last", "eager")
Pair = namedtuple("Pair", "small large")


class Small(nn.Module):
    """A convolution that is folded, one that is read twice, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        y = self.second(x)
        x = F.relu(self.other(y) + y)
        return self.classifier(x.mean((2, 3)))


class Shaped(nn.Module):
    """Returns what `shape` makes of a small and a large tensor."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.convolution, self.shape = nn.Conv2d(3, 4, 3), shape

    def forward(self, x: Tensor) -> Any:
        large = self.convolution(x)
        return self.shape(large.mean((2, 3)), large)


def varied(network: nn.Module, seed: int = 0) -> nn.Module:
    """Give BatchNorm statistics that a fold could get wrong."""
    torch.manual_seed(seed)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                assert tensor is not None
                nn.init.uniform_(tensor, 0.5, 1.5)
    return network.eval()


def images(batch: int = 2, size: int = 11, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def plain(network: nn.Module, *given: Tensor) -> Any:
    with torch.no_grad():
        return network(*given)


def tensors_of(output: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
