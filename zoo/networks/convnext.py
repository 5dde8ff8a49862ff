"""ConvNeXt and its second version: depthwise 7x7 convolutions, and dense layers over each pixel's channels as in a transformer."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import LayerNorm2d, Permute, StochasticDepth
from zoo.networks.model import Model

EPS = 1e-6
"""Of `ResponseNorm`, and of LayerNorms but for one variant's, in torchvision, timm and the authors' code."""


class ResponseNorm(nn.Module):
    """Global response normalisation (Woo et al. 2023, algorithm 1), of maps with the channels last.

    A channel's response is its norm over the image, in units of the mean of all channels'. It multiplies the channel.
    """

    def __init__(self, channels: int) -> None:
        """Build it for `channels`; fresh parameters are zero, with which it returns its input."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise (B, H, W, C)."""
        response = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
        response = response / (response.mean(-1, keepdim=True) + EPS)
        return x + torch.addcmul(self.bias, self.weight, x * response)


class Block(nn.Module):
    """Depthwise 7x7 convolution, then two dense layers over each pixel's channels, beside a shortcut (Liu et al. 2022, Figure 4).

    Version 2 normalises responses between the dense layers, and needs no layer scale then (Woo et al. 2023, Figure 5).
    """

    def __init__(self, channels: int, response_norm: bool, stochastic_depth: float, norm_eps: float) -> None:
        super().__init__()
        hidden = 4 * channels
        steps: list[nn.Module] = [
            nn.Conv2d(channels, channels, 7, padding=3, groups=channels),
            Permute(0, 2, 3, 1),
            nn.LayerNorm(channels, eps=norm_eps),
            nn.Linear(channels, hidden),
            nn.GELU(),
        ]
        if response_norm:
            steps.append(ResponseNorm(hidden))
        self.block = nn.Sequential(*steps, nn.Linear(hidden, channels), Permute(0, 3, 1, 2))
        self.layer_scale = None if response_norm else nn.Parameter(torch.full((channels, 1, 1), 1e-6))
        self.stochastic_depth = StochasticDepth(stochastic_depth)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.block(x)
        if self.layer_scale is not None:
            branch = self.layer_scale * branch
        return x + self.stochastic_depth(branch)


class ConvNeXt(Model):
    """Liu et al. 2022, section 3: a ResNet brought up to date step by step; the widths and numbers of blocks make the variant.

    Layers have torchvision's names.
    """

    paper = "https://arxiv.org/abs/2201.03545"
    min_size = 32
    first_layer = "features.0.0"
    classifiers = ("classifier.2",)

    widths: ClassVar[tuple[int, int, int, int]]
    """Channels of each stage, C in section 3."""
    blocks: ClassVar[tuple[int, int, int, int]]
    """Blocks of each stage, B in section 3."""
    stochastic_depth: ClassVar[float] = 0.0
    """Default probability of dropping the last block's branch: what the authors trained with (Table 5), 0 where they don't say."""
    response_norm: ClassVar[bool] = False
    """Whether blocks normalise their responses, as version 2 does, rather than have a layer scale."""
    stem_width: ClassVar[int | None] = None
    """Channels between two overlapping 3x3 convolutions, which timm's `_ols` have instead of the one that reads patches of 4x4."""
    norm_first: ClassVar[bool] = False
    """Whether the last norm stands before the pool, as in timm's `_hnf`, not behind it."""
    head_width: ClassVar[int | None] = None
    """Width of a hidden dense layer before the classifier's, as networks have that were trained with texts."""
    norm_eps: ClassVar[float] = EPS
    """What LayerNorms add to the variance."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, stochastic_depth: float | None = None) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            stochastic_depth: probability of dropping the last block's branch; it grows linearly from 0 at the first block. None is
                the variant's own.

        Raises:
            ValueError: `stochastic_depth` is outside 0 <= p < 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        last = type(self).stochastic_depth if stochastic_depth is None else stochastic_depth
        done, total = 0, sum(self.blocks)
        width = self.widths[0]
        norm = partial(LayerNorm2d, eps=self.norm_eps)
        stem: list[nn.Module] = [nn.Conv2d(in_channels, width, 4, 4)]
        if self.stem_width is not None:
            stem = [nn.Conv2d(in_channels, self.stem_width, 3, 2, 1), nn.Conv2d(self.stem_width, width, 3, 2, 1)]
        layers: list[nn.Module] = [nn.Sequential(*stem, norm(width))]
        for channels, count in zip(self.widths, self.blocks, strict=True):
            if channels != width:
                layers.append(nn.Sequential(norm(width), nn.Conv2d(width, channels, 2, 2)))
            stage = nn.Sequential()
            for _ in range(count):
                stage.append(Block(channels, self.response_norm, last * done / (total - 1), self.norm_eps))
                done += 1
            layers.append(stage)
            width = channels
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        if self.norm_first:
            self.features.append(norm(width))
        flat: nn.Module = nn.Flatten(1)
        if self.head_width is not None:
            flat = nn.Sequential(flat, nn.Linear(width, self.head_width), nn.GELU())
        last_norm = nn.Identity() if self.norm_first else norm(width)
        self.classifier = nn.Sequential(last_norm, flat, nn.Linear(self.head_width or width, num_classes))
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class ConvNeXtV2(ConvNeXt):
    """Woo et al. 2023: ConvNeXt with global response normalisation, to learn from masked images.

    Layers have the names that torchvision's scheme would give them: `block.5` normalises the responses, `block.6` is the second
    dense layer. Branches are dropped as often as the authors' page on training says, or as of Base where it says nothing.
    """

    paper = "https://arxiv.org/abs/2301.00808"
    response_norm = True
    stochastic_depth = 0.1
