"""SqueezeNet: fire modules between pools that keep a partial last window, as Caffe pools."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.model import Model

FIRES = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
"""Squeezed channels and channels of each expansion of fire2 to fire9 (Iandola et al. 2016, Table 1)."""


class Fire(nn.Module):
    """Squeeze by a 1x1 convolution, expand by 1x1 and 3x3 side by side (Iandola et al. 2016, Figure 1)."""

    def __init__(self, in_channels: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(in_channels, squeezed, 1)
        self.squeeze_activation = nn.ReLU()
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand1x1_activation = nn.ReLU()
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.expand3x3_activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze_activation(self.squeeze(x))
        return torch.cat([self.expand1x1_activation(self.expand1x1(x)), self.expand3x3_activation(self.expand3x3(x))], 1)


class SqueezeNet(Model):
    """Iandola et al. 2016, Table 1; version 1.1 has a smaller stem and pools earlier."""

    paper = "https://arxiv.org/abs/1602.07360"
    first_layer = "features.0"
    classifiers = ("classifier.1",)

    stem_channels: ClassVar[int]
    stem_kernel: ClassVar[int]
    pools_after: ClassVar[tuple[int, ...]]
    """Layers that a max pool follows, numbered as in Table 1: conv1 is 1, fire2 is 2."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5, classifier_padding: int = 0) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last convolution.
            in_channels: channels of the images.
            dropout: probability after fire9 (section 3.3: 0.5).
            classifier_padding: pixels around the map that the last convolution, 1x1, reads. The authors' Caffe network has 1, so that a rim
                of relu(bias) enters the mean over the pixels; torchvision's has none.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layers: list[nn.Module] = [nn.Conv2d(in_channels, self.stem_channels, self.stem_kernel, stride=2), nn.ReLU()]
        width = self.stem_channels
        for number, (squeezed, expanded) in enumerate(FIRES, start=2):
            if number - 1 in self.pools_after:
                layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            layers.append(Fire(width, squeezed, expanded))
            width = 2 * expanded
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout), nn.Conv2d(width, num_classes, 1, padding=classifier_padding), nn.ReLU(), nn.AdaptiveAvgPool2d(1)
        )
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(x).flatten(1)

    def paper_names(self) -> dict[str, str]:
        """Return the names of Table 1: conv1, fire2 to fire9, conv10 (before its activation); pool3 follows fire3, as in Caffe."""
        named: dict[str, str] = {"conv1": "features.0", "relu1": "features.1"}
        number = 1
        for index, layer in self.features.named_children():
            if isinstance(layer, nn.MaxPool2d):
                named[f"pool{number}"] = f"features.{index}"
            elif isinstance(layer, Fire):
                number += 1
                named[f"fire{number}"] = f"features.{index}"
        return named | {"conv10": "classifier.1"}

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if not isinstance(layer, nn.Conv2d):
            return
        if name in self.classifiers:
            nn.init.normal_(layer.weight, 0, 0.01)
        else:
            nn.init.kaiming_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
