"""ResNetV2, whose blocks normalise before they convolve: BiT's with groups and standardised weights, and Keras's with BatchNorm."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import GroupNorm, StandardisedConv2d, ZeroPaddedMaxPool2d, conv1x1, conv3x3
from zoo.networks.model import Model


class Shortcut(nn.Module):
    """The 1x1 convolution of what the first normalisation gives, named as in timm."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class BiTBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, each behind GroupNorm and ReLU (He et al. 2016, Figure 1b)."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, projects: bool) -> None:
        super().__init__()
        width = out_channels // 4
        self.downsample = Shortcut(StandardisedConv2d(in_channels, out_channels, 1, stride, bias=False)) if projects else None
        self.norm1 = GroupNorm(32, in_channels)
        self.conv1 = StandardisedConv2d(in_channels, width, 1, bias=False)
        self.norm2 = GroupNorm(32, width)
        self.conv2 = StandardisedConv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm3 = GroupNorm(32, width)
        self.conv3 = StandardisedConv2d(width, out_channels, 1, bias=False)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        before = self.relu1(self.norm1(x))
        shortcut = x if self.downsample is None else self.downsample(before)
        x = self.conv2(self.relu2(self.norm2(self.conv1(before))))
        return self.conv3(self.relu3(self.norm3(x))) + shortcut


class Stage(nn.Module):
    """Blocks in a row, named as in timm."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class BiTStem(nn.Module):
    """A 7x7 convolution and a max pool, named as in timm."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.conv = StandardisedConv2d(in_channels, channels, 7, 2, 3, bias=False)
        self.pool = ZeroPaddedMaxPool2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(self.conv(x))


class BiTHead(nn.Module):
    """Means over places, and the classifier, which is a 1x1 convolution."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x)).flatten(1)


class BiT(Model):
    """Kolesnikov et al. 2019, section 3.3, with layers named as in timm: ResNetV2 times a width, GroupNorm, standardised weights."""

    paper = "https://arxiv.org/abs/1912.11370"
    first_layer = "stem.conv"
    classifiers = ("head.fc",)

    blocks: ClassVar[tuple[int, ...]]
    """Number of blocks in each of the four stages."""
    width: ClassVar[int] = 1
    """How many times more channels than ResNet."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        """Build the network untrained, for images of `in_channels` channels, with `num_classes` logits."""
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        width = 64 * self.width
        self.stem = BiTStem(in_channels, width)
        stages: list[nn.Module] = []
        for index, count in enumerate(self.blocks):
            out, stride = 256 * 2**index * self.width, 1 if index == 0 else 2
            first = BiTBottleneck(width, out, stride, projects=True)
            stages.append(Stage(first, *(BiTBottleneck(out, out, 1, projects=False) for _ in range(count - 1))))
            width = out
        self.stages = nn.Sequential(*stages)
        self.norm = GroupNorm(32, width)
        self.relu = nn.ReLU()
        self.head = BiTHead(width, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.stages(self.stem(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(x)

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if name == "head.fc" and isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.01)


class PreActivationBottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions, the first behind BatchNorm and ReLU (He et al. 2016, Figure 1b), as Keras has them.

    A shortcut with a stride and without a projection takes every second pixel. The last convolution has a bias.
    """

    def __init__(self, in_channels: int, channels: int, stride: int, projects: bool, norm_eps: float) -> None:
        super().__init__()
        out = 4 * channels
        if projects:
            self.downsample: nn.Module | None = nn.Conv2d(in_channels, out, 1, stride)
        else:
            self.downsample = nn.MaxPool2d(1, stride) if stride > 1 else None
        self.projects = projects
        self.bn1 = nn.BatchNorm2d(in_channels, norm_eps)
        self.conv1 = conv1x1(in_channels, channels)
        self.bn2 = nn.BatchNorm2d(channels, norm_eps)
        self.conv2 = conv3x3(channels, channels, stride)
        self.bn3 = nn.BatchNorm2d(channels, norm_eps)
        self.conv3 = nn.Conv2d(channels, out, 1)
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        before = self.relu1(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(before if self.projects else x)
        x = self.conv2(self.relu2(self.bn2(self.conv1(before))))
        return self.conv3(self.relu3(self.bn3(x))) + shortcut


class ResNetV2(Model):
    """He et al. 2016, Figure 1b, as keras.applications builds it: the last block of a stage has the stride, not the next one's first."""

    paper = "https://arxiv.org/abs/1603.05027"
    first_layer = "conv1"
    classifiers = ("fc",)

    blocks: ClassVar[tuple[int, ...]]
    """Number of blocks in each of the four stages."""

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, norm_eps: float = 1.001e-5) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            norm_eps: added to the variances.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3)
        self.maxpool = ZeroPaddedMaxPool2d()
        width = 64
        for stage, (count, channels) in enumerate(zip(self.blocks, (64, 128, 256, 512), strict=True), start=1):
            blocks = []
            for index in range(count):
                stride = 2 if stage < 4 and index == count - 1 else 1
                blocks.append(PreActivationBottleneck(width, channels, stride, index == 0, norm_eps))
                width = 4 * channels
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.bn = nn.BatchNorm2d(width, norm_eps)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.conv1(x))
        return self.relu(self.bn(self.layer4(self.layer3(self.layer2(self.layer1(x))))))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))
