"""Segmenters on a dilated network: FCN, DeepLabV3 and Lite R-ASPP."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.extraction.stages import Stages, stages
from zoo.networks.model import Model
from zoo.segmentation.segmenter import Segmenter


class FCNHead(nn.Sequential):
    """A 3x3 convolution to a quarter of the channels, and a 1x1 one to classes."""

    def __init__(self, channels: int, num_classes: int) -> None:
        """Build it for maps of `channels`."""
        few = channels // 4
        super().__init__(*_unit(channels, few, 3), nn.Dropout(0.1), nn.Conv2d(few, num_classes, 1))


class Pooled(nn.Sequential):
    """The mean of the whole map at each of its pixels, by a 1x1 convolution."""

    def __init__(self, channels: int, out_channels: int) -> None:
        """Build it for maps of `channels`."""
        super().__init__(nn.AdaptiveAvgPool2d(1), *_unit(channels, out_channels, 1))

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, `out_channels`, H, W)."""
        return F.interpolate(super().forward(input), size=input.shape[-2:], mode="bilinear", align_corners=False)


class AtrousPyramid(nn.Module):
    """Convolutions of several dilations beside each other, and the mean of all (Chen et al. 2017, section 3.3)."""

    def __init__(self, channels: int, rates: tuple[int, ...], out_channels: int = 256) -> None:
        """Build it for maps of `channels`."""
        super().__init__()
        wide = [nn.Sequential(*_unit(channels, out_channels, 3, rate)) for rate in rates]
        narrow = nn.Sequential(*_unit(channels, out_channels, 1))
        self.convs = nn.ModuleList([narrow, *wide, Pooled(channels, out_channels)])
        self.project = nn.Sequential(*_unit(out_channels * len(self.convs), out_channels, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, `out_channels`, H, W)."""
        return self.project(torch.cat([conv(x) for conv in self.convs], 1))


class DeepLabHead(nn.Sequential):
    """An `AtrousPyramid` with the paper's rates, a 3x3 convolution and a 1x1 one to classes."""

    def __init__(self, channels: int, num_classes: int) -> None:
        """Build it for maps of `channels`."""
        super().__init__(AtrousPyramid(channels, (12, 24, 36)), *_unit(256, 256, 3), nn.Conv2d(256, num_classes, 1))


class LiteHead(nn.Module):
    """Classes of a coarse map that a gate of its own mean scales, and of a finer one (Howard et al. 2019, Figure 10)."""

    def __init__(self, low: int, high: int, num_classes: int, channels: int = 128) -> None:
        """Build it for a finer map of `low` channels and a coarse one of `high`."""
        super().__init__()
        self.cbr = nn.Sequential(*_unit(high, channels, 1))
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(high, channels, 1, bias=False), nn.Sigmoid())
        self.low_classifier = nn.Conv2d(low, num_classes, 1)
        self.high_classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, low: Tensor, high: Tensor) -> Tensor:
        """Return logits (B, K, H, W) of the size of `low`."""
        x = self.cbr(high) * self.scale(high)
        x = F.interpolate(x, size=low.shape[-2:], mode="bilinear", align_corners=False)
        return self.low_classifier(low) + self.high_classifier(x)


def _unit(in_channels: int, out_channels: int, kernel_size: int, rate: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=rate * (kernel_size // 2), dilation=rate, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU()]


class DilatedSegmenter(Segmenter):
    """A network whose last strides are traded for dilation, a head on its last map, and in training another on an earlier one.

    A variant over another body is one line, for any convolutional network of the catalogue that can be dilated:
    ``class Mine(DeepLabV3, body=ResNet18): ...``. Layers have torchvision's names, so that files fit both ways.
    """

    classifiers = ("classifier.4",)

    body: ClassVar[Any]
    """The class of the network whose maps are read."""
    at: ClassVar[tuple[str, ...]] = ("C5",)
    """The map that the head reads."""
    aux_at: ClassVar[str] = "C4"
    """The map that the auxiliary head reads."""
    output_stride: ClassVar[int] = 8
    """Pixels of the image between neighbours of the last map."""

    head: ClassVar[Any]
    """The class of the head."""

    def __init__(self, num_classes: int = 21, aux: bool = False, body: Model | None = None) -> None:
        """Build the network untrained.

        Args:
            num_classes: with the background, which is class 0.
            aux: whether it has the auxiliary head, whose loss helps training; torchvision's checkpoints but LRASPP's have it.
            body: a network whose layers to take, such as ``trained(ResNet50)``; None builds the class's own, untrained.

        Raises:
            ValueError: the body can't be dilated.
            TypeError: the body is no network.
        """
        super().__init__()
        self.num_classes, self.in_channels = num_classes, 3
        self.backbone = self._stages(body, (self.aux_at, *self.at) if aux else self.at)
        self.classifier = self.head(self.backbone.widths[-1], num_classes)
        self.aux_classifier = FCNHead(self.backbone.widths[0], num_classes) if aux else None

    def _stages(self, body: Model | None, at: tuple[str, ...]) -> Stages:
        network = self.body() if body is None else body
        if not isinstance(network, Model):
            raise TypeError(f"{type(self).__name__}'s body is a network such as trained(ResNet50), not {network!r:.60}")
        return stages(network, at, self.output_stride)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the layers that have one output per class."""
        return self.classifiers if self.aux_classifier is None else (*self.classifiers, "aux_classifier.4")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = self.backbone(x)
        found = {"out": _as_large(self.classifier(maps[-1]), x)}
        if self.aux_classifier is not None:
            found["aux"] = _as_large(self.aux_classifier(maps[0]), x)
        return found


class FCN(DilatedSegmenter, head=FCNHead):
    """Long et al. 2014, by a dilated network instead of a way up."""

    paper = "https://arxiv.org/abs/1411.4038"


class DeepLabV3(DilatedSegmenter, head=DeepLabHead):
    """Chen et al. 2017: what lies around a pixel at several distances, and the whole image, decide its class."""

    paper = "https://arxiv.org/abs/1706.05587"


class LRASPP(DilatedSegmenter, head=LiteHead, output_stride=16):
    """Howard et al. 2019, section 6.4: a light head for phones."""

    paper = "https://arxiv.org/abs/1905.02244"
    classifiers = ("classifier.low_classifier", "classifier.high_classifier")

    def __init__(self, num_classes: int = 21, body: Model | None = None) -> None:
        """Build the network untrained; see `DeepLabV3`. It has no auxiliary head."""
        Segmenter.__init__(self)
        self.num_classes, self.in_channels = num_classes, 3
        self.backbone = self._stages(body, self.at)
        self.classifier = self.head(*self.backbone.widths, num_classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        low, high = self.backbone(x)
        return {"out": _as_large(self.classifier(low, high), x)}


def _as_large(x: Tensor, images: Tensor) -> Tensor:
    return F.interpolate(x, size=images.shape[-2:], mode="bilinear", align_corners=False)
