"""Teaching a segmenter other classes: `train_segmenter`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weights.arguments import forgiving
from weights.places import at_home
from zoo.images.preprocess import open_image
from zoo.segmentation.drawing import palette
from zoo.segmentation.measures import IGNORED, PixelConfusion, PixelMeasures
from zoo.segmentation.run import segment
from zoo.segmentation.segmenter import Segmenter
from zoo.training.loop import LearningSettings, Learnt, learn

AUXILIARY = 0.5
"""Weight of the auxiliary head's loss, torchvision's."""


@forgiving
def train_segmenter(
    model: Segmenter,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    classes: Sequence[str],
    side: int = 480,
    restart: bool = False,
    done: Callable[[int, int, float], None] | None = None,
    **settings: Any,
) -> Learnt:
    """Train a segmenter on photographs whose pixels' classes are known, or go on with a training that was interrupted.

    Args:
        model: a segmenter, such as ``trained(DeepLabV3_ResNet50, num_classes=3)``, on any device; it learns in place.
        data: a folder as VOC has them: ``JPEGImages/a.jpg`` and ``SegmentationClass/a.png``, whose colours are VOC's palette.
        out: the folder of the run.
        classes: names, the background first.
        side: pixels of the square that is cut out of each photograph, whose shorter side is resized to as many.
        restart: throw away what an earlier call did.
        done: is called behind each step with its number, the number of all steps and its loss.
        **settings: see `LearningSettings`: epochs, batch_size, rate.

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
    if model.num_classes != len(classes):
        raise ValueError(f"{len(classes)} classes are named, and the network has num_classes={model.num_classes}")
    pairs = pairs_of(data)
    how = LearningSettings(**settings)
    device = next(model.parameters()).device
    mean, std = (torch.tensor(of, device=device).view(-1, 1, 1) for of in (model.mean, model.std))

    def losses(numbers: Sequence[int], random: torch.Generator) -> dict[str, Tensor]:
        examples = [_example(*pairs[number], side, how.flip, random, model.num_classes) for number in numbers]
        images = (torch.stack([pixels for pixels, _ in examples]).to(device) - mean) / std
        true = torch.stack([numbers for _, numbers in examples]).to(device)
        found = model(images)
        weights = {"out": 1.0, "aux": AUXILIARY}
        return {name: weights[name] * F.cross_entropy(logits, true, ignore_index=IGNORED) for name, logits in found.items()}

    facts = {"network": type(model).__name__, "files": [path.name for path, _ in pairs], "side": side}
    learnt = learn(model, len(pairs), losses, Path(out), how, facts, classes=classes, restart=restart, done=done)
    if model.checkpoint is not None:
        model.checkpoint = replace(model.checkpoint, labels=None, metrics={}, metrics_data=None)
    return learnt


def measure_segmenter(model: Segmenter, data: str | os.PathLike[str]) -> PixelMeasures:
    """Measure a segmenter on photographs whose pixels' classes are known; `data` and errors are as in `train_segmenter`."""
    counts = PixelConfusion(model.num_classes)
    for photograph, mask in pairs_of(data):
        found: Any = segment(model, photograph)
        counts.add(found.classes, torch.from_numpy(true_map(mask, model.num_classes)))
    return counts.measures()


def pairs_of(data: str | os.PathLike[str]) -> list[tuple[Path, Path]]:
    """List photographs and their maps of a folder as VOC has them.

    Raises:
        ValueError: there are none.
    """
    folder = at_home(data)
    masks = sorted((folder / "SegmentationClass").glob("*.png"))
    pairs = [(folder / "JPEGImages" / f"{mask.stem}.jpg", mask) for mask in masks]
    pairs = [pair for pair in pairs if pair[0].is_file()]
    if not pairs:
        raise ValueError(f"{folder} has no photographs JPEGImages/NAME.jpg with a map SegmentationClass/NAME.png, as VOC has them")
    return pairs


def true_map(mask: Path, count: int) -> np.ndarray:
    """Read a map of classes by its colours, int64 (H, W): those of VOC's palette, of which the last means that nobody knows.

    Raises:
        ValueError: a colour is that of no class.
    """
    pixels = np.asarray(open_image(mask, "RGB")).astype(np.int64)
    codes = pixels @ np.array([1 << 16, 1 << 8, 1])
    colours = palette(256).astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
    number = {int(code): place for place, code in reversed(list(enumerate(colours)))}
    found, inverse = np.unique(codes, return_inverse=True)
    places = np.array([number.get(int(code), -1) for code in found])
    if wrong := [int(code) for code, place in zip(found, places, strict=True) if not (0 <= place < count or place == IGNORED)]:
        raise ValueError(f"{mask} has the colour #{wrong[0]:06x}, which is none of VOC's first {count} classes")
    return places[inverse].reshape(codes.shape)


def _example(photograph: Path, mask: Path, side: int, flip: bool, random: torch.Generator, count: int) -> tuple[Tensor, Tensor]:
    pixels = torch.from_numpy(np.array(open_image(photograph, "RGB"))).permute(2, 0, 1).float() / 255
    true = torch.from_numpy(true_map(mask, count))
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
