"""A list of images: a text file of paths or URLs, one a line, or JSON lines that have labels too."""

from __future__ import annotations

import io
from pathlib import Path

from blake3 import blake3

from weights.documents import read_json
from zoo.images import files
from zoo.images.source import Source

LINE_BYTES = 1 << 20
LIST_BYTES = 4 << 30
PLACES = ("url", "path", "image", "file", "file_name")
"""Where a JSON line holds the image's place, the first that is there."""
LABELS = ("label", "cls", "class")


class Listing(Source):
    """The images of a list, in its order; a path that is not absolute begins at the list's folder."""

    def __init__(self, where: str) -> None:
        if (size := files.size(where)) > LIST_BYTES:
            raise ValueError(f"{where} has {size:,} bytes, and a list of images at most {LIST_BYTES:,}: divide it")
        data = files.read(where, 0, size)
        digest = blake3(data).hexdigest()
        keys: list[str] = []
        labels: list[str | None] = []
        try:
            for number, line in enumerate(io.TextIOWrapper(io.BytesIO(data), "utf-8-sig"), 1):  # never all lines beside the file
                if line := line.strip():
                    key, label = _entry(line, f"{where}, line {number}")
                    keys.append(key)
                    labels.append(label)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is no text: {error}; a list of images is one path or URL a line, in UTF-8") from None
        del data
        if len(set(keys)) < len(keys):
            seen: set[str] = set()
            twice = next(key for key in keys if key in seen or seen.add(key))
            raise ValueError(f"{where} lists {twice} twice; take one of the lines out")
        for url in {key.partition("://")[0]: key for key in keys if files.is_url(key)}.values():
            try:
                files.filesystem(url)  # a package that is missing is told here, not by a process that decodes
            except ValueError as error:
                raise ValueError(f"{where} can't be used: {error}") from None
        super().__init__(where, keys, labels, [digest])
        self.shared = self.shared and not any(key.startswith("memory://") for key in keys)
        self._folder = where.rpartition("/")[0]

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        key, folder = self._keys[index], self._folder
        return files.read(key if files.is_url(key) or Path(key).is_absolute() or not folder else f"{folder}/{key}")


def _entry(line: str, place: str) -> tuple[str, str | None]:
    if not line.startswith("{"):
        return line, None
    told = read_json(line, place, "Mend that line", most_bytes=LINE_BYTES)
    key = next((told[k] for k in PLACES if isinstance(told.get(k), str)), None)
    if key is None:
        raise ValueError(f"{place} names no image: it needs one of {', '.join(PLACES)}")
    label = next((told[k] for k in LABELS if told.get(k) is not None), None)
    return key, None if label is None else str(label)
