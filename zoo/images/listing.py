"""A list of images: a text file of paths or URLs, one a line, or JSON lines that have labels too."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

from weights.documents import read_json
from zoo.images import files
from zoo.images.source import Source

LINE_BYTES = 1 << 20
PLACES = ("url", "path", "image", "file", "file_name")
"""Where a JSON line holds the image's place, the first that is there."""
LABELS = ("label", "cls", "class")


class Listing(Source):
    """The images of a list, in its order; a path that is not absolute begins at the list's folder."""

    def __init__(self, where: str) -> None:
        data = files.read(where)
        try:
            lines = data.decode("utf-8-sig").splitlines()
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is no text: {error}; a list of images is one path or URL a line, in UTF-8") from None
        keys: list[str] = []
        labels: list[str | None] = []
        for number, line in enumerate(lines, 1):
            if line := line.strip():
                key, label = _entry(line, f"{where}, line {number}")
                keys.append(key)
                labels.append(label)
        if len(set(keys)) < len(keys):
            seen: set[str] = set()
            twice = next(key for key in keys if key in seen or seen.add(key))
            raise ValueError(f"{where} lists {twice} twice; take one of the lines out")
        for url in {key.partition("://")[0]: key for key in keys if files.is_url(key)}.values():
            files.filesystem(url)  # a package that is missing is told here, not by a process that decodes
        super().__init__(where, keys, labels, [blake3(data).hexdigest()])
        self.shared = self.shared and not any(key.startswith("memory://") for key in keys)
        folder = where.rpartition("/")[0]
        self._files = [key if files.is_url(key) or Path(key).is_absolute() or not folder else f"{folder}/{key}" for key in keys]

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        return files.read(self._files[index])


def _entry(line: str, place: str) -> tuple[str, str | None]:
    if not line.startswith("{"):
        return line, None
    told = read_json(line, place, "Mend that line", most_bytes=LINE_BYTES)
    key = next((told[k] for k in PLACES if isinstance(told.get(k), str)), None)
    if key is None:
        raise ValueError(f"{place} names no image: it needs one of {', '.join(PLACES)}")
    label = next((told[k] for k in LABELS if told.get(k) is not None), None)
    return key, None if label is None else str(label)
