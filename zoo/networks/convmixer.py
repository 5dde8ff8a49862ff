"""ConvMixer: patches, and at their resolution depthwise convolutions of large kernels and 1x1 ones in turn."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import activation
from zoo.networks.model import Model


class Residual(nn.Module):
    """Layers beside a shortcut."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.fn = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class ConvMixer(Model):
    """Trockman & Kolter 2022, section 2 and Table 1: the BatchNorms are behind the activations."""

    paper = "https://arxiv.org/abs/2201.09792"
    first_layer = "stem.0"
    classifiers = ("head",)
    min_size = 7

    width: ClassVar[int]
    """Channels everywhere, h in the paper."""
    depth: ClassVar[int]
    """Number of blocks, d."""
    kernel_size: ClassVar[int] = 9
    """Side of the depthwise convolutions' kernels, k."""
    patch_size: ClassVar[int] = 7
    """Side of a patch in pixels, p; a rest of the image that fills none is left out."""
    activation: ClassVar[str] = "gelu"

    def __init__(self, num_classes: int = 1000, in_channels: int = 3) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.stem = nn.Sequential(nn.Conv2d(in_channels, self.width, self.patch_size, self.patch_size), *self.act_norm())
        self.blocks = nn.Sequential(*(self.block() for _ in range(self.depth)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(self.width, num_classes)
        self.initialise()

    def block(self) -> nn.Sequential:
        """Make a block: the mixing of places beside a shortcut, then that of channels without one."""
        depthwise = nn.Conv2d(self.width, self.width, self.kernel_size, padding=self.kernel_size // 2, groups=self.width)
        return nn.Sequential(Residual(depthwise, *self.act_norm()), nn.Conv2d(self.width, self.width, 1), *self.act_norm())

    def act_norm(self) -> tuple[nn.Module, nn.Module]:
        """Make what is behind each convolution."""
        return activation(self.activation), nn.BatchNorm2d(self.width)

    def forward_body(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        """Leave every layer as PyTorch draws it, which the authors did."""
