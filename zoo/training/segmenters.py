"""Teaching a segmenter other classes: `train_segmenter`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import forgiving
from zoo.finetuning.progress import Show
from zoo.images.preprocess import open_image
from zoo.segmentation.measures import IGNORED, PixelConfusion, PixelMeasures
from zoo.segmentation.run import segment
from zoo.segmentation.segmenter import Segmenter
from zoo.training.loop import LearningSettings, Learnt, learn
from zoo.training.pixel_truths import Painted, read_painted

SIDE = 480
"""Pixels of the squares that are learnt from, where the caller says none."""
AUXILIARY = 0.5
"""Weight of the auxiliary head's loss, torchvision's."""


@forgiving
def train_segmenter(
    model: Segmenter,
    data: str | os.PathLike[str] | Painted,
    out: str | os.PathLike[str],
    *,
    classes: Sequence[str] | None = None,
    size: int = SIDE,
    restart: bool = False,
    progress: bool | Show = True,
    **settings: Any,
) -> Learnt:
    """Train a segmenter on photographs whose pixels' classes are known, or go on with a training that was interrupted.

    Args:
        model: a segmenter, such as ``trained(DeepLabV3_ResNet50, num_classes=3)``, on any device; it learns in place.
        data: a folder as VOC has them: ``JPEGImages/a.jpg`` and ``SegmentationClass/a.png``, in the colours of VOC's palette; a JSON file
            as COCO has them, whose things have outlines; or what `read_painted` returns.
        out: the folder of the run.
        classes: names of a folder's classes, the background first; those of its ``classes.txt`` if left out, else VOC's.
        size: pixels of the square that is cut out of each photograph, whose shorter side is resized to as many.
        restart: throw away what an earlier call did.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.finetuning.progress.Show`.
        **settings: see `LearningSettings`: epochs, batch_size, lr.

    Raises:
        TypeError: the model is no segmenter, or a setting is not known.
        ValueError: the network has another number of classes, the folder has no such photographs, or it has another run.
        Diverged: the loss is no number any more.

    Example:
        >>> model = trained(LRASPP_MobileNet_V3_Large, num_classes=3)  # doctest: +SKIP
        >>> train_segmenter(model, "VOC2012", "runs/one", classes=["background", "cat", "dog"])  # doctest: +SKIP
    """
    if not isinstance(model, Segmenter):
        raise TypeError(f"train_segmenter() takes a segmenter, such as DeepLabV3_ResNet50(), not a {type(model).__name__}")
    painted = data if isinstance(data, Painted) else read_painted(data, classes)
    classes, photographs = painted.classes, painted.photographs
    if model.num_classes != len(classes):
        raise ValueError(f"{len(classes)} classes are named, and the network has num_classes={model.num_classes}")
    how = LearningSettings(**settings)
    device = next(model.parameters()).device
    mean, std = (torch.tensor(of, device=device).view(-1, 1, 1) for of in (model.mean, model.std))

    def losses(numbers: Sequence[int], random: torch.Generator) -> dict[str, Tensor]:
        examples = [_example(painted, number, size, how.flip, random) for number in numbers]
        images = (torch.stack([pixels for pixels, _ in examples]).to(device) - mean) / std
        true = torch.stack([numbers for _, numbers in examples]).to(device)
        found = model(images)
        weights = {"out": 1.0, "aux": AUXILIARY}
        return {name: weights[name] * F.cross_entropy(logits, true, ignore_index=IGNORED) for name, logits in found.items()}

    facts = {"network": type(model).__name__, "files": [path.name for path in photographs], "size": size}
    learnt = learn(model, len(photographs), losses, Path(out), how, facts, classes=classes, restart=restart, progress=progress)
    if model.checkpoint is not None:
        model.checkpoint = replace(model.checkpoint, labels=None, metrics={}, metrics_data=None)
    return learnt


def measure_segmenter(model: Segmenter, data: str | os.PathLike[str] | Painted) -> PixelMeasures:
    """Measure a segmenter on photographs whose pixels' classes are known; `data` and errors are as in `train_segmenter`."""
    painted = data if isinstance(data, Painted) else read_painted(data, model.names() if Path(data).is_dir() else None)
    counts = PixelConfusion(model.num_classes)
    for number, photograph in enumerate(painted.photographs):
        found: Any = segment(model, photograph)
        counts.add(found.labels, torch.from_numpy(painted.true(number)))
    return counts.measures()


def _example(painted: Painted, number: int, side: int, flip: bool, random: torch.Generator) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(open_image(painted.photographs[number], "RGB"))).permute(2, 0, 1).float() / 255
    true = torch.from_numpy(painted.true(number))
    if true.shape != pixels.shape[1:]:
        shown = "x".join(map(str, reversed(true.shape))), "x".join(map(str, reversed(pixels.shape[1:])))
        raise ValueError(f"the map of {painted.photographs[number]} is {shown[0]} pixels, and the photograph {shown[1]}")
    height, width = true.shape
    scale = side / min(height, width)
    size = (max(side, round(height * scale)), max(side, round(width * scale)))
    pixels = F.interpolate(pixels[None], size=size, mode="bilinear", align_corners=False, antialias=True)[0]
    true = F.interpolate(true[None, None].float(), size=size, mode="nearest")[0, 0].long()
    top = int(torch.randint(size[0] - side + 1, (), generator=random))
    left = int(torch.randint(size[1] - side + 1, (), generator=random))
    pixels, true = pixels[:, top : top + side, left : left + side], true[top : top + side, left : left + side]
    if flip and torch.rand((), generator=random) < 0.5:
        pixels, true = pixels.flip(2), true.flip(1)
    return pixels, true
