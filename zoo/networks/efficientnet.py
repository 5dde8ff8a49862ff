"""EfficientNet: one network found by search, scaled in depth and width together."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.layers import InvertedResidual, SqueezeExcitation, conv_norm_act, divisible
from zoo.networks.model import Model

B0 = (  # Tan & Le 2019, Table 1: expansion, kernel, stride of the first, channels, repeats
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)


class EfficientNet(Model):
    """Tan & Le 2019: Table 1 is B0, the others multiply its channels by `width` and its repeats by `depth`."""

    paper = "https://arxiv.org/abs/1905.11946"
    first_layer = "features.0.0"
    classifiers = ("classifier.1",)

    width: ClassVar[float]
    depth: ClassVar[float]
    dropout: ClassVar[float]
    """Default probability before the dense layer (section 5.2: from 0.2 for B0 to 0.5 for B7)."""
    norm_eps: ClassVar[float] = 1e-5
    """Default eps of BatchNorm: what torchvision's files of this variant were trained with."""
    norm_momentum: ClassVar[float] = 0.1
    padding: ClassVar[str] = "symmetric"
    activation: ClassVar[str] = "silu"
    gated: ClassVar[bool] = True
    """Whether squeeze and excitation stands in each block."""
    scaled_ends: ClassVar[bool] = True
    """Whether the stem's and the head's channels and the first and the last stage's repeats are multiplied, too."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_channels: int = 3,
        dropout: float | None = None,
        stochastic_depth: float = 0.2,
        padding: str | None = None,
        norm_eps: float | None = None,
    ) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the dense layer.
            in_channels: channels of the images.
            dropout: probability before the dense layer; None is the variant's own.
            stochastic_depth: probability of dropping the last block's branch; it grows linearly from 0 at the first block.
            padding: "symmetric", or "same" as TensorFlow and Keras pad; None is the family's own, for EfficientNet "symmetric".
            norm_eps: added to the variances (TensorFlow's and Keras's files: 0.001); None is the variant's own.

        Raises:
            ValueError: another `padding`, or a `stochastic_depth` outside 0 <= p < 1.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layer = partial(
            conv_norm_act,
            act=self.activation,
            padding=self.padding if padding is None else padding,
            norm_eps=self.norm_eps if norm_eps is None else norm_eps,
            norm_momentum=self.norm_momentum,
        )
        ends = self.width if self.scaled_ends else 1.0
        width = divisible(32 * ends)
        layers = [layer(in_channels, width, 3, stride=2)]
        repeats = [math.ceil(count * self.depth) for *_, count in B0]
        if not self.scaled_ends:
            repeats[0], repeats[-1] = B0[0][-1], B0[-1][-1]
        done, total = 0, sum(repeats)
        for (expansion, kernel, first_stride, channels, _), count in zip(B0, repeats, strict=True):
            out = divisible(channels * self.width)
            stage = nn.Sequential()
            for index in range(count):
                expanded = width * expansion
                gate = SqueezeExcitation(expanded, width // 4, activation=nn.SiLU()) if self.gated else None
                stride = first_stride if index == 0 else 1
                stage.append(InvertedResidual(layer, width, expanded, out, kernel, stride, gate, stochastic_depth * done / total))
                width, done = out, done + 1
            layers.append(stage)
        head = 4 * divisible(320 * ends)
        layers.append(layer(width, head, 1))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Dropout(type(self).dropout if dropout is None else dropout),
            nn.Linear(head, num_classes),
        )
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            bound = layer.out_features**-0.5
            nn.init.uniform_(layer.weight, -bound, bound)
            nn.init.zeros_(layer.bias)


class EfficientNetLite(EfficientNet):
    """Google's EfficientNet for phones (Liu 2020): no gates, ReLU6, and a stem and a head that are never scaled.

    Its files were trained with TensorFlow's SAME padding and an eps of 0.001, so both are the defaults here.
    """

    paper = "https://github.com/tensorflow/tpu/tree/master/models/official/efficientnet/lite"
    norm_eps = 1e-3
    padding = "same"
    activation = "relu6"
    gated = False
    scaled_ends = False
