"""EfficientNetV2: EfficientNet whose first stages join the expansion and the depthwise convolution to one full convolution."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import InvertedResidual, SqueezeExcitation, StochasticDepth, conv_norm_act
from zoo.networks.model import Model

Table = tuple[tuple[int, int, int, int], ...]
"""Expansion, stride of the first block, channels, repeats; every kernel is 3x3."""
S: Table = ((1, 1, 24, 2), (4, 2, 48, 4), (4, 2, 64, 4), (4, 2, 128, 6), (6, 1, 160, 9), (6, 2, 256, 15))  # Tan & Le 2021, Table 4
# The others are in no table of the paper, but in its authors' code: https://github.com/google/automl/tree/master/efficientnetv2
M: Table = ((1, 1, 24, 3), (4, 2, 48, 5), (4, 2, 80, 5), (4, 2, 160, 7), (6, 1, 176, 14), (6, 2, 304, 18), (6, 1, 512, 5))
L: Table = ((1, 1, 32, 4), (4, 2, 64, 7), (4, 2, 96, 7), (4, 2, 192, 10), (6, 1, 224, 19), (6, 2, 384, 25), (6, 1, 640, 7))
XL: Table = ((1, 1, 32, 4), (4, 2, 64, 8), (4, 2, 96, 8), (4, 2, 192, 16), (6, 1, 256, 24), (6, 2, 512, 32), (6, 1, 640, 8))
BASE: Table = ((1, 1, 16, 1), (4, 2, 32, 2), (4, 2, 48, 2), (4, 2, 96, 3), (6, 1, 112, 5), (6, 2, 192, 8))
FUSED = 3
"""Stages, from the first, whose blocks are fused and have no gate."""


class FusedInvertedResidual(nn.Module):
    """A 3x3 expansion and a linear 1x1 projection, or one 3x3 convolution where nothing is expanded, beside a shortcut (Figure 2)."""

    def __init__(
        self, layer: partial[nn.Sequential], in_channels: int, expanded: int, out_channels: int, stride: int, stochastic_depth: float
    ) -> None:
        super().__init__()
        if expanded == in_channels:
            self.block = nn.Sequential(layer(in_channels, out_channels, 3, stride))
        else:
            self.block = nn.Sequential(layer(in_channels, expanded, 3, stride), layer(expanded, out_channels, 1, act=None))
        self.stochastic_depth = StochasticDepth(stochastic_depth) if stride == 1 and in_channels == out_channels else None

    def forward(self, x: Tensor) -> Tensor:
        if self.stochastic_depth is None:
            return self.block(x)
        return x + self.stochastic_depth(self.block(x))


class EfficientNetV2(Model):
    """Tan & Le 2021, Table 4; the B variants multiply the channels of a small table by `width` and its repeats by `depth`."""

    paper = "https://arxiv.org/abs/2104.00298"
    first_layer = "features.0.0"
    classifiers = ("classifier.1",)

    table: ClassVar[Table]
    stem: ClassVar[int]
    """Channels of the first convolution, before `width` multiplies them."""
    width: ClassVar[float] = 1.0
    depth: ClassVar[float] = 1.0
    dropout: ClassVar[float]
    """Default probability before the dense layer, as the authors' code sets it."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float | None = None,
        stochastic_depth: float = 0.2,
        padding: str = "symmetric",
        norm_eps: float = 1e-3,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer; None is the variant's own.
            stochastic_depth: probability of dropping the last block's branch; it grows linearly from 0 at the first block.
            padding: "symmetric", or "same" as TensorFlow and Keras pad.
            norm_eps: added to the variances; all published files have 0.001.

        Raises:
            ValueError: another `padding`, or a `stochastic_depth` outside 0 <= p < 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(conv_norm_act, act="silu", padding=padding, norm_eps=norm_eps)
        width = self.scaled(self.stem)
        layers = [layer(in_channels, width, 3, stride=2)]
        repeats = [math.ceil(count * self.depth) for *_, count in self.table]
        done, total = 0, sum(repeats)
        for row, ((expansion, first_stride, channels, _), count) in enumerate(zip(self.table, repeats, strict=True)):
            out = self.scaled(channels)
            stage = nn.Sequential()
            for index in range(count):
                expanded, stride = width * expansion, first_stride if index == 0 else 1
                drop = stochastic_depth * done / total
                if row < FUSED:
                    stage.append(FusedInvertedResidual(layer, width, expanded, out, stride, drop))
                else:
                    gate = SqueezeExcitation(expanded, width // 4, activation=nn.SiLU())
                    stage.append(InvertedResidual(layer, width, expanded, out, 3, stride, gate, drop))
                width, done = out, done + 1
            layers.append(stage)
        head = self.scaled(1280)
        layers.append(layer(width, head, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Dropout(type(self).dropout if dropout is None else dropout),
            nn.Linear(head, num_classes),
        )
        self.initialise()

    @classmethod
    def scaled(cls, channels: int) -> int:
        """Multiply by `width` and round to the nearest multiple of 8, however much is lost: V1's bound of 10 % is no more."""
        return max(8, int(channels * cls.width + 4) // 8 * 8)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            bound = layer.out_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)
