"""MobileNetV4: universal inverted bottlenecks, and in the hybrids attention whose heads share one key and one value."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.networks.layers import StochasticDepth, activation, conv2d, divisible
from zoo.networks.model import Model


class Conv(NamedTuple):
    """A row of the tables that is a convolution, BatchNorm and activation."""

    kernel: int
    channels: int
    stride: int = 1


class Fused(NamedTuple):
    """A row that expands by a 3x3 convolution with the stride and projects by a 1x1 one."""

    expansion: int
    channels: int
    stride: int


class UIB(NamedTuple):
    """A row that is a universal inverted bottleneck (Figure 4): a depthwise kernel of 0 is left out."""

    start: int
    middle: int
    expansion: int
    channels: int
    stride: int = 1


class MQA(NamedTuple):
    """A row that is mobile multi-query attention (section 3.2), whose keys and values may be of a map with a stride."""

    heads: int
    width: int
    stride: int = 1


Row = Conv | Fused | UIB | MQA
Table = tuple[tuple[Row, ...], ...]
"""Rows by stage; all but the last halve the map first, and the last is one 1x1 convolution."""


def unit(
    in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1, act: str | None = "relu", norm: str = "bn"
) -> nn.Sequential:
    """Make convolution, BatchNorm and activation with timm's names."""
    steps: OrderedDict[str, nn.Module] = OrderedDict(conv=conv2d(in_channels, out_channels, kernel, stride, groups))
    steps[norm] = nn.BatchNorm2d(out_channels)
    if act is not None:
        steps["act"] = activation(act)
    return nn.Sequential(steps)


class LayerScale2d(nn.Module):
    """A factor for each channel of a branch (Touvron et al. 2021, https://arxiv.org/abs/2103.17239)."""

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma[:, None, None]


class Residual(nn.Module):
    """What the blocks share: a shortcut beside their layers, where the shape stays."""

    def shortcut(self, in_channels: int, out_channels: int, stride: int, scaled: bool, stochastic_depth: float) -> None:
        """Say what joins the branch: whether it is `scaled` for each channel first, and how often it is dropped."""
        self.layer_scale = LayerScale2d(out_channels, 1e-5) if scaled else nn.Identity()
        self.drop_path = StochasticDepth(stochastic_depth) if stride == 1 and in_channels == out_channels else None

    def branch(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.layer_scale(self.branch(x))
        return scaled if self.drop_path is None else x + self.drop_path(scaled)


class FusedInvertedBottleneck(Residual):
    """A 3x3 expansion and a linear 1x1 projection."""

    def __init__(self, row: Fused, in_channels: int, out_channels: int, act: str, stochastic_depth: float) -> None:
        super().__init__()
        expanded = divisible(in_channels * row.expansion)
        self.conv_exp = conv2d(in_channels, expanded, 3, row.stride)
        self.bn1, self.act1 = nn.BatchNorm2d(expanded), activation(act)
        self.conv_pwl = conv2d(expanded, out_channels, 1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut(in_channels, out_channels, row.stride, False, stochastic_depth)

    def branch(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv_pwl(self.act1(self.bn1(self.conv_exp(x)))))


class UniversalInvertedBottleneck(Residual):
    """A linear depthwise convolution, expansion, a depthwise convolution and linear projection; each depthwise one may be missing.

    Without both it is a feed-forward network, with the first a ConvNeXt block, with the second an inverted residual.
    """

    def __init__(self, row: UIB, in_channels: int, out_channels: int, act: str, scaled: bool, stochastic_depth: float) -> None:
        super().__init__()
        expanded = divisible(in_channels * row.expansion)
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        if row.start:
            steps["dw_start"] = unit(in_channels, in_channels, row.start, 1 if row.middle else row.stride, in_channels, None)
        steps["pw_exp"] = unit(in_channels, expanded, 1, act=act)
        if row.middle:
            steps["dw_mid"] = unit(expanded, expanded, row.middle, row.stride, expanded, act)
        steps["pw_proj"] = unit(expanded, out_channels, 1, act=None)
        for name, step in steps.items():
            self.add_module(name, step)
        self.steps = tuple(steps)
        self.shortcut(in_channels, out_channels, row.stride, scaled, stochastic_depth)

    def branch(self, x: Tensor) -> Tensor:
        for name in self.steps:
            x = getattr(self, name)(x)
        return x


class SharedKeys(nn.Module):
    """Let every head of every pixel read one row of keys and values; a module of its own, which gives a map for a map."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Make a map as large as the queries (B, heads * `width`, H, W), of keys and values (B, `width`, L)."""
        heads = query.unflatten(1, (-1, self.width)).flatten(3).transpose(2, 3)
        # The keys are the same for all heads, so that these are more queries of one head: nothing is repeated
        seen = F.scaled_dot_product_attention(heads.flatten(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        return seen.view_as(heads).transpose(2, 3).reshape(query.shape)


class MultiQueryAttention(nn.Module):
    """Attention of `heads` queries a pixel to one key and one value a pixel, or a pixel of a map of half the size."""

    def __init__(self, row: MQA, channels: int) -> None:
        super().__init__()
        self.query = nn.Sequential(OrderedDict(proj=conv2d(channels, row.heads * row.width, 1)))
        self.key, self.value = (self.projection(channels, row) for _ in range(2))
        self.attend = SharedKeys(row.width)
        self.output = nn.Sequential(OrderedDict(proj=conv2d(row.heads * row.width, channels, 1)))

    @staticmethod
    def projection(channels: int, row: MQA) -> nn.Sequential:
        """Make what computes keys, or values, of a map."""
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        if row.stride > 1:
            steps["down_conv"] = conv2d(channels, channels, 3, row.stride, channels)
            steps["norm"] = nn.BatchNorm2d(channels)
        steps["proj"] = conv2d(channels, row.width, 1)
        return nn.Sequential(steps)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.attend(self.query(x), self.key(x).flatten(2), self.value(x).flatten(2)))


class MobileAttention(Residual):
    """BatchNorm and multi-query attention, beside a shortcut."""

    def __init__(self, row: MQA, channels: int, scaled: bool, stochastic_depth: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.attn = MultiQueryAttention(row, channels)
        self.shortcut(channels, channels, 1, scaled, stochastic_depth)

    def branch(self, x: Tensor) -> Tensor:
        return self.attn(self.norm(x))


class MobileNetV4(Model):
    """Qin et al. 2024, the appendix's tables; `width` multiplies all channels but the first and the last convolution's, as timm does."""

    paper = "https://arxiv.org/abs/2404.10518"
    first_layer = "conv_stem"
    classifiers = ("classifier",)

    table: ClassVar[Table]
    stem: ClassVar[int]
    """Channels of the first convolution, which no width below 1 narrows."""
    width: ClassVar[float] = 1.0
    activation: ClassVar[str] = "relu"
    layer_scale: ClassVar[bool] = False
    """Whether the branches of bottlenecks and attention are scaled, as in timm's hybrids."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.0, stochastic_depth: float = 0.0) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer.
            stochastic_depth: probability of dropping a branch, at the end of the network; it grows linearly from 0 at the first block.

        Raises:
            ValueError: a `stochastic_depth` outside 0 <= p < 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        channels = self.stem
        self.conv_stem = conv2d(in_channels, channels, 3, stride=2)
        self.bn1, self.act1 = nn.BatchNorm2d(channels), activation(self.activation)
        self.blocks = nn.Sequential()
        done, total = 0, sum(map(len, self.table))
        for rows in self.table:
            stage = nn.Sequential()
            for row in rows:
                out = channels if isinstance(row, MQA) else divisible(row.channels * self.width)
                stage.append(self.block(row, channels, out, stochastic_depth * done / total))
                channels, done = out, done + 1
            self.blocks.append(stage)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_head = conv2d(channels, 1280, 1)
        self.norm_head, self.act2 = nn.BatchNorm2d(1280), activation(self.activation)
        self.flatten = nn.Flatten()
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(1280, num_classes)
        self.initialise()

    @classmethod
    def block(cls, row: Row, in_channels: int, out_channels: int, stochastic_depth: float) -> nn.Module:
        """Build what a row of the table says."""
        if isinstance(row, Conv):
            return unit(in_channels, out_channels, row.kernel, row.stride, act=cls.activation, norm="bn1")
        if isinstance(row, Fused):
            return FusedInvertedBottleneck(row, in_channels, out_channels, cls.activation, stochastic_depth)
        if isinstance(row, UIB):
            return UniversalInvertedBottleneck(row, in_channels, out_channels, cls.activation, cls.layer_scale, stochastic_depth)
        return MobileAttention(row, in_channels, cls.layer_scale, stochastic_depth)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.blocks(self.act1(self.bn1(self.conv_stem(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        x = self.act2(self.norm_head(self.conv_head(self.global_pool(x))))
        return self.classifier(self.dropout(self.flatten(x)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d) and ".attn." in name:
            nn.init.xavier_uniform_(layer.weight)
        elif isinstance(layer, nn.Conv2d):  # a channel of a group fans out into that group alone
            fan_out = layer.weight[0, 0].numel() * layer.out_channels // layer.groups
            nn.init.normal_(layer.weight, 0, (2 / fan_out) ** 0.5)
        elif isinstance(layer, nn.Linear):
            bound = layer.out_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)


LAST = (Conv(1, 960),)
SMALL: Table = (  # Qin et al. 2024, the appendix's tables, with expansions where these have widths
    (Conv(3, 32, 2), Conv(1, 32)),
    (Conv(3, 96, 2), Conv(1, 64)),
    (UIB(5, 5, 3, 96, 2), *4 * (UIB(0, 3, 2, 96),), UIB(3, 0, 4, 96)),
    (UIB(3, 3, 6, 128, 2), UIB(5, 5, 4, 128), UIB(0, 5, 4, 128), UIB(0, 5, 3, 128), *2 * (UIB(0, 3, 4, 128),)),
    LAST,
)
MEDIUM: Table = (
    (Fused(4, 48, 2),),
    (UIB(3, 5, 4, 80, 2), UIB(3, 3, 2, 80)),
    (
        *(UIB(3, 5, 6, 160, 2), UIB(3, 3, 4, 160), UIB(3, 3, 4, 160), UIB(3, 5, 4, 160), UIB(3, 3, 4, 160)),
        *(UIB(3, 0, 4, 160), UIB(0, 0, 2, 160), UIB(3, 0, 4, 160)),
    ),
    (
        *(UIB(5, 5, 6, 256, 2), UIB(5, 5, 4, 256), UIB(3, 5, 4, 256), UIB(3, 5, 4, 256), UIB(0, 0, 4, 256), UIB(3, 0, 4, 256)),
        *(UIB(3, 5, 2, 256), UIB(5, 5, 4, 256), UIB(0, 0, 4, 256), UIB(0, 0, 4, 256), UIB(5, 0, 2, 256)),
    ),
    LAST,
)
LARGE: Table = (
    (Fused(4, 48, 2),),
    (UIB(3, 5, 4, 96, 2), UIB(3, 3, 4, 96)),
    (UIB(3, 5, 4, 192, 2), *3 * (UIB(3, 3, 4, 192),), UIB(3, 5, 4, 192), *5 * (UIB(5, 3, 4, 192),), UIB(3, 0, 4, 192)),
    (
        *(UIB(5, 5, 4, 512, 2), *3 * (UIB(5, 5, 4, 512),), UIB(5, 0, 4, 512), UIB(5, 3, 4, 512), *2 * (UIB(5, 0, 4, 512),)),
        *(UIB(5, 3, 4, 512), UIB(5, 5, 4, 512), *3 * (UIB(5, 0, 4, 512),)),
    ),
    LAST,
)
HYBRID_MEDIUM: Table = (
    (Fused(4, 48, 2),),
    (UIB(3, 5, 4, 80, 2), UIB(3, 3, 2, 80)),
    (
        *(UIB(3, 5, 6, 160, 2), UIB(0, 0, 2, 160), UIB(3, 3, 4, 160), UIB(3, 5, 4, 160), MQA(4, 64, 2), UIB(3, 3, 4, 160)),
        *(MQA(4, 64, 2), UIB(3, 0, 4, 160), MQA(4, 64, 2), UIB(3, 3, 4, 160), MQA(4, 64, 2), UIB(3, 0, 4, 160)),
    ),
    (
        *(UIB(5, 5, 6, 256, 2), UIB(5, 5, 4, 256), UIB(3, 5, 4, 256), UIB(3, 5, 4, 256), UIB(0, 0, 2, 256), UIB(3, 5, 2, 256)),
        *(UIB(0, 0, 2, 256), UIB(0, 0, 4, 256), MQA(4, 64), UIB(3, 0, 4, 256), MQA(4, 64), UIB(5, 5, 4, 256)),
        *(MQA(4, 64), UIB(5, 0, 4, 256), MQA(4, 64), UIB(5, 0, 4, 256)),
    ),
    LAST,
)
HYBRID_LARGE: Table = (
    *LARGE[:2],
    (
        *(UIB(3, 5, 4, 192, 2), *3 * (UIB(3, 3, 4, 192),), UIB(3, 5, 4, 192), UIB(5, 3, 4, 192), UIB(5, 3, 4, 192)),
        *(*3 * (MQA(8, 48, 2), UIB(5, 3, 4, 192)), MQA(8, 48, 2), UIB(3, 0, 4, 192)),
    ),
    (*LARGE[3][:10], *4 * (MQA(8, 64), UIB(5, 0, 4, 512))),
    LAST,
)
