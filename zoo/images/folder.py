"""A folder of images, nested as it likes; the folders at its top are the classes."""

from __future__ import annotations

from pathlib import Path

from zoo.images import files
from zoo.images.source import SUFFIXES, Source


class Folder(Source):
    """Image files below a folder or URL, sorted by the parts of their path."""

    def __init__(self, where: str, found: list[files.Found] | None = None) -> None:
        found = list(files.walk(where)) if found is None else found
        images = sorted((f for f in found if f.name.lower().endswith(SUFFIXES)), key=lambda f: f.name.split("/"))
        names = [f.name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for f in images]  # a name may be any bytes
        labels = [name.partition("/")[0] if "/" in name else None for name in names]
        super().__init__(where, names, labels, (f.stamp for f in images), _tops(where) - {label for label in labels if label})
        self._files = [f.where for f in images]

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        return files.read(self._files[index])


def _tops(where: str) -> set[str]:
    """Name the folders at the top, those without images too; stores without folders of their own have no empty ones."""
    if files.is_url(where):
        fs, path = files.filesystem(where)
        return {entry["name"].rstrip("/").rpartition("/")[2] for entry in fs.ls(path, detail=True) if entry["type"] == "directory"}
    return {entry.name for entry in Path(where).iterdir() if entry.is_dir() and not entry.name.startswith(".")}
