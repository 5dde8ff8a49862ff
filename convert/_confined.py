"""What a process gives up before it reads a stranger's file: memory, time, writing, the network, other files, other processes.

Runs in the reader's own process, see `convert.sandbox`. Each protection is one that the kernel may or may not have, so that each says
whether it is in force.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

SPARE_BYTES = 2**30
"""Memory beside four times the input: what a reader may hold."""
FILES = 256
"""Open files that a reader may have; TensorFlow's and ONNX's weights may lie in some dozens."""
GRACE_S = 5
"""From the signal that says that the time is over to the one that can't be missed."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_DUMPABLE, _PR_SET_SECCOMP = 38, 4, 22
_LANDLOCK = {"create": 444, "add": 445, "restrict": 446}  # the same number on every architecture
_EXECUTE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 2, 1 << 3
_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 5: (1 << 16) - 1}  # by version: refer, truncate, ioctl were added
_TCP, _SCOPES = 0b11, 0b11  # bind and connect; abstract sockets and signals

# by machine: AUDIT_ARCH, the calls that are refused, clone, and clone3, whose flags a filter can't see
_CALLS: dict[str, tuple[int, tuple[int, ...], int, int]] = {
    # socket connect accept sendto sendmsg bind listen socketpair fork vfork execve kill ptrace mount process_vm_readv/writev
    # open_by_handle_at bpf execveat userfaultfd perf_event_open io_uring_setup/enter pidfd_open unshare setns
    "x86_64": (
        0xC000003E,
        (41, 42, 43, 44, 46, 49, 50, 53, 57, 58, 59, 62, 101, 165, 310, 311, 304, 321, 322, 323, 298, 425, 426, 434, 272, 308),
        56,
        435,
    ),
    "aarch64": (
        0xC00000B7,
        (198, 203, 202, 206, 211, 200, 201, 199, 221, 129, 117, 40, 270, 271, 265, 280, 281, 282, 241, 425, 426, 434, 97, 268),
        220,
        435,
    ),
}
_CLONE_THREAD, _EPERM, _ENOSYS = 0x10000, 1, 38


def confine(inputs: Sequence[str], size_bytes: int, cpu_s: int, spare_bytes: int = SPARE_BYTES) -> list[str]:
    """Give up what reading needs not.

    Args:
        inputs: files and folders that may be read, beside Python's own.
        size_bytes: of the input: memory is limited in its proportion.
        cpu_s: seconds of processor time, after which the kernel ends the process.
        spare_bytes: of memory beside that.

    Returns:
        What is in force, in words: "memory 1.2 GB", "no network (seccomp)" …
    """
    active = _limits(size_bytes, cpu_s, spare_bytes)
    if not sys.platform.startswith("linux"):
        return active
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        return active
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    active.append("no new privileges")
    with suppress(OSError):
        active.append(_landlock(libc, inputs))
    with suppress(OSError):
        active.append(_seccomp(libc))
    if not any("seccomp" in each for each in active) and libc.unshare(0x40000000 | (0x10000000 if os.getuid() else 0)) == 0:
        active.append("no network (namespace)")
    return active


def _limits(size_bytes: int, cpu_s: int, spare_bytes: int) -> list[str]:
    try:
        import resource
    except ImportError:  # Windows
        return []
    active: list[str] = []
    memory = _used_bytes() + 4 * size_bytes + spare_bytes
    wanted = {
        "RLIMIT_CORE": (0, "no core dump"),
        "RLIMIT_FSIZE": (0, "no writing"),
        "RLIMIT_NOFILE": (FILES, f"{FILES} open files"),
        "RLIMIT_CPU": (cpu_s, f"processor {cpu_s} s"),
        "RLIMIT_AS": (memory, f"memory {memory / 1e9:.1f} GB"),
    }
    for name, (limit, words) in wanted.items():
        hard = resource.getrlimit(getattr(resource, name))[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(
                getattr(resource, name), (limit, limit + GRACE_S if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else limit)
            )
        except (ValueError, OSError):  # macOS limits no address space
            continue
        active.append(words)
    return active


def _used_bytes() -> int:
    """Tell the address space in use: libraries that are loaded already are no fault of the file's."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**32


def _landlock(libc: ctypes.CDLL, inputs: Sequence[str]) -> str:
    """Let this process read `inputs` and Python's own files, write nothing, and speak no TCP."""
    version = libc.syscall(_LANDLOCK["create"], None, ctypes.c_size_t(0), ctypes.c_uint(1))
    if version < 1:
        raise OSError(ctypes.get_errno(), "the kernel has no Landlock")
    handled = _RIGHTS[max(known for known in _RIGHTS if known <= version)]
    rules = struct.pack("<QQQ", handled, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    rules = rules[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(_LANDLOCK["create"], rules, ctypes.c_size_t(len(rules)), ctypes.c_uint(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "no ruleset")
    try:
        for place in (*inputs, *_own_places()):
            with suppress(OSError):
                _allow(libc, ruleset, place, _READ_FILE | _READ_DIR | (0 if place in inputs else _EXECUTE))
        if libc.syscall(_LANDLOCK["restrict"], ctypes.c_int(ruleset), ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), "not restricted")
    finally:
        os.close(ruleset)
    return f"no other files{', no TCP' if version >= 4 else ''} (Landlock {version})"


def _allow(libc: ctypes.CDLL, ruleset: int, place: str, rights: int) -> None:
    fd = os.open(place, os.O_PATH | os.O_CLOEXEC)
    try:
        folder = Path(place).is_dir()
        rule = struct.pack("<Qi", rights if folder else rights & ~_READ_DIR, fd)
        if libc.syscall(_LANDLOCK["add"], ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint(0)) != 0:
            raise OSError(ctypes.get_errno(), place)
    finally:
        os.close(fd)


def _own_places() -> list[str]:
    """List where Python and its libraries lie, from which more may be imported: no folder of the user's own work."""
    prefixes = {str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix)}
    places = {*prefixes, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"}
    for entry in sys.path:
        folder = Path(entry)
        if folder.name in ("site-packages", "dist-packages") or any(entry.startswith(prefix) for prefix in prefixes):
            places.add(entry)
        else:
            places |= {str(folder / package) for package in ("convert", "weights")}
    return sorted(places)


def _seccomp(libc: ctypes.CDLL) -> str:
    """Refuse sockets, other programs, other processes and the doors around this; threads stay allowed."""
    if platform.machine() not in _CALLS or struct.calcsize("P") != 8:
        raise OSError("no table for this machine")
    architecture, refused, clone, clone3 = _CALLS[platform.machine()]
    load, equal, masked, give = 0x20, 0x15, 0x45, 0x06  # LD W ABS, JEQ, JSET, RET
    kill, error, allow = 0x80000000, 0x00050000, 0x7FFF0000
    # x32 calls have bit 30 set, and would walk past numbers that are compared for equality
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, kill), (load, 0, 0, 0), (masked, 0, 1, 0x40000000)]
    program += [(give, 0, 0, kill)]
    for number in refused:
        program += [(equal, 0, 1, number), (give, 0, 0, error | _EPERM)]
    program += [(equal, 0, 1, clone3), (give, 0, 0, error | _ENOSYS)]  # the C library then asks clone
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (masked, 1, 0, _CLONE_THREAD), (give, 0, 0, error | _EPERM), (give, 0, 0, allow)]
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
    held = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("<H6xQ", len(program), ctypes.addressof(held))
    if libc.prctl(_PR_SET_SECCOMP, 2, described, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no filter")
    return "no network, no programs (seccomp)"
