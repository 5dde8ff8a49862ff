"""MaxViT: convolution, attention inside windows and attention over a grid of the whole map, in each of its layers."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import SqueezeExcitation, StochasticDepth, conv2d, conv_norm_act, pair_offsets
from zoo.networks.model import Model

EPS, MOMENTUM = 1e-3, 0.01
"""Of every BatchNorm, in the authors' code and in torchvision."""
EXPANSION = 4
"""Of MBConv's middle and of the dense layers (section 4)."""


class MBConv(nn.Module):
    """Norm, expansion, depthwise 3x3 convolution, gate and projection, beside a shortcut that means halve (Tu et al. 2022, section 3.3)."""

    def __init__(self, in_channels: int, channels: int, stride: int, stochastic_depth: float) -> None:
        super().__init__()
        self.proj: nn.Module = nn.Identity()
        if stride != 1:
            self.proj = nn.Sequential(nn.AvgPool2d(3, stride, 1), nn.Conv2d(in_channels, channels, 1))
        middle = EXPANSION * channels
        steps: OrderedDict[str, nn.Module] = OrderedDict(
            pre_norm=nn.BatchNorm2d(in_channels, EPS, MOMENTUM),
            conv_a=conv_norm_act(in_channels, middle, 1, act="gelu", norm_eps=EPS, norm_momentum=MOMENTUM),
            conv_b=conv_norm_act(middle, middle, 3, stride, middle, act="gelu", norm_eps=EPS, norm_momentum=MOMENTUM),
            squeeze_excitation=SqueezeExcitation(middle, channels // 4, nn.SiLU()),
            conv_c=nn.Conv2d(middle, channels, 1),
        )
        self.layers = nn.Sequential(steps)
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x) + self.stochastic_depth(self.layers(x))


class Attention(nn.Module):
    """Self-attention inside groups of `side` x `side` pixels, with a bias for each offset of two pixels.

    Logits are in units of the root of the channels of all heads, as in torchvision, with which its weights were trained. timm, as the
    authors, takes the root of one head's.
    """

    def __init__(self, channels: int, heads: int, side: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        self.to_qkv = nn.Linear(channels, 3 * channels)
        self.merge = nn.Linear(channels, channels)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, heads))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, groups, pixels, C) of (B, groups, pixels, C)."""
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(3, 0, 1, 4, 2, 5).unbind()
        bias = self.relative_position_bias_table[pair_offsets(self.side, x.device)].permute(2, 0, 1)
        logits = q @ (k * x.shape[-1] ** -0.5).transpose(-2, -1) + bias
        return self.merge((logits.softmax(-1) @ v).transpose(2, 3).flatten(3))


class PartitionAttention(nn.Module):
    """Attention and dense layers over groups of a map's pixels: windows of neighbours, or grids of pixels far apart (section 3.2)."""

    def __init__(self, channels: int, head_channels: int, side: int, grid: bool, stochastic_depth: float) -> None:
        super().__init__()
        self.side, self.grid = side, grid
        self.attn_layer = nn.Sequential(nn.LayerNorm(channels), Attention(channels, channels // head_channels, side))
        self.stochastic_depth1 = StochasticDepth(stochastic_depth)
        hidden = EXPANSION * channels
        self.mlp_layer = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels)
        )  # fmt: skip
        self.stochastic_depth2 = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) of (B, C, H, W); H and W are multiples of `side`."""
        _, channels, height, width = x.shape
        side = self.side
        traced = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]  # where shapes are tensors
        if not traced and (height % side or width % side):
            raise ValueError(f"a map of {height}x{width} pixels can't be divided into groups of {side}x{side}")
        rows, columns = height // side, width // side
        if self.grid:  # pixels of a group are `rows` and `columns` apart
            x = x.reshape(-1, channels, side, rows, side, columns).permute(0, 3, 5, 2, 4, 1)
        else:
            x = x.reshape(-1, channels, rows, side, columns, side).permute(0, 2, 4, 3, 5, 1)
        x = x.reshape(-1, rows * columns, side * side, channels)
        x = x + self.stochastic_depth1(self.attn_layer(x))
        x = x + self.stochastic_depth2(self.mlp_layer(x))
        x = x.reshape(-1, rows, columns, side, side, channels)
        x = x.permute(0, 5, 3, 1, 4, 2) if self.grid else x.permute(0, 5, 1, 3, 2, 4)
        return x.reshape(-1, channels, height, width)


class MaxViT(Model):
    """Tu et al. 2022, section 3.3: four stages of layers that each convolve, attend nearby and attend far away.

    Layers have torchvision's names. The sides of images are multiples of 224 pixels: each stage halves a map that windows must divide.
    """

    paper = "https://arxiv.org/abs/2204.01697"
    min_size = size_multiple = 224
    first_layer = "stem.0.0"
    classifiers = ("classifier.5",)

    stem_channels: ClassVar[int]
    """Channels of the stem's two convolutions."""
    widths: ClassVar[tuple[int, int, int, int]]
    """Channels of each stage (Table 1)."""
    depths: ClassVar[tuple[int, int, int, int]]
    """Layers of each stage (Table 1)."""
    stochastic_depth: ClassVar[float]
    """Default probability of dropping the last layer's branches."""
    head_channels: ClassVar[int] = 32
    """Channels of a head of attention."""
    partition: ClassVar[int] = 7
    """Side of a window, and of a grid, in pixels."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, stochastic_depth: float | None = None) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last dense layer, which has no bias.
            in_channels: channels of the images.
            stochastic_depth: probability of dropping the last layer's branches. It grows linearly from 0 at the first layer. None is
                the variant's own.

        Raises:
            ValueError: `stochastic_depth` is outside 0 <= p < 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        last = type(self).stochastic_depth if stochastic_depth is None else stochastic_depth
        width = self.stem_channels
        self.stem = nn.Sequential(
            conv_norm_act(in_channels, width, 3, 2, act="gelu", norm_eps=EPS, norm_momentum=MOMENTUM),
            nn.Sequential(conv2d(width, width, 3, bias=True))
        )  # fmt: skip
        self.blocks = nn.Sequential()
        done, total = 0, sum(self.depths)
        for channels, count in zip(self.widths, self.depths, strict=True):
            layers = nn.Sequential()
            for index in range(count):
                drop = last * done / (total - 1)
                steps: OrderedDict[str, nn.Module] = OrderedDict(
                    MBconv=MBConv(width, channels, 1 if index else 2, drop),
                    window_attention=PartitionAttention(channels, self.head_channels, self.partition, False, drop),
                    grid_attention=PartitionAttention(channels, self.head_channels, self.partition, True, drop),
                )
                layers.append(nn.Sequential(OrderedDict(layers=nn.Sequential(steps))))
                done, width = done + 1, channels
            self.blocks.append(nn.Sequential(OrderedDict(layers=layers)))
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, num_classes, bias=False),
        )  # fmt: skip
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(x)

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, Attention):
            nn.init.trunc_normal_(layer.relative_position_bias_table, std=0.02)
