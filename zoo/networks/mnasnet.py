"""MNASNet: inverted residuals with 3x3 and 5x5 convolutions, chosen by search for their time on a phone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import conv_norm_act, divisible
from zoo.networks.model import Model

B1 = (  # Tan et al. 2018, Table 2, as its authors' code builds it: expansion, kernel, stride of the first, channels, repeats
    (3, 3, 2, 24, 3),
    (3, 5, 2, 40, 3),
    (6, 5, 2, 80, 3),
    (6, 3, 1, 96, 2),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution and linear 1x1 projection in one row of layers, beside a shortcut (Figure 7 b)."""

    def __init__(
        self, layer: Callable[..., nn.Sequential], in_channels: int, out_channels: int, kernel_size: int, stride: int, expansion: int
    ) -> None:
        super().__init__()
        width = in_channels * expansion
        self.layers = nn.Sequential(
            *layer(in_channels, width, 1),
            *layer(width, width, kernel_size, stride, groups=width),
            *layer(width, out_channels, 1, act=None),
        )
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_shortcut else self.layers(x)


class MNASNet(Model):
    """Tan et al. 2018, the B1 of Table 2, which has no squeeze-and-excitation; `width` is section 6.2's depth multiplier."""

    paper = "https://arxiv.org/abs/1807.11626"
    first_layer = "layers.0"
    classifiers = ("classifier.1",)

    width: ClassVar[float] = 1.0
    _version = 2
    """Of the state dict: torchvision gives a narrow network of version 1 the stem of a wide one."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.2) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(conv_norm_act, norm_momentum=1 - 0.9997)
        stem, width = divisible(32 * self.width), divisible(16 * self.width)
        layers: list[nn.Module] = [
            *layer(in_channels, stem, 3, stride=2),
            *layer(stem, stem, 3, groups=stem),
            *layer(stem, width, 1, act=None),
        ]
        for expansion, kernel, first_stride, channels, repeats in B1:
            out = divisible(channels * self.width)
            stage = nn.Sequential()
            for index in range(repeats):
                stage.append(InvertedResidual(layer, width, out, kernel, first_stride if index == 0 else 1, expansion))
                width = out
            layers.append(stage)
        self.layers = nn.Sequential(*layers, *layer(width, 1280, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(1280, num_classes))
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.layers(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, mode="fan_out", nonlinearity="sigmoid")
            nn.init.zeros_(layer.bias)
