"""Small networks, and pictures that are different and smooth."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo.kernels.comparing.sample_images import natural_images


def shapes(count: int, side: int = 16, seed: int = 0) -> Tensor:
    """Make images that neither calibration nor any other seed has."""
    parts = [natural_images((16, 3, side, side), torch.device("cpu"), 1000 * (seed + 1) + i) for i in range(-(-count // 16))]
    return torch.cat(parts)[:count]


class Tiny(nn.Module):
    """Convolutions, a depthwise one and a classifier.

    Args:
        wide: how many times one channel between the layers is larger than the others, without changing what is computed.
    """

    def __init__(self, wide: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm, depthwise = nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), norm, nn.ReLU())
        self.deep = nn.Sequential(depthwise, nn.ReLU(), nn.Conv2d(16, 24, 1), nn.ReLU())
        self.more = nn.Sequential(nn.Conv2d(24, 24, 3, stride=2), nn.ReLU())
        self.head = nn.Linear(24 * 4, 8)
        with torch.no_grad():
            self.eval()
            self.head.bias -= self(shapes(64, seed=50)).mean(0)  # so that images differ in their classes
            norm.weight[3] *= wide
            norm.bias[3] *= wide
            depthwise.weight[3] /= wide

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 8 classes."""
        return self.head(nn.functional.adaptive_avg_pool2d(self.more(self.deep(self.stem(x))), 2).flatten(1))


def _unchanged(x: Tensor) -> Tensor:
    return x


class Chain(nn.Module):
    """A first layer, a pool, two residual blocks, a pool between them, and a classifier: what VGGs and ResNets are made of."""

    def __init__(self, middle: Callable[[Tensor], Tensor] = _unchanged) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.enter = nn.Conv2d(32, 32, 3, padding=1)
        self.widen, self.narrow = nn.Conv2d(32, 64, 1), nn.Conv2d(64, 32, 1)
        self.last, self.head = nn.Conv2d(32, 48, 3, stride=2, padding=1), nn.Linear(48, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of 8 classes."""
        x = torch.relu(self.stem(x))
        x = nn.functional.max_pool2d(torch.relu(self.enter(x)), 2)
        x = torch.relu(self.narrow(torch.relu(self.widen(x))) + x)
        x = torch.relu(self.last(self.middle(x)))
        return self.head(x.mean((2, 3)))


def distance(ours: Tensor, right: Tensor) -> float:
    """Return a relative error."""
    return ((ours.float() - right).norm() / right.norm()).item()
