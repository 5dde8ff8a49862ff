"""Which system calls a confined process may make, as a filter for the kernel (seccomp): all that is not allowed here is refused.

A call is allowed if it changes nothing outside of the process, whatever its arguments, or with arguments that are checked. What is refused
gets the answer from which libraries go on best:

- EPERM for most, with the call's name noted (`noting`), so that an error says which call a library lacks;
- ENOSYS for calls since Linux 5.1 and for a few that libraries only try, because the C library then makes an older call instead: `clone`
  for `clone3` and `openat` for `openat2`, whose flags lie in memory where no filter sees them;
- EROFS for opening a file to write or to make it, EAGAIN for a thread too many, ENOTTY for commands to devices, and the like;
- the end of the process for what no reader has a reason to do: `ptrace`, `mount`, `init_module`.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import struct
import sys
from typing import Any

from convert._call_table import COMMON, NAMES, NUMBERS


def _names(words: str) -> tuple[str, ...]:
    return tuple(words.split())


FREE = _names(
    # what is open already, and the process's own memory
    "read readv pread64 preadv write writev lseek close close_range dup dup2 dup3 fstat mincore munmap mprotect mremap brk "
    "poll ppoll select pselect6 getdents getdents64 "
    # what files are called and what they are; which of them can be opened is Landlock's to say
    "stat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat getcwd statfs fstatfs "
    # time, chance, and facts of the process and the machine
    "clock_gettime clock_getres gettimeofday time nanosleep clock_nanosleep getrandom getrusage times sysinfo uname getcpu getrlimit "
    "getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid getsid "
    "sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min "
    # threads and signals within the process
    "futex set_robust_list set_tid_address rseq rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending sigaltstack restart_syscall "
    "exit exit_group"
)
"""Allowed whatever their arguments."""
FATAL = _names(
    "ptrace process_vm_readv process_vm_writev pidfd_getfd kexec_load kexec_file_load init_module finit_module delete_module reboot bpf "
    "mount umount2 pivot_root chroot setns unshare move_mount open_tree open_tree_attr fsopen fsconfig fsmount fspick mount_setattr swapon "
    "swapoff acct quotactl quotactl_fd open_by_handle_at iopl ioperm modify_ldt sethostname setdomainname settimeofday clock_settime"
)
"""What no library tries."""
TRIED = _names("membarrier get_mempolicy set_mempolicy mbind pkey_alloc copy_file_range")
"""What libraries try, and do without where a kernel lacks it."""

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32 = 0x40000000  # the bit of calls by another convention, which would walk past numbers that are compared for equality
_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _GIVE = 0x20, 0x15, 0x45, 0x35, 0x06  # LD W ABS, JEQ, JSET, JGE, RET
_KILL, _TRAP, _ERROR, _ALLOW = 0x80000000, 0x00030000, 0x00050000, 0x7FFF0000
_GET_FILTER, _SET_FILTER, _ALL_THREADS = 21, 1, 1
_WRITES = os.O_WRONLY | os.O_RDWR | getattr(os, "O_CREAT", 0) | getattr(os, "O_TRUNC", 0) | 0x400000  # the last: O_TMPFILE
_A_THREAD = (0x3D0F00, 0x7D0F00)  # how glibc and musl start a thread; no other process is started so
_HUGE_PAGES = 0x40000  # of all processes, and few
_TCGETS, _FIOCLEX, _FIONREAD = 0x5401, 0x5451, 0x541B
_FCNTL = (0, 1, 2, 3, 4, 1030, 1034)  # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GET_SEALS: no lock, lease or owner
_NAME, _GET_NAME, _VMA_NAME = 15, 16, 0x53564D41  # of a thread, and of a piece of memory
_BROKEN_PAGES = (100, 101)  # MADV_HWPOISON, MADV_SOFT_OFFLINE

Instruction = tuple[int, int, int, int]


def known() -> bool:
    """Whether there is a table of this machine's calls."""
    return platform.machine() in NUMBERS and struct.calcsize("P") == 8 and sys.byteorder == "little"


def available(libc: Any) -> bool:
    """Whether the kernel filters calls, and this machine's are known."""
    return known() and libc.prctl(_GET_FILTER, 0, 0, 0, 0) >= 0


def name(number: int, machine: str = "") -> str:
    """Name a system call; "call 1234" where the table has none."""
    return NAMES.get(machine or platform.machine(), {}).get(number, f"call {number}")


def program(machine: str, pid: int, threads: bool, refusal: int = _TRAP) -> list[Instruction]:
    """Write the filter.

    Args:
        machine: "x86_64" or "aarch64".
        pid: of the process, which may send signals to itself.
        threads: whether it may start more.
        refusal: what a call gets that is not listed here; `_TRAP` for a signal that `noting` hears.
    """
    numbers = NUMBERS[machine]
    made: list[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, _ARCHITECTURES[machine]), (_GIVE, 0, 0, _KILL)]
    made += [(_LOAD, 0, 0, 0), (_ANY_BIT, 0, 1, _X32), (_GIVE, 0, 0, _KILL)]
    blocks = {call: [(_GIVE, 0, 0, _ALLOW)] for call in FREE} | checked(pid, threads, (_GIVE, 0, 0, refusal))
    blocks |= {call: [(_GIVE, 0, 0, _KILL)] for call in FATAL} | {call: [_error(errno.ENOSYS)] for call in TRIED}
    for call, block in blocks.items():
        if call in numbers:
            made += [(_EQUAL, 0, len(block), numbers[call]), *block]
    return [*made, (_AT_LEAST, 0, 1, COMMON), _error(errno.ENOSYS), (_GIVE, 0, 0, refusal)]


def checked(pid: int, threads: bool, refused: Instruction) -> dict[str, list[Instruction]]:
    """Give what decides on each call that is allowed with some arguments."""
    return {
        "open": _without(1, _WRITES, _error(errno.EROFS)),
        "openat": _without(2, _WRITES, _error(errno.EROFS)),
        "mmap": _without(3, _HUGE_PAGES, _error(errno.ENOMEM)),
        "madvise": _only_other(2, _BROKEN_PAGES, refused),
        "fcntl": _among(1, _FCNTL, refused),
        "ioctl": _among(1, (_TCGETS, _FIOCLEX, _FIONREAD), _error(errno.ENOTTY)),
        "prctl": _among(0, (_NAME, _GET_NAME, _VMA_NAME), _error(errno.EPERM)),
        "kill": _among(0, (pid,), refused),
        "tgkill": _among(0, (pid,), refused),
        "prlimit64": [*_null(2, refused), *_among(0, (0, pid), refused)],
        "clone": _among(0, _A_THREAD if threads else (), _error(errno.EAGAIN)),
    }


def _error(number: int) -> Instruction:
    return _GIVE, 0, 0, _ERROR | number


def _low(argument: int) -> Instruction:
    """Load what the kernel reads of an argument that is an int: its lower half."""
    return _LOAD, 0, 0, 16 + 8 * argument


def _without(argument: int, bits: int, refusal: Instruction) -> list[Instruction]:
    return [_low(argument), (_ANY_BIT, 0, 1, bits), refusal, (_GIVE, 0, 0, _ALLOW)]


def _among(argument: int, values: tuple[int, ...], refusal: Instruction) -> list[Instruction]:
    made = [_low(argument)]
    for value in values:
        made += [(_EQUAL, 0, 1, value), (_GIVE, 0, 0, _ALLOW)]
    return [*made, refusal]


def _only_other(argument: int, values: tuple[int, ...], refusal: Instruction) -> list[Instruction]:
    made = [_low(argument)]
    for value in values:
        made += [(_EQUAL, 0, 1, value), refusal]
    return [*made, (_GIVE, 0, 0, _ALLOW)]


def _null(argument: int, refusal: Instruction) -> list[Instruction]:
    """Go on only if a pointer is null, in both halves."""
    low, high = _low(argument), (_LOAD, 0, 0, 20 + 8 * argument)
    return [low, (_EQUAL, 1, 0, 0), refusal, high, (_EQUAL, 1, 0, 0), refusal]


def forbid(libc: Any, threads: bool, noted: bool) -> None:
    """Put the filter on this process, all its threads, for good.

    Raises:
        OSError: the kernel has no such filter, or the machine no table.
    """
    if not known():
        raise OSError(errno.ENOSYS, "no table for this machine")
    made = program(platform.machine(), os.getpid(), threads, _TRAP if noted else _ERROR | errno.EPERM)
    code = b"".join(struct.pack("<HBBI", *instruction) for instruction in made)
    held = ctypes.create_string_buffer(code, len(code))
    described = struct.pack("<H6xQ", len(made), ctypes.addressof(held))
    seccomp = NUMBERS[platform.machine()]["seccomp"]
    if libc.syscall(seccomp, ctypes.c_uint(_SET_FILTER), ctypes.c_uint(_ALL_THREADS), described) != 0:
        raise OSError(ctypes.get_errno(), "no filter")


def noting(libc: Any, told: int | None) -> bool:
    """Have the number of each refused call written to the descriptor `told`; the call fails with EPERM then too.

    The kernel sends SIGSYS at the call itself. What hears it is machine code, since Python might wait for a thread that waits for it.
    Returns False where that can't be.
    """
    if told is None or told >= 1 << 15 or platform.machine() not in _HEARD:
        return False
    code = _HEARD[platform.machine()](told)
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        return False
    page.write(code)
    place = ctypes.addressof(ctypes.c_char.from_buffer(page))
    _kept.append(page)
    if libc.mprotect(ctypes.c_void_p(place), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        return False  # where no memory may be made executable
    with_context, again = 4, 0x40000000  # SA_SIGINFO, SA_NODEFER
    action = struct.pack("<Q128siiQ", place, b"", with_context | again, 0, 0)
    return libc.sigaction(int(signal.SIGSYS), action, None) == 0


_kept: list[mmap.mmap] = []


def _x86_64(told: int) -> bytes:
    """Write a handler of signals: context->rax = -EPERM; write(told, &info->si_syscall, 4)."""
    return b"".join(
        (
            bytes.fromhex("48c78290000000ffffffff"),  # mov qword [rdx+144], -1
            b"\xbf" + struct.pack("<i", told),  # mov edi, told
            bytes.fromhex("4883c618"),  # add rsi, 24
            bytes.fromhex("ba04000000"),  # mov edx, 4
            bytes.fromhex("b801000000"),  # mov eax, 1: write
            bytes.fromhex("0f05c3"),  # syscall; ret
        )
    )


def _arm64(told: int) -> bytes:
    """Write the same for ARM64: context->regs[0] = -EPERM, and so on."""
    return struct.pack(
        "<8I",
        0x92800003,  # mov x3, #-1
        0xF9005C43,  # str x3, [x2, #184]
        0x52800000 | told << 5,  # mov w0, told
        0x91006021,  # add x1, x1, #24
        0xD2800082,  # mov x2, #4
        0xD2800808,  # mov x8, #64: write
        0xD4000001,  # svc #0
        0xD65F03C0,  # ret
    )


_HEARD = {"x86_64": _x86_64, "aarch64": _arm64}
