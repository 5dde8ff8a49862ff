"""GhostNet: half of each map is computed, the other half made of it by a cheap depthwise convolution."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import SqueezeExcitation, conv1x1, divisible
from zoo.networks.model import Model

TABLE = (  # Han et al. 2019, Table 1, a row for each resolution and again behind its stride: kernel, expansion, channels, gate, stride
    ((3, 16, 16, False, 1),),
    ((3, 48, 24, False, 2),),
    ((3, 72, 24, False, 1),),
    ((5, 72, 40, True, 2),),
    ((5, 120, 40, True, 1),),
    ((3, 240, 80, False, 2),),
    ((3, 200, 80, False, 1), (3, 184, 80, False, 1), (3, 184, 80, False, 1), (3, 480, 112, True, 1), (3, 672, 112, True, 1)),
    ((5, 672, 160, True, 2),),
    ((5, 960, 160, False, 1), (5, 960, 160, True, 1), (5, 960, 160, False, 1), (5, 960, 160, True, 1)),
)
LAST, HIDDEN = 960, 1280
"""Channels of the last map before its width, and of the hidden layer at every width."""


def depthwise(channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Make a depthwise convolution that keeps the size at stride 1."""
    return nn.Conv2d(channels, channels, kernel_size, stride, kernel_size // 2, groups=channels, bias=False)


class GhostModule(nn.Module):
    """A 1x1 convolution to half of the channels, and a 3x3 depthwise one of these to the others (Figure 2)."""

    def __init__(self, in_channels: int, out_channels: int, relu: bool) -> None:
        super().__init__()
        half = out_channels // 2
        act = nn.ReLU if relu else nn.Identity
        self.primary_conv = nn.Sequential(conv1x1(in_channels, half), nn.BatchNorm2d(half), act())
        self.cheap_operation = nn.Sequential(depthwise(half, 3), nn.BatchNorm2d(half), act())

    def forward(self, x: Tensor) -> Tensor:
        primary = self.primary_conv(x)
        return torch.cat([primary, self.cheap_operation(primary)], 1)


class Bottleneck(nn.Module):
    """Two Ghost modules, between them a stride and a gate where there are any, beside a shortcut (Figure 3)."""

    def __init__(self, in_channels: int, expanded: int, out_channels: int, kernel_size: int, stride: int, gated: bool) -> None:
        super().__init__()
        self.ghost1 = GhostModule(in_channels, expanded, relu=True)
        self.conv_dw = depthwise(expanded, kernel_size, stride) if stride > 1 else nn.Identity()
        self.bn_dw = nn.BatchNorm2d(expanded) if stride > 1 else nn.Identity()
        self.se = SqueezeExcitation(expanded, divisible(expanded / 4, 4), gate=nn.Hardsigmoid()) if gated else nn.Identity()
        self.ghost2 = GhostModule(expanded, out_channels, relu=False)
        self.shortcut = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                *[depthwise(in_channels, kernel_size, stride), nn.BatchNorm2d(in_channels)],
                *[conv1x1(in_channels, out_channels), nn.BatchNorm2d(out_channels)],
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(self.bn_dw(self.conv_dw(self.ghost1(x))))
        return self.ghost2(y) + self.shortcut(x)


class GhostNet(Model):
    """Han et al. 2019, Table 1, with timm's names; the gates' layers are fc1 and fc2."""

    width: ClassVar[float]
    """Factor on all channels but the hidden layer's."""

    paper = "https://arxiv.org/abs/1911.11907"
    first_layer = "conv_stem"
    classifiers = ("classifier",)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.2) -> None:
        """Build the network untrained; `dropout` is the probability before the dense layer."""
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        channels = divisible(16 * self.width, 4)
        self.conv_stem = nn.Conv2d(in_channels, channels, 3, 2, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.act1 = nn.ReLU()
        self.blocks = nn.Sequential()
        for row in TABLE:
            stage = nn.Sequential()
            for kernel_size, expanded, wide, gated, stride in row:
                out_channels = divisible(wide * self.width, 4)
                stage.append(Bottleneck(channels, divisible(expanded * self.width, 4), out_channels, kernel_size, stride, gated))
                channels = out_channels
            self.blocks.append(stage)
        last = divisible(LAST * self.width, 4)
        final: OrderedDict[str, nn.Module] = OrderedDict(conv=conv1x1(channels, last), bn1=nn.BatchNorm2d(last), act1=nn.ReLU())
        self.blocks.append(nn.Sequential(nn.Sequential(final)))
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_head = nn.Conv2d(last, HIDDEN, 1)
        self.act2 = nn.ReLU()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(HIDDEN, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.blocks(self.act1(self.bn1(self.conv_stem(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        x = self.act2(self.conv_head(self.global_pool(x)))
        return self.classifier(self.dropout(x.flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        del name, layer  # PyTorch's own, as timm leaves them
