"""Xception: Inception taken to its extreme, depthwise separable convolutions with shortcuts."""

from __future__ import annotations

import itertools
from functools import partial

from torch import Tensor, nn

from zoo.networks.layers import MaxPoolSame, conv1x1, conv3x3
from zoo.networks.model import Model


class SeparableConv2d(nn.Module):
    """A 3x3 depthwise and a 1x1 convolution with nothing between them (Chollet 2016, section 3)."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = conv3x3(in_channels, in_channels, groups=in_channels)
        self.pointwise = conv1x1(in_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.pointwise(self.conv1(x))


class Block(nn.Module):
    """Separable convolutions of the given `widths`, a ReLU before each and a BatchNorm after, beside a shortcut."""

    def __init__(self, widths: tuple[int, ...], stride: int, padding: str, norm_eps: float, first_relu: bool = True) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            layers += [nn.ReLU(), SeparableConv2d(before, after), nn.BatchNorm2d(after, norm_eps)]
        if stride > 1:
            layers.append(MaxPoolSame(stride) if padding == "same" else nn.MaxPool2d(3, stride, padding=1))
        self.rep = nn.Sequential(*layers[0 if first_relu else 1 :])
        self.has_projection = stride > 1
        if self.has_projection:
            self.skip = conv1x1(widths[0], widths[-1], stride)
            self.skipbn = nn.BatchNorm2d(widths[-1], norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.skipbn(self.skip(x)) if self.has_projection else x
        return self.rep(x) + shortcut


class Xception(Model):
    """Chollet 2016, Figure 5, with the layer names of timm's legacy_xception."""

    paper = "https://arxiv.org/abs/1610.02357"
    input_size = 299
    min_size = 7
    first_layer = "conv1"
    classifiers = ("fc",)

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        padding: str = "symmetric",
        norm_eps: float = 1e-5,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer (section 4.4: 0.5 on ImageNet).
            padding: of the max pools: "symmetric", or "same" as TensorFlow and Keras pad.
            norm_eps: added to the variances (Keras's files: 0.001).

        Raises:
            ValueError: another `padding`.
        """
        super().__init__()
        if padding not in ("symmetric", "same"):
            raise ValueError(f'padding is "symmetric" (PyTorch) or "same" (TensorFlow), got {padding!r}')
        block = partial(Block, padding=padding, norm_eps=norm_eps)
        self.num_classes, self.in_channels = num_classes, in_channels
        self.conv1 = nn.Conv2d(in_channels, 32, 3, stride=2, bias=False)
        self.bn1 = nn.BatchNorm2d(32, norm_eps)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(64, norm_eps)
        self.act2 = nn.ReLU()
        self.block1 = block((64, 128, 128), stride=2, first_relu=False)
        self.block2 = block((128, 256, 256), stride=2)
        self.block3 = block((256, 728, 728), stride=2)
        for number in range(4, 12):
            self.add_module(f"block{number}", block((728, 728, 728, 728), stride=1))
        self.block12 = block((728, 728, 1024), stride=2)
        self.conv3 = SeparableConv2d(1024, 1536)
        self.bn3 = nn.BatchNorm2d(1536, norm_eps)
        self.act3 = nn.ReLU()
        self.conv4 = SeparableConv2d(1536, 2048)
        self.bn4 = nn.BatchNorm2d(2048, norm_eps)
        self.act4 = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(2048, num_classes)
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        for number in range(1, 13):
            x = self.get_submodule(f"block{number}")(x)
        x = self.act3(self.bn3(self.conv3(x)))
        return self.act4(self.bn4(self.conv4(x)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))
