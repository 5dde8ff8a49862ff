"""MobileNet V1, V2 and V3: depthwise separable convolutions."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import InvertedResidual, SqueezeExcitation, conv_norm_act, divisible
from zoo.networks.model import Model


class MobileNet(Model):
    """What the three versions share: a Sequential body, a mean over the pixels, a Sequential classifier."""

    first_layer = "features.0.0"

    features: nn.Sequential
    avgpool: nn.AdaptiveAvgPool2d
    classifier: nn.Sequential

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.zeros_(layer.bias)


class MobileNetV1(MobileNet):
    """Howard et al. 2017, Table 1; `width` is the width multiplier of section 3.3."""

    paper = "https://arxiv.org/abs/1704.04861"
    classifiers = ("classifier.1",)

    width: ClassVar[float] = 1.0
    table: ClassVar[tuple[tuple[int, int], ...]] = (
        # channels of the pointwise convolution, stride of the depthwise one
        (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2),
        (512, 1), (512, 1), (512, 1), (512, 1), (512, 1), (1024, 2), (1024, 1),
    )  # fmt: skip

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.001,
        padding: str = "symmetric",
        norm_eps: float = 1e-5,
        activation: str = "relu",
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer (the authors' code: 0.001).
            padding: "symmetric", "same" as TensorFlow pads, or "even" as Keras does: the same thing where every map's size is even.
            norm_eps: added to the variances (TensorFlow's and Keras's files: 0.001).
            activation: after every BatchNorm, by its name in `layers.ACTIVATIONS` (the paper: "relu", its authors' files: "relu6").

        Raises:
            ValueError: another `padding`, or no activation of this name.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(conv_norm_act, act=activation, padding=padding, norm_eps=norm_eps)
        width = int(32 * self.width)
        layers = [layer(in_channels, width, 3, stride=2)]
        for channels, stride in self.table:
            out = int(channels * self.width)
            layers.append(nn.Sequential(layer(width, width, 3, stride, groups=width), layer(width, out, 1)))
            width = out
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(width, num_classes))
        self.initialise()


class LinearBottleneck(nn.Module):
    """An inverted residual with torchvision's names for V2, whose projection is no unit of its own (Sandler et al. 2018, Table 1)."""

    def __init__(self, layer: partial[nn.Sequential], in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        width = in_channels * expansion
        expand = [layer(in_channels, width, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(*expand, layer(width, width, 3, stride, groups=width), *layer(width, out_channels, 1, act=None))
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.has_shortcut else self.conv(x)


class MobileNetV2(MobileNet):
    """Sandler et al. 2018, Table 2; `width` is the width multiplier, which never narrows the last convolution."""

    paper = "https://arxiv.org/abs/1801.04381"
    classifiers = ("classifier.1",)

    width: ClassVar[float] = 1.0
    table: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        # expansion t, channels c, repeats n, stride s of the first
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.2,
        padding: str = "symmetric",
        norm_eps: float = 1e-5,
        stem_stride: int = 2,
        early_stride: int = 2,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer.
            padding: "symmetric", or "same" as TensorFlow and Keras pad.
            norm_eps: added to the variances (TensorFlow's and Keras's files: 0.001).
            stem_stride: of the first convolution, 1 or 2; 1 for images of 32 pixels, CIFAR's, which else end as one.
            early_stride: of the table's second row, 1 or 2; 1 for the same.

        Raises:
            ValueError: another `padding` or stride.
        """
        for name, stride in (("stem_stride", stem_stride), ("early_stride", early_stride)):
            if stride not in (1, 2):
                raise ValueError(f"{name} is 1 or 2, got {stride!r}")
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(conv_norm_act, act="relu6", padding=padding, norm_eps=norm_eps)
        width = divisible(32 * self.width)
        layers: list[nn.Module] = [layer(in_channels, width, 3, stride=stem_stride)]
        for row, (expansion, channels, repeats, stride) in enumerate(self.table):
            out = divisible(channels * self.width)
            first_stride = early_stride if row == 1 else stride
            for index in range(repeats):
                layers.append(LinearBottleneck(layer, width, out, first_stride if index == 0 else 1, expansion))
                width = out
        last = divisible(1280 * max(1.0, self.width))
        layers.append(layer(width, last, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, num_classes))
        self.initialise()


class MobileNetV3(MobileNet):
    """Howard et al. 2019, Tables 1 (Large) and 2 (Small)."""

    paper = "https://arxiv.org/abs/1905.02244"
    classifiers = ("classifier.3",)

    table: ClassVar[tuple[tuple[int, int, int, bool, str, int], ...]]
    """One row a block: kernel, expanded channels, channels, squeeze-and-excite, activation, stride."""
    last_channels: ClassVar[int]
    """Width of the hidden dense layer."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float = 0.2,
        padding: str = "symmetric",
        norm_eps: float = 1e-3,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last dense layer.
            in_channels: channels of the images.
            dropout: probability before the last dense layer.
            padding: "symmetric", "same" as TensorFlow and Keras pad, or "even" as Keras does when it is built for images of any size.
            norm_eps: added to the variances (some of timm's files: 1e-5).

        Raises:
            ValueError: another `padding`.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(conv_norm_act, padding=padding, norm_eps=norm_eps, norm_momentum=0.01)
        width = 16
        layers: list[nn.Module] = [layer(in_channels, width, 3, stride=2, act="hardswish")]
        for kernel, expanded, channels, squeeze_excite, act, stride in self.table:
            gate = SqueezeExcitation(expanded, divisible(expanded // 4), gate=nn.Hardsigmoid()) if squeeze_excite else None
            layers.append(InvertedResidual(partial(layer, act=act), width, expanded, channels, kernel, stride, gate))
            width = channels
        layers.append(layer(width, 6 * width, 1, act="hardswish"))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * width, self.last_channels),
            nn.Hardswish(),
            nn.Dropout(dropout),
            nn.Linear(self.last_channels, num_classes),
        )
        self.initialise()


LARGE = (  # Howard et al. 2019, Table 1
    (3, 16, 16, False, "relu", 1),
    (3, 64, 24, False, "relu", 2),
    (3, 72, 24, False, "relu", 1),
    (5, 72, 40, True, "relu", 2),
    (5, 120, 40, True, "relu", 1),
    (5, 120, 40, True, "relu", 1),
    (3, 240, 80, False, "hardswish", 2),
    (3, 200, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 184, 80, False, "hardswish", 1),
    (3, 480, 112, True, "hardswish", 1),
    (3, 672, 112, True, "hardswish", 1),
    (5, 672, 160, True, "hardswish", 2),
    (5, 960, 160, True, "hardswish", 1),
    (5, 960, 160, True, "hardswish", 1),
)
SMALL = (  # Howard et al. 2019, Table 2
    (3, 16, 16, True, "relu", 2),
    (3, 72, 24, False, "relu", 2),
    (3, 88, 24, False, "relu", 1),
    (5, 96, 40, True, "hardswish", 2),
    (5, 240, 40, True, "hardswish", 1),
    (5, 240, 40, True, "hardswish", 1),
    (5, 120, 48, True, "hardswish", 1),
    (5, 144, 48, True, "hardswish", 1),
    (5, 288, 96, True, "hardswish", 2),
    (5, 576, 96, True, "hardswish", 1),
    (5, 576, 96, True, "hardswish", 1),
)
