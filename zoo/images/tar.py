"""Tar files as WebDataset writes them: files that share a name up to its first dot are one sample."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from os.path import commonpath

from zoo.images import files
from zoo.images.source import SUFFIXES, Source

LABELS = ("label", "cls", "class")
"""Where a sample's .json holds its label, the first that is there."""


class Tar(Source):
    """Images of uncompressed tar files, shard after shard, in each in the order of the file.

    A sample's label is what its .cls or .json says; without them it is the folder at the top, as in a tar of class folders.
    Headers are read once, at opening; an image is read by its place, without what lies before it.
    """

    def __init__(self, where: str, shards: list[str]) -> None:
        names = short_names(shards)
        keys: list[str] = []
        labels: list[str | None] = []
        self._shards = shards
        self._places: list[tuple[int, int, int]] = []
        """Shard, first byte and size of every image."""
        for number, (shard, short) in enumerate(zip(shards, names, strict=True)):
            for name, start, size, label in _samples(shard):
                keys.append(f"{short}/{name}")
                labels.append(label)
                self._places.append((number, start, size))
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{where} holds {twice} twice, so its name tells no image from another; write it with names that differ")
        super().__init__(where, keys, labels, [*map(files.stamp, shards), *self._places])

    def read(self, index: int) -> bytes:
        """Return the bytes of one image."""
        shard, start, size = self._places[index]
        return files.read(self._shards[shard], start, start + size)


def short_names(shards: list[str]) -> list[str]:
    """Name shards by what tells them apart: their file names, with folders only where these repeat."""
    names = [shard.rpartition("/")[2] for shard in shards]
    if len(set(names)) == len(names):
        return names
    shared = commonpath(shards)
    return [shard[len(shared) :].lstrip("/") for shard in shards]


def _samples(shard: str) -> Iterator[tuple[str, int, int, str | None]]:
    """Give name, first byte, size and label of every image of a shard."""
    images: list[tuple[str, int, int]] = []
    told: str | None = None
    last = None
    with files.opened(shard) as file:
        for name, start, size, content in _members(shard, file):
            folder, slash, base = name.rpartition("/")
            sample = folder + slash + base.partition(".")[0]
            if sample != last:
                yield from _labelled(images, told)
                images, told, last = [], None, sample
            if name.lower().endswith(SUFFIXES):
                images.append((name, start, size))
            elif content is not None:
                told = _label(content, name, shard) or told
    yield from _labelled(images, told)


def _labelled(images: list[tuple[str, int, int]], told: str | None) -> Iterator[tuple[str, int, int, str | None]]:
    for name, start, size in images:
        yield name, start, size, told if told is not None else name.partition("/")[0] if "/" in name else None


def _members(shard: str, file: object) -> Iterator[tuple[str, int, int, bytes | None]]:
    """Give name, first byte and size of every file of a shard, and the content of those that may hold a label."""
    whole = files.size(shard)
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for member in archive:
                archive.members.clear()  # it keeps every header otherwise
                if not member.isreg():
                    continue
                if member.offset_data + member.size > whole:
                    raise ValueError(f"{shard} is cut off: {member.name} ends behind the file's {whole:,} bytes; get it again")
                content = None
                if member.name.lower().endswith((".cls", ".json")):
                    taken = archive.extractfile(member)
                    content = taken.read() if taken is not None else None
                yield member.name.removeprefix("./"), member.offset_data, member.size, content
    except (tarfile.TarError, EOFError) as error:
        with files.opened(shard) as again:
            packed = again.read(6)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
        why = "it is compressed, and images are read by their place in it: unpack it once" if packed else f"{error}; get it again"
        raise ValueError(f"{shard} can't be read as a tar file: {why}") from None


def _label(content: bytes, name: str, shard: str) -> str | None:
    text = content.decode("utf-8", "replace").strip()
    if not name.lower().endswith(".json"):
        return text or None
    try:
        told = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{name} in {shard} is no JSON: {error}") from None
    found = next((told[k] for k in LABELS if told.get(k) is not None), None) if isinstance(told, dict) else told
    return str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None
