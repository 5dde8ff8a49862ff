"""ResNet and its relatives: ResNeXt, Wide ResNet, SENet, ResNet-C/D/S/T, ResNet-RS, ECA-Net, and the three-stage networks for CIFAR."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from zoo.networks.layers import MaxPoolSame, PaddedShortcut, SqueezeExcitation, conv1x1, conv2d, conv3x3
from zoo.networks.model import Model


class AcrossChannels(nn.Conv1d):
    """A convolution along the channels of a map of one pixel."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve (B, C, 1, 1) to the same shape."""
        along = self._conv_forward(input.flatten(2).transpose(1, 2), self.weight, self.bias)
        return along.transpose(1, 2).unsqueeze(3)


class ChannelAttention(nn.Module):
    """Scale each channel by a gate computed from the means of the channels beside it (Wang et al. 2019, section 3.2).

    Source: https://arxiv.org/abs/1910.03151, with the kernel that equation 12 gives for the number of channels.
    """

    def __init__(self, channels: int) -> None:
        """Build a gate for `channels`."""
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        width = max(3, int((math.log2(channels) + 1) / 2) // 2 * 2 + 1)
        self.conv = AcrossChannels(1, 1, width, padding=width // 2, bias=False)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, (B, C, H, W), times the gate."""
        return x * self.gate(self.conv(self.avgpool(x)))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al. 2015, Figure 5 left)."""

    expansion = 1

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        shortcut: nn.Module | None,
        gate: Callable[[int], nn.Module] | None = None,
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
    ) -> None:
        super().__init__()
        self.conv1 = conv2d(in_channels, channels, 3, stride, padding=padding)
        self.bn1 = nn.BatchNorm2d(channels, norm_eps)
        self.conv2 = conv3x3(channels, channels)
        self.bn2 = nn.BatchNorm2d(channels, norm_eps)
        self.se = gate(channels) if gate else nn.Identity()
        self.downsample = shortcut
        self.relu1, self.relu2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.se(self.bn2(self.conv2(x)))
        return self.relu2(x + shortcut)


class RectifiedBlock(BasicBlock):
    """A block whose gate is behind a ReLU of its own, as in the first port of SENet to PyTorch, which timm calls legacy."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.relu3 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.se(self.relu2(self.bn2(self.conv2(x))))
        return self.relu3(x + shortcut)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions beside a shortcut (He et al. 2015, Figure 5 right)."""

    expansion = 4

    def __init__(
        self,
        in_channels: int,
        channels: int,
        stride: int,
        shortcut: nn.Module | None,
        gate: Callable[[int], nn.Module] | None = None,
        groups: int = 1,
        width_per_group: int = 64,
        stride_on: str = "3x3",
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
        reduce_first: int = 1,
        blur: bool = False,
    ) -> None:
        super().__init__()
        width = channels * width_per_group // 64 * groups
        out = channels * self.expansion
        first, second = (stride, 1) if stride_on == "1x1" else (1, stride)
        self.conv1 = conv1x1(in_channels, width // reduce_first, first)
        self.bn1 = nn.BatchNorm2d(width // reduce_first, norm_eps)
        pools = blur and second > 1
        self.conv2 = conv2d(width // reduce_first, width, 3, 1 if pools else second, groups, padding=padding)
        self.bn2 = nn.BatchNorm2d(width, norm_eps)
        self.aa = nn.AvgPool2d(second) if pools else nn.Identity()
        self.conv3 = conv1x1(width, out)
        self.bn3 = nn.BatchNorm2d(out, norm_eps)
        self.se = gate(out) if gate else nn.Identity()
        self.downsample = shortcut
        self.relu1, self.relu2, self.relu3 = nn.ReLU(), nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.aa(self.relu2(self.bn2(self.conv2(x))))
        x = self.se(self.bn3(self.conv3(x)))
        return self.relu3(x + shortcut)


class ResNet(Model):
    """He et al. 2015, Table 1; the relatives are the same tables with other widths, groups, gates, stems and shortcuts.

    Layers are named as in torchvision; what it has not, the convolutions of a stem and the pool of a shortcut, as in timm.
    """

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
    reduction: ClassVar[int] = 16
    """How many times fewer channels than the block a gate of squeeze and excitation has inside."""
    channel_attention: ClassVar[bool] = False
    """Whether blocks have ECA-Net's gate."""
    stem: ClassVar[tuple[int, ...]] = ()
    """Channels of the 3x3 convolutions that replace the 7x7 one (He et al. 2018, ResNet-C); none: the 7x7 one, with 64."""
    stem_pool: ClassVar[Literal["max", "average", "convolution"]] = "max"
    """What halves the stem's map: a convolution in ResNet-RS."""
    average_shortcut: ClassVar[bool] = False
    """Whether an average pool of 2x2 has a shortcut's stride, before its convolution (He et al. 2018, ResNet-D)."""
    shortcut_kernel: ClassVar[int] = 1
    """Side of the convolution in shortcuts with a stride: 3 in SENet-154."""
    reduce_first: ClassVar[int] = 1
    """How many times narrower a bottleneck's first convolution is than its second: 2 in SENet-154."""
    blur: ClassVar[bool] = False
    """Whether an average pool behind the 3x3 convolution has a bottleneck's stride."""

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        cls.first_layer = "conv1.0" if cls.stem else "conv1"

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
        options: dict[str, Any] = {"gate": self._gate(), "norm_eps": norm_eps, "padding": padding}
        if self.block is Bottleneck:
            options |= {"groups": self.groups, "width_per_group": self.width_per_group, "stride_on": stride_on}
            options |= {"reduce_first": self.reduce_first, "blur": self.blur}
        elif stride_on == "1x1":
            raise ValueError(f"{type(self).__name__} has no bottlenecks, so there is no 1x1 convolution for the stride")
        elif (self.groups, self.width_per_group) != (1, 64):
            raise ValueError(f"{type(self).__name__} has no bottlenecks, so there are no groups and no width of a group")
        self.num_classes, self.in_channels = num_classes, in_channels
        norm = partial(nn.BatchNorm2d, eps=norm_eps)
        width = self.stem[-1] if self.stem else 64
        self.conv1 = self._deep_stem(norm, padding) if self.stem else nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.relu = nn.ReLU()
        if self.stem_pool == "convolution":
            self.maxpool = nn.Sequential(conv2d(width, width, 3, 2, padding=padding), norm(width), nn.ReLU())
        elif self.stem_pool == "average":
            self.maxpool = nn.AvgPool2d(2)
        elif padding == "same":
            self.maxpool = MaxPoolSame(2)
        else:
            self.maxpool = nn.MaxPool2d(3, stride=2, padding=0 if ceil_mode else 1, ceil_mode=ceil_mode)
        for stage, (count, channels) in enumerate(zip(self.blocks, (64, 128, 256, 512), strict=True), start=1):
            blocks = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                out = channels * self.block.expansion
                changes = stride != 1 or width != out
                shortcut = self._shortcut(width, out, stride, norm) if changes else None
                blocks.append(self.block(width, channels, stride, shortcut, **options))
                width = out
            self.add_module(f"layer{stage}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def _gate(self) -> Callable[[int], nn.Module] | None:
        if self.channel_attention:
            return ChannelAttention
        return (lambda channels: SqueezeExcitation(channels, channels // self.reduction)) if self.squeeze_excite else None

    def _deep_stem(self, norm: Callable[[int], nn.Module], padding: str) -> nn.Sequential:
        """Make the convolutions of the stem, BatchNorm and ReLU between them; the last one's are the network's `bn1` and `relu`."""
        layers: list[nn.Module] = []
        for index, (before, channels) in enumerate(zip((self.in_channels, *self.stem), self.stem, strict=False)):
            layers += [norm(before), nn.ReLU()] if index else []
            layers.append(conv2d(before, channels, 3, 1 if index else 2, padding=padding))
        return nn.Sequential(*layers)

    def _shortcut(self, in_channels: int, out_channels: int, stride: int, norm: Callable[[int], nn.Module]) -> nn.Sequential:
        """Make a projection; an average pool before it keeps a partial last window, and counts only what is there."""
        if self.average_shortcut:
            pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
            return nn.Sequential(pool, conv1x1(in_channels, out_channels), norm(out_channels))
        kernel = self.shortcut_kernel if stride > 1 else 1
        return nn.Sequential(conv2d(in_channels, out_channels, kernel, stride), norm(out_channels))

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
