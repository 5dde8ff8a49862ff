"""Photographs whose pixels' classes are known: as Pascal VOC paints them, and as COCO outlines them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from weights.documents import misread, read_json, table
from weights.errors import MalformedFile
from weights.places import at_home
from zoo.detection.truths import MOST_JSON, bounded, folder_of, there
from zoo.images.preprocess import open_image
from zoo.segmentation.drawing import palette
from zoo.segmentation.measures import IGNORED

NAMES = "classes.txt"
VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable", "dog", "horse",
    "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
"""Pascal VOC's own classes, in the order of its colours."""


@dataclass(frozen=True, slots=True, eq=False)
class Painted:
    """Photographs and the class of each of their pixels.

    Attributes:
        photographs: their files, in order.
        classes: names of the classes, the background first.
        true: returns the map of the photograph of a number, int64 (H, W), `IGNORED` where nobody knows.
    """

    photographs: tuple[Path, ...]
    classes: tuple[str, ...]
    true: Callable[[int], np.ndarray]

    def part(self, numbers: Sequence[int]) -> Painted:
        """Return the photographs of these numbers alone."""
        return Painted(tuple(self.photographs[number] for number in numbers), self.classes, lambda number: self.true(numbers[number]))


def read_painted(
    data: str | os.PathLike[str], classes: Sequence[str] | None = None, images: str | os.PathLike[str] | None = None
) -> Painted:
    """Read what is known of photographs' pixels.

    Args:
        data: a folder as VOC has them, ``JPEGImages/a.jpg`` and ``SegmentationClass/a.png`` in VOC's colours; or a JSON file as COCO has
            them, whose things have outlines. Where outlines overlap, the later thing is above; crowds are ignored.
        classes: names of a folder's classes, the background first; those of its ``classes.txt`` if left out, else VOC's.
        images: the folder of a COCO file's photographs; looked for beside it if left out.

    Raises:
        FileNotFoundError: the file, the folder or a photograph is not there.
        MalformedFile, LimitExceeded: a file of annotations is damaged or too long.
        ValueError: there are no photographs with maps.
    """
    place = at_home(data)
    if not place.is_dir():
        return _outlined(place, None if images is None else at_home(images))
    if classes is None and (place / NAMES).is_file():
        lines = bounded(place / NAMES, MOST_JSON).decode("utf-8", errors="replace").splitlines()
        classes = [line.strip() for line in lines if line.strip()]
        classes = classes if "background" in classes[:1] else ["background", *classes]
    names = VOC if classes is None else tuple(classes)
    pairs = pairs_of(place)
    return Painted(tuple(one for one, _ in pairs), names, lambda number: true_map(pairs[number][1], len(names)))


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


def _outlined(file: Path, images: Path | None) -> Painted:
    todo = "Fetch it again"
    told = read_json(bounded(file, MOST_JSON), file, todo, most_bytes=MOST_JSON)
    with misread(f"{file} is no file of COCO's annotations", todo):
        parts = table(told, {"images": list, "annotations": list, "categories": list})
        kinds = {int(row["id"]): str(row["name"]) for row in parts["categories"]}
        order = {number: place for place, number in enumerate(sorted(kinds), start=1)}
        rows = {row["id"]: row for row in sorted(parts["images"], key=lambda row: row["id"])}
        sizes = [(int(row["width"]), int(row["height"])) for row in rows.values()]
        names = [str(row["file_name"]) for row in rows.values()]
        things: dict[Any, list[tuple[int, Any]]] = {number: [] for number in rows}
        for row in parts["annotations"]:
            kind = IGNORED if row.get("iscrowd", 0) else order[int(row["category_id"])]
            things[row["image_id"]].append((kind, row.get("segmentation")))
    if len(kinds) >= IGNORED:
        raise ValueError(f"{file} has {len(kinds)} classes, and a map tells {IGNORED - 1} apart")
    folder = images or folder_of(file, next(iter(names), ""))
    drawn = list(things.values())
    if not any(outline for found in drawn for _, outline in found):
        raise ValueError(f"{file} has no outlines: none of its things has a segmentation, so nothing says which pixels are theirs")
    return Painted(
        tuple(there(folder / name) for name in names),
        ("background", *(kinds[number] for number in sorted(kinds))),
        lambda number: _painted(drawn[number], sizes[number], f"{file}, the things of {names[number]}"),
    )


def _painted(things: Sequence[tuple[int, Any]], size: tuple[int, int], where: str) -> np.ndarray:
    """Paint outlines, lists of x and y or lengths of runs, into a map."""
    canvas = Image.new("L", size, 0)
    pen = ImageDraw.Draw(canvas)
    for kind, outline in things:
        if isinstance(outline, dict):
            inside = _from_runs(outline, size, where)
            canvas.paste(kind, mask=Image.fromarray(inside.astype(np.uint8) * 255))
            continue
        for polygon in outline or []:
            with misread(f"{where} have an outline that is none", "Fetch it again"):
                corners = [(float(x), float(y)) for x, y in zip(polygon[::2], polygon[1::2], strict=True)]
            if len(corners) >= 3:
                pen.polygon(corners, fill=kind)
    return np.asarray(canvas).astype(np.int64)


def _from_runs(outline: dict[str, Any], size: tuple[int, int], where: str) -> np.ndarray:
    """Return the pixels, bool (H, W), that COCO's runs mark: column by column, in turns outside and inside."""
    counts = outline.get("counts")
    if not isinstance(counts, list):
        raise MalformedFile(f"{where} have runs that are compressed to text; pycocotools' annToRLE and maskUtils.decode make them lists")
    with misread(f"{where} have runs that are none", "Fetch it again"):
        lengths = np.array(counts, dtype=np.int64)
        if (lengths < 0).any() or lengths.sum() != size[0] * size[1]:
            raise ValueError(f"runs of {lengths.sum()} pixels in a photograph of {size[0] * size[1]}")
    marks = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
    return marks.reshape(size[0], size[1]).T
