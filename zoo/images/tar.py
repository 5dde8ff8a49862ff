"""Tar files as WebDataset writes them: files that share a name up to its first dot are one sample."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from os.path import commonpath
from posixpath import dirname, join, normpath
from typing import NamedTuple

from weights.documents import MISREAD, read_json, reason
from weights.errors import MalformedFile
from zoo.images import files
from zoo.images.folder import ending
from zoo.images.kinds import is_image, unreadable
from zoo.images.source import LeftOut, Source

LABELS = ("label", "cls", "class")
"""Where a sample's .json holds its label, the first that is there."""
LABEL_BYTES = 1 << 20
"""Of a file beside an image that may hold its label."""
LINKS = 8
"""That are followed from one to the next."""


class Tar(Source):
    """Images of uncompressed tar files, shard after shard, in each in the order of the file.

    A sample's label is what its .cls or .json says; without them it is the folder at the top, as in a tar of class folders.
    Links lead to another file of the shard. Headers are read once, at opening; an image is read by its place, without what lies before it.
    """

    def __init__(self, where: str, shards: list[str]) -> None:
        names = short_names(shards)
        keys: list[str] = []
        labels: list[str | None] = []
        self._shards = shards
        self._places: list[tuple[int, int, int]] = []
        """Shard, first byte and size of every image; -1 for a link to nothing."""
        self.left_out, self.others = [], Counter[str]()
        for number, (shard, short) in enumerate(zip(shards, names, strict=True)):
            for name, start, size, label in _samples(shard, self.others):
                if why := unreadable(name):
                    self.left_out.append(LeftOut(f"{short}/{name}", why))
                    continue
                keys.append(f"{short}/{name}")
                labels.append(label)
                self._places.append((number, start, size))
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ValueError(f"{where} holds {twice} twice, so its name tells no image from another; write it with names that differ")
        super().__init__(where, keys, labels, [*map(files.stamp, shards), *self._places])

    def read(self, index: int) -> bytes:
        """Return the bytes of one image.

        Raises:
            FileNotFoundError: it is a link to something that is not in its shard.
        """
        shard, start, size = self._places[index]
        if start < 0:
            raise FileNotFoundError(f"{self._keys[index]} is a link to a file that is not in {self._shards[shard]}, or in parts")
        return files.read(self._shards[shard], start, start + size)


def short_names(shards: list[str]) -> list[str]:
    """Name shards by what tells them apart: their file names, with folders only where these repeat."""
    names = [shard.rpartition("/")[2] for shard in shards]
    if len(set(names)) == len(names):
        return names
    shared = commonpath(shards)
    return [shard[len(shared) :].lstrip("/") for shard in shards]


def _samples(shard: str, others: Counter[str]) -> Iterator[tuple[str, int, int, str | None]]:
    """Give name, first byte, size and label of every image of a shard; count the files that are neither images nor labels."""
    images: list[tuple[str, int, int]] = []
    told: str | None = None
    last = None
    with files.opened(shard) as file:
        members = _members(shard, file)
    known = {member.name: member for member in members}
    for member in members:
        name, real = files.readable(member.name), _real(member, known)
        folder, slash, base = name.rpartition("/")
        sample = folder + slash + base.partition(".")[0]
        if sample != last:
            yield from _labelled(images, told)
            images, told, last = [], None, sample
        if is_image(name):
            images.append((name, real.start, real.size) if real is not None else (name, -1, 0))
        elif real is not None and real.told is not None:
            told = real.told or told
        else:
            others[ending(name)] += 1
    yield from _labelled(images, told)


def _real(member: _Member, known: dict[str, _Member]) -> _Member | None:
    """Follow links to a file of the same shard; None where they lead elsewhere or in a circle."""
    for _ in range(LINKS):
        if member.link is None:
            return member
        if member.link not in known:
            return None
        member = known[member.link]
    return None


def _labelled(images: list[tuple[str, int, int]], told: str | None) -> Iterator[tuple[str, int, int, str | None]]:
    for name, start, size in images:
        yield name, start, size, told if told is not None else name.partition("/")[0] if "/" in name else None


class _CutOff(ValueError):
    """A shard ends in one of its files."""


class _Member(NamedTuple):
    """A file of a shard: its name, first byte and size, the name it is a link to, and the label that it tells, "" where it tells none."""

    name: str
    start: int
    size: int
    link: str | None = None
    told: str | None = None


def _members(shard: str, file: object) -> list[_Member]:
    """List the files and links of a shard, without what macOS puts beside each file."""
    whole = files.size(shard)
    found: list[_Member] = []
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:  # pyright: ignore[reportCallIssue, reportArgumentType]
            for member in archive:
                archive.members.clear()  # it keeps every header otherwise
                name = normpath(member.name)
                if any(part.startswith("._") or part == "__MACOSX" for part in name.split("/")):
                    continue
                if member.islnk() or member.issym():  # a hard link's target begins at the top, a symbolic one's at its folder
                    target = member.linkname if member.islnk() else join(dirname(name), member.linkname)
                    found.append(_Member(name, 0, 0, normpath(target)))
                elif member.issparse():  # its bytes lie in pieces
                    found.append(_Member(name, 0, 0, ""))
                elif member.isreg():
                    if member.offset_data + member.size > whole:
                        raise _CutOff(f"{shard} is cut off: {files.readable(name)} ends behind the file's {whole:,} bytes; get it again")
                    told = None
                    if name.lower().endswith((".cls", ".json")):
                        taken = archive.extractfile(member)
                        told = taken and (_label(taken.read(LABEL_BYTES + 1), files.readable(name), shard) or "")
                    found.append(_Member(name, member.offset_data, member.size, None, told))
    except (_CutOff, MalformedFile):
        raise
    except (tarfile.TarError, *MISREAD) as error:  # headers of headers end in a RecursionError, and sizes in any other
        with files.opened(shard) as again:
            packed = again.read(6)[:2] in (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")
        why = "it is compressed, and images are read by their place in it: unpack it once" if packed else f"{reason(error)}; get it again"
        raise ValueError(f"{shard} can't be read as a tar file: {why}") from None
    return found


def _label(content: bytes, name: str, shard: str) -> str | None:
    text = content[:LABEL_BYTES].decode("utf-8", "replace").strip()
    if not name.lower().endswith(".json"):
        return text or None
    told = read_json(content, f"{name} in {shard}", "Mend or leave out that label", most_bytes=LABEL_BYTES)
    found = next((told[k] for k in LABELS if told.get(k) is not None), None) if isinstance(told, dict) else told
    return str(found) if isinstance(found, str | int) and not isinstance(found, bool) else None
