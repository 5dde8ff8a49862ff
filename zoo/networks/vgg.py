"""VGG: stacks of 3x3 convolutions between max pools, then three dense layers."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from zoo.networks.model import Model


class VGG(Model):
    """Simonyan & Zisserman 2014, Table 1; `batch_norm` puts BatchNorm after every convolution."""

    paper = "https://arxiv.org/abs/1409.1556"
    min_size = 32
    first_layer = "features.0"
    classifiers = ("classifier.6",)

    blocks: ClassVar[tuple[int, ...]]
    """Number of convolutions before each of the five pools."""
    batch_norm: ClassVar[bool] = False
    channels: ClassVar[tuple[int, ...]] = (64, 128, 256, 512, 512)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5, bias: bool = True) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last dense layer.
            in_channels: channels of the images.
            dropout: probability after the two hidden dense layers (section 3.1: 0.5).
            bias: whether convolutions have one, as in the paper; pytorchcv's checkpoints with BatchNorm have none.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        layers: list[nn.Module] = []
        width = in_channels
        for convolutions, channels in zip(self.blocks, self.channels, strict=True):
            for _ in range(convolutions):
                layers.append(nn.Conv2d(width, channels, 3, padding=1, bias=bias))
                if self.batch_norm:
                    layers.append(nn.BatchNorm2d(channels))
                layers.append(nn.ReLU())
                width = channels
            layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(width * 7 * 7, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, num_classes),
        )
        self.initialise()

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def paper_names(self) -> dict[str, str]:
        """Return Caffe's names, which papers on style and segmentation use: conv1_1, bn1_1, relu1_1, ..., pool5, fc6, relu6, ..., fc8."""
        named: dict[str, str] = {}
        block, number = 1, 0
        for index, layer in self.features.named_children():
            if isinstance(layer, nn.Conv2d):
                number += 1
            kind = {nn.Conv2d: "conv", nn.BatchNorm2d: "bn", nn.ReLU: "relu"}.get(type(layer))
            named[f"{kind}{block}_{number}" if kind else f"pool{block}"] = f"features.{index}"
            if not kind:
                block, number = block + 1, 0
        for name, index in (("fc6", 0), ("relu6", 1), ("drop6", 2), ("fc7", 3), ("relu7", 4), ("drop7", 5), ("fc8", 6)):
            named[name] = f"classifier.{index}"
        return named

    def initialise_layer(self, name: str, layer: nn.Module) -> None:
        super().initialise_layer(name, layer)
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
            nn.init.zeros_(layer.bias)
