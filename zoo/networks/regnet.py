"""RegNet X and Y: residual bottlenecks of grouped convolutions, whose widths follow a line that is rounded in two steps."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import SqueezeExcitation, conv_norm_act, divisible
from zoo.networks.model import Model


class Bottleneck(nn.Module):
    """1x1, grouped 3x3 and 1x1 convolutions of one width beside a shortcut, in Y with a gate before the last (Figure 4, section 4)."""

    def __init__(self, in_channels: int, channels: int, stride: int, groups: int, squeeze_excite: bool) -> None:
        super().__init__()
        self.proj = None
        if stride != 1 or in_channels != channels:
            self.proj = conv_norm_act(in_channels, channels, 1, stride, act=None)
        steps: OrderedDict[str, nn.Module] = OrderedDict(
            a=conv_norm_act(in_channels, channels, 1), b=conv_norm_act(channels, channels, 3, stride, groups)
        )
        if squeeze_excite:  # a quarter of what enters the block, not of what the gate sees
            steps["se"] = SqueezeExcitation(channels, round(in_channels / 4))
        steps["c"] = conv_norm_act(channels, channels, 1, act=None)
        self.f = nn.Sequential(steps)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.proj is None else self.proj(x)
        return self.activation(shortcut + self.f(x))


class RegNet(Model):
    """Radosavovic et al. 2020, section 3.3: five numbers make a network, and `squeeze_excite` makes an X a Y."""

    paper = "https://arxiv.org/abs/2003.13678"
    first_layer = "stem.0"
    classifiers = ("fc",)

    depth: ClassVar[int]
    """Number of blocks, d in Figures 15 and 16, where it is the sum of the stages'."""
    w0: ClassVar[int]
    """Width of the first block before it is rounded."""
    wa: ClassVar[float]
    """By how much the line of widths rises from block to block."""
    wm: ClassVar[float]
    """Factor between the widths of two stages, to whose powers the line is rounded."""
    group_width: ClassVar[int]
    """Channels of a group of the 3x3 convolutions, g."""
    squeeze_excite: ClassVar[bool] = False
    nearest: ClassVar[bool] = False
    """Whether widths are the nearest multiple of a group's, as the authors have them; torchvision takes at most 10 % away from one."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        width = 32
        self.stem = conv_norm_act(in_channels, width, 3, stride=2)
        self.trunk_output = nn.Sequential()
        for stage, (channels, count) in enumerate(self.stages(), start=1):
            blocks = nn.Sequential()
            groups = channels // min(self.group_width, channels)
            for index in range(count):
                stride = 2 if index == 0 else 1
                blocks.add_module(f"block{stage}-{index}", Bottleneck(width, channels, stride, groups, self.squeeze_excite))
                width = channels
            self.trunk_output.add_module(f"block{stage}", blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    @classmethod
    def stages(cls) -> list[tuple[int, int]]:
        """Return width and number of blocks of each stage, by equations 2 to 4 in Python's numbers: the meta device has none."""
        widths: list[int] = []
        for block in range(cls.depth):
            power = round(math.log((cls.w0 + cls.wa * block) / cls.w0, cls.wm))
            widths.append(8 * round(cls.w0 * cls.wm**power / 8))
        stages: list[tuple[int, int]] = []
        for width, same in itertools.groupby(widths):
            group = min(cls.group_width, width)
            stages.append((max(1, round(width / group)) * group if cls.nearest else divisible(width, group), len(list(same))))
        return stages

    def forward_body(self, x: Tensor) -> Tensor:
        return self.trunk_output(self.stem(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d):  # and the gates' biases stay as PyTorch draws them, as in the authors' code
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.zeros_(layer.bias)
