"""Which files a process may open at all, as a rule of Linux's Landlock, which holds for its later threads and for good.

Source:
    https://docs.kernel.org/userspace-api/landlock.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

NEWEST = 6
"""The newest version that is asked for; later ones confine nothing more of what is here."""
TCP_SINCE, SIGNALS_SINCE = 4, 6

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same number on every architecture
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by version: refer, truncate, ioctl were added
_OF_FILES = _EXECUTE | 1 << 1 | _READ_FILE | 1 << 14 | 1 << 15  # the others are of folders
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals


def version(libc: Any, most: int = NEWEST) -> int:
    """Ask the kernel which version it has, 0 for none; `most` emulates an older one."""
    return max(0, min(libc.syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)), most))


def allow_only(libc: Any, version: int, reads: Collection[str], executes: Collection[str] = (), writes: Collection[str] = ()) -> None:
    """Let this thread, and those it starts, open no other files, and speak no TCP and send no signals where the version knows these.

    Args:
        libc: the C library.
        version: of Landlock, at most the kernel's.
        reads: files and folders that may be read; places that are not there are left out.
        executes: such whose programs may be run too.
        writes: folders in which everything may be done.

    Raises:
        OSError: the kernel refuses.
    """
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    rules = struct.pack("<QQQ", handled, _TCP if version >= TCP_SINCE else 0, _SCOPES if version >= SIGNALS_SINCE else 0)
    rules = rules[: 8 if version < TCP_SINCE else 16 if version < SIGNALS_SINCE else 24]
    ruleset = libc.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "no ruleset")
    try:
        reading = _READ_FILE | _READ_DIR
        for places, rights in ((reads, reading), (executes, reading | _EXECUTE), (writes, handled)):
            for place in places:
                with suppress(OSError):
                    _allow(libc, ruleset, place, rights)
        if libc.syscall(_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno() or errno.EPERM, "not restricted")
    finally:
        os.close(ruleset)


def _allow(libc: Any, ruleset: int, place: str, rights: int) -> None:
    fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("<Qi", rights if Path(place).is_dir() else rights & _OF_FILES, fd)
        if libc.syscall(_ADD, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), place)
    finally:
        os.close(fd)
