"""Reading weights so that what is returned is what was hashed."""

from __future__ import annotations

import hashlib
import mmap
import os
import queue
import sys
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

from blake3 import blake3

from weights.cache import Cache, Installed, stamp_of
from weights.errors import CorruptCache, SourceUnavailable
from weights.regular import open_regular
from weights.sources import switched_on

CHUNK = 2 << 20
SETTLED_S = 0.1
"""A file that changed so recently could change again within the same tick of its times: its stamp proves nothing yet."""


def now() -> float:
    """Return the time that files are dated by, in seconds."""
    return time.time()


def load(installed: Installed, verify: str = "load") -> memoryview:
    """Return the bytes of an installed safetensors file in private, writable memory.

    Args:
        installed: what `get` returned.
        verify: "load" reads the file and hashes the very bytes that it returns, with the BLAKE3 recorded at install, or SHA-256.
            "stamp" maps the file, copy-on-write and without hashing, if its device, inode, size and times are those of an earlier
            full check; else it does as "load" and keeps the stamp, where the cache can be written. A mapping is as good as the file
            stays: if another process truncates it in place, touching the lost pages kills this process with SIGBUS.
            Frozen, by ZOO_FROZEN or because `installed` was asked for so, neither stamp nor BLAKE3 is believed: SHA-256 is computed.

    Raises:
        CorruptCache: the file is gone, or not what was installed; it was moved to quarantine, and `get` fetches it again.
        ValueError: `verify` is neither "load" nor "stamp".

    Example:
        >>> len(load(get(find("ResNet20"))))
        1094304
    """
    if verify not in ("load", "stamp"):
        raise ValueError(f'verify is "load" or "stamp", got {verify!r}')
    cache, frozen = Cache(), installed.frozen or switched_on("ZOO_FROZEN")
    try:
        fd = _open(installed.path)
        try:
            before = os.fstat(fd)
            if before.st_size != installed.size_bytes or not before.st_size:
                raise CorruptCache(f"{installed.path}: expected {installed.size_bytes:,} bytes, got {before.st_size:,}.")
            cache.touch(installed)
            if verify == "stamp" and not frozen and cache.stamp(installed.sha256) == stamp_of(before):
                return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
            fast = None if frozen else installed.blake3  # the cache's own note
            wanted, hasher = (fast, blake3()) if fast else (installed.sha256, hashlib.sha256())
            data = _read(fd, before.st_size, hasher, installed.path)
            if hasher.hexdigest() != wanted:
                raise CorruptCache(f"{installed.path}: expected {hasher.name} {wanted}, got {hasher.hexdigest()}.")
            if verify == "stamp" and stamp_of(os.fstat(fd)) == stamp_of(before) and now() - before.st_ctime > SETTLED_S:
                cache.keep_stamp(installed.sha256, stamp_of(before))
        finally:
            os.close(fd)
    except CorruptCache as error:
        if installed.path == cache.blob(installed.sha256) and os.path.lexists(installed.path):
            cache.quarantine(installed.path, str(error))
        raise
    return data


def read_file(path: Path) -> tuple[str, memoryview]:
    """Read a file of the user's where it lies; nothing enters the cache.

    Returns:
        Its SHA-256, and the very bytes that were hashed, in private, writable memory.

    Raises:
        SourceUnavailable: it can't be read, is empty, or is no regular file.

    Example:
        >>> sha256, data = read_file(Path("weights.safetensors"))  # doctest: +SKIP
    """
    try:
        fd = _open(path.resolve())
        try:
            if not (size := os.fstat(fd).st_size):
                raise CorruptCache(f"{path} is empty.")
            hasher = hashlib.sha256()
            data = _read(fd, size, hasher, path)
        finally:
            os.close(fd)
    except (CorruptCache, RuntimeError) as error:  # RuntimeError: a loop of links
        raise SourceUnavailable(str(error)) from error
    return hasher.hexdigest(), data


def read_unhashed(path: Path) -> memoryview:
    """Read a file that was just written here into private, writable memory, for who has no use for its hash; raises as `read_file`."""
    try:
        fd = _open(path.resolve())
        try:
            return _read(fd, os.fstat(fd).st_size, None, path)
        finally:
            os.close(fd)
    except (CorruptCache, RuntimeError) as error:
        raise SourceUnavailable(str(error)) from error


def hashes(path: Path) -> tuple[str, str, int]:
    """Read a file once; return its SHA-256, its BLAKE3 and its size in bytes.

    Raises:
        CorruptCache: it can't be read, or is no regular file.
    """
    sha256, fast = hashlib.sha256(), blake3()
    fd = _open(path)
    try:
        size = os.fstat(fd).st_size
        memory = memoryview(bytearray(min(size, CHUNK) or 1))
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            while count := file.readinto(memory):
                sha256.update(memory[:count])
                fast.update(memory[:count])
    except OSError as error:
        raise CorruptCache(f"{path} can't be read: {error.strerror}.") from error
    finally:
        os.close(fd)
    return sha256.hexdigest(), fast.hexdigest(), size


def _open(path: Path) -> int:
    """Open a regular file: no link is followed, and a pipe does not block us."""
    try:
        return open_regular(path)
    except OSError as error:
        raise CorruptCache(f"{path} can't be opened: {error.strerror}.") from error


def _read(fd: int, size: int, hasher: Any, path: Path) -> memoryview:
    """Read with one thread and hash behind it with this one: 575 MB take 0.13 s on two cores, 0.3 s in small pages."""
    data = _memory(size)
    ready: queue.SimpleQueue[int | OSError] = queue.SimpleQueue()
    stop = threading.Event()
    thread = threading.Thread(target=_fill, args=(fd, data, ready, stop), daemon=True)
    thread.start()
    done = 0
    try:
        while done < size:
            end = ready.get()
            if isinstance(end, OSError):
                raise CorruptCache(f"{path} can't be read: {end}.") from end
            if hasher is not None:
                hasher.update(data[done:end])
            done = end
    finally:
        stop.set()
        thread.join()  # the descriptor is the caller's to close, and to nobody's surprise
    return data


def _fill(fd: int, data: memoryview, ready: queue.SimpleQueue[int | OSError], stop: threading.Event) -> None:
    try:
        with os.fdopen(fd, "rb", buffering=0, closefd=False) as file:
            start = 0
            while start < len(data) and not stop.is_set():
                count = file.readinto(data[start : start + CHUNK])
                if not count:
                    raise OSError(f"it shrank to {start:,} bytes while it was read")
                start += count
                ready.put(start)
    except OSError as error:
        ready.put(error)


def _memory(size: int) -> memoryview:
    """Allocate fresh memory, in huge pages where they are cheap: faulting in small ones takes longer than reading into them."""
    if sys.platform == "win32":
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and not _gives_pages_back():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


@cache
def _gives_pages_back() -> bool:
    """Tell whether this is a virtual machine whose free huge pages go back to its host: each then costs a slow fault in the host."""
    try:
        order = int(Path("/sys/module/page_reporting/parameters/page_reporting_order").read_text())
    except (OSError, ValueError):
        return False
    return 0 <= order < 64  # all bits are set where nothing is reported
