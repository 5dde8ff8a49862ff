"""What a process gives up before it reads a stranger's file: memory, time, writing, the network, other files, other processes.

Runs in the reader's own process, see `convert.sandbox`, in two steps: `enclose` before libraries are imported, since what it takes is
taken of one thread and those that it starts; and `close`, which leaves what reading alone needs. Each protection is one that the kernel
may or may not have, so that each says whether it is in force.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from convert import _calls, _landlock

SPARE_BYTES = 2**30
"""Memory beside four times the input: what a reader may hold."""
FILES = 256
"""Open files that a reader may have; TensorFlow's and ONNX's weights may lie in some dozens."""
GRACE_S = 5
"""From the signal that says that the time is over to the one that can't be missed."""
MOST_WEIGHED = 1000
"""Files of a folder that are looked at."""

_SET_DUMPABLE, _CAPABILITY_DROP, _SET_NO_NEW_PRIVILEGES, _AMBIENT, _CLEAR_ALL = 4, 24, 38, 47, 4
_CAPABILITIES_3 = 0x20080522
_READ_ALL, _OVERRIDE = 1 << 2, 1 << 1  # CAP_DAC_READ_SEARCH and CAP_DAC_OVERRIDE: containers have only the latter
_LAST_CAPABILITY = 63
_NEW_NETWORK, _NEW_USER = 0x40000000, 0x10000000
_SOMEBODY = 2_000_000_000  # with the process's number: a user that nobody is


@dataclass(frozen=True, slots=True)
class Kernel:
    """What is used of a kernel's protections at most: tests emulate older ones.

    Args:
        landlock: version of Landlock, 0 for none.
        seccomp: whether it filters system calls.
    """

    landlock: int = _landlock.NEWEST
    seccomp: bool = True


@dataclass(frozen=True, slots=True)
class Protections:
    """What is in force, in words, and what is not and what that means: "memory 1.2 GB", "no Landlock (Linux 5.13): …"."""

    held: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])


def enclose(inputs: Sequence[str], folder: str | None = None, threads: int = 0, kernel: Kernel | None = None) -> Protections:
    """Give up what the import of libraries needs not, while there is one thread: privileges, and the user's files.

    Args:
        inputs: files and folders that may be read.
        folder: where libraries may write while they are imported; beside Python's own folders, for its bytecode.
        threads: how many the process will need beside those that run already; 0 for none.
        kernel: what is used of the kernel's protections; all that it has, if None.
    """
    made, kernel = Protections(), kernel or Kernel()
    if folder:
        made.held.append("a temporary folder of its own")
    if not sys.platform.startswith("linux"):
        made.missing.append(f"{sys.platform} has no protection of files and network: a file that takes its reader over can do what you can")
        return made
    libc = ctypes.CDLL(None, use_errno=True)
    if threads:
        _limit_threads(threads, made)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        made.missing.append("no_new_privs was refused: nothing that builds on it is in force")
        return made
    made.held.append("no new privileges")
    if not (kernel.seccomp and _calls.available(libc)) and (libc.unshare(_NEW_NETWORK) == 0 or libc.unshare(_NEW_NETWORK | _NEW_USER) == 0):
        made.held.append("no network (namespace)")
    _drop_capabilities(libc, inputs, made)
    version = _landlock.version(libc, kernel.landlock)
    try:
        if not version:
            raise OSError
        python = _python_places()  # which may be written to for its bytecode: no code but our own runs until `close`
        _landlock.allow_only(
            libc, version, (*inputs, *_FACTS), (*_LIBRARIES, *_PROGRAMS, *_named_places()), (*python, folder) if folder else python
        )
    except OSError:
        made.missing.append(
            "no Landlock (Linux 5.13): a file that takes its reader over can read every file that you can read, "
            "and the memory of your other programs"
        )
    else:
        made.held.append(f"no other files{', no TCP' if version >= _landlock.TCP_SINCE else ''} (Landlock {version})")
        if _threads() > 1:
            made.missing.append("threads that ran before: they are outside of Landlock")
    return made


def close(
    made: Protections,
    inputs: Sequence[str],
    size_bytes: int,
    cpu_s: int,
    spare_bytes: int = SPARE_BYTES,
    threads: int = 0,
    kernel: Kernel | None = None,
    told: int | None = None,
) -> None:
    """Give up all that is left but reading; what is in force is added to what `enclose` returned.

    Args:
        made: what `enclose` returned.
        inputs, threads, kernel: as of `enclose`.
        size_bytes: of the input: memory is limited in its proportion.
        cpu_s: seconds of processor time, after which the kernel ends the process.
        spare_bytes: of memory beside that.
        told: descriptor to which the number of each refused call is written.
    """
    kernel = kernel or Kernel()
    _limits(size_bytes, cpu_s, spare_bytes, threads, made)
    if "no new privileges" not in made.held:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)
    if any("Landlock" in each for each in made.held):
        with suppress(OSError):  # for where no filter of calls is; the first rule holds anyway
            _landlock.allow_only(libc, _landlock.version(libc, kernel.landlock), (*inputs, *_FACTS), (*_LIBRARIES, *_python_places()))
    try:
        if not kernel.seccomp:
            raise OSError
        _calls.forbid(libc, threads > 0, _calls.noting(libc, told))
    except OSError:
        why = "seccomp" if _calls.known() else "seccomp; this processor is not known"
        made.missing.append(
            f"no filter of system calls ({why}): a file that takes its reader over can change and lock your files, disturb your other "
            "programs, start programs, and leave things in memory"
        )
        if "no network (namespace)" not in made.held:
            made.missing.append("the network can be reached")
    else:
        made.held.append("only system calls on the process itself: no network, no programs, no changes (seccomp)")


def _drop_capabilities(libc: Any, inputs: Sequence[str], made: Protections) -> None:
    """Drop root's privileges; the one to read others' files stays where the input, or Python itself, is another's."""
    head = struct.pack("<Ii", _CAPABILITIES_3, 0)
    now = ctypes.create_string_buffer(24)
    if libc.capget(head, now) != 0:
        made.missing.append("capabilities can't be asked for, and were not dropped")
        return
    permitted = struct.unpack("<6I", now.raw)[1]
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_CAPABILITY_DROP, capability, 0, 0, 0)
    libc.prctl(_AMBIENT, _CLEAR_ALL, 0, 0, 0)
    kept = permitted & _READ_ALL or permitted & _OVERRIDE
    if kept:
        libc.capset(head, struct.pack("<6I", 0, kept, 0, 0, 0, 0))
        kept = 0 if all(_readable(place) for place in (*inputs, *sys.path)) else kept
    if libc.capset(head, struct.pack("<6I", kept, kept, 0, 0, 0, 0)) != 0:
        made.missing.append("capabilities were not dropped")
        return
    made.held.append("no capabilities" if not kept else "no capabilities but to read others' files")


def _readable(place: str) -> bool:
    """Whether a place can be read, and what is in it, as far as is looked at; one that is not there needs no privilege."""

    def give_up(error: OSError) -> None:
        raise error

    try:
        path = Path(place)
        files = (Path(folder, name) for folder, _, names in os.walk(path, onerror=give_up) for name in names) if path.is_dir() else [path]
        for file in islice(files, 1 if place in sys.path else MOST_WEIGHED):
            if file.is_file():
                os.close(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _limit_threads(threads: int, made: Protections) -> None:
    """Limit threads by what the user has running already; root, whom no such limit binds, first becomes somebody with nothing running."""
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if os.geteuid() == 0:
        with suppress(OSError):  # of the real user alone; files are opened as the effective one
            os.setresuid(_SOMEBODY + os.getpid(), 0, 0)
    limit = (1 if os.getuid() >= _SOMEBODY else _running()) + threads
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        if os.getuid() and _starts_a_thread():
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
            made.held.append(f"{threads} threads")
            return
        resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
    made.missing.append("no limit of threads: a file that takes its reader over can slow this machine down until the reader is ended")


def _running() -> int:
    """Count the threads that this user has running."""
    own, found = os.getuid(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, KeyError, IndexError, ValueError):  # it has ended
            facts = dict(line.split(":", 1) for line in status.read_text().splitlines())
            found += int(facts["Threads"]) if int(facts["Uid"].split()[0]) == own else 0
    return found


def _starts_a_thread() -> bool:
    """Try whether a thread can be started, and wait for its end, which comes a little after the last that Python sees of it."""
    try:
        thread = threading.Thread(target=lambda: None)
        thread.start()
    except RuntimeError:
        return False
    thread.join()
    end = time.monotonic() + 1
    while _threads() > 1 and time.monotonic() < end:
        time.sleep(0.001)
    return True


def _threads() -> int:
    try:
        return sum(1 for _ in Path("/proc/self/task").iterdir())
    except OSError:
        return threading.active_count()


def _limits(size_bytes: int, cpu_s: int, spare_bytes: int, threads: int, made: Protections) -> None:
    try:
        import resource
    except ImportError:  # Windows
        made.missing.append("no limits of memory and time of the processor")
        return
    memory = _used_bytes() + 4 * size_bytes + spare_bytes
    wanted: dict[str, tuple[int, str]] = {
        "RLIMIT_CORE": (0, "no core dump"),
        "RLIMIT_FSIZE": (0, "no writing"),
        "RLIMIT_NOFILE": (FILES, f"{FILES} open files"),
        "RLIMIT_CPU": (cpu_s, f"processor {cpu_s} s"),
        "RLIMIT_AS": (memory, f"memory {memory / 1e9:.1f} GB"),
        "RLIMIT_MEMLOCK": (0, "no locked memory"),
        "RLIMIT_MSGQUEUE": (0, "no message queues"),
    }
    if not threads and os.getuid():  # root is bound by the filter of calls alone
        wanted["RLIMIT_NPROC"] = (0, "no new threads")
    for name, (limit, words) in wanted.items():
        try:
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(which, (limit, limit + GRACE_S if name == "RLIMIT_CPU" and hard == resource.RLIM_INFINITY else limit))
        except (AttributeError, ValueError, OSError):  # macOS limits no address space
            if name == "RLIMIT_AS":
                made.missing.append("no limit of memory")
            continue
        made.held.append(words)


def _used_bytes() -> int:
    """Tell the address space in use: libraries that are loaded already are no fault of the file's."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 2**32


_FACTS = (
    *("/dev/null", "/dev/urandom", "/etc/localtime", "/etc/os-release", "/usr/share/zoneinfo"),
    *("/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/self", "/sys/devices/system/cpu", "/sys/devices/system/node"),
)
"""What libraries ask of the machine: nothing in it is the user's."""
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache", "/nix/store", "/gnu/store")
_PROGRAMS = ("/bin", "/sbin", "/usr/bin", "/usr/sbin")
"""What libraries may start while they are imported: `platform.processor` asks `uname`."""


def _named_places() -> list[str]:
    """List where the user has libraries, which are needed while others are imported."""
    return [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":") if Path(entry).is_absolute()]


def _python_places() -> list[str]:
    """List where Python and its libraries lie, from which more may be imported: no folder of the user's own work."""
    prefixes = {str(Path(prefix) / "lib") for prefix in (sys.prefix, sys.base_prefix)}
    places, libraries = set(prefixes), set[str]()
    for entry in sys.path:
        if Path(entry).name in ("site-packages", "dist-packages") or any(entry.startswith(prefix) for prefix in prefixes):
            libraries.add(entry)
        else:
            places |= {str(Path(entry) / package) for package in ("convert", "weights")}
    if any(os.path.islink(file) for module in tuple(sys.modules.values()) if (file := getattr(module, "__file__", None))):  # noqa: PTH114
        packages = {*map(Path, places - prefixes), *(file for entry in libraries if Path(entry).is_dir() for file in Path(entry).iterdir())}
        places |= {str(place) for package in packages for place in _linked(package)}
    places |= libraries
    return sorted(places)


def _linked(package: Path) -> Iterator[Path]:
    """Follow the links of a package whose files are links to files elsewhere, as uv and Bazel install them."""
    with suppress(OSError):
        if package.is_symlink():
            yield package.resolve()
        elif package.is_dir():
            yield from {file.resolve().parent for file in package.iterdir() if file.is_symlink()}
