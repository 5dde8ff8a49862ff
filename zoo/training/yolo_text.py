"""Photographs whose things are known as YOLO's text files tell them: a line each, class and box in parts of the photograph."""

from __future__ import annotations

import os
from pathlib import Path

from weights.errors import LimitExceeded, MalformedFile
from weights.places import at_home
from weights.regular import open_regular
from zoo.detection.measures import Truth
from zoo.detection.truths import Known
from zoo.images.folder import image_files
from zoo.images.preprocess import picture_size

MOST = 1 << 22
"""Bytes of a file of labels."""
NAMES = "classes.txt"


def is_yolo(data: str | os.PathLike[str]) -> bool:
    """Tell a folder with ``images`` and ``labels`` inside."""
    place = at_home(data)
    return (place / "images").is_dir() and (place / "labels").is_dir()


def read_yolo(data: str | os.PathLike[str]) -> Known:
    """Read a folder with ``images``, ``labels`` and ``classes.txt``, the names of the classes, one a line.

    A photograph ``images/a.jpg`` has its things in ``labels/a.txt``: class, centre, width and height, in parts of the photograph. One
    without such a file has none.

    Raises:
        FileNotFoundError: there is no ``classes.txt``.
        MalformedFile, LimitExceeded: a file is damaged or too long.
        ValueError: there are no photographs.
    """
    folder = at_home(data)
    if not (folder / NAMES).is_file():
        raise FileNotFoundError(f"{folder} has no {NAMES}; write the names of its classes there, one a line")
    names = tuple(line.strip() for line in _text(folder / NAMES).splitlines() if line.strip())
    photographs = tuple(sorted(image_files(folder / "images")))
    if not photographs:
        raise ValueError(f"{folder / 'images'} has no photographs")
    return Known(
        "coco", photographs, tuple(_truth(path, folder / "labels" / f"{path.stem}.txt", len(names)) for path in photographs), names
    )


def _truth(photograph: Path, file: Path, count: int) -> Truth:
    width, height = picture_size(photograph)
    boxes: list[list[float]] = []
    classes: list[int] = []
    for number, line in enumerate(_text(file).splitlines() if file.is_file() else [], start=1):
        if not line.strip():
            continue
        try:
            kind, x, y, w, h = line.split()
            place, (x, y, w, h) = int(kind), (float(side) for side in (x, y, w, h))
        except ValueError:
            raise MalformedFile(f"{file}, line {number}: it should be a class and four numbers, not {line[:60]!r}") from None
        if not 0 <= place < count or not all(-1e-3 <= side <= 1.001 for side in (x, y, w, h)):
            raise MalformedFile(f"{file}, line {number}: the class is 0 to {count - 1} and the rest 0 to 1, not {line[:60]!r}")
        boxes.append([(x - w / 2) * width, (y - h / 2) * height, (x + w / 2) * width, (y + h / 2) * height])
        classes.append(place)
    return Truth.of(boxes, classes)


def _text(file: Path) -> str:
    with os.fdopen(open_regular(file, follow=True), "rb") as opened:
        data = opened.read(MOST + 1)
    if len(data) > MOST:
        raise LimitExceeded(f"{file} has more than {MOST:,} bytes, which no such file has")
    return data.decode("utf-8", errors="replace")
