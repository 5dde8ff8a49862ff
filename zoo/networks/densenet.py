"""DenseNet: every layer sees all earlier feature maps of its block."""

from __future__ import annotations

from collections import OrderedDict
from typing import ClassVar

import torch
from torch import Tensor, nn

from zoo.networks.layers import MaxPoolSame, conv1x1, conv2d, conv3x3
from zoo.networks.model import Model


class DenseLayer(nn.Module):
    """Append `growth_rate` channels, made by a 1x1 and a 3x3 convolution, to the input (Huang et al. 2016, DenseNet-B)."""

    def __init__(self, in_channels: int, growth_rate: int, dropout: float, norm_eps: float) -> None:
        super().__init__()
        width = 4 * growth_rate
        self.norm1 = nn.BatchNorm2d(in_channels, norm_eps)
        self.relu1 = nn.ReLU()
        self.conv1 = conv1x1(in_channels, width)
        self.norm2 = nn.BatchNorm2d(width, norm_eps)
        self.relu2 = nn.ReLU()
        self.conv2 = conv3x3(width, growth_rate)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(self.relu1(self.norm1(x)))
        new = self.conv2(self.relu2(self.norm2(new)))
        return torch.cat([x, self.dropout(new)], 1)


def transition(channels: int, norm_eps: float, ceil_mode: bool = False) -> nn.Sequential:
    """Halve the channels and the size (section 3: compression 0.5, DenseNet-C)."""
    layers = [
        ("norm", nn.BatchNorm2d(channels, norm_eps)),
        ("relu", nn.ReLU()),
        ("conv", conv1x1(channels, channels // 2)),
        ("pool", nn.AvgPool2d(2, stride=2, ceil_mode=ceil_mode)),
    ]
    return nn.Sequential(OrderedDict(layers))


class DenseNet(Model):
    """Huang et al. 2016, Table 1: DenseNet-BC for ImageNet."""

    paper = "https://arxiv.org/abs/1608.06993"
    min_size = 29
    first_layer = "features.conv0"
    classifiers = ("classifier",)

    blocks: ClassVar[tuple[int, ...]]
    """Number of layers in each dense block."""
    growth_rate: ClassVar[int] = 32
    """Channels that each layer appends: the paper's k."""
    stem_channels: ClassVar[int] = 64

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.0,
        norm_eps: float = 1e-5,
        padding: str = "symmetric",
        ceil_mode: bool = False,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability after every 3x3 convolution (section 4.2: 0.2 on small data without augmentation).
            norm_eps: added to the variances (Keras's files: 1.001e-5).
            padding: of the first convolution and the pool behind it: "symmetric", as in keras.applications too, or "same" as in
                KerasHub.
            ceil_mode: every pool keeps a partial last window, as in Caffe's networks.

        Raises:
            ValueError: another `padding`.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.features = self.make_stem(in_channels, norm_eps, padding, ceil_mode)
        width = self.stem_channels
        for number, count in enumerate(self.blocks, start=1):
            block = nn.Sequential()
            for index in range(1, count + 1):
                block.add_module(f"denselayer{index}", DenseLayer(width, self.growth_rate, dropout, norm_eps))
                width += self.growth_rate
            self.features.add_module(f"denseblock{number}", block)
            if number < len(self.blocks):
                self.features.add_module(f"transition{number}", transition(width, norm_eps, ceil_mode))
                width //= 2
        last = len(self.blocks) + 1
        self.features.add_module(f"norm{last}", nn.BatchNorm2d(width, norm_eps))
        self.features.add_module(f"relu{last}", nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(width, num_classes)
        self.initialise()

    def make_stem(self, in_channels: int, norm_eps: float, padding: str, ceil_mode: bool) -> nn.Sequential:
        """Make what comes before the first dense block."""
        if padding not in ("symmetric", "same"):
            raise ValueError(f'padding is "symmetric" (PyTorch) or "same" (TensorFlow), got {padding!r}')
        layers = [
            ("conv0", conv2d(in_channels, self.stem_channels, 7, stride=2, padding=padding)),
            ("norm0", nn.BatchNorm2d(self.stem_channels, norm_eps)),
            ("relu0", nn.ReLU()),
            ("pool0", MaxPoolSame(2) if padding == "same" else nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=ceil_mode)),
        ]
        return nn.Sequential(OrderedDict(layers))

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
        elif isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)


class CIFARDenseNet(DenseNet):
    """The networks for 32x32 images of Huang et al. 2016, Table 2: three blocks behind one 3x3 convolution."""

    input_size = 32
    min_size = 4

    def __init__(self, num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, norm_eps: float = 1e-5) -> None:
        """Build the network untrained; arguments as in `DenseNet`."""
        super().__init__(num_classes, in_channels, dropout, norm_eps)

    def make_stem(self, in_channels: int, norm_eps: float, padding: str, ceil_mode: bool) -> nn.Sequential:
        del norm_eps, padding, ceil_mode  # a stem of one convolution at stride 1
        return nn.Sequential(OrderedDict([("conv0", conv3x3(in_channels, self.stem_channels))]))
