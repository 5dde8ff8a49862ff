"""A folder of images, nested as it likes; the folders at its top are the classes."""

from __future__ import annotations

from zoo.images import files
from zoo.images.source import SUFFIXES, Source


class Folder(Source):
    """Image files below a folder or URL, sorted by the parts of their path."""

    def __init__(self, where: str, found: list[files.Found] | None = None) -> None:
        found = list(files.walk(where)) if found is None else found
        images = sorted((f for f in found if f.name.lower().endswith(SUFFIXES)), key=lambda f: f.name.split("/"))
        names = [files.readable(f.name) for f in images]
        labels = [name.partition("/")[0] if "/" in name else None for name in names]
        empty = set(files.folders(where)) - {label for label in labels if label}
        super().__init__(where, names, labels, (f.stamp for f in images), empty)
        self._files = [f.where for f in images]

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        return files.read(self._files[index])
