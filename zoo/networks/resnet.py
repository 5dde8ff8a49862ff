"""ResNet and its relatives: ResNeXt, Wide ResNet, SE-ResNet, and the three-stage networks for CIFAR."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from zoo.networks.layers import MaxPoolSame, PaddedShortcut, SqueezeExcitation, conv1x1, conv2d, conv3x3
from zoo.networks.model import Model


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, Figure 5 left)."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        shortcut: nn.Module | None,
        squeeze_excite: bool = False,
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
    ) -> None:
        super().__init__()
        self.conv1 = conv2d(in_channels, channels, 3, stride, padding=padding)
        self.bn1 = nn.BatchNorm2d(channels, norm_eps)
        self.conv2 = conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels, norm_eps)
        self.se = SqueezeExcitation(channels, channels // 16) if squeeze_excite else nn.Identity()
        self.downsample = shortcut
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.se(self.bn2(self.conv2(x)))
        return self.relu2(x + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut (He et al. 2015, Figure 5 right)."""

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        shortcut: nn.Module | None,
        squeeze_excite: bool = False,
        groups: int = 1,
        width_per_group: int = 64,
        stride_on: str = "3x3",
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
    ) -> None:
        super().__init__()
        width = channels * width_per_group // 64 * groups
        out = channels * self.expansion
        first, second = (stride, 1) if stride_on == "1x1" else (1, stride)
        self.conv1 = conv1x1(in_channels, width, first)
        self.bn1 = nn.BatchNorm2d(width, norm_eps)
        self.conv2 = conv2d(width, width, 3, second, groups, padding=padding)
        self.bn2 = nn.BatchNorm2d(width, norm_eps)
        self.conv3 = conv1x1(width, out)
        self.bn3 = nn.BatchNorm2d(out, norm_eps)
        self.se = SqueezeExcitation(out, out // 16) if squeeze_excite else nn.Identity()
        self.downsample = shortcut
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        x = self.se(self.bn3(self.conv3(x)))
        return self.relu3(x + shortcut)


class ResNet(Model):
    """He et al. 2015, Table 1; ResNeXt, Wide ResNet and SE-ResNet are the same tables with other widths, groups and gates."""

    paper = "https://arxiv.org/abs/1512.03385"
    first_layer = "conv1"
    classifiers = ("fc",)

    block: ClassVar[type[BasicBlock] | type[Bottleneck]]
    blocks: ClassVar[tuple[int, ...]]
    """Number of blocks in each of the four stages."""
    groups: ClassVar[int] = 1
    """Groups of the 3x3 convolutions: ResNeXt's cardinality."""
    width_per_group: ClassVar[int] = 64
    """Channels of a group in the first stage's 3x3 convolutions."""
    squeeze_excite: ClassVar[bool] = False

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        stride_on: Literal["3x3", "1x1"] = "3x3",
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
        ceil_mode: bool = False,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            stride_on: the convolution of a bottleneck that has the stride. "1x1" is the paper's (v1: Caffe's and Keras's
                files need it), "3x3" is what torchvision and timm train (v1.5). Same shapes, other numbers.
            norm_eps: added to the variances (Keras's files: 1.001e-5).
            padding: of the max pool and of 3x3 convolutions with a stride: "symmetric", or "same" as TensorFlow pads; the 7x7
                convolution's is symmetric in both. Flax's example is built so.
            ceil_mode: the max pool has no padding and keeps a partial last window, as in the authors' Caffe networks.

        Raises:
            ValueError: another `stride_on` or `padding`, or "1x1" for a network without bottlenecks.
        """
        super().__init__()
        if stride_on not in ("3x3", "1x1"):
            raise ValueError(f'stride_on is "3x3" (v1.5, torchvision) or "1x1" (v1, Caffe and Keras), got {stride_on!r}')
        if padding not in ("symmetric", "same"):
            raise ValueError(f'padding is "symmetric" (PyTorch) or "same" (TensorFlow), got {padding!r}')
        options = {"squeeze_excite": self.squeeze_excite, "norm_eps": norm_eps, "padding": padding}
        if self.block is Bottleneck:
            options |= {"groups": self.groups, "width_per_group": self.width_per_group, "stride_on": stride_on}
        elif stride_on == "1x1":
            raise ValueError(f"{type(self).__name__} has no bottlenecks, so there is no 1x1 convolution for the stride")
        elif (self.groups, self.width_per_group) != (1, 64):
            raise ValueError(f"{type(self).__name__} has no bottlenecks, so there are no groups and no width of a group")
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv1 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64, norm_eps)
        self.relu = nn.ReLU()
        self.maxpool = (
            MaxPoolSame(2) if padding == "same" else nn.MaxPool2d(3, stride=2, padding=0 if ceil_mode else 1, ceil_mode=ceil_mode)
        )
        width = 64
        for stage, (count, channels) in enumerate(zip(self.blocks, (64, 128, 256, 512), strict=True), start=1):
            blocks = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                out = channels * self.block.expansion
                changes = stride != 1 or width != out
                shortcut = nn.Sequential(conv1x1(width, out, stride), nn.BatchNorm2d(out, norm_eps)) if changes else None
                blocks.append(self.block(width, channels, stride, shortcut, **options))
                width = out
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))


class CIFARResNet(Model):
    """The 6n+2 layer networks for 32x32 images of He et al. 2015, section 4.2."""

    paper = "https://arxiv.org/abs/1512.03385"
    input_size = 32
    first_layer = "conv1"
    classifiers = ("fc",)

    n: ClassVar[int]
    """Blocks in each of the three stages; the depth is 6n + 2."""

    def __init__(self, num_classes: int = 10, in_channels: int = 3, shortcut: Literal["A", "B"] = "A", norm_eps: float = 1e-5) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            shortcut: where channels double: "A" pads with zero channels (the paper's choice on CIFAR), "B" projects by a 1x1
                convolution.
            norm_eps: added to the variances (Lasagne's files: 1e-4).

        Raises:
            ValueError: another `shortcut`.
        """
        super().__init__()
        if shortcut not in ("A", "B"):
            raise ValueError(f'shortcut is "A" (zero padding) or "B" (1x1 projection), got {shortcut!r}')
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv1 = conv3x3(in_channels, 16)
        self.bn1 = nn.BatchNorm2d(16, norm_eps)
        self.relu = nn.ReLU()
        width = 16
        for stage, channels in enumerate((16, 32, 64), start=1):
            blocks = []
            for index in range(self.n):
                joins = index == 0 and channels != width
                stride = 2 if joins else 1
                branch: nn.Module | None = None
                if joins and shortcut == "A":
                    branch = PaddedShortcut(width, channels)
                elif joins:
                    branch = nn.Sequential(conv1x1(width, channels, stride), nn.BatchNorm2d(channels, norm_eps))
                blocks.append(BasicBlock(width, channels, stride, branch, norm_eps=norm_eps))
                width = channels
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        return self.layer3(self.layer2(self.layer1(x)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_normal_(layer.weight)
