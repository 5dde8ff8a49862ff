"""The user's images and their labels, whatever they were given as."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from weights.places import at_home
from zoo.embedding.probing import told_labels
from zoo.finetuning.splits import parts_of
from zoo.images import Source, open_source
from zoo.images.files import is_url
from zoo.images.preprocess import open_image

LEAST = 10
"""Images of a class that are drawn at least, where it has them and all classes' together are not too many."""


class InMemory(Source):
    """Images that a program holds: paths, files' bytes, Pillow's images, uint8 arrays (H, W, 3)."""

    def __init__(self, images: Sequence[Any]) -> None:
        self._data: list[bytes | Path] = []
        keys: list[str] = []
        stamps: list[object] = []
        for number, image in enumerate(images):
            if isinstance(image, str | os.PathLike):
                path = at_home(image)
                self._data.append(path)
                keys.append(f"{number:05d} {path.name}")
                stamps.append((str(path.absolute()), *_stamp(path)))
                continue
            data = bytes(image) if isinstance(image, bytes | bytearray) else _png(image, number)
            self._data.append(data)
            keys.append(f"{number:05d}")
            stamps.append(blake3(data).hexdigest())
        super().__init__("memory://images", keys, [None] * len(keys), stamps)

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        held = self._data[index]
        return held.read_bytes() if isinstance(held, Path) else held


class Some(Source):
    """A part of another source, in its order."""

    def __init__(self, source: Source, indices: Sequence[int]) -> None:
        self._source, self._indices = source, list(indices)
        items = [source[index] for index in self._indices]
        super().__init__(source.where, [i.key for i in items], [i.label for i in items], [source.fingerprint, *self._indices])
        self.shared, self.left_out, self.others = source.shared, source.left_out, source.others

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file."""
        return self._source.read(self._indices[index])


@dataclass(frozen=True)
class Pictures:
    """What is compared on.

    Attributes:
        source: the images.
        labels: one for each; None where it has none. None as a whole where nobody knows any.
        asked: how many images there were, of which `source` may be a part.
        fewer: classes that have fewer than `LEAST` images here, because of theirs fewer were drawn.
        left: classes of which no image was drawn, for there are too many classes.
    """

    source: Source
    labels: list[str | None] | None
    asked: int
    fewer: int = 0
    left: int = 0


def opened(images: Any, labels: Any, most: int, folds: int = 2) -> Pictures:
    """Open images and labels, and draw `most` of them, each class's share kept, where there are more; see `drawn`.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError, TypeError: images or labels can't be used; the message says what to do.
    """
    source = _source(images)
    told = _labels(source, labels)
    if len(source) <= most:
        return Pictures(source, told, len(source))
    chosen = drawn(told if told is not None else [None] * len(source), most, folds)
    if told is None:
        return Pictures(Some(source, chosen), None, len(source))
    labelled = [told[i] for i in chosen]
    had, has = (Counter(label for label in those if label is not None) for those in (told, labelled))
    fewer = sum(has[label] < min(LEAST, count) for label, count in had.items() if label in has)
    return Pictures(Some(source, chosen), labelled, len(source), fewer, len(had) - len(has))


def drawn(labels: Sequence[str | None], most: int, folds: int = 2) -> list[int]:
    """Draw `most` indices at most, the same every time: each class's share, and of each class `LEAST` where it has them.

    Where that were more than `most`, each class has fewer, and at least one for each of `folds`; where even that were more, some classes
    have `LEAST` or `folds`, and the others none.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).tolist()
    counts = Counter(labels[index] for index in order)
    classes = [label for label in counts if label is not None] or list(counts)
    full = min(max(LEAST, folds), most // 2)
    if sum(min(full, counts[label]) for label in classes) <= most:
        least = full
    elif (least := most // len(classes)) < folds:
        least = full
        reached = accumulate(min(full, counts[label]) for label in classes)
        classes = [label for label, images in zip(classes, reached, strict=True) if images <= most]
        counts = Counter({label: counts[label] for label in classes})
    known = set(classes)
    room = _shared(counts, {label: min(count, least) if label in known else 0 for label, count in counts.items()}, most)
    found = []
    for index in order:
        if room.get(labels[index], 0) > 0:
            room[labels[index]] -= 1
            found.append(index)
    return sorted(found)


def _shared(counts: Mapping[str | None, int], least: Mapping[str | None, int], most: int) -> dict[str | None, int]:
    """Give each class its share of `most`, and its least before; what is left of `most` then goes by the shares."""
    total = sum(counts.values())
    wanted = {label: max(min(count, round(most * count / total)) - least[label], 0) for label, count in counts.items()}
    left, asked = max(most - sum(least.values()), 0), sum(wanted.values())
    if asked <= left:
        return {label: least[label] + more for label, more in wanted.items()}
    given = {label: more * left // asked for label, more in wanted.items()}
    rest = left - sum(given.values())
    for label in sorted(wanted, key=lambda label: -(wanted[label] * left % asked))[:rest]:
        given[label] += 1
    return {label: least[label] + more for label, more in given.items()}


def _source(images: Any) -> Source:
    if isinstance(images, Source):
        return images
    if isinstance(images, str | os.PathLike):
        root = os.fspath(images)
        root = root if is_url(root) else str(at_home(root))
        return open_source(parts_of(root).get("train", root))
    if isinstance(images, Sequence) or hasattr(images, "__iter__"):
        listed = list(images)
        if not listed:
            raise ValueError("there are no images in the list; give a folder of images, or some images")
        return InMemory(listed)
    raise TypeError(f"images are a folder, what zoo.images.open_source takes, or a list of images; got {type(images).__name__}")


def _labels(source: Source, labels: Any) -> list[str | None] | None:
    if labels is False:
        return None
    if labels is None:
        told = [item.label for item in source]
        return told if any(label is not None for label in told) else None
    if isinstance(labels, str | os.PathLike | Mapping):
        known = told_labels(labels) or {}
        found = [known.get(item.key) for item in source]
        if not any(label is not None for label in found):
            raise ValueError(f"none of the labels' keys is an image of {source.where}; a key is like {source[0].key!r}")
        return [None if label is None else str(label) for label in found]
    if hasattr(labels, "tolist"):
        labels = labels.tolist()
    if not isinstance(labels, Sequence):
        raise TypeError(f"labels are a list with one a image, {{key: label}}, a file of these, or False; got {type(labels).__name__}")
    if len(labels) != len(source):
        raise ValueError(f"there are {len(source):,} images and {len(labels):,} labels; give one label for each image, in their order")
    return [None if label is None else str(label) for label in labels]


def _png(image: Any, number: int) -> bytes:
    """Encode a picture without loss, so that it goes the way of all others."""
    try:
        picture = open_image(image)
    except (TypeError, ValueError, OSError) as error:
        raise ValueError(f"image {number} of the list can't be used: {error}") from None
    file = io.BytesIO()
    picture.convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0  # embedding tells it
    return status.st_size, status.st_mtime_ns
