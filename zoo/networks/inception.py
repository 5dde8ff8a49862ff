"""InceptionV3: factorised convolutions in branches side by side."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from zoo.networks.layers import ConvNormReLU, imagenet_to_inception
from zoo.networks.model import Model

Convolution = tuple[Any, ...]
"""Channels, kernel (height and width if they differ), and the stride if it isn't 1."""
Branches = dict[str, tuple[Convolution | list[Convolution], ...]]
"""The convolutions of each branch in order; a list is convolutions side by side."""


def figure5(pool: int) -> Branches:
    """Szegedy et al. 2015, Figure 5: for 35x35 maps."""
    return {"1x1": ((64, 1),), "5x5": ((48, 1), (64, 5)), "3x3dbl": ((64, 1), (96, 3), (96, 3)), "_pool": ((pool, 1),)}


def figure6(width: int) -> Branches:
    """Figure 6: 7x7 convolutions in two factors, for 17x17 maps."""
    row, column = (width, (1, 7)), (width, (7, 1))
    return {
        "1x1": ((192, 1),),
        "7x7": ((width, 1), row, (192, (7, 1))),
        "7x7dbl": ((width, 1), column, row, column, (192, (1, 7))),
        "_pool": ((192, 1),),
    }


FIGURE7: Branches = {  # wider instead of deeper, for 8x8 maps
    "1x1": ((320, 1),),
    "3x3": ((384, 1), [(384, (1, 3)), (384, (3, 1))]),
    "3x3dbl": ((448, 1), (384, 3), [(384, (1, 3)), (384, (3, 1))]),
    "_pool": ((192, 1),),
}
# Figure 10 halves the grid: 35x35 to 17x17, and 17x17 to 8x8.
TO_17: Branches = {"3x3": ((384, 3, 2),), "3x3dbl": ((64, 1), (96, 3), (96, 3, 2)), "_pool": ()}
TO_8: Branches = {"3x3": ((192, 1), (320, 3, 2)), "7x7x3": ((192, 1), (192, (1, 7)), (192, (7, 1)), (192, 3, 2)), "_pool": ()}
TABLE = {  # Szegedy et al. 2015, Table 1, from the first 35x35 map on
    "Mixed_5b": figure5(pool=32),
    "Mixed_5c": figure5(pool=64),
    "Mixed_5d": figure5(pool=64),
    "Mixed_6a": TO_17,
    "Mixed_6b": figure6(128),
    "Mixed_6c": figure6(160),
    "Mixed_6d": figure6(160),
    "Mixed_6e": figure6(192),
    "Mixed_7a": TO_8,
    "Mixed_7b": FIGURE7,
    "Mixed_7c": FIGURE7,
}


class InceptionV3Outputs(NamedTuple):
    """What an InceptionV3 with its auxiliary head returns in train mode: twice logits (B, num_classes)."""

    logits: Tensor
    aux_logits: Tensor


def convolution(in_channels: int, channels: int, kernel: int | tuple[int, int], stride: int = 1) -> ConvNormReLU:
    """Make one convolution of a table: it keeps the size at stride 1, and pads nothing where it halves the grid."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    return ConvNormReLU(in_channels, channels, (height, width), stride, (height // 2, width // 2) if stride == 1 else 0)


class Mixed(nn.Module):
    """Branches side by side, as a row of `TABLE` says, with torchvision's names: branch1x1, branch3x3_2a, branch_pool."""

    def __init__(self, in_channels: int, branches: Branches, padding: str) -> None:
        super().__init__()
        average = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=padding == "symmetric")
        self.pool = average if branches["_pool"] else nn.MaxPool2d(3, stride=2)
        self.paths: list[list[list[str]]] = []
        self.out_channels = 0
        for branch, steps in branches.items():
            path, width = [["pool"]] if branch == "_pool" else [], in_channels
            for number, step in enumerate(steps, start=1):
                side_by_side = step if isinstance(step, list) else [step]
                name = f"branch{branch}_{number}" if len(steps) > 1 else f"branch{branch}"
                names = [name + letter for letter in "ab"] if len(side_by_side) > 1 else [name]
                for name, settings in zip(names, side_by_side, strict=True):
                    self.add_module(name, convolution(width, *settings))
                path.append(names)
                width = sum(channels for channels, *_ in side_by_side)
            self.paths.append(path)
            self.out_channels += width

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.follow(path, x) for path in self.paths], 1)

    def follow(self, path: list[list[str]], x: Tensor) -> Tensor:
        """Compute one branch."""
        for names in path:
            maps = [self.get_submodule(name)(x) for name in names]
            x = maps[0] if len(maps) == 1 else torch.cat(maps, 1)
        return x


class AuxiliaryHead(nn.Module):
    """A classifier on the last 17x17 map that regularises training (Szegedy et al. 2015, section 4)."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.pool = nn.AvgPool2d(5, stride=3)
        self.conv0 = ConvNormReLU(in_channels, 128, 1)
        self.conv1 = ConvNormReLU(128, 768, 5)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(self.conv0(self.pool(x)))
        return self.fc(self.avgpool(x).flatten(1))


class InceptionV3(Model):
    """Szegedy et al. 2015, Table 1, as torchvision's and TensorFlow's files have it."""

    paper = "https://arxiv.org/abs/1512.00567"
    input_size = 299
    min_size = 75
    first_layer = "Conv2d_1a_3x3.conv"
    classifiers = ("fc", "AuxLogits.fc")

    aux_min_size: ClassVar[int] = 299
    """Smallest side in pixels that the auxiliary head's arithmetic allows."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.5,
        aux_logits: bool = False,
        transform_input: bool = False,
        padding: str = "symmetric",
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer.
            aux_logits: add the auxiliary head; in train mode forward then returns `InceptionV3Outputs`.
            transform_input: take images normalised with ImageNet's mean and deviation and bring them to -1..1 first, as
                torchvision's file needs it.
            padding: "symmetric", or "same" as TensorFlow and Keras pad: there the zeros around a map don't count in an average pool.

        Raises:
            ValueError: another `padding`.
        """
        super().__init__()
        if padding not in ("symmetric", "same"):
            raise ValueError(f'padding is "symmetric" (PyTorch) or "same" (TensorFlow), got {padding!r}')
        self.num_classes, self.in_channels, self.transform_input = num_classes, in_channels, transform_input
        self.Conv2d_1a_3x3 = ConvNormReLU(in_channels, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = ConvNormReLU(32, 32, 3)
        self.Conv2d_2b_3x3 = ConvNormReLU(32, 64, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = ConvNormReLU(64, 80, 1)
        self.Conv2d_4a_3x3 = ConvNormReLU(80, 192, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        width = 192
        for name, branches in TABLE.items():
            mixed = Mixed(width, branches, padding)
            self.add_module(name, mixed)
            width = mixed.out_channels
        self.AuxLogits = AuxiliaryHead(768, num_classes) if aux_logits else None
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, num_classes)
        self.initialise()

    def forward(self, x: Tensor) -> Tensor | InceptionV3Outputs:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Compute logits (B, `num_classes`) of images, and with the auxiliary head in train mode `InceptionV3Outputs`.

        Raises:
            ValueError: as in `Model.forward`, or the auxiliary head is to be trained on images smaller than `aux_min_size`.
        """
        if self.AuxLogits is None or not self.training:
            return super().forward(x)
        self.check_input(x)
        if min(x.shape[2:]) < self.aux_min_size:
            raise ValueError(
                f"InceptionV3's auxiliary head needs images of at least {self.aux_min_size}x{self.aux_min_size} pixels, "
                f"got {x.shape[2]}x{x.shape[3]}; resize them, or build the network with aux_logits=False."
            )
        x = self.lower(x)
        aux = self.AuxLogits(x)
        return InceptionV3Outputs(self.forward_head(self.upper(x)), aux)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.upper(self.lower(x))

    def lower(self, x: Tensor) -> Tensor:
        """Compute the last 17x17 map, which the auxiliary head reads."""
        if self.transform_input:
            x = imagenet_to_inception(x)
        x = self.maxpool1(self.Conv2d_2b_3x3(self.Conv2d_2a_3x3(self.Conv2d_1a_3x3(x))))
        x = self.maxpool2(self.Conv2d_4a_3x3(self.Conv2d_3b_1x1(x)))
        x = self.Mixed_5d(self.Mixed_5c(self.Mixed_5b(x)))
        return self.Mixed_6e(self.Mixed_6d(self.Mixed_6c(self.Mixed_6b(self.Mixed_6a(x)))))

    def upper(self, x: Tensor) -> Tensor:
        """Compute the last feature map."""
        return self.Mixed_7c(self.Mixed_7b(self.Mixed_7a(x)))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.fc(self.dropout(self.avgpool(x).flatten(1)))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        # Google's deviations; torchvision means the same, but its 0.01 reaches no layer.
        deviation = {"AuxLogits.conv1.conv": 0.01, "AuxLogits.fc": 0.001}.get(name, 0.1)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(layer.weight, std=deviation)
