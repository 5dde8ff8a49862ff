"""AlexNet: five convolutions, then three dense layers."""

from __future__ import annotations

from torch import Tensor, nn

from zoo.networks.model import Model


class AlexNet(Model):
    """Krizhevsky 2014, section 5: AlexNet in one column without response normalisation, with torchvision's widths."""

    paper = "https://arxiv.org/abs/1404.5997"
    min_size = 63
    first_layer = "features.0"
    classifiers = ("classifier.6",)

    def __init__(self, num_classes: int = 1000, in_channels: int = 3, dropout: float = 0.5) -> None:
        """Build the network untrained.

        Args:
            num_classes: width of the last dense layer.
            in_channels: channels of the images.
            dropout: probability before the two hidden dense layers.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, in_channels
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, 64, 11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(64, 192, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(192, 384, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(384, 256, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(256, 256, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(4096, 4096),
            nn.ReLU(),
            nn.Linear(4096, num_classes),
        )
        # No self.initialise(): torchvision trains it from PyTorch's own draws, which the layers have made.

    def forward_body(self, x: Tensor) -> Tensor:
        return self.features(x)

    def forward_head(self, x: Tensor) -> Tensor:
        return self.classifier(self.avgpool(x).flatten(1))

    def paper_names(self) -> dict[str, str]:
        """Return Caffe's names: conv1, relu1, pool1, ..., pool5, fc6, relu6, fc7, relu7, fc8."""
        maps = ["conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "conv3", "relu3", "conv4", "relu4", "conv5", "relu5", "pool5"]
        dense = ["drop6", "fc6", "relu6", "drop7", "fc7", "relu7", "fc8"]
        named = {name: f"features.{index}" for index, name in enumerate(maps)}
        return named | {name: f"classifier.{index}" for index, name in enumerate(dense)}
