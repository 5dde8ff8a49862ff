"""Photographs whose things are known, as COCO and Pascal VOC keep them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from weights.documents import misread, read_json, table
from weights.errors import LimitExceeded, MalformedFile
from weights.places import at_home
from weights.regular import open_regular
from zoo.detection.measures import Truth

MOST_JSON, MOST_XML = 1 << 30, 1 << 20
"""Bytes of a file of annotations."""
NEXT_TO = ("images", "val2017", "train2017", "")
"""Folders beside a COCO file, or beside its folder, in which its photographs are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """Photographs and what is on them.

    Attributes:
        kind: "coco" or "voc", whose conventions its measure has.
        photographs: their files, in order.
        truths: what is on each; classes are numbers of `classes`.
        classes: names of the classes.
    """

    kind: str
    photographs: tuple[Path, ...]
    truths: tuple[Truth, ...]
    classes: tuple[str, ...]

    def part(self, numbers: Sequence[int]) -> Known:
        """Return the photographs of these numbers alone."""
        return replace(
            self, photographs=tuple(self.photographs[number] for number in numbers), truths=tuple(self.truths[number] for number in numbers)
        )


def read_truths(data: str | os.PathLike[str], images: str | os.PathLike[str] | None = None, split: str | None = None) -> Known:
    """Read what is known of photographs.

    Args:
        data: a JSON file as COCO has them, instances_val2017.json; or a folder as VOC has them, with Annotations and JPEGImages.
        images: the folder of a COCO file's photographs; it is looked for beside the file if left out.
        split: of a VOC folder: a list in ImageSets/Main, "test"; every annotation if left out.

    Raises:
        FileNotFoundError: the file, the folder or a photograph is not there.
        MalformedFile, LimitExceeded: a file of annotations is damaged or too long.
        ValueError: the data are neither.
    """
    place = at_home(data)
    if place.is_dir():
        if not (place / "Annotations").is_dir():
            raise ValueError(f"{place} is no folder as VOC has them, with Annotations and JPEGImages; of COCO's, name the JSON file")
        return _voc(place, split)
    if split is not None:
        raise ValueError(f"split is of a VOC folder, and {place} is a file: leave it out")
    return _coco(place, None if images is None else at_home(images))


def _coco(file: Path, images: Path | None) -> Known:
    todo = "Fetch it again"
    told = read_json(bounded(file, MOST_JSON), file, todo, most_bytes=MOST_JSON)
    with misread(f"{file} is no file of COCO's annotations", todo):
        parts = table(told, {"images": list, "annotations": list, "categories": list})
        kinds = {int(row["id"]): str(row["name"]) for row in parts["categories"]}
        order = {number: place for place, number in enumerate(sorted(kinds))}
        rows = {row["id"]: str(row["file_name"]) for row in sorted(parts["images"], key=lambda row: row["id"])}
        things: dict[Any, list[tuple[list[float], int, float, bool]]] = {number: [] for number in rows}
        for row in parts["annotations"]:
            left, top, width, height = (float(edge) for edge in row["bbox"])
            area = float(row.get("area", width * height))
            box = [left, top, left + width, top + height]
            things[row["image_id"]].append((box, order[int(row["category_id"])], area, bool(row.get("iscrowd", 0))))
    folder = images or folder_of(file, next(iter(rows.values()), ""))
    photographs = tuple(there(folder / name) for name in rows.values())
    names = tuple(kinds[number] for number in sorted(kinds))
    return Known("coco", photographs, tuple(_truth(found) for found in things.values()), names)


def folder_of(file: Path, name: str) -> Path:
    """Find the folder of a COCO file's photographs by the first of them, beside the file; FileNotFoundError where none has it."""
    beside = [folder / inner for folder in (file.parent, file.parent.parent) for inner in NEXT_TO]
    found = next((folder for folder in beside if (folder / name).is_file()), None)
    if found is None:
        raise FileNotFoundError(f"'{name}', the first photograph of {file}, lies in none of the folders beside it; name theirs: images=…")
    return found


def _voc(folder: Path, split: str | None) -> Known:
    files = sorted((folder / "Annotations").glob("*.xml"))
    if split is not None:
        listed = bounded(folder / "ImageSets" / "Main" / f"{split}.txt", MOST_JSON).decode("utf-8", errors="replace").split("\n")
        files = [folder / "Annotations" / f"{line.split()[0]}.xml" for line in listed if line.strip()]
    if not files:
        raise ValueError(f"{folder} has no annotations{f' in the split {split!r}' if split else ''}")
    read = [_voc_photograph(file) for file in files]
    names = tuple(sorted({name for _, things in read for name, _, _ in things}))
    photographs = tuple(there(folder / "JPEGImages" / name) for name, _ in read)
    truths = [[(box, names.index(name), _area(box), difficult) for name, box, difficult in things] for _, things in read]
    return Known("voc", photographs, tuple(map(_truth, truths)), names)


def _area(box: Sequence[float]) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _voc_photograph(file: Path) -> tuple[str, list[tuple[str, list[float], bool]]]:
    data = bounded(file, MOST_XML)
    if b"<!" in data:  # a document type may say that a word is a thousand others
        raise MalformedFile(f"{file} has a document type or a comment, which no annotation of VOC has")
    with misread(f"{file} is no annotation as VOC has them", "Fetch it again"):
        try:
            root = ElementTree.fromstring(data)
        except ElementTree.ParseError as error:
            raise MalformedFile(f"{file} is no XML: {error}") from error
        things: list[tuple[str, list[float], bool]] = []
        for thing in root.iterfind("object"):
            box = [float(_word(thing, f"bndbox/{edge}")) for edge in ("xmin", "ymin", "xmax", "ymax")]
            things.append((_word(thing, "name"), box, (thing.findtext("difficult") or "0").strip() == "1"))
        return _word(root, "filename"), things


def _word(inside: ElementTree.Element, path: str) -> str:
    found = inside.findtext(path)
    if found is None or not found.strip():
        raise KeyError(f"{path} is missing")
    return found.strip()


def _truth(things: Sequence[tuple[list[float], int, float, bool]]) -> Truth:
    columns: Callable[[int], list[Any]] = lambda at: [one[at] for one in things]  # noqa: E731
    return Truth.of(columns(0), columns(1), columns(2), columns(3))


def bounded(file: Path, most: int) -> bytes:
    """Read a regular file of at most so many bytes; LimitExceeded says of a longer one how many it may have."""
    with os.fdopen(open_regular(file, follow=True), "rb") as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise LimitExceeded(f"{file} has more than {most:,} bytes, which no such file has")
    return data


def there(photograph: Path) -> Path:
    """Return the file; FileNotFoundError says that it is annotated, and missing."""
    if not photograph.is_file():
        raise FileNotFoundError(f"'{photograph}' is not there, and it is annotated")
    return photograph
