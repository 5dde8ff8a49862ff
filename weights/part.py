"""A file on its way: its bytes go to disk and into both hashes, and a part whose owner died is taken over and resumed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Generator
from functools import lru_cache
from pathlib import Path

from blake3 import blake3

from weights.addresses import Address
from weights.digests import hasher, written
from weights.documents import MISREAD, json_file, table
from weights.errors import CacheNotWritable, NoSpace, WeightsError
from weights.places import cache_folder

IDLE_S = 600.0
"""A part of another machine, container or boot is copied and continued when nothing was written to it for so long."""
ABANDONED_S = 3600.0
"""Such a part is deleted when nothing was written to it for so long."""
CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says where a disk, a quota or a limit leaves no room."""
NOTE_BYTES = 1 << 16
_ETAG = re.compile(r'"[!#-~]{0,500}"')
"""A strong ETag that can go back into a header, as RFC 9110 has it, in ASCII."""
OWNER = r"(?P<scope>[0-9a-f]{12})\.(?P<pid>[0-9]{1,10})\.(?P<start>[0-9]{1,20})\.[0-9a-f]{8}"
"""What `owner` writes."""
_NAME = re.compile(rf"(?P<key>[0-9a-f]{{64}})\.{OWNER}\.(?P<kind>part|made|json|wheel)(?P<note>\.json)?")


@contextlib.contextmanager
def disk(folder: Path, needs: int | None = None) -> Generator[None]:
    """Turn the operating system's errors of writing below `folder` into NoSpace or CacheNotWritable.

    Args:
        folder: the folder.
        needs: bytes of what is written, where that is known.
    """
    try:
        yield
    except OSError as raised:
        error = raised.__cause__ if isinstance(raised, NoSpace) else raised  # of `whole`, which doesn't know what to set
        if not isinstance(error, OSError) or isinstance(error, WeightsError):
            raise
        switch, place = _switch(folder)
        if error.errno in FULL:
            room = f"{free_bytes(folder)} are free" if needs is None else f"{needs:,} bytes are needed, {free_bytes(folder)} are free"
            todo = f"free some, or {switch} on another disk"
            raise NoSpace(f"the disk of {place} is full ({error.strerror}), {room}: {todo}. Nothing half-written was installed.") from error
        if place != folder:
            raise CacheNotWritable(f"{place} can't be entered, so nothing of your own is kept there: {switch}.") from error
        raise CacheNotWritable(f"{place} can't be written ({error}): {switch} that can.") from error


def free_bytes(folder: Path) -> str:
    """Say how many bytes are free on the disk of a folder, "12,345 bytes"."""
    for place in (folder, *folder.absolute().parents):  # the folder may be what can't be made
        with contextlib.suppress(OSError):
            return f"{shutil.disk_usage(place).free:,} bytes"
    return "an unknown number of bytes"


def _switch(folder: Path) -> tuple[str, Path]:
    """Say what to set so that another folder is written, and how this one is really called."""
    from weights.registry import NOWHERE, named_folder

    own = named_folder()
    if NOWHERE.parent in (folder, *folder.parents):
        return "set HOME, or ZOO_USER_REGISTRY to a folder", own
    if own in (folder, *folder.parents):
        return "set ZOO_USER_REGISTRY to a folder", folder
    return ("set ZOO_CACHE to a folder" if cache_folder() in (folder, *folder.parents) else "name a folder"), folder


def fresh(folder: Path, key: str, kind: str) -> Path:
    """Name a temporary file so that others can tell whose it is, and whether its owner still lives."""
    return folder / f"{key}.{owner()}.{kind}"


def owner() -> str:
    """Name this process, its start, its machine and a random number, as a part of a file's name that `lives` understands."""
    pid = os.getpid()
    return f"{_scope()}.{pid}.{_started(pid) or 0}.{secrets.token_hex(4)}"


def sweep(folder: Path, spare: str | None = None, done: str | None = None) -> None:
    """Delete what dead processes left, except parts that can be resumed.

    A complete part is no use to resume, and it may be a pickle: none stays in the cache.

    Args:
        folder: where parts lie.
        spare: a key of which everything is kept, since it is about to be taken over.
        done: a key that is installed, of which nothing needs to be resumed.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if not name or name["key"] == spare or lives(path, name):
                continue
            part = path.with_suffix("") if name["note"] else path
            if name["kind"] == "wheel":
                shutil.rmtree(path, ignore_errors=True)
            elif name["kind"] != "part" or name["key"] == done or not part.exists() or not _resumable(part):
                path.unlink(missing_ok=True)


def require(folder: Path, size_bytes: int, copies: int = 1) -> None:
    """Refuse before the first byte what can't fit.

    Raises:
        NoSpace: the disk of `folder` has less room than that many copies need.
    """
    with disk(folder):
        free = shutil.disk_usage(folder).free
    if free < size_bytes * copies:
        raise NoSpace(f"{size_bytes * copies:,} bytes are needed in {folder}, {free:,} are free: free some, or set ZOO_CACHE.")


def newest(folder: Path, key: str) -> float:
    """When a file of this key was last written to, in seconds since the epoch; 0 where there is none."""
    times = [0.0]
    for path in folder.glob(f"{key}.*"):
        with contextlib.suppress(OSError):
            times.append(path.stat().st_mtime)
    return max(times)


class Part:
    """One file being received, to be ended with `discard` or `release`.

    Args:
        folder: where parts lie, on the disk of the blobs.
        key: 64 hex digits that name what is fetched.
        url: where it comes from; only a part of the same URL is taken over, so that a source that fails costs no other its part. Its note
            has no password and no query of it.
        digest: what is published of the file, if that is no SHA-256: the bytes are hashed by its algorithm too.

    Attributes:
        key: as it was given.
        size: bytes received so far, all of them hashed.
        etag: the strong ETag under which they can be resumed.
        total: the announced bytes.
        foreign: whether another machine, container or boot began it, so that its bytes may have been lost under way.

    Raises:
        CacheNotWritable: the part can't be created.
    """

    def __init__(self, folder: Path, key: str, url: str, digest: str | None = None) -> None:
        self.folder, self.key, self.url, self._asked = folder, key, Address(url).noted, digest
        self.path = fresh(folder, key, "part")
        with disk(folder):
            scope = self._adopt(key)
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
            self.fd = os.open(self.path, flags, 0o600)
        self.foreign = scope not in (None, _scope())
        _, self.etag, self.total = _note(self.path) if scope else (None, None, None)
        try:
            self._hash()
        except OSError:  # a bad sector below what a dead process left
            self.etag = None
        if self.etag is None:
            try:
                self.restart()
            except WeightsError:
                self.discard()
                raise

    def _adopt(self, key: str) -> str | None:
        names = [(path, name) for path in self.folder.glob(f"{key}.*.part") if (name := _NAME.fullmatch(path.name))]
        names = [(path, name) for path, name in names if _note(path)[0] == self.url]
        orphans = [(path, name) for path, name in names if not lives(path, name, IDLE_S) and _readable(path)]
        for orphan, name in sorted(orphans, key=lambda found: _size(found[0]), reverse=True):
            with contextlib.suppress(OSError):  # another process was faster, or may not be robbed
                if name["scope"] != _scope():  # its owner may only sleep, and would go on writing into what we publish
                    shutil.copyfile(orphan, self.path)
                    shutil.copyfile(_beside(orphan), _beside(self.path))
                else:
                    orphan.rename(self.path)
                    with contextlib.suppress(OSError):
                        _beside(orphan).rename(_beside(self.path))
                return name["scope"]
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
        return None

    def _hash(self) -> None:
        self.size, self._sha256, self._blake3 = 0, hashlib.sha256(), blake3()
        self._other = hasher(self._asked) if self._asked else None
        while data := os.read(self.fd, CHUNK):
            self._count(data)

    def _count(self, data: bytes) -> None:
        self._sha256.update(data)
        self._blake3.update(data)
        if self._other is not None:
            self._other.update(data)
        self.size += len(data)

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes received so far."""
        return self._sha256.hexdigest()

    @property
    def blake3(self) -> str:
        """BLAKE3 of the bytes received so far."""
        return self._blake3.hexdigest()

    @property
    def digest(self) -> str | None:
        """The same bytes by the algorithm of the published digest, "sha1:0b5a…"; None where none was asked for."""
        return written(self._asked, self._other) if self._asked else None

    def write(self, data: bytes) -> None:
        """Append bytes to the file and to all hashes."""
        view = memoryview(data)
        with disk(self.folder, self.total or self.size + len(view)):
            while view:
                view = view[os.write(self.fd, view) :]
        self._count(data)

    def restart(self) -> None:
        """Forget every byte received so far."""
        self.etag = self.total = None
        with disk(self.folder):
            _beside(self.path).unlink(missing_ok=True)
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)
        self._hash()

    def remember(self, etag: str | None, total: int | None) -> None:
        """Note what the bytes are of; with a strong ETag and a known length, another process can resume them."""
        self.total = total
        self.etag = etag if etag and _ETAG.fullmatch(etag) else None
        with disk(self.folder):
            if self.etag:
                fd = os.open(_beside(self.path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o600)
                with os.fdopen(fd, "w", encoding="ascii") as file:
                    json.dump({"url": self.url, "etag": etag, "total": total}, file)
            else:
                _beside(self.path).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, which stays where it is."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with disk(self.folder):  # a network disk may say only now that it is full
                os.close(fd)

    def release(self) -> None:
        """Leave the part to the next caller, of this process or another, if it can be resumed; delete it otherwise."""
        if self.etag is None or self.total is None or not 0 < self.size < self.total:
            return self.discard()
        self.close()
        head, _, tail = self.path.name.partition(f".{os.getpid()}.")
        ownerless = self.folder / f"{head}.0.0.{tail.partition('.')[2]}"
        with contextlib.suppress(OSError):
            _beside(self.path).rename(_beside(ownerless))
            self.path.rename(ownerless)
        return None

    def discard(self) -> None:
        """Delete the part and its note."""
        with contextlib.suppress(NoSpace, CacheNotWritable):
            self.close()
        for path in (self.path, _beside(self.path)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _readable(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.access(path, os.R_OK) and stat.S_ISREG(path.lstat().st_mode)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _note(path: Path) -> tuple[str, str, int] | tuple[None, None, None]:
    with contextlib.suppress(OSError, *MISREAD):
        note = table(json_file(_beside(path), most_bytes=NOTE_BYTES), {"url": str, "etag": str, "total": int})
        if _ETAG.fullmatch(note["etag"]) and 0 < note["total"] < 1 << 62:
            return note["url"], note["etag"], note["total"]
    return None, None, None


def _resumable(path: Path) -> bool:
    return (total := _note(path)[2]) is not None and 0 < _size(path) < total


def owned(path: Path) -> re.Match[str] | None:
    """Read whose a file of `partial` is from its name; None if it is none of ours."""
    return _NAME.fullmatch(path.name)


def lives(path: Path, name: re.Match[str], idle_s: float = ABANDONED_S) -> bool:
    """Whether the owner of a part may still write to it: known on this machine, elsewhere judged by the time of its last write."""
    if name["pid"] == "0":
        return False
    try:
        status = path.stat()
    except OSError:
        return True  # it was renamed or deleted under our eyes
    if name["scope"] == _scope() and status.st_uid == _user():  # other users' processes may be hidden from us
        return _started(int(name["pid"])) == name["start"]
    return abs(time.time() - status.st_mtime) < idle_s  # a time far ahead is another clock's, and no sign of life


def _started(pid: int) -> str | None:
    """The tick at which a process began, which tells it from a later one of the same number; None if it is dead."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "1" if pid == os.getpid() else None
    return None if state in "ZX" else fields[18]


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0


def _scope() -> str:
    return _scope_of(os.getpid())


@lru_cache(maxsize=8)
def _scope_of(pid: int) -> str:
    """Name the set of processes whose numbers we can look up: one host, one boot, one container."""
    try:
        world = Path("/proc/sys/kernel/random/boot_id").read_text() + str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # not Linux: only this very process is known
        world = str(pid) + secrets.token_hex(8)
    return hashlib.sha256((socket.gethostname() + world).encode()).hexdigest()[:12]
