"""SSD and SSDlite: classes and boxes on maps of six sizes of one small image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.detection.anchors import DefaultBoxes, flattened
from zoo.detection.assigning import assign
from zoo.detection.box_codes import WEIGHTED, decode, encode
from zoo.detection.learning import LearningDetector
from zoo.detection.resizing import Batch, Outputs, Target
from zoo.detection.suppression import clip, suppress
from zoo.networks.layers import InvertedResidual, conv_norm_act
from zoo.networks.mobilenet import LARGE, MobileNetV3
from zoo.networks.model import Model
from zoo.networks.vgg import VGG

NEGATIVES = 3
"""Boxes that learn the background, for each one that learns a thing: the worst ones (section 2.2)."""


REDUCED = tuple(
    (kernel, expanded // 2 if expanded == 960 else expanded, channels // 2 if channels == 160 else channels, *rest)
    for kernel, expanded, channels, *rest in LARGE
)


class ReducedMobileNetV3Large(MobileNetV3, table=REDUCED, last_channels=640):
    """Howard et al. 2019, section 6.3 and Table 6: the last blocks have half the channels, for a detector."""


class Extra(nn.Sequential):
    """A map of half the size, by a 1x1 convolution and a 3x3 one (Liu et al. 2015, Figure 2)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        """Build it; without `stride` 2 the border is lost instead."""
        middle = channels // 2
        layers = [nn.Conv2d(in_channels, middle, 1), nn.ReLU(), nn.Conv2d(middle, channels, 3, stride, stride - 1), nn.ReLU()]
        super().__init__(*layers)


class VGGMaps(nn.Module):
    """Six maps of a VGG and what follows it; the first is scaled to a length that is learnt (Liu et al. 2015, section 3.1)."""

    widths = (512, 1024, 512, 256, 256, 256)

    def __init__(self, network: VGG) -> None:
        """Take the layers of a network without BatchNorm."""
        super().__init__()
        layers: list[Any] = list(network.features)
        pools = [index for index, layer in enumerate(layers) if isinstance(layer, nn.MaxPool2d)]
        layers[pools[2]] = nn.MaxPool2d(2, 2, ceil_mode=True)  # 38 x 38 of 300 x 300 pixels, the paper's
        self.scale_weight = nn.Parameter(torch.full((512,), 20.0))
        self.features = nn.Sequential(*layers[: pools[3]])
        fc = nn.Sequential(
            nn.MaxPool2d(3, 1, 1), nn.Conv2d(512, 1024, 3, padding=6, dilation=6), nn.ReLU(), nn.Conv2d(1024, 1024, 1), nn.ReLU()
        )
        after = [Extra(1024, 512, 2), Extra(512, 256, 2), Extra(256, 256, 1), Extra(256, 256, 1)]
        for layer in nn.ModuleList([fc, *after]).modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]
        self.extra = nn.ModuleList([nn.Sequential(*layers[pools[3] : -1], fc), *after])

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the maps of images (B, 3, H, W), from fine to coarse."""
        x = self.features(x)
        maps = [self.scale_weight.view(1, -1, 1, 1) * F.normalize(x)]
        for block in self.extra:
            x = block(x)
            maps.append(x)
        return maps


class MobileNetMaps(nn.Module):
    """Six maps of a MobileNet and what follows it; the first is what the first block of stride 32 expands."""

    def __init__(self, network: MobileNetV3, norm_eps: float = 1e-3, norm_momentum: float = 0.03) -> None:
        """Take the layers of a network."""
        super().__init__()
        blocks: list[Any] = list(network.features)
        strided = [i for i, block in enumerate(blocks) if isinstance(block, InvertedResidual) and _stride(block) == 2]
        last = blocks[strided[-1]].block
        self.features = nn.Sequential(nn.Sequential(*blocks[: strided[-1]], last[0]), nn.Sequential(last[1:], *blocks[strided[-1] + 1 :]))
        widths = [blocks[-1][0].out_channels, 512, 256, 256, 128]
        self.extra = nn.ModuleList(_extra(*pair) for pair in pairwise(widths))
        self.widths = (last[0][0].out_channels, *widths)
        for layer in self.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.eps, layer.momentum = norm_eps, norm_momentum
        _draw(self)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Compute the maps of images (B, 3, H, W), from fine to coarse."""
        maps: list[Tensor] = []
        for block in (*self.features, *self.extra):
            x = block(x)
            maps.append(x)
        return maps


def _stride(block: InvertedResidual) -> int:
    return max(layer.stride[0] for layer in block.modules() if isinstance(layer, nn.Conv2d))


def _extra(in_channels: int, channels: int) -> nn.Sequential:
    middle = channels // 2
    options: dict[str, Any] = {"act": "relu6", "norm_eps": 1e-3, "norm_momentum": 0.03}
    return nn.Sequential(
        conv_norm_act(in_channels, middle, 1, **options),
        conv_norm_act(middle, middle, 3, 2, groups=middle, **options),
        conv_norm_act(middle, channels, 1, **options),
    )


def _draw(module: nn.Module) -> None:
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.03)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


class Scores(nn.Module):
    """A convolution for each map: of classes, or of boxes."""

    def __init__(self, widths: Sequence[int], each: Sequence[int], numbers: int, light: bool) -> None:
        """Build it.

        Args:
            widths: channels of the maps.
            each: boxes around each pixel of each map.
            numbers: for each box.
            light: whether the convolution is a depthwise one and a 1x1 one (Sandler et al. 2018, section 6.2).
        """
        super().__init__()
        self.numbers = numbers
        self.module_list = nn.ModuleList()
        for width, boxes in zip(widths, each, strict=True):
            if light:
                depthwise = conv_norm_act(width, width, 3, groups=width, act="relu6", norm_eps=1e-3, norm_momentum=0.03)
                self.module_list.append(nn.Sequential(depthwise, nn.Conv2d(width, boxes * numbers, 1)))
            else:
                self.module_list.append(nn.Conv2d(width, boxes * numbers, 3, padding=1))
        if light:
            _draw(self)
        else:
            for layer in self.module_list:
                nn.init.xavier_uniform_(layer.weight)  # pyright: ignore[reportArgumentType]
                nn.init.zeros_(layer.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, maps: Sequence[Tensor]) -> list[Tensor]:
        """Return (B, A `numbers`, H, W) for the boxes of each map."""
        return [layer(x) for layer, x in zip(self.module_list, maps, strict=True)]

    def each(self, found: Sequence[Tensor]) -> Tensor:
        """Return (B, N, `numbers`) of what `forward` gave, box by box as default boxes are."""
        return torch.cat([flattened(x, self.numbers) for x in found], 1)


class SSDHead(nn.Module):
    """Classes and boxes; see `Scores`."""

    def __init__(self, widths: Sequence[int], each: Sequence[int], num_classes: int, light: bool) -> None:
        super().__init__()
        self.classification_head = Scores(widths, each, num_classes, light)
        self.regression_head = Scores(widths, each, 4, light)

    def forward(self, maps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return maps of logits and of codes."""
        return self.classification_head(maps), self.regression_head(maps)

    def outputs(self, found: tuple[list[Tensor], list[Tensor]]) -> tuple[Tensor, Tensor]:
        """Return logits (B, N, K) and codes (B, N, 4) of what `forward` gave."""
        return self.classification_head.each(found[0]), self.regression_head.each(found[1])


class SSD(LearningDetector):
    """Liu et al. 2015: no proposals, and a small image."""

    paper = "https://arxiv.org/abs/1512.02325"
    input_size = 300
    fixed = (300, 300)
    classifiers = tuple(f"head.classification_head.module_list.{index}" for index in range(6))
    multiple = 1
    threshold, overlap = 0.01, 0.45

    most: ClassVar[int] = 200
    """Things that are told of an image."""
    candidates: ClassVar[int] = 400
    """Boxes of a class that are looked at."""
    ratios: ClassVar[tuple[tuple[int, ...], ...]] = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))
    """Widths over heights of the default boxes of each map, beside 1."""
    scales: ClassVar[tuple[float, ...]] = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
    """Sides of the default boxes in parts of the image's, of each map and one more."""
    steps: ClassVar[tuple[int, ...] | None] = (8, 16, 32, 64, 100, 300)
    """Pixels between neighbours of each map; None divides the image by the map's size."""
    light: ClassVar[bool] = False
    """Whether convolutions of the heads are depthwise ones and 1x1 ones, and the body a MobileNet."""

    def __init__(self, num_classes: int = 91, body: Model | None = None) -> None:
        """Build the network untrained.

        Args:
            num_classes: with the background, which is class 0.
            body: for `SSDlite` a MobileNetV3, else a VGG without BatchNorm; None builds the class's own, untrained.

        Raises:
            TypeError: the body is another network.
        """
        super().__init__()
        network = self.body() if body is None else body
        fits = isinstance(network, MobileNetV3) if self.light else isinstance(network, VGG) and not network.batch_norm
        if not fits:
            needs = "MobileNetV3" if self.light else "VGG without BatchNorm"
            raise TypeError(f"{type(self).__name__}'s body is a {needs}, not {network!r:.60}")
        self.num_classes, self.in_channels = num_classes, 3
        self.transform = self.resizing()
        maps: Any = MobileNetMaps if self.light else VGGMaps
        self.backbone = maps(network)
        self.anchor_generator = DefaultBoxes(self.ratios, self.scales, self.steps)
        self.head = SSDHead(self.backbone.widths, self.anchor_generator.per_pixel, num_classes, self.light)

    def maps(self, images: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return self.head(self.backbone(images))

    def run(self, batch: Batch, targets: list[Target] | None, threshold: float, overlap: float) -> list[Target] | Outputs:
        maps = self.maps(batch.images)
        logits, codes = self.head.outputs(maps)
        start = self.anchor_generator(batch.padded, maps[0])
        if targets is not None:
            return self.losses(logits, codes, start, targets)
        sizes = torch.tensor(batch.sizes).to(codes.device, non_blocking=True)
        boxes = clip(decode(codes, start, WEIGHTED), sizes[:, None])
        likely = logits.softmax(2)[..., 1:].transpose(1, 2)
        score, at = likely.topk(min(self.candidates, likely.shape[2]), 2)
        image, kind, rank = (score > threshold).nonzero(as_tuple=True)
        where, score = boxes[image, at[image, kind, rank]], score[image, kind, rank]
        kept = suppress(where, score, kind + 1, image, len(sizes), overlap, self.most)
        return [{"boxes": where[some], "scores": score[some], "labels": kind[some] + 1} for some in kept]

    def losses(self, logits: Tensor, codes: Tensor, start: Tensor, targets: list[Target]) -> Outputs:
        """Return the losses of all boxes that learn a thing, and of three times as many that are worst at seeing that there is none."""
        boxes: list[Tensor] = []
        labels = torch.zeros(logits.shape[:2], dtype=torch.int64, device=logits.device)
        count = 0
        for label, code, target in zip(labels, codes, targets, strict=True):
            number = assign(start, target["boxes"], 0.5, 0.5, "best")
            at = (number >= 0).nonzero()[:, 0]
            count += len(at)
            boxes.append(F.smooth_l1_loss(code[at], encode(target["boxes"][number[at]], start[at], WEIGHTED), reduction="sum"))
            label[at] = target["labels"][number[at]]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
        things = labels > 0
        rank = loss.masked_fill(things, -torch.inf).sort(1, descending=True).indices.sort(1).indices
        worst = rank < NEGATIVES * things.sum(1, keepdim=True)
        count = max(1, count)
        return {"bbox_regression": torch.stack(boxes).sum() / count, "classification": (loss[things].sum() + loss[worst].sum()) / count}


class SSDlite(SSD, light=True):
    """Sandler et al. 2018, section 6.2, and Howard et al. 2019, section 6.3: SSD of depthwise convolutions, over a MobileNet."""

    paper = "https://arxiv.org/abs/1801.04381"
    input_size = 320
    fixed = (320, 320)
    threshold, overlap = 0.001, 0.55
    most = candidates = 300
    mean = std = (0.5, 0.5, 0.5)
    ratios = ((2, 3),) * 6
    scales = (0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)
    steps = None
    classifiers = tuple(f"head.classification_head.module_list.{index}.1" for index in range(6))
