"""What lies in the cache: which checkpoints, how large, who brought them, who keeps them, and when they were last used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weights.addresses import Address
from weights.cache import Cache, read_json
from weights.collecting import locks_that_keep, made_of, used
from weights.registry import SHIPPED, located


@dataclass(frozen=True, slots=True)
class Held:
    """One file of weights in the cache.

    Attributes:
        path: where it lies.
        sha256: of the file.
        size_bytes: of the file.
        checkpoints: what records call it, "ResNet50:imagenet1k_v2"; () where no record knows it.
        sources: where it came from; a key in a URL is hashed.
        own: whether a record of the user's own names it, as `zoo add` writes one.
        bundle: the bundle that brought it, "" where none did.
        owner: the user whose file it is, "" where the system doesn't say.
        used: when it was last used, in seconds since 1970.
        kept_by: the locks of projects that name it: `weights.gc` leaves it alone.
    """

    path: Path
    sha256: str
    size_bytes: int
    checkpoints: tuple[str, ...]
    sources: tuple[str, ...]
    own: bool
    bundle: str
    owner: str
    used: float
    kept_by: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Inventory:
    """All of the cache.

    Attributes:
        root: its folder.
        files: of weights, the last used first.
        others: bytes of everything else that is not a note, by its folder: "kernels", "partial", "quarantine".
    """

    root: Path
    files: tuple[Held, ...]
    others: dict[str, int]

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of weights."""
        return sum(one.size_bytes for one in self.files)


def inventory() -> Inventory:
    """List what lies in the cache; nothing is hashed, changed or noted as used.

    Example:
        >>> [(one.checkpoints, one.size_bytes) for one in inventory().files]  # doctest: +SKIP
        [(('ResNet50:imagenet1k_v2',), 102517345)]

    Raises:
        CacheNotWritable: the cache's folder can't be read.
        BadLock, BadRecord: a lock or a registry can't be read.
    """
    cache = Cache()
    cache.check_folder()
    files = sorted(_held(cache), key=lambda one: (-one.used, one.sha256))
    others = {name: size for name in ("kernels", "partial", "quarantine") if (size := _size(cache.root / name))}
    return Inventory(cache.root, tuple(files), others)


def _held(cache: Cache) -> Iterator[Held]:
    names, own = _names()
    notes = [note for path in sorted((cache.root / "refs").glob("*.json")) if (note := read_json(path))]
    origins = made_of(cache)
    locks = locks_that_keep(cache)
    for path in sorted((cache.root / "blobs" / "sha256").glob("*/*")):
        if (found := used(cache, path)) is None:
            continue
        hashes = {path.name, *origins.get(path.name, ())}
        mine = [note for note in notes if note.get("sha256") == path.name]
        sources = tuple(dict.fromkeys(str(note["source"]) for note in mine if note.get("source")))
        known = [names.get(key, ()) for key in (*sorted(hashes), *sources)]
        yield Held(
            path=path,
            sha256=path.name,
            size_bytes=found[1],
            checkpoints=tuple(dict.fromkeys(name for some in known for name in some)),
            sources=sources,
            own=not own.isdisjoint(hashes),
            bundle=next((str(note["bundle"]) for note in mine if note.get("bundle")), ""),
            owner=_owner(path),
            used=found[0],
            kept_by=tuple(lock for lock, kept in locks.items() if not kept.isdisjoint(hashes)),
        )


def _names() -> tuple[dict[str, list[str]], set[str]]:
    """Map hashes and sources to the checkpoints of records, and collect the hashes of the user's own."""
    names: dict[str, list[str]] = {}
    own: set[str] = set()
    for one in located():
        name = f"{one.row.model}:{one.row.tag}"
        for row in one.row.containers():
            for key in filter(None, (row.sha256, *(Address(source).noted for source in row.sources))):
                if name not in names.setdefault(key, []):
                    names[key].append(name)
        if one.path.parent != SHIPPED and one.row.sha256:
            own.add(one.row.sha256)
    return names, own


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError, KeyError, NotImplementedError, ImportError):
        return path.owner()
    return ""


def _size(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total
