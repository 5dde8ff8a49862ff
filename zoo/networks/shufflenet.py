"""ShuffleNet V2: two branches side by side, whose channels are shuffled behind every unit."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import conv_norm_act
from zoo.networks.model import Model

STEM_CHANNELS = 24
UNITS = (4, 8, 4)
"""Units in stage 2, 3 and 4 (Ma et al. 2018, Table 5)."""


class ChannelShuffle(nn.Module):
    """Interleave two halves of the channels (Zhang et al. 2017, https://arxiv.org/abs/1707.01083, Figure 1).

    A module of its own, for behind five axes in a graph nobody could tell where the pixels are.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class ShuffleUnit(nn.Module):
    """Half of the channels beside three convolutions of the others; at stride 2 two branches of all (Ma et al. 2018, Figure 3c and 3d)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        half = out_channels // 2
        self.split = half if stride == 1 else None
        read = half if stride == 1 else in_channels
        spatial = partial(conv_norm_act, kernel_size=3, stride=stride, act=None)
        self.branch1 = nn.Identity() if stride == 1 else nn.Sequential(*spatial(read, read, groups=read), *conv_norm_act(read, half, 1))
        self.branch2 = nn.Sequential(*conv_norm_act(read, half, 1), *spatial(half, half, groups=half), *conv_norm_act(half, half, 1))
        self.shuffle = ChannelShuffle()

    def forward(self, x: Tensor) -> Tensor:
        first, second = (x, x) if self.split is None else (x[:, : self.split], x[:, self.split :])
        return self.shuffle(torch.cat([self.branch1(first), self.branch2(second)], 1))


class ShuffleNetV2(Model):
    """Ma et al. 2018, Table 5."""

    paper = "https://arxiv.org/abs/1807.11164"
    first_layer = "conv1.0"
    classifiers = ("fc",)

    widths: ClassVar[tuple[int, int, int, int]]
    """Channels of stage 2, 3 and 4, and of the convolution behind them."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        *stages, last = self.widths
        self.conv1 = conv_norm_act(in_channels, STEM_CHANNELS, 3, stride=2)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        width = STEM_CHANNELS
        for number, (out, count) in enumerate(zip(stages, UNITS, strict=True), start=2):
            units = [ShuffleUnit(width, out, stride=2), *(ShuffleUnit(out, out, stride=1) for _ in range(count - 1))]
            self.add_module(f"stage{number}", nn.Sequential(*units))
            width = out
        self.conv5 = conv_norm_act(width, last, 1)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(last, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.conv1(x))
        return self.conv5(self.stage4(self.stage3(self.stage2(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        """Leave every layer as PyTorch draws it, as torchvision does."""
