"""A folder of images, nested as it likes; the folders at its top are the classes."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from zoo.images import files
from zoo.images.kinds import is_image, unreadable
from zoo.images.source import LeftOut, Source

log = logging.getLogger("zoo")


class Folder(Source):
    """Image files below a folder or URL, sorted by the parts of their path; every other file is counted, or left out with a reason."""

    def __init__(self, where: str, found: list[files.Found] | None = None, refused: Sequence[tuple[str, str]] = ()) -> None:
        if found is None:
            found = list(files.walk(where, refused := []))
        images, self.left_out, self.others = sorted_out(found, refused)
        names = [files.readable(f.name) for f in images]
        labels = [name.partition("/")[0] if "/" in name else None for name in names]
        refused_in = {files.readable(name).partition("/")[0] for name, _ in refused}
        empty = set(files.folders(where)) - {label for label in labels if label} - refused_in
        super().__init__(where, names, labels, (f.stamp for f in images), empty)
        self._files = [f.where for f in images]

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        return files.read(self._files[index])


def sorted_out(found: Iterable[files.Found], refused: Iterable[tuple[str, str]]) -> tuple[list[files.Found], list[LeftOut], dict[str, int]]:
    """Divide what `files.walk` found: images that can be decoded, sorted; what is left out, sorted; how many others of each ending."""
    images: list[files.Found] = []
    left_out: list[LeftOut] = []
    others: Counter[str] = Counter()
    for file in found:
        if not is_image(file.name):
            others[ending(file.name)] += 1
        elif why := unreadable(file.name):
            left_out.append(LeftOut(files.readable(file.name), why))
        else:
            images.append(file)
    for name, why in refused:
        if name.endswith("/") or is_image(name) or not ending(name):  # a link without an ending was to be a folder, perhaps
            left_out.append(LeftOut(files.readable(name).removesuffix("/"), why))
        else:
            others[ending(name)] += 1
    return sorted(images, key=lambda f: f.name.split("/")), sorted(left_out), dict(others)


def image_files(folder: Path) -> list[Path]:
    """List the image files below a local folder, nested as it likes; what is left out of them stands in the log.

    Raises:
        OSError: the folder can't be listed.
    """
    refused: list[tuple[str, str]] = []
    images, left_out, _ = sorted_out(files.walk(str(folder), refused), refused)
    for key, why in left_out:
        log.warning("%s: %s is left out: %s", folder, key, why)
    return [Path(image.where) for image in images]


def ending(name: str) -> str:
    """Return the ending of a file's name in lower case, ".txt"; "" where it has none."""
    return os.path.splitext(name.lower())[1]  # noqa: PTH122  (thousands of names)
