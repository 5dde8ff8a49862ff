"""MetaFormer: four stages of a transformer's blocks whose token mixer is a pool, a separable convolution, or attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.networks.layers import GroupNorm, LayerNorm2d, StochasticDepth
from zoo.networks.model import Model

EPS = 1e-6
"""Of every norm but those of PoolFormer's blocks, in timm and the authors' code."""


class SquaredReLU(nn.Module):
    """The square of ReLU (So et al. 2021, https://arxiv.org/abs/2109.08668)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class StarReLU(SquaredReLU):
    """The square of ReLU with one scale and one shift, which are learnt (Yu et al. 2022, section 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * super().forward(x) + self.bias


class Scale(nn.Module):
    """A factor for each channel, of maps (B, H, W, C) or (B, C, H, W)."""

    def __init__(self, channels: int, start: float, channels_last: bool) -> None:
        super().__init__()
        self.channels_last, self.scale = channels_last, nn.Parameter(torch.full((channels,), start))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale if self.channels_last else self.scale[:, None, None])


class Pooling(nn.Module):
    """The mean of each pixel and its neighbours, less the pixel (Yu et al. 2021, section 3.2)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        del channels
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) - x


def separable(channels: int) -> nn.Sequential:
    """Make an inverted separable convolution of 7x7 without biases."""
    middle = 2 * channels
    steps: OrderedDict[str, nn.Module] = OrderedDict(pwconv1=nn.Conv2d(channels, middle, 1, bias=False), act1=StarReLU())
    steps["dwconv"] = nn.Conv2d(middle, middle, 7, padding=3, groups=middle, bias=False)
    return nn.Sequential(steps | {"pwconv2": nn.Conv2d(middle, channels, 1, bias=False)})


class AllPixels(nn.Module):
    """Attention of each pixel to all, by heads of 32 channels; a module of its own, which gives a map (B, H, W, C) for one of 3 C."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.flatten(1, 2).unflatten(-1, (3, -1, 32)).permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(query, key, value)
        return seen.transpose(1, 2).reshape(x.shape[0], x.shape[1], x.shape[2], -1)


def attention(channels: int) -> nn.Sequential:
    """Make self-attention without biases, of maps (B, H, W, C)."""
    qkv, proj = nn.Linear(channels, 3 * channels, bias=False), nn.Linear(channels, channels, bias=False)
    return nn.Sequential(OrderedDict(qkv=qkv, attend=AllPixels(), proj=proj))


class Block(nn.Module):
    """A token mixer and two dense layers, each behind a norm and beside a shortcut (Yu et al. 2021, section 3.1)."""

    def __init__(self, network: type[MetaFormer], stage: int, stochastic_depth: float) -> None:
        super().__init__()
        channels, mixer, first = network.widths[stage], network.mixers[stage], network.layer_scale is not None
        last = self.channels_last = mixer is attention
        dense = partial(nn.Linear if last else partial(nn.Conv2d, kernel_size=1), bias=first)

        def scale(start: float | None) -> nn.Module:
            return nn.Identity() if start is None else Scale(channels, start, last)

        shortcut = None if first or stage < 2 else 1.0
        self.norm1 = network.norm(channels, last)
        self.token_mixer = mixer(channels)
        self.drop_path1 = StochasticDepth(stochastic_depth)
        self.layer_scale1, self.res_scale1 = scale(network.layer_scale), scale(shortcut)
        self.norm2 = network.norm(channels, last)
        self.mlp = nn.Sequential(OrderedDict(fc1=dense(channels, 4 * channels), act=nn.GELU() if first else StarReLU()))
        self.mlp.add_module("fc2", dense(4 * channels, channels))
        self.drop_path2 = StochasticDepth(stochastic_depth)
        self.layer_scale2, self.res_scale2 = scale(network.layer_scale), scale(shortcut)

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, C, H, W) of (B, C, H, W)."""
        x = x.permute(0, 2, 3, 1) if self.channels_last else x
        x = self.res_scale1(x) + self.layer_scale1(self.drop_path1(self.token_mixer(self.norm1(x))))
        x = self.res_scale2(x) + self.layer_scale2(self.drop_path2(self.mlp(self.norm2(x))))
        return x.permute(0, 3, 1, 2) if self.channels_last else x


class MetaFormer(Model):
    """What the networks of Yu et al. 2021 and 2022 share. Layers have timm's names."""

    paper = "https://arxiv.org/abs/2210.13452"
    min_size = 3
    first_layer = "stem.conv"
    classifiers = ("head.fc",)

    widths: ClassVar[tuple[int, int, int, int]]
    """Channels of each stage."""
    blocks: ClassVar[tuple[int, int, int, int]]
    """Blocks of each stage."""
    stochastic_depth: ClassVar[float]
    """Default probability of dropping the last block's branches: what the authors trained with."""
    dropout: ClassVar[float] = 0.0
    """Default probability before the last layer: what the authors trained with."""
    mixers: ClassVar[tuple[Callable[[int], nn.Module], ...]] = (Pooling,) * 4
    """What makes the token mixer of a number of channels, in each stage."""
    layer_scale: ClassVar[float | None] = None
    """What layer scales begin as, with which go GELU and biases; None is StarReLU, and scaled shortcuts in the last two stages."""

    def __init__(
        self, num_classes: int = 1000, in_channels: int = 3, stochastic_depth: float | None = None, dropout: float | None = None
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last dense layer.
            in_channels: channels of the images.
            stochastic_depth: probability of dropping the last block's branches. It grows linearly from 0 at the first block. None is
                the variant's own.
            dropout: probability before the last dense layer; None is the variant's own.

        Raises:
            ValueError: `stochastic_depth` is outside 0 <= p < 1, or `dropout` outside 0 <= p <= 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        last = type(self).stochastic_depth if stochastic_depth is None else stochastic_depth
        rates = iter(torch.linspace(0, last, sum(self.blocks), device="cpu").tolist())
        width = self.widths[0]
        self.stem = nn.Sequential(OrderedDict(conv=nn.Conv2d(in_channels, width, 7, 4, 2), norm=self.map_norm(width)))
        self.stages = nn.Sequential()
        for stage, (channels, count) in enumerate(zip(self.widths, self.blocks, strict=True)):
            halves = OrderedDict(norm=self.map_norm(width), conv=nn.Conv2d(width, channels, 3, 2, 1)) if stage else None
            steps: OrderedDict[str, nn.Module] = OrderedDict(downsample=nn.Sequential(halves) if halves else nn.Identity())
            steps["blocks"] = nn.Sequential(*(Block(type(self), stage, next(rates)) for _ in range(count)))
            self.stages.append(nn.Sequential(steps))
            width = channels
        self.head = nn.Sequential(OrderedDict(global_pool=nn.AdaptiveAvgPool2d(1), norm=LayerNorm2d(width, EPS), flatten=nn.Flatten(1)))
        for name, layer in self.classifier(width, nn.Dropout(type(self).dropout if dropout is None else dropout)).items():
            self.head.add_module(name, layer)
        self.initialise()

    @staticmethod
    def norm(channels: int, channels_last: bool) -> nn.Module:
        """Make a block's norm."""
        return (nn.LayerNorm if channels_last else LayerNorm2d)(channels, EPS, bias=False)

    @staticmethod
    def map_norm(channels: int) -> nn.Module:
        """Make the norm behind the stem's convolution, and before those that halve the map."""
        return LayerNorm2d(channels, EPS, bias=False)

    def classifier(self, width: int, dropout: nn.Module) -> dict[str, nn.Module]:
        """Make what is behind the last norm."""
        return {"drop": dropout, "fc": nn.Linear(width, self.num_classes)}

    def forward_body(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x)

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class PoolFormer(MetaFormer):
    """Yu et al. 2021, Table 1: pools mix tokens, and a norm is of all channels and pixels of an image."""

    paper = "https://arxiv.org/abs/2111.11418"
    layer_scale = 1e-6

    @staticmethod
    def norm(channels: int, channels_last: bool) -> nn.Module:
        return GroupNorm(1, channels)

    @staticmethod
    def map_norm(channels: int) -> nn.Module:
        return nn.Identity()


class PoolFormerV2(MetaFormer):
    """Yu et al. 2022: PoolFormer with norms of maps, StarReLU and scaled shortcuts, and without biases."""

    @staticmethod
    def norm(channels: int, channels_last: bool) -> nn.Module:
        made = GroupNorm(1, channels, EPS)
        made.register_parameter("bias", None)
        return made


class ConvFormer(MetaFormer):
    """Yu et al. 2022: separable convolutions mix tokens, and two dense layers classify."""

    classifiers = ("head.fc.fc2",)
    mixers = (separable,) * 4

    def classifier(self, width: int, dropout: nn.Module) -> dict[str, nn.Module]:
        wide = 4 * width
        steps: OrderedDict[str, nn.Module] = OrderedDict(fc1=nn.Linear(width, wide), act=SquaredReLU(), norm=nn.LayerNorm(wide, EPS))
        return {"fc": nn.Sequential(steps | {"head_drop": dropout, "fc2": nn.Linear(wide, self.num_classes)})}


class CAFormer(ConvFormer):
    """Yu et al. 2022: separable convolutions mix tokens in two stages, and attention of all pixels in the last two."""

    mixers = (separable, separable, attention, attention)
