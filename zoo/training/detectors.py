"""Teaching a detector other things: `train_detector`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weights.arguments import forgiving
from zoo.detection.learning import LearningDetector
from zoo.detection.truths import Known, read_truths
from zoo.finetuning.progress import Show
from zoo.images.preprocess import open_image
from zoo.training.loop import LearningSettings, Learnt, learn
from zoo.training.yolo_text import is_yolo, read_yolo


@forgiving
def train_detector(
    model: LearningDetector,
    data: str | os.PathLike[str] | Known,
    out: str | os.PathLike[str],
    *,
    images: str | os.PathLike[str] | None = None,
    split: str | None = None,
    restart: bool = False,
    progress: bool | Show = True,
    **settings: Any,
) -> Learnt:
    """Train a detector on photographs whose things are known, or go on with a training that was interrupted.

    The same call again goes on, and ends with the same numbers as if it had not been interrupted. `trained` loads the result:
    ``trained(FasterRCNN_ResNet50_FPN, "runs/one/model.safetensors")``. Things that are crowds or difficult are left out.

    Args:
        model: a detector with losses, such as ``trained(FasterRCNN_ResNet50_FPN, num_classes=3)``, on any device; it learns in place. Its
            classes are the background and those of the data in their order.
        data: a JSON file as COCO has them, a folder as VOC has them, a folder with ``images`` and ``labels`` as YOLO has them, or what
            `read_truths` returns.
        out: the folder of the run.
        images: the folder of a COCO file's photographs; looked for beside it if left out.
        split: of a VOC folder, "train"; every annotation if left out.
        restart: throw away what an earlier call did.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.finetuning.progress.Show`.
        **settings: see `LearningSettings`: epochs, batch_size, lr.

    Raises:
        TypeError: the model is no detector with losses, or a setting is not known.
        ValueError: the network has another number of classes than the data, or the folder has another run.
        FileNotFoundError: the data, or a photograph of them, are not there.
        Diverged: the loss is no number any more.

    Example:
        >>> model = trained(SSDlite320_MobileNet_V3_Large, num_classes=3)  # doctest: +SKIP
        >>> train_detector(model, "annotations.json", "runs/one", epochs=5)  # doctest: +SKIP
    """
    if not isinstance(model, LearningDetector):
        raise TypeError(f"train_detector() takes a detector with losses, such as FasterRCNN_ResNet50_FPN(), not a {type(model).__name__}")
    known = read_known(data, images, split)
    if model.num_classes != len(known.classes) + 1:
        raise ValueError(
            f"the data have {len(known.classes)} classes, and with the background the network needs num_classes={len(known.classes) + 1}; "
            f"it has {model.num_classes}"
        )
    if wanted := "masks" if getattr(model, "masks", False) else "keypoints" if getattr(model, "points", 0) else "":
        raise TypeError(
            f"{type(model).__name__} learns {wanted} too, which are not read from annotations; FasterRCNN_ResNet50_FPN learns boxes"
        )
    how = LearningSettings(**settings)
    device = next(model.parameters()).device

    def losses(numbers: Sequence[int], random: torch.Generator) -> dict[str, Tensor]:
        photographs: list[Tensor] = []
        targets: list[dict[str, Tensor]] = []
        for number in numbers:
            pixels, target = _example(known, number, how.flip and bool(torch.rand((), generator=random) < 0.5))
            photographs.append(pixels.to(device))
            targets.append({name: tensor.to(device) for name, tensor in target.items()})
        found: Any = model(photographs, targets)
        return found

    facts = {"network": type(model).__name__, "files": [path.name for path in known.photographs]}
    names = ("background", *known.classes)
    learnt = learn(model, len(known.photographs), losses, Path(out), how, facts, classes=names, restart=restart, progress=progress)
    model.called = names
    if model.checkpoint is not None:  # its metrics hold for the network that was measured
        model.checkpoint = replace(model.checkpoint, labels=None, metrics={}, metrics_data=None)
    return learnt


def read_known(data: str | os.PathLike[str] | Known, images: str | os.PathLike[str] | None = None, split: str | None = None) -> Known:
    """Read annotations in any of the forms that `train_detector` takes."""
    return data if isinstance(data, Known) else read_yolo(data) if is_yolo(data) else read_truths(data, images, split)


def _example(known: Known, number: int, mirrored: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a photograph, 0..1, and what is on it; boxes without area are left out, as pixels outside of the photograph."""
    path, truth = known.photographs[number], known.truths[number]
    pixels = torch.from_numpy(np.array(open_image(path, "RGB"))).permute(2, 0, 1).float() / 255
    height, width = pixels.shape[1:]
    first = 1 if known.kind == "voc" else 0  # VOC counts pixels from 1
    boxes = torch.from_numpy(truth.boxes).float() - torch.tensor([first, first, 0, 0])
    boxes = torch.minimum(boxes.clamp(min=0), torch.tensor([width, height, width, height], dtype=torch.float32))
    labels = torch.from_numpy(truth.classes) + 1
    kept = ((boxes[:, 2:] - boxes[:, :2]) >= 1).all(1) & ~torch.from_numpy(truth.crowds)
    boxes, labels = boxes[kept], labels[kept]
    if mirrored:
        pixels = pixels.flip(2)
        boxes = torch.stack([width - boxes[:, 2], boxes[:, 1], width - boxes[:, 0], boxes[:, 3]], 1)
    return pixels, {"boxes": boxes, "labels": labels}
