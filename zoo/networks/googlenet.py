"""GoogLeNet: Inception V1 with BatchNorm."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from zoo.networks.layers import ConvNormReLU, imagenet_to_inception
from zoo.networks.model import Model

TABLE = {  # Szegedy et al. 2014, Table 1: #1x1, #3x3 reduce, #3x3, #5x5 reduce, #5x5, pool proj
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


class GoogLeNetOutputs(NamedTuple):
    """What a GoogLeNet with auxiliary heads returns in train mode: three times logits (B, num_classes)."""

    logits: Tensor
    aux_logits2: Tensor
    aux_logits1: Tensor


class Inception(nn.Module):
    """Four branches side by side (Szegedy et al. 2014, Figure 2b)."""

    def __init__(self, in_channels: int, one: int, reduce3: int, three: int, reduce5: int, five: int, pool: int) -> None:
        super().__init__()
        self.branch1 = ConvNormReLU(in_channels, one, 1)
        self.branch2 = nn.Sequential(ConvNormReLU(in_channels, reduce3, 1), ConvNormReLU(reduce3, three, 3, padding=1))
        # The paper's #5x5 is 3x3 in TensorFlow's published network, whose weights torchvision's file holds, so it is here.
        self.branch3 = nn.Sequential(ConvNormReLU(in_channels, reduce5, 1), ConvNormReLU(reduce5, five, 3, padding=1))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1, ceil_mode=True), ConvNormReLU(in_channels, pool, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class AuxiliaryHead(nn.Module):
    """A classifier on a lower feature map that helps training only (section 5)."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(4)
        self.conv = ConvNormReLU(in_channels, 128, 1)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.7)
        self.fc2 = nn.Linear(1024, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.avgpool(x)).flatten(1)
        return self.fc2(self.dropout(self.relu(self.fc1(x))))


class GoogLeNet(Model):
    """Szegedy et al. 2014, Table 1, with BatchNorm instead of response normalisation, as torchvision has it."""

    paper = "https://arxiv.org/abs/1409.4842"
    min_size = 15
    first_layer = "conv1.conv"
    classifiers = ("fc", "aux1.fc2", "aux2.fc2")

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.2,
        aux_logits: bool = False,
        transform_input: bool = False,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer (torchvision: 0.2, the paper: 0.4).
            aux_logits: add the two auxiliary heads; in train mode forward then returns `GoogLeNetOutputs`.
            transform_input: take images normalised with ImageNet's mean and deviation and bring them to -1..1 first, as
                torchvision's file needs it.
        """
        super().__init__()
        self.num_classes, self.in_channels, self.transform_input = num_classes, in_channels, transform_input
        self.conv1 = ConvNormReLU(in_channels, 64, 7, stride=2, padding=3)
        self.maxpool1 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.conv2 = ConvNormReLU(64, 64, 1)
        self.conv3 = ConvNormReLU(64, 192, 3, padding=1)
        self.maxpool2 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        width = 192
        for name, row in TABLE.items():
            self.add_module(f"inception{name}", Inception(width, *row))
            width = row[0] + row[2] + row[4] + row[5]
        self.maxpool3 = nn.MaxPool2d(3, stride=2, ceil_mode=True)
        self.maxpool4 = nn.MaxPool2d(2, stride=2, ceil_mode=True)
        self.aux1 = AuxiliaryHead(512, num_classes) if aux_logits else None
        self.aux2 = AuxiliaryHead(528, num_classes) if aux_logits else None
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def forward(self, x: Tensor) -> Tensor | GoogLeNetOutputs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute logits (B, `num_classes`) of images, and with auxiliary heads in train mode `GoogLeNetOutputs`.

        Raises:
            ValueError: as in `Model.forward`.
        """
        if self.aux1 is None or self.aux2 is None or not self.training:
            return super().forward(x)
        self.check_input(x)
        x = self.lower(x)
        aux1 = self.aux1(x)
        x = self.middle(x)
        aux2 = self.aux2(x)
        return GoogLeNetOutputs(self.forward_head(self.upper(x)), aux2, aux1)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.upper(self.middle(self.lower(x)))

    def lower(self, x: Tensor) -> Tensor:
        """Compute what the first auxiliary head reads."""
        if self.transform_input:
            x = imagenet_to_inception(x)
        x = self.maxpool1(self.conv1(x))
        x = self.maxpool2(self.conv3(self.conv2(x)))
        x = self.maxpool3(self.inception3b(self.inception3a(x)))
        return self.inception4a(x)

    def middle(self, x: Tensor) -> Tensor:
        """Compute what the second auxiliary head reads."""
        return self.inception4d(self.inception4c(self.inception4b(x)))

    def upper(self, x: Tensor) -> Tensor:
        """Compute the last feature map."""
        x = self.maxpool4(self.inception4e(x))
        return self.inception5b(self.inception5a(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=0.01)
