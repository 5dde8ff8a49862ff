"""Res2Net and Res2NeXt: ResNet's bottlenecks with a hierarchy of small 3x3 convolutions in the place of one."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import conv1x1, conv3x3
from zoo.networks.model import Model


class Bottle2neck(nn.Module):
    """1x1 convolution, 3x3 convolutions of channel splits, and 1x1 convolution, beside a shortcut (Gao et al. 2019, Figure 2b).

    Every split but the last is convolved, after the one before has been added. The first block of a stage adds none, and its
    last split passes through an average pool, which counts the padding.
    """

    expansion = 4

    def __init__(
        self, in_channels: int, channels: int, stride: int, shortcut: nn.Module | None, scale: int, base_width: int, groups: int
    ) -> None:
        super().__init__()
        self.width = channels * base_width // 64 * groups
        self.scale, out = scale, channels * self.expansion
        self.conv1 = conv1x1(in_channels, self.width * scale)
        self.bn1 = nn.BatchNorm2d(self.width * scale)
        self.convs = nn.ModuleList(conv3x3(self.width, self.width, stride, groups) for _ in range(scale - 1))
        self.bns = nn.ModuleList(nn.BatchNorm2d(self.width) for _ in range(scale - 1))
        self.relus = nn.ModuleList(nn.ReLU() for _ in range(scale - 1))
        self.pool = nn.AvgPool2d(3, stride, padding=1) if shortcut is not None else nn.Identity()
        self.conv3 = conv1x1(self.width * scale, out)
        self.bn3 = nn.BatchNorm2d(out)
        self.downsample = shortcut
        self.relu1, self.relu3 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        splits = [x[:, index * self.width : (index + 1) * self.width] for index in range(self.scale)]
        maps: list[Tensor] = []
        for index, (conv, bn, relu) in enumerate(zip(self.convs, self.bns, self.relus, strict=True)):
            adds = maps and self.downsample is None
            maps.append(relu(bn(conv(maps[-1] + splits[index] if adds else splits[index]))))
        maps.append(self.pool(splits[-1]))
        return self.relu3(self.bn3(self.conv3(torch.cat(maps, 1))) + shortcut)


class Res2Net(Model):
    """Gao et al. 2019, Tables 1 and 10, with layers named as in timm; v1b has the stem and the shortcuts of ResNet-D."""

    paper = "https://arxiv.org/abs/1904.01169"
    first_layer = "conv1"
    classifiers = ("fc",)

    blocks: ClassVar[tuple[int, ...]]
    """Number of blocks in each of the four stages."""
    base_width: ClassVar[int]
    """Channels of a split in the first stage, or of a group of a split: the 26 of 26w."""
    scale: ClassVar[int]
    """Number of splits: the 4 of 4s."""
    groups: ClassVar[int] = 1
    v1b: ClassVar[bool] = False
    """Whether three 3x3 convolutions are the stem and an average pool has the stride of shortcuts, as in ResNet-D."""

    def __init_subclass__(cls, **config: object) -> None:
        super().__init_subclass__(**config)
        cls.first_layer = "conv1.0" if cls.v1b else "conv1"

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        """Build the network untrained, for images of `in_channels` channels, with a dense layer of `num_classes`."""
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 7, 2, 3, bias=False) if not self.v1b else self._deep_stem()
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        width = 64
        for stage, (count, channels) in enumerate(zip(self.blocks, (64, 128, 256, 512), strict=True), start=1):
            blocks = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                shortcut = self._shortcut(width, channels * Bottle2neck.expansion, stride) if index == 0 else None
                blocks.append(Bottle2neck(width, channels, stride, shortcut, self.scale, self.base_width, self.groups))
                width = channels * Bottle2neck.expansion
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def _deep_stem(self) -> nn.Sequential:
        halves = [conv3x3(self.in_channels, 32, 2), nn.BatchNorm2d(32), nn.ReLU()]
        return nn.Sequential(*halves, conv3x3(32, 32), nn.BatchNorm2d(32), nn.ReLU(), conv3x3(32, 64))

    def _shortcut(self, in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
        if not self.v1b:
            return nn.Sequential(conv1x1(in_channels, out_channels, stride), nn.BatchNorm2d(out_channels))
        pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
        return nn.Sequential(pool, conv1x1(in_channels, out_channels), nn.BatchNorm2d(out_channels))

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))
