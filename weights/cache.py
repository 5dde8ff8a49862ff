"""The cache on disk: content-addressed, without symlinks, with names made only of our own hashes.

    CACHEDIR.TAG  layout.json
    blobs/sha256/ab/<64 hex>            safetensors, mode 0444, the name is the content's SHA-256
    refs/<sha256 of the source>.json    what a source gave: source, commit, source_sha256, sha256, blake3, size, seen
    derived/<source sha256>.<v>.json    which safetensors was made of a foreign file
    stamps/<sha256>.json                size, times and inode of a file that passed a full check
    beside/<sha256 of the folder>.json  what lies beside the weights of a Hub repository, at one commit
    labels/<sha256>.tsv                 names of classes that a repository gives
    tensors/<sha256>.json               how many it has, and their fingerprint
    used/<sha256>                       empty; its time is that of the last use, for `weights.gc`
    own/registry/  own/weights.lock     what `zoo add` registered and what was pinned, where ZOO_CACHE names the folder
    projects/<sha256 of the path>.json  where a lock file was seen whose weights `weights.gc` keeps
    bench/<sha256 of the path>.json     where `zoo bench` saved a record, for `zoo browse --mine`
    pages/                              what `zoo browse` opened
    seen/<sha256 of a path>.json        the highest serial of the lock file there
    partial/  quarantine/  locks/       what is coming, what went bad, who is fetching

Nothing here is right because a lock is held: every writer has its own part file, and a blob appears by one rename.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import json
import logging
import os
import re
import secrets
import stat
import sys
import threading
import time
from collections.abc import Generator, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from weights.addresses import Address
from weights.documents import json_file
from weights.errors import CacheNotWritable, MalformedFile, NoSpace
from weights.part import disk, fresh, newest, sweep
from weights.places import cache_folder
from weights.record import KEPT, Checkpoint
from weights.whole import sync_folder, write_whole
from weights.wording import clause

log = logging.getLogger("weights")
PACKAGE = Path(__file__).parent
LAYOUT = 1
BUNDLE = "bundle"
"""Stands for a version of the converter where another machine converted."""
_HERE: dict[tuple[Path, str], threading.Lock] = {}
"""Locks of this process's threads, which need no file; a process that is forked has none of its parent's."""
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HERE.clear)
LOCK_IDLE_S = 20.0
"""How long another process may hold the lock while nothing of its file arrives; then we fetch beside it."""
NO_MODES = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)
"""What disks say that know no modes, FAT among them."""
SAME_USE_S = 20.0
"""A file that was used so short a time ago is not noted again."""
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Installed:
    """A safetensors file that is ready to be read.

    Attributes:
        path: where it lies; read it through `load`, which proves what it returns.
        sha256: of this file.
        blake3: of this file, recorded at its install; None where nobody recorded it.
        size_bytes: of this file.
        source: the URL that served it, its query but as a hash: that may hold a key to somebody's storage.
        source_sha256: of the bytes that were served, which differs when they were converted.
        frozen: whether it was asked for frozen, so that whoever loads it believes no note of the cache.

    Example:
        >>> get(find("ResNet20")).sha256[:8]
        '22978711'
    """

    path: Path
    sha256: str
    blake3: str | None
    size_bytes: int
    source: str
    source_sha256: str
    frozen: bool = False


FOLDERS = ("blobs", "blobs/sha256", "refs", "derived", "stamps", "tensors", "used", "seen", "partial", "quarantine", "locks")
"""What `Cache.prepare` makes, each behind what it lies in."""


def _seen(folder: Path, instead: str) -> None:
    try:
        os.scandir(folder).close()
    except FileNotFoundError:
        return
    except OSError as error:
        raise CacheNotWritable(f"{folder} is no folder that can be read ({error.strerror}): {instead}.") from error


class Cache:
    """The folder of ZOO_CACHE, else `kernelzoo` in the user's cache folder; nothing is created before the first write.

    Attributes:
        quarantined: one line for each damaged file that this object moved aside.

    Example:
        >>> Cache().lookup(find("ResNet50"))  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.root = cache_folder()
        self.partial = self.root / "partial"
        self.quarantined: list[str] = []

    def blob(self, sha256: str) -> Path:
        """Name the file of this content."""
        return self.root / "blobs" / "sha256" / sha256[:2] / sha256

    def exists(self) -> bool:
        """Whether there is a cache yet.

        Raises:
            CacheNotWritable: the place can't be looked at, so nobody knows.
        """
        try:
            return stat.S_ISDIR(self.root.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise CacheNotWritable(f"{self.root} can't be looked at ({error.strerror}): set ZOO_CACHE to a folder of your own.") from error

    def check_folder(self) -> None:
        """See that a missing file means that it was not installed, not that nothing can be seen here.

        Raises:
            CacheNotWritable: there is something else than a folder that can be read, or one in it is another user's alone.
        """
        blobs = self.root / "blobs" / "sha256"
        for name in (".", *FOLDERS, "projects"):
            _seen(self.root / name, "set ZOO_CACHE to one")
        for shard in sorted(blobs.iterdir()) if blobs.exists() else ():
            if shard.is_dir():
                _seen(shard, "ask its owner to let you, or set ZOO_CACHE to a folder of your own")

    def prepare(self) -> None:
        """Create the layout.

        Raises:
            CacheNotWritable: the folder can't be written, or a later version of the layout is in it.
        """
        version = (read_json(self.root / "layout.json") or {}).get("version")
        if isinstance(version, int) and version != LAYOUT:
            raise CacheNotWritable(f"{self.root} has layout {version!r} and this version writes {LAYOUT}: set ZOO_CACHE to another folder.")
        with disk(self.root):
            for name in FOLDERS:
                (self.root / name).mkdir(parents=True, exist_ok=True)
        if not (tag := self.root / "CACHEDIR.TAG").exists():
            note = "safe to delete: what came from a URL is fetched again, what zoo add copied from a file is not"
            self.write_text(tag, f"Signature: 8a477f597d28d172789f06886806bc55\n# Model weights; {note}.\n")
        if version != LAYOUT:
            self.write_json(self.root / "layout.json", {"version": LAYOUT})

    def lookup(self, checkpoint: Checkpoint) -> Installed | None:
        """Find the checkpoint's file without network and without hashing; a damaged one is moved aside and not found."""
        for source in checkpoint.sources:
            if source.startswith("package:") and (found := _packaged(source, checkpoint)):
                return found
            ref = self.ref(source)
            if ref and _agrees(ref, checkpoint) and (checkpoint.sha256 or same_file(source, ref)) and (found := self._intact(ref)):
                return found
        if checkpoint.sha256 is None:
            return None
        if checkpoint.format == "safetensors":
            return self._intact({"source": checkpoint.sources[0], "source_sha256": checkpoint.sha256, "sha256": checkpoint.sha256})
        made = (facts for _, facts in self.conversions(checkpoint.sha256) if _agrees(facts, checkpoint))
        return next((found for facts in made if (found := self._intact(facts))), None)

    def conversions(self, source_sha256: str = "*") -> list[tuple[Path, dict[str, Any]]]:
        """List the notes of what was made of a file, or of all, the latest version of a converter first and a bundle's word last."""
        notes = sorted((self.root / "derived").glob(f"{source_sha256}.*.json"), key=_version, reverse=True)
        return [(note, facts) for note in notes if (facts := _facts(note))]

    def converted_here(self, installed: Installed) -> bool:
        """Whether a converter of this cache's own made the file, so that not only a bundle says what it was made of."""
        notes = self.conversions(installed.source_sha256)
        return any(facts["sha256"] == installed.sha256 and not note.name.endswith(f".{BUNDLE}.json") for note, facts in notes)

    def _intact(self, facts: dict[str, Any]) -> Installed | None:
        sha256, size = facts["sha256"], facts.get("size")
        path = self.blob(sha256)
        try:
            status = path.lstat()
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode):
            self.quarantine(path, "it is no regular file")
        elif status.st_size != (size or status.st_size) or not status.st_size:
            self.quarantine(path, f"it has {status.st_size:,} bytes, {size or 'some'} were installed")
        else:
            return Installed(path, sha256, facts.get("blake3"), status.st_size, facts["source"], facts["source_sha256"])
        return None

    def ref(self, source: str) -> dict[str, Any] | None:
        """Read what was recorded when this source was last installed."""
        return _facts(self.root / "refs" / f"{key(source)}.json")

    def record(
        self,
        source: str,
        installed: Installed,
        commit: str | None,
        stamp: list[int] | None,
        source_size: int,
        by: str = "",
        bundle: Path | None = None,
        digest: str | None = None,
        kept: bool = False,
    ) -> None:
        """Note what a source gave, so that it is found again and must give the same.

        Args:
            source: of the record.
            installed: what came of it.
            commit: of the Hub's repository, where one is known.
            stamp: of a file on this machine.
            source_size: bytes of what the source served.
            by: who says that the source gave it, if it was not the source.
            bundle: the file that brought it.
            digest: of what the source served, by the algorithm of the one that is published.
            kept: the file holds the very bytes that the source served, unread; see `Checkpoint.format`.
        """
        seen = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        more: dict[str, Any] = {"commit": commit, "seen": seen, "stamp": stamp, "source_size": source_size}
        more |= {"kept": True} if kept else {}
        more |= ({"by": by} if by else {}) | ({"bundle": str(bundle)} if bundle else {}) | ({"digest": digest} if digest else {})
        self.write_json(self.root / "refs" / f"{key(source)}.json", _noted(installed) | more)

    def rename(self, installed: Installed, source: str) -> None:
        """Note another name of where a file came from, since the one that it was installed from is gone."""
        kept = bool((self.ref(installed.source) or {}).get("kept"))
        self.record(source, replace(installed, source=source), None, None, installed.size_bytes, kept=kept)
        self.forget((installed.source,))

    def forget(self, sources: Iterable[str]) -> None:
        """Drop the notes of what sources gave; the files stay until `gc`."""
        for source in sources:
            with contextlib.suppress(OSError):
                (self.root / "refs" / f"{key(source)}.json").unlink()

    def derive(self, installed: Installed, version: str, kept: bool = False) -> None:
        """Note which safetensors was made of a foreign file, and by which version of the converter; `kept` as of `record`."""
        name = f"{installed.source_sha256}.{version}{'-kept' if kept and version != BUNDLE else ''}.json"
        self.write_json(self.root / "derived" / name, _noted(installed) | ({"kept": True} if kept else {}))

    def publish(self, path: Path, sha256: str) -> Path:
        """Move a complete and verified file of `partial` to its name; it is on the disk before it has the name."""
        blob = self.blob(sha256)
        with disk(self.root):
            blob.parent.mkdir(exist_ok=True)
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                try:
                    path.chmod(0o444)
                except OSError as error:
                    if error.errno not in NO_MODES:  # it keeps others from writing by mistake; nothing is right because of it
                        raise
            finally:
                os.close(fd)
            if blob.is_dir() and not blob.is_symlink():
                self.quarantine(blob, "it is a folder")
            path.replace(blob)
            sync_folder(blob.parent)
        return blob

    def quarantine(self, path: Path, why: str) -> None:
        """Move a damaged file aside, where somebody can look at it; in a cache that can't be written it stays."""
        line = f"{path} is damaged: {clause(why)}"
        self.quarantined.append(line)
        aside = self.root / "quarantine" / f"{path.name}.{secrets.token_hex(4)}"
        try:
            aside.parent.mkdir(exist_ok=True)
            path.rename(aside)
            log.warning("%s; moved to %s", line, aside)
        except OSError as error:
            log.warning("%s; it can't be moved away (%s)", line, error)

    def aside(self) -> dict[str, Path]:
        """Find the damaged files that were moved aside and lie there still, by the hash that was their name."""
        found = sorted((self.root / "quarantine").glob("*"))
        return {path.stem: path for path in found if _HASH.fullmatch(path.stem)}

    @contextlib.contextmanager
    def lock(self, name: str) -> Generator[None]:
        """Wait while another process or thread fetches the same file: it saves the second download, nothing depends on it."""
        import filelock

        # The native lock only: a soft one outlives its owner. Recent versions fall back to it unless told not to.
        kind = filelock.WindowsFileLock if sys.platform == "win32" else filelock.UnixFileLock
        hard: dict[str, Any] = {"fallback_to_soft": False} if "fallback_to_soft" in inspect.signature(kind).parameters else {}
        seen, since = newest(self.partial, name), time.monotonic()  # that it changes counts: clocks jump, and a server has its own
        lock = kind(self.root / "locks" / f"{name}.lock", timeout=1, **hard)
        here = _HERE.setdefault((self.root, name), threading.Lock())  # of this process, where no file can be locked
        ours = False
        while True:
            try:
                ours = ours or here.acquire(timeout=1)
                if not ours:
                    raise filelock.Timeout(name)
                lock.acquire()
                break
            except filelock.Timeout:
                if (now := newest(self.partial, name)) != seen:
                    seen, since = now, time.monotonic()
                elif time.monotonic() - since > LOCK_IDLE_S:
                    log.warning("another process holds the lock of %s and nothing arrives: fetching beside it", name[:12])
                    break
            except (OSError, NotImplementedError) as error:
                log.info("no file lock here (%s): going on without", error)
                break
        try:
            yield
        finally:
            with contextlib.suppress(OSError, NotImplementedError):
                lock.release()
            if ours:
                here.release()

    def temporary(self, name: str) -> Path:
        """Name a file in `partial` that is swept away if this process dies."""
        return fresh(self.partial, name, "made")

    def sweep(self, spare: str | None = None, done: str | None = None) -> None:
        """Delete what dead processes left in `partial`; see `weights.part.sweep`."""
        sweep(self.partial, spare, done)

    def stamp(self, sha256: str) -> list[int] | None:
        """Read the stamp of a file that passed a full check."""
        return (read_json(self.root / "stamps" / f"{sha256}.json") or {}).get("stamp")

    def keep_stamp(self, sha256: str, stamp: list[int]) -> None:
        """Record the stamp of a file that passed a full check, where the cache can be written."""
        with contextlib.suppress(CacheNotWritable, NoSpace):
            self.prepare()
            self.write_json(self.root / "stamps" / f"{sha256}.json", {"stamp": stamp})

    def touch(self, installed: Installed) -> None:
        """Note that a file is in use, where the cache can be written; `weights.gc` goes by it."""
        if installed.path != self.blob(installed.sha256):
            return
        note = self.root / "used" / installed.sha256
        with contextlib.suppress(OSError):
            try:
                if not 0 <= time.time() - note.stat().st_mtime < SAME_USE_S:
                    os.utime(note)
            except FileNotFoundError:
                note.parent.mkdir(exist_ok=True)
                note.touch()

    def write_json(self, path: Path, facts: dict[str, Any]) -> None:
        """Write a note at once or not at all."""
        self.write_text(path, json.dumps(facts, indent=1))

    def write_text(self, path: Path, text: str) -> None:
        """Write a text at once or not at all."""
        with disk(self.root):
            write_whole(path, text, sync=True, by=fresh(self.partial, key(path.name), "json"))


def key(text: str) -> str:
    """Name something that came from outside by our own hash of it; of an address, of all of it."""
    return hashlib.sha256((text.reveal() if isinstance(text, Address) else text).encode("utf-8", "surrogatepass")).hexdigest()


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a note; None if it is missing, damaged or no table."""
    try:
        facts = json_file(path)
    except (OSError, MalformedFile):
        return None
    return cast("dict[str, Any]", facts) if isinstance(facts, dict) else None


def _noted(installed: Installed) -> dict[str, Any]:
    facts = {f.name: getattr(installed, f.name) for f in fields(installed) if f.name not in ("path", "size_bytes", "frozen")}
    return facts | {"size": installed.size_bytes}


def _facts(path: Path) -> dict[str, Any] | None:
    """Read what `_noted` wrote; None if anything about it is not as it was written."""
    facts = read_json(path) or {}
    hashes = [facts.get(name) for name in ("sha256", "source_sha256", "blake3")]
    texts = [facts.get("source"), facts.get("commit") or ""]
    right = all(isinstance(h, str) and _HASH.fullmatch(h) for h in hashes) and all(isinstance(t, str) for t in texts)
    return facts if right and isinstance(facts.get("size"), int) else None


def _version(derived: Path) -> tuple[bool, list[str]]:
    """Sort the notes of converters by their versions: 10 comes behind 9, and both behind what a bundle brought."""
    version = derived.name.partition(".")[2].removesuffix(".json")
    return version != BUNDLE, [part.zfill(20) if part.isdigit() else part for part in re.split(r"(\d+)", version)]


def stamp_of(status: os.stat_result) -> list[int]:
    """Everything that changes when a file does: device, inode, size and both times in nanoseconds."""
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def same_file(source: str, ref: dict[str, Any]) -> bool:
    """Whether a file on this machine is still the one that was installed; always true of a source that is elsewhere."""
    if not source.startswith("file:"):
        return True
    from weights.sources import local_path

    with contextlib.suppress(OSError):
        return ref.get("stamp") == stamp_of(local_path(source).stat())
    return False


def _agrees(ref: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a note may speak for the record: of the right file, itself where nothing was to be made of it, kept or read alike."""
    alike = bool(ref.get("kept")) == (checkpoint.format in KEPT)
    return is_of(ref, checkpoint) and alike and (checkpoint.format != "safetensors" or ref["sha256"] == ref["source_sha256"])


def is_of(ref: dict[str, Any], checkpoint: Checkpoint) -> bool:
    """Whether a note is of the bytes that the record means: by the SHA-256, all of it or its beginning, and by the digest.

    A note of before the record had a digest says nothing of it, which is enough only where the SHA-256 is known.
    """
    digest = ref.get("digest") or (checkpoint.digest if checkpoint.sha256 else "")
    right = ref["source_sha256"].startswith(checkpoint.sha256 or checkpoint.sha256_prefix or "")
    return right and str(digest).startswith(checkpoint.digest or "")


def _packaged(source: str, checkpoint: Checkpoint) -> Installed | None:
    path = (PACKAGE / source.removeprefix("package:")).resolve()
    if not path.is_relative_to(PACKAGE.resolve()) or not path.is_file() or checkpoint.sha256 is None:
        return None
    return Installed(path, checkpoint.sha256, None, path.stat().st_size, source, checkpoint.sha256)
