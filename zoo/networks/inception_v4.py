"""InceptionV4 and InceptionResNetV2: uniform Inception blocks, without and with shortcuts, in one paper."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.networks.layers import ConvNormReLU
from zoo.networks.model import Model

Step = tuple[Any, ...] | str
"""A pool, "average" or "max", or a convolution: channels, kernel (height and width if they differ), stride 1 and its padding."""
Branches = tuple[tuple[Step, ...], ...]
"""The steps of each branch in order; a map's branches are joined in theirs."""

INCEPTION_A: Branches = (((96, 1),), ((64, 1), (96, 3)), ((64, 1), (96, 3), (96, 3)), ("average", (96, 1)))  # Figure 4
REDUCTION_A: Branches = (((384, 3, 2),), ((192, 1), (224, 3), (256, 3, 2)), ("max",))  # Figure 7 with Table 1
INCEPTION_B: Branches = (  # Figure 5
    ((384, 1),),
    ((192, 1), (224, (1, 7)), (256, (7, 1))),
    ((192, 1), (192, (7, 1)), (224, (1, 7)), (224, (7, 1)), (256, (1, 7))),
    ("average", (128, 1)),
)
REDUCTION_B: Branches = (  # Figure 8
    ((192, 1), (192, 3, 2)),
    ((256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2)),
    ("max",),
)
STEM_4A: Branches = (  # Figure 3
    ((64, 1), (96, 3, 1, 0)),
    ((64, 1), (64, (1, 7)), (64, (7, 1)), (96, 3, 1, 0)),
)
RESNET_5B: Branches = (((96, 1),), ((48, 1), (64, 5)), ((64, 1), (96, 3), (96, 3)), ("average", (64, 1)))  # V3's Figure 5, wider
RESNET_A: Branches = (((32, 1),), ((32, 1), (32, 3)), ((32, 1), (48, 3), (64, 3)))  # Figure 16
RESNET_6A: Branches = (((384, 3, 2),), ((256, 1), (256, 3), (384, 3, 2)), ("max",))  # Figure 7 with Table 1
RESNET_B: Branches = (((192, 1),), ((128, 1), (160, (1, 7)), (192, (7, 1))))  # Figure 17
RESNET_7A: Branches = (((256, 1), (384, 3, 2)), ((256, 1), (288, 3, 2)), ((256, 1), (288, 3), (320, 3, 2)), ("max",))  # Figure 18
RESNET_C: Branches = (((192, 1),), ((192, 1), (224, (1, 3)), (256, (3, 1))))  # Figure 19


def convolution(
    in_channels: int, channels: int, kernel: int | tuple[int, int], stride: int = 1, padding: int | None = None
) -> ConvNormReLU:
    """Make one convolution of a table: it keeps the size at stride 1, and pads nothing where it halves the grid."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    keeping = (height // 2, width // 2) if stride == 1 else 0
    return ConvNormReLU(in_channels, channels, (height, width), stride, keeping if padding is None else padding)


def average() -> nn.AvgPool2d:
    """Make the pool of a branch; the zeros around a map don't count."""
    return nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)


class Mixed(nn.Module):
    """Branches side by side with timm's names: branch0, branch1.0, or the given ones."""

    def __init__(self, in_channels: int, branches: Branches | Mapping[str, tuple[Step, ...]]) -> None:
        super().__init__()
        named = branches if isinstance(branches, Mapping) else {f"branch{number}": steps for number, steps in enumerate(branches)}
        self.names = list(named)
        self.out_channels = 0
        for name, steps in named.items():
            width, layers = in_channels, []
            for step in steps:
                if isinstance(step, str):
                    layers.append(average() if step == "average" else nn.MaxPool2d(3, stride=2))
                else:
                    layers.append(convolution(width, *step))
                    width = step[0]
            self.add_module(name, layers[0] if len(layers) == 1 else nn.Sequential(*layers))
            self.out_channels += width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.get_submodule(name)(x) for name in self.names], 1)


class Residual(Mixed):
    """Branches whose joined map, through a linear 1x1 convolution and times `scale`, is added to what they read."""

    def __init__(self, channels: int, branches: Branches, scale: float, relu: bool = True) -> None:
        super().__init__(channels, branches)
        self.scale = scale
        self.conv2d = nn.Conv2d(self.out_channels, channels, 1)
        self.act = nn.ReLU() if relu else nn.Identity()
        self.out_channels = channels

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x + self.scale * self.conv2d(super().forward(x)))


class InceptionC(nn.Module):
    """Figure 6: two of the branches end in a row and a column side by side."""

    out_channels = 1536

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        row, column = (1, 3), (3, 1)
        self.branch0 = convolution(in_channels, 256, 1)
        self.branch1_0 = convolution(in_channels, 384, 1)
        self.branch1_1a = convolution(384, 256, row)
        self.branch1_1b = convolution(384, 256, column)
        self.branch2_0 = convolution(in_channels, 384, 1)
        self.branch2_1 = convolution(384, 448, column)
        self.branch2_2 = convolution(448, 512, row)
        self.branch2_3a = convolution(512, 256, row)
        self.branch2_3b = convolution(512, 256, column)
        self.branch3 = nn.Sequential(average(), convolution(in_channels, 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        short = self.branch1_0(x)
        long = self.branch2_2(self.branch2_1(self.branch2_0(x)))
        forks = [self.branch1_1a(short), self.branch1_1b(short), self.branch2_3a(long), self.branch2_3b(long)]
        return torch.cat([self.branch0(x), *forks, self.branch3(x)], 1)


class InceptionV4(Model):
    """Szegedy et al. 2016, Figure 9 with the stem of Figure 3, and timm's names."""

    paper = "https://arxiv.org/abs/1602.07261"
    input_size = 299
    min_size = 75
    first_layer = "features.0.conv"
    classifiers = ("last_linear",)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.2) -> None:
        """Build the network untrained; `dropout` is the probability before the dense layer (Figure 9 keeps 0.8)."""
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        blocks: list[nn.Module] = [
            ConvNormReLU(in_channels, 32, 3, stride=2),
            ConvNormReLU(32, 32, 3),
            ConvNormReLU(32, 64, 3, padding=1),
            Mixed(64, {"maxpool": ("max",), "conv": ((96, 3, 2),)}),
            Mixed(160, STEM_4A),
            Mixed(192, {"conv": ((192, 3, 2),), "maxpool": ("max",)}),
        ]
        width = 384
        for block in [INCEPTION_A] * 4 + [REDUCTION_A] + [INCEPTION_B] * 7 + [REDUCTION_B] + [None] * 3:
            blocks.append(InceptionC(width) if block is None else Mixed(width, block))
            width = int(blocks[-1].out_channels)  # pyright: ignore[reportArgumentType]
        self.features = nn.Sequential(*blocks)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.head_drop = nn.Dropout(dropout)
        self.last_linear = nn.Linear(width, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.last_linear(self.head_drop(self.global_pool(x).flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        del name, layer  # PyTorch's own, as timm leaves them


class InceptionResNetV2(Model):
    """Szegedy et al. 2016, Figure 15, as the authors released it: V3's stem, scaled residuals, and timm's names.

    The released network is not the paper's in its stem and its widths; Keras and timm both compute the released one.
    """

    paper = "https://arxiv.org/abs/1602.07261"
    input_size = 299
    min_size = 75
    first_layer = "conv2d_1a.conv"
    classifiers = ("classif",)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.2) -> None:
        """Build the network untrained; `dropout` is the probability before the dense layer (Figure 15 keeps 0.8)."""
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv2d_1a = ConvNormReLU(in_channels, 32, 3, stride=2)
        self.conv2d_2a = ConvNormReLU(32, 32, 3)
        self.conv2d_2b = ConvNormReLU(32, 64, 3, padding=1)
        self.maxpool_3a = nn.MaxPool2d(3, stride=2)
        self.conv2d_3b = ConvNormReLU(64, 80, 1)
        self.conv2d_4a = ConvNormReLU(80, 192, 3)
        self.maxpool_5a = nn.MaxPool2d(3, stride=2)
        self.mixed_5b = Mixed(192, RESNET_5B)
        self.repeat = nn.Sequential(*[Residual(320, RESNET_A, scale=0.17) for _ in range(10)])
        self.mixed_6a = Mixed(320, RESNET_6A)
        self.repeat_1 = nn.Sequential(*[Residual(1088, RESNET_B, scale=0.1) for _ in range(20)])
        self.mixed_7a = Mixed(1088, RESNET_7A)
        self.repeat_2 = nn.Sequential(*[Residual(2080, RESNET_C, scale=0.2) for _ in range(9)])
        self.block8 = Residual(2080, RESNET_C, scale=1.0, relu=False)
        self.conv2d_7b = ConvNormReLU(2080, 1536, 1)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.head_drop = nn.Dropout(dropout)
        self.classif = nn.Linear(1536, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.conv2d_2b(self.conv2d_2a(self.conv2d_1a(x)))
        x = self.conv2d_4a(self.conv2d_3b(self.maxpool_3a(x)))
        x = self.repeat(self.mixed_5b(self.maxpool_5a(x)))
        x = self.repeat_1(self.mixed_6a(x))
        x = self.repeat_2(self.mixed_7a(x))
        return self.conv2d_7b(self.block8(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classif(self.head_drop(self.global_pool(x).flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        del name, layer  # PyTorch's own, as timm leaves them
