"""NASNet-A: two kinds of cells that a search found, each reading the last two maps."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import AvgPoolSame, MaxPoolSame, MaxPoolZero, conv1x1, conv2d
from zoo.networks.model import Model

T = TypeVar("T")
EPS = 1e-3
"""Of every BatchNorm, as the authors have it."""


class ReLUConvNorm(nn.Module):
    """ReLU, 1x1 convolution and BatchNorm: how a cell brings a map to its width."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.conv = conv1x1(in_channels, out_channels)
        self.bn = nn.BatchNorm2d(out_channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(self.act(x)))


class SeparableConv2d(nn.Module):
    """A depthwise and a 1x1 convolution with nothing between them."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.depthwise_conv2d = conv2d(in_channels, in_channels, kernel_size, stride, groups=in_channels, padding="same")
        self.pointwise_conv2d = conv1x1(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise_conv2d(self.depthwise_conv2d(x))


class Separables(nn.Module):
    """A separable convolution, applied twice with a ReLU before and a BatchNorm behind each (appendix A.4)."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> None:
        super().__init__()
        self.act_1 = nn.ReLU()
        self.separable_1 = SeparableConv2d(in_channels, out_channels, kernel_size, stride)
        self.bn_sep_1 = nn.BatchNorm2d(out_channels, EPS)
        self.act_2 = nn.ReLU()
        self.separable_2 = SeparableConv2d(out_channels, out_channels, kernel_size, 1)
        self.bn_sep_2 = nn.BatchNorm2d(out_channels, EPS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn_sep_1(self.separable_1(self.act_1(x)))
        return self.bn_sep_2(self.separable_2(self.act_2(x)))


def average() -> nn.AvgPool2d:
    """Make the average pool that keeps the size; the zeros around a map don't count."""
    return nn.AvgPool2d(3, 1, 1, count_include_pad=False)


class Cell(nn.Module):
    """What both kinds begin with: the last map at the cell's width, and the map before it at its width and size."""

    def __init__(self, width: int, channels: int, previous: int, adjust: str) -> None:
        """Bring `channels` to `width`, and `previous` channels too: by "project", by "halve" (the size as well), or "keep" them."""
        super().__init__()
        self.conv_1x1 = ReLUConvNorm(channels, width)
        self.adjust = adjust
        if adjust == "project":
            self.conv_prev_1x1 = ReLUConvNorm(previous, width)
        elif adjust == "halve":  # half of the channels from every second pixel, half from the pixels diagonally between them
            halves = [nn.AvgPool2d(1, 2, count_include_pad=False) for _ in range(2)]
            first, second = (conv1x1(previous, width // 2) for _ in range(2))
            self.act = nn.ReLU()
            self.path_1 = nn.Sequential(OrderedDict(avgpool=halves[0], conv=first))
            self.path_2 = nn.Sequential(OrderedDict(pad=nn.ZeroPad2d((-1, 1, -1, 1)), avgpool=halves[1], conv=second))
            self.final_path_bn = nn.BatchNorm2d(width, EPS)

    def adjusted(self, previous: Tensor) -> Tensor:
        """Compute the map before the last, (B, `width`, H, W) as the last one's."""
        if self.adjust == "keep":
            return previous
        if self.adjust == "project":
            return self.conv_prev_1x1(previous)
        previous = self.act(previous)
        return self.final_path_bn(torch.cat([self.path_1(previous), self.path_2(previous)], 1))


class NormalCell(Cell):
    """Zoph et al. 2017, Figure 4 left; six times `width` channels."""

    joined = 6

    def __init__(self, width: int, channels: int, previous: int, adjust: str, padding: str) -> None:
        super().__init__(width, channels, previous, adjust)
        del padding  # of strides alone
        self.comb_iter_0_left = Separables(width, width, 5)
        self.comb_iter_0_right = Separables(width, width, 3)
        self.comb_iter_1_left = Separables(width, width, 5)
        self.comb_iter_1_right = Separables(width, width, 3)
        self.comb_iter_2_left = average()
        self.comb_iter_3_left = average()
        self.comb_iter_3_right = average()
        self.comb_iter_4_left = Separables(width, width, 3)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        h, p = self.conv_1x1(x), self.adjusted(previous)
        zero = self.comb_iter_0_left(h) + self.comb_iter_0_right(p)
        one = self.comb_iter_1_left(p) + self.comb_iter_1_right(p)
        two = self.comb_iter_2_left(h) + p
        three = self.comb_iter_3_left(p) + self.comb_iter_3_right(p)
        four = self.comb_iter_4_left(h) + h
        return torch.cat([p, zero, one, two, three, four], 1)


class ReductionCell(Cell):
    """Zoph et al. 2017, Figure 4 right: half the size, four times `width` channels."""

    joined = 4

    def __init__(self, width: int, channels: int, previous: int, adjust: str, padding: str) -> None:
        super().__init__(width, channels, previous, adjust)
        p = previous if adjust == "keep" else width
        maximum = MaxPoolZero if padding == "zero" else MaxPoolSame
        self.comb_iter_0_left = Separables(width, width, 5, 2)
        self.comb_iter_0_right = Separables(p, width, 7, 2)
        self.comb_iter_1_left = maximum(2)
        self.comb_iter_1_right = Separables(p, width, 7, 2)
        self.comb_iter_2_left = AvgPoolSame(2)
        self.comb_iter_2_right = Separables(p, width, 5, 2)
        self.comb_iter_3_right = average()
        self.comb_iter_4_left = Separables(width, width, 3)
        self.comb_iter_4_right = maximum(2)

    def forward(self, x: Tensor, previous: Tensor) -> Tensor:
        h, p = self.conv_1x1(x), self.adjusted(previous)
        zero = self.comb_iter_0_left(h) + self.comb_iter_0_right(p)
        one = self.comb_iter_1_left(h) + self.comb_iter_1_right(p)
        two = self.comb_iter_2_left(h) + self.comb_iter_2_right(p)
        three = self.comb_iter_3_right(zero) + one
        four = self.comb_iter_4_left(zero) + self.comb_iter_4_right(h)
        return torch.cat([one, two, three, four], 1)


class NASNetA(Model):
    """Zoph et al. 2017, NASNet-A `repeats` @ `penultimate` for ImageNet (Figure 2 right), with timm's names.

    Every convolution and pool of stride 2 is padded as TensorFlow pads.
    """

    penultimate: ClassVar[int]
    """Channels of the last map."""
    repeats: ClassVar[int]
    """Normal cells in each of the three stages."""
    stem_channels: ClassVar[int]
    """Channels of the first convolution."""
    skip_reduction: ClassVar[bool] = False
    """Whether the cell behind a reduction reads, beside it, the map before the one that was reduced."""

    paper = "https://arxiv.org/abs/1707.07012"
    min_size = 3
    first_layer = "conv0.conv"
    classifiers = ("last_linear",)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5, padding: str = "same") -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer.
            padding: of max pools of stride 2: "same" as TensorFlow and timm pad, or "zero", where the zeros around a map take part
                in the maximum, as Keras computes it.

        Raises:
            ValueError: another `padding`.
        """
        super().__init__()
        if padding not in ("same", "zero"):
            raise ValueError(f'padding is "same" (TensorFlow, timm) or "zero" (Keras), got {padding!r}')
        self.num_classes, self.in_channels = num_classes, in_channels
        first = nn.Conv2d(in_channels, self.stem_channels, 3, stride=2, bias=False)
        self.conv0 = nn.Sequential(OrderedDict(conv=first, bn=nn.BatchNorm2d(self.stem_channels, EPS)))
        unit = self.penultimate // 24
        x, previous = (self.stem_channels, 0), (self.stem_channels, 0)  # channels, and how often they were halved
        self.names: list[str] = []
        for name, kind, width in self.cells(unit):
            halved = x[1] + (kind is ReductionCell)
            adjust = "keep" if not self.names else "project" if x[1] == previous[1] else "halve"
            self.add_module(name, kind(width, x[0], previous[0], adjust, padding))
            self.names.append(name)
            x, previous = (kind.joined * width, halved), self.following(name, x, previous)
        self.act = nn.ReLU()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.head_drop = nn.Dropout(dropout)
        self.last_linear = nn.Linear(x[0], num_classes)
        self.initialise()

    @classmethod
    def cells(cls, unit: int) -> list[tuple[str, type[NormalCell] | type[ReductionCell], int]]:
        """List the cells in order: name, kind and width; `unit` is the first stage's width."""
        cells: list[tuple[str, type[NormalCell] | type[ReductionCell], int]] = [
            ("cell_stem_0", ReductionCell, unit // 4),
            ("cell_stem_1", ReductionCell, unit // 2),
        ]
        for stage in range(3):
            if stage:
                cells.append((f"reduction_cell_{stage - 1}", ReductionCell, unit * 2**stage))
            cells += [(f"cell_{stage * cls.repeats + number}", NormalCell, unit * 2**stage) for number in range(cls.repeats)]
        return cells

    def following(self, name: str, x: T, previous: T) -> T:
        """Tell which map the cell behind `name` reads beside its output: what `name` read last, or first."""
        return previous if self.skip_reduction and name.startswith("reduction") else x

    def forward_body(self, x: Tensor) -> Tensor:
        x = previous = self.conv0(x)
        for name in self.names:
            made = self.get_submodule(name)(x, previous)
            x, previous = made, self.following(name, x, previous)
        return self.act(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.last_linear(self.head_drop(self.global_pool(x).flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        del name, layer  # PyTorch's own, as timm leaves them
