"""What a source of images is, wherever its bytes lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from blake3 import blake3

LABEL_CHARS = 4096
"""Of a class's name."""


@dataclass(frozen=True, slots=True)
class Item:
    """One image of a source.

    Attributes:
        key: unique and stable in its source: "cat/001.jpg", "shard-0003.tar/000017.jpg", "part-0.parquet#12".
        label: its class's name, or None where it has none.
    """

    key: str
    label: str | None


class LeftOut(NamedTuple):
    """What looks like an image, or a folder of some, and can't be used.

    Attributes:
        key: its name in the source, as an image's.
        why: it is left out.
    """

    key: str
    why: str


class Source:
    """Images by their index, in an order that depends on nothing but the source; `open_source` makes one.

    It can be pickled, and `read` may be called from any thread and process. Iterating gives the items.

    Attributes:
        where: what `open_source` was called with.
        classes: the labels that occur, sorted; [] if there are none.
        empty: folders of classes that hold no image, sorted; other kinds of source can't have any.
        fingerprint: changes where the images' names, labels, sizes, times or order do; no image is read for it.
        left_out: what looks like images and isn't among them, with the reason of each: pipes, links to themselves, folders without
            permission, kinds that nothing installed here decodes.
        others: how many other files lie beside the images, by their endings: {".txt": 3}.
        shared: whether another process finds the same bytes; only those in this process's memory are private to it.
    """

    left_out: Sequence[LeftOut] = ()
    others: Mapping[str, int] = MappingProxyType({})

    def __init__(self, where: str, keys: Sequence[str], labels: Sequence[str | None], stamps: Iterable[object], empty: Iterable[str] = ()):
        if (longest := max((len(label) for label in labels if label is not None), default=0)) > LABEL_CHARS:
            raise ValueError(f"{where} has a label of {longest:,} characters; the name of a class has at most {LABEL_CHARS:,}")
        self.where = where
        self.classes = sorted({label for label in labels if label is not None})
        self.empty = sorted(empty)
        self.shared = not where.startswith("memory://")
        self._keys, self._labels = keys, labels
        digest = blake3()
        for part in (keys, labels, stamps):
            for value in part:
                digest.update(f"{value!r}\n".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, index: int) -> Item:
        return Item(self._keys[index], self._labels[index])

    def __iter__(self) -> Iterator[Item]:
        return (Item(key, label) for key, label in zip(self._keys, self._labels, strict=True))

    def read(self, index: int) -> bytes:
        """Return the bytes of one image's file.

        Raises:
            FileNotFoundError: it is there no longer.
            OSError: it can't be read.
        """
        raise NotImplementedError
