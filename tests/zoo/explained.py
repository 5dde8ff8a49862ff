"""Networks that tests of explanations share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from weights import Checkpoint, Preprocessing
from zoo.networks.model import Model

HALVES = Preprocessing(256, 224, "bilinear", (0.5,) * 3, (0.5,) * 3)
CIFAR = Preprocessing(32, 32, "bilinear", (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616))


def record(preprocessing: Preprocessing, labels: str | None = None, classes: int = 10) -> Checkpoint:
    return Checkpoint("ResNet20", "test", ("file:///none",), "pytorch", "ours", classes, preprocessing, "MIT", "a test", labels=labels)


class Bright(Model):
    """Five convolutions of stride 2 that average; class 0 is how bright, class 1 how dark, class 2 nothing."""

    paper = "https://example.org"
    first_layer = "layers.0"
    classifiers = ("fc",)

    def __init__(self, kernel: int = 3) -> None:
        super().__init__()
        self.num_classes, self.in_channels = 3, 3
        layers: list[nn.Module] = []
        for index in range(5):
            layers += [nn.Conv2d(3 if index == 0 else 1, 1, kernel, 2, padding=kernel // 2), nn.ReLU(inplace=True)]
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(1, 3, bias=False)
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.constant_(layer.weight, 1 / layer.weight[0].numel())
                nn.init.constant_(layer.bias, 1.0 if layer.in_channels == 3 else 0.0)  # black is -1
        self.fc.weight.data = torch.tensor([[1.0], [-1.0], [0.0]])

    def forward_body(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(x.mean((2, 3)))


def lively(network: nn.Module) -> nn.Module:
    """Give BatchNorms statistics that do something."""
    generator = torch.Generator().manual_seed(1)
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d) and layer.running_mean is not None and layer.running_var is not None:
            layer.running_mean.copy_(torch.randn(layer.running_mean.shape, generator=generator) / 10)
            layer.running_var.copy_(torch.rand(layer.running_var.shape, generator=generator) + 0.5)
    return network
