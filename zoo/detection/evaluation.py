"""`evaluate`: how well a detector finds what is known to be on photographs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weights.arguments import forgiving, whole
from weights.progress import Show, show_of
from zoo.detection.detector import Detector
from zoo.detection.measures import Answer, Precision, coco_precision, voc_precision
from zoo.detection.run import detect
from zoo.detection.truths import Known, read_truths

LEAST = 0.001
"""Score from which on answers are measured: a higher one cuts the recall."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How well a detector does.

    Attributes:
        precision: COCO's numbers, 0 to 1.
        voc: Pascal VOC's mean average precision at an overlap of .5, 0 to 1; None of COCO's data.
        classes: average precision of each class by its name, by COCO's measure, of VOC's data by VOC's.
        photographs: how many were looked at.
        unknown: classes of the data that the network does not know; none of their things can be found, and they count.
    """

    precision: Precision
    voc: float | None
    classes: Mapping[str, float]
    photographs: int
    unknown: tuple[str, ...]


@forgiving
def evaluate(
    model: Detector,
    data: str | os.PathLike[str] | Known,
    *,
    images: str | os.PathLike[str] | None = None,
    split: str | None = None,
    overlap: float | None = None,
    batch_size: int = 8,
    points: int | None = None,
    progress: bool | Show = True,
) -> Evaluation:
    """Measure a detector on photographs whose things are known.

    Classes are matched by their names: those of the network that the data don't have count nowhere.

    Args:
        model: a detector, as `trained` returns it, on any device.
        data: a JSON file as COCO has them or a folder as VOC has them, or what `read_truths` returns.
        images: the folder of a COCO file's photographs; looked for beside it if left out.
        split: of a VOC folder, "test"; every annotation if left out.
        overlap: as `detect` takes it.
        batch_size: photographs that go through the network at once.
        points: 11 for VOC 2007's measure; the area under the curve if left out.
        progress: whether a terminal sees a bar; or what shows the photographs instead, a `weights.progress.Show`.

    Raises:
        FileNotFoundError: the data, or a photograph of them, are not there.
        ValueError: the data can't be used, or have no class that the network knows.

    Example:
        >>> evaluate(trained(YoloFastest), "annotations/instances_val2017.json").precision.ap50  # doctest: +SKIP
    """
    batch_size = whole("batch_size", batch_size)
    known = data if isinstance(data, Known) else read_truths(data, images, split)
    names = model.names_of(range(model.num_classes))
    numbers = _matched(names, known.classes)
    answers: list[Answer] = []
    with show_of(progress)("measuring", len(known.photographs), 0) as advance:
        for start in range(0, len(known.photographs), batch_size):
            batch = list(known.photographs[start : start + batch_size])
            for found in detect(model, batch, LEAST, overlap, batch_size):
                place = numbers[found.labels.numpy()]
                boxes = found.boxes.double().numpy() + (np.array([1, 1, 0, 0]) if known.kind == "voc" else 0)
                answers.append(Answer.of(boxes[place >= 0], place[place >= 0], found.scores.double().numpy()[place >= 0]))
            advance(len(batch))
    precision = coco_precision(known.truths, answers)
    each = voc_precision(known.truths, answers, points=points) if known.kind == "voc" else precision.classes
    unknown = tuple(name for number, name in enumerate(known.classes) if number not in numbers)
    voc = float(np.mean(list(each.values()))) if known.kind == "voc" and each else None
    return Evaluation(precision, voc, {known.classes[kind]: value for kind, value in each.items()}, len(answers), unknown)


SAME = {"aeroplane": "airplane", "motorbike": "motorcycle", "tvmonitor": "tv", "sofa": "couch", "pottedplant": "potted plant"}
SAME |= {"diningtable": "dining table"}
"""VOC's and Darknet's names for COCO's things."""


def _matched(names: Sequence[str], classes: Sequence[str]) -> np.ndarray:
    """Return the number that each class of the network has among the data's, -1 where they don't have it.

    Raises:
        ValueError: they have none.
    """
    told = {SAME.get(name.lower(), name.lower()): number for number, name in enumerate(classes)}
    found = np.array([told.get(SAME.get(name.lower(), name.lower()), -1) for name in names])
    if not (found >= 0).any():
        theirs, ours = (", ".join(some[:5]) + (", …" if len(some) > 5 else "") for some in (classes, names))
        raise ValueError(f"the data have {theirs}, and the network knows none of these: it knows {ours}")
    return found
