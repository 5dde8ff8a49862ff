"""What a reader that was taken over may do: nothing outside of itself, and where the kernel is too old for that, it is said."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import platform
import random
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confinement
import numpy as np
import pytest
from confinement import ATTEMPTS, ENDING, UNFILTERED

from convert import _calls, _confined, sandbox
from convert._call_table import COMMON, NAMES, NUMBERS
from convert._calls import FATAL, FREE, TRIED
from weights import CallRefused, ConvertError, ReaderCrashed, ReaderUnavailable
from zoo.commands.app import main

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="these are Linux's protections")
RECORD = Path(__file__).parents[2] / "docs" / "confined.json"
REFUSE = "from weights.errors import MalformedFile\nraise MalformedFile("
"""How the code of a test tells what it found."""
WHO = "import os, pathlib; from convert import sandbox; s = sandbox.read(pathlib.Path(os.environ['WEIGHTS'])); print(s.reader)"
BEHIND = sandbox.START.removesuffix("main()\n")
UNREADABLE = (
    "no Landlock (Linux 5.13): a file that takes its reader over can read every file that you can read, "
    "and the memory of your other programs"
)
ALWAYS = {"fchmodat", "utimensat", "read a file", "make a file", "unlinkat", "kill", "prlimit64, to ask"}
"""What every Linux lets a process do that is not confined, so that refusing it is worth something."""
MEMORY = "memory by the proc folder"


@functools.cache
def seen(user: str) -> list[dict[str, Any]]:
    """Run the probe, as this user or as one without privileges."""
    if user == "nobody" and os.geteuid() != 0:
        pytest.skip("only root can become somebody else, and who is not root has no privileges")
    command = [sys.executable, str(Path(confinement.__file__)), *(["--nobody"] if user == "nobody" else [])]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module", params=["this user", "nobody"])
def ages(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return seen(request.param)


def acts(age: dict[str, Any]) -> list[str]:
    return [name for name, outcome in age["attempts"].items() if outcome == "acted"]


def filtered(age: dict[str, Any]) -> bool:
    return any("seccomp" in each for each in age["held"])


@linux
def test_no_call_acts_outside_of_a_confined_reader_unless_it_is_said(ages: list[dict[str, Any]]) -> None:
    unconfined, *confined = ages
    names = [name for kind in ATTEMPTS.values() for name in kind]
    assert list(unconfined["attempts"]) == names
    assert set(acts(unconfined)) >= ALWAYS
    assert len(acts(unconfined)) > 30  # a container may forbid some of the others, and a kernel lack some
    for age in confined:
        assert list(age["attempts"]) == names
        asked, hidden = age["age"], any("Landlock" in each for each in age["held"])
        assert hidden == (UNREADABLE not in age["missing"])
        assert filtered(age) == (not any("no filter of system calls" in each for each in age["missing"]))
        if not filtered(age):  # announced, in words of all kinds
            assert not set(acts(age)) & {"TCP", "a socket with a name"} or "the network can be reached" in age["missing"]
        elif hidden:
            assert acts(age) == [], asked
        else:
            assert set(acts(age)) <= {"read a file", "list a folder", MEMORY}, asked
        assert not [outcome for outcome in age["attempts"].values() if outcome.startswith("died") or ":" in outcome], asked


@linux
def test_threads_are_limited(ages: list[dict[str, Any]]) -> None:
    for age in ages[1:]:
        limited = "no limit of threads" not in "".join(age["missing"])
        if filtered(age) and limited:
            assert age["attempts"]["threads"] == (f"{age['age']['threads']} threads" if age["age"]["threads"] else "EAGAIN")
    assert any(age["age"]["threads"] for age in ages)


@linux
def test_every_call_of_the_kernels_table_is_refused_unless_it_is_known_to_act_inside(ages: list[dict[str, Any]]) -> None:
    tables = [age["table"] for age in ages[1:] if filtered(age) and not age["age"]["threads"]]
    if not tables:
        pytest.skip("this kernel, or what runs these tests in it, admits no filter of calls")
    numbers = NUMBERS[platform.machine()]
    for table in tables:
        assert set(table) == set(numbers) - set(ENDING)
        for name, outcome in table.items():
            if name in UNFILTERED:
                continue
            lacking = outcome == "ENOSYS" and name in FREE and numbers[name] >= COMMON  # a kernel older than the call
            assert lacking or outcome == expected(name, numbers[name]), name


def expected(name: str, number: int) -> str:
    """What a call with arguments that no kernel takes gets from the filter; "passed" where the kernel looks at them."""
    if name in FREE or name == "madvise":
        return "passed"
    if name in FATAL:
        return "killed"
    checked = {"open": "EROFS", "openat": "EROFS", "mmap": "ENOMEM", "ioctl": "ENOTTY", "clone": "EAGAIN"}
    return checked.get(name, "ENOSYS" if name in TRIED or number >= COMMON else "EPERM")


@linux
def test_the_record_of_the_documents_is_what_is_seen_here() -> None:
    """If it is not: python tests/convert/confinement.py --write docs/confined.json, as root where nothing is missing; make docs-pages."""
    recorded, now = json.loads(RECORD.read_text(encoding="utf-8")), seen("this user")
    for old, new in zip(recorded, now, strict=True):
        assert old["age"] == new["age"]
        assert list(old["attempts"]) == list(new["attempts"])
        if filtered(new) and old["missing"] == new["missing"] and platform.machine() == "x86_64":
            assert set(acts(old)) ^ set(acts(new)) <= {MEMORY}  # which Yama forbids, or that a process has more privileges
        for name, outcome in old["table"].items():
            assert name in UNFILTERED or outcome == expected(name, NUMBERS["x86_64"][name]), name
    assert all(filtered(old) for old in recorded if old["age"]["seccomp"])
    assert set(recorded[1]["table"]) == set(NUMBERS["x86_64"]) - set(ENDING)  # and of later ages what differs


# The filter, without a kernel: both machines' programs, as the kernel would run them.

ALLOW, KILL, TRAP = "allow", "kill", "trap"
PID = 4711


def decide(machine: str, name: str | int, *arguments: int, threads: bool = False, architecture: int | None = None) -> str:
    """Run the filter's program on one call."""
    number = NUMBERS[machine][name] if isinstance(name, str) else name
    words = {0: number, 4: _calls._ARCHITECTURES[machine] if architecture is None else architecture}
    for index in range(6):
        value = (arguments[index] if index < len(arguments) else 0) & (2**64 - 1)
        words |= {16 + 8 * index: value & 0xFFFFFFFF, 20 + 8 * index: value >> 32}
    program, at, held = _calls.program(machine, PID, threads), 0, 0
    assert len(program) <= 4096  # more than the kernel takes
    while True:
        code, yes, no, value = program[at]
        assert yes < 256
        assert no < 256
        at += 1
        if code == 0x20:
            held = words[value]
        elif code == 0x06:
            if value & 0xFFFF0000 == 0x50000:
                return errno.errorcode[value & 0xFFFF]
            return {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x30000: TRAP}[value]
        else:
            holds = {0x15: held == value, 0x45: bool(held & value), 0x35: held >= value}[code]
            at += yes if holds else no


machines = pytest.mark.parametrize("machine", sorted(NUMBERS))


@machines
def test_each_call_of_either_machine_is_decided(machine: str) -> None:
    ones = [-1] * 6
    for name, number in NUMBERS[machine].items():
        wanted = expected(name, number).replace("passed", ALLOW).replace("killed", KILL).replace("EPERM", TRAP)
        wanted = "EPERM" if name == "prctl" else wanted
        assert decide(machine, name, *ones) == wanted, name
    assert decide(machine, 9999) == "ENOSYS"  # of a kernel to come
    assert decide(machine, "read", architecture=0x40000003) == KILL  # by the calls of 32 bits
    assert decide(machine, 0x40000000 | NUMBERS[machine]["read"]) == KILL


@machines
def test_arguments_are_checked(machine: str) -> None:
    def opens(flags: int) -> str:
        return decide(machine, "openat", -100, 1, flags)

    assert opens(os.O_RDONLY | os.O_CLOEXEC | 0o200000) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, 3, os.O_CREAT, os.O_TRUNC, 0o20000000 | os.O_RDWR):
        assert opens(flags) == opens(flags | os.O_CLOEXEC) == "EROFS"
    assert decide(machine, "kill", PID, 6) == decide(machine, "tgkill", PID, 1, 6) == ALLOW
    for other in (0, -1, -PID, PID + 1, PID - 1):
        assert decide(machine, "kill", other, 9) == decide(machine, "tgkill", other, other, 9) == TRAP
    assert decide(machine, "prlimit64", 0, 7, 0, 1) == decide(machine, "prlimit64", PID, 7, 0, 1) == ALLOW
    for arguments in ((PID + 1, 7, 0, 1), (0, 7, 1, 0), (0, 7, 1 << 32, 0), (0, 7, 1 << 63 | 1, 0)):
        assert decide(machine, "prlimit64", *arguments) == TRAP
    assert decide(machine, "clone", 0x3D0F00, threads=True) == decide(machine, "clone", 0x7D0F00, threads=True) == ALLOW
    for flags in (17, 0x3D0F00 | 1 << 29, 0x3D0F00 & ~0x10000, 0x100 | 0x4000 | 17, 0):
        assert decide(machine, "clone", flags, threads=True) == "EAGAIN"
    assert decide(machine, "clone", 0x3D0F00) == "EAGAIN"
    assert decide(machine, "clone3", 1, 88, threads=True) == "ENOSYS"
    assert decide(machine, "mmap", 0, 4096, 3, 0x22) == ALLOW
    assert decide(machine, "mmap", 0, 4096, 3, 0x22 | 0x40000) == "ENOMEM"
    assert [decide(machine, "fcntl", 3, command) for command in (0, 1, 3, 4, 1030)] == [ALLOW] * 5
    assert {decide(machine, "fcntl", 3, command) for command in (5, 6, 7, 8, 10, 15, 1024, 1026, 1031, 1033, 36, 37)} == {TRAP}
    assert decide(machine, "ioctl", 0, 0x5401) == ALLOW
    assert {decide(machine, "ioctl", 0, command) for command in (0x5412, 0x40086602, 0x5402, 0x541D)} == {"ENOTTY"}
    assert decide(machine, "prctl", 15) == ALLOW
    assert {decide(machine, "prctl", option) for option in (1, 4, 22, 35, 38)} == {"EPERM"}
    assert decide(machine, "madvise", 0, 4096, 4) == ALLOW
    assert decide(machine, "madvise", 0, 4096, 100) == decide(machine, "madvise", 0, 4096, 101) == TRAP


@machines
def test_no_number_is_allowed_but_those_of_the_list(machine: str) -> None:
    """All numbers of the table, those between and behind them, and those beside where a sign or a half would matter."""
    draw, odd = random.Random(0), (0, 1, PID, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 32, 1 << 63, 2**64 - 1)
    may = {*FREE, *_calls.checked(PID, True, (6, 0, 0, 0))}
    beside = [2**31 - 1, 2**31, 2**32 - 1, *(bit | number for bit in (1 << 29, 1 << 30, 1 << 31) for number in (0, 56, 63, 93, 280))]
    for number in [*range(1100), *beside]:
        name = NAMES[machine].get(number, "")
        for _ in range(8):
            arguments = [draw.choice((draw.getrandbits(64), draw.getrandbits(12), *odd)) for _ in range(6)]
            decision = decide(machine, number, *arguments, threads=draw.random() < 0.5)
            if name in FREE:
                assert decision == ALLOW, name
            elif name not in may:
                assert decision == (KILL if name in FATAL or number & 1 << 30 else "ENOSYS" if name in TRIED or number >= COMMON else TRAP)


def test_both_machines_decide_alike_on_calls_that_both_have() -> None:
    draw = random.Random(1)
    one, other = sorted(NUMBERS)
    for name in sorted(NUMBERS[one].keys() & NUMBERS[other].keys()):
        for _ in range(20):
            arguments = [
                draw.choice((0, PID, draw.getrandbits(8), draw.getrandbits(24), draw.getrandbits(64), *range(40))) for _ in range(6)
            ]
            threads = draw.random() < 0.5
            assert decide(one, name, *arguments, threads=threads) == decide(other, name, *arguments, threads=threads), (name, arguments)


@pytest.mark.parametrize("told", [0, 3, 255, 256, (1 << 15) - 1])
def test_what_hears_of_a_refusal_on_arm64_answers_eperm_and_writes_the_number(told: int) -> None:
    """The handler's machine code, run step by step: x1 is the signal's siginfo, x2 its ucontext."""
    info, context, signs = 0x10000, 0x20000, 1 << 64
    held, stored, calls = {0: 31, 1: info, 2: context}, {}, []
    code = struct.unpack("<8I", _calls._arm64(told))
    for word in code:
        to, base, immediate = word & 31, word >> 5 & 31, word >> 10 & 0xFFF
        if word >> 23 == 0x1A5 or word >> 23 == 0xA5:  # movz, of 64 or 32 bits
            assert word >> 21 & 3 == 0
            held[to] = word >> 5 & 0xFFFF
        elif word >> 21 == 0x494:  # movn
            held[to] = ~(word >> 5 & 0xFFFF) % signs
        elif word >> 22 == 0x244:  # add, of 64 bits, an immediate that is not shifted
            held[to] = held[base] + immediate
        elif word >> 22 == 0x3E4:  # str, of 64 bits, scaled by 8
            stored[held[base] + 8 * immediate] = held[to]
        elif word == 0xD4000001:  # svc #0
            calls.append((NAMES["aarch64"][held[8]], held[0], held[1], held[2]))
        else:
            assert word == 0xD65F03C0  # ret
    flags, link, stack, mask, fault = 8, 8, 24, 128, 8  # of ucontext, whose machine's part begins at a multiple of 16
    registers = (flags + link + stack + mask + 15) // 16 * 16 + fault
    assert stored == {context + registers: -errno.EPERM % signs}
    head, address = 16, 8  # of siginfo: three ints and their padding, then the caller's address
    assert calls == [("write", told, info + head + address, 4)]
    assert code[-1] == 0xD65F03C0


@machines
def test_what_is_listed_exists_and_is_listed_once(machine: str) -> None:
    lists = [*FREE, *FATAL, *TRIED, *_calls.checked(1, False, (6, 0, 0, 0))]
    assert len(lists) == len(set(lists))
    assert set(lists) <= set().union(*NUMBERS.values())
    assert len(NAMES[machine]) == len(NUMBERS[machine])
    assert _calls.name(NUMBERS[machine]["mbind"], machine) == "mbind"
    assert _calls.name(9999, machine) == "call 9999"


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), ("x86_64", "/usr/include/asm/unistd_64.h")],
)
def test_the_table_is_the_kernels(machine: str, header: str) -> None:
    if not Path(header).exists():
        pytest.skip("the kernel's headers are not installed there")
    theirs = dict(re.findall(r"#define __NR_(\w+) (\d+)", Path(header).read_text(encoding="utf-8")))
    assert len(theirs) > 300
    ours = {name: str(number) for name, number in NUMBERS[machine].items() if name in theirs}
    assert ours == {name: number for name, number in theirs.items() if int(number) <= max(NUMBERS[machine].values())}


def test_the_table_of_arm64_is_the_kernels() -> None:
    header = Path("/usr/include/asm-generic/unistd.h")
    if not header.exists():
        pytest.skip("the kernel's headers are not installed there")
    text = header.read_text(encoding="utf-8")
    theirs = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+) (\d+)\n", text)}
    ours = NUMBERS["aarch64"]
    renamed = {"sync_file_range2": "sync_file_range", "fstatat": "newfstatat"}
    assert len(theirs) > 250
    for name, number in theirs.items():
        if name != "syscalls" and ((number < 403 and number != 244) or number >= COMMON):
            assert ours.get(renamed.get(name, name)) == number, name


# The reader's process.


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", **{"a.weight": np.zeros((2, 3), np.float32)})
    return tmp_path / "x.npz"


@pytest.fixture
def doing(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the reader do something else when it opens a file, in the confinement of a real one."""

    def replace(code: str) -> None:
        body = "".join(f"    {line}\n" for line in code.splitlines())
        monkeypatch.setattr(
            sandbox,
            "START",
            f"{BEHIND}import os, sys, convert._reader as r\ndef opened(module, asked):\n{body}r._opened = opened\nmain()\n",
        )

    return replace


def in_force() -> bool:
    """Whether calls are filtered here, by the kernel's own word."""
    return any("seccomp" in each for each in sandbox.protections()[0])


@linux
def test_a_refused_call_is_an_error_that_names_it(file: Path, doing: Callable[[str], None]) -> None:
    if not in_force():
        pytest.skip("no filter of calls is in force here")
    doing("os.memfd_create('x')")
    with pytest.raises(CallRefused, match=r"x\.npz can't be read: its reader made the system call 'memfd_create', .* report it") as refused:
        sandbox.read(file)
    assert refused.value.path == str(file)
    assert isinstance(refused.value, ConvertError)
    doing("try:\n    os.memfd_create('x')\nexcept OSError as error:\n    raise ValueError('a library wraps it') from error")
    with pytest.raises(CallRefused, match=r"'memfd_create'.*a library wraps it"):
        sandbox.read(file)
    doing("try:\n    os.memfd_create('x')\nexcept OSError:\n    os.abort()")
    with pytest.raises(ReaderCrashed, match=r"died of SIGABRT after the system call 'memfd_create' was refused to it"):
        sandbox.read(file)
    doing("import ctypes\nctypes.CDLL(None).ptrace(0, 0, 0, 0)")
    with pytest.raises(ReaderCrashed, match="died of SIGSYS, the end of who makes a system call that no reader has a reason to make"):
        sandbox.read(file)


@linux
def test_a_refusal_that_harmed_nobody_is_no_error(file: Path, doing: Callable[[str], None]) -> None:
    doing("try:\n    os.memfd_create('x')\nexcept OSError:\n    return module.read(__import__('pathlib').Path(asked['path']))")
    with sandbox.read(file) as source:
        assert source.tensors["a.weight"].array().shape == (2, 3)
    doing(f"try:\n    os.memfd_create('x')\nexcept OSError:\n    pass\n{REFUSE}'damaged')")
    with pytest.raises(ConvertError, match=r"^damaged$"):
        sandbox.read(file)


@linux
def test_threads_that_ran_before_are_confined_too(file: Path, doing: Callable[[str], None]) -> None:
    """A library may start some when it is imported, and whoever takes the reader over could have one of them do the work."""
    if not in_force():
        pytest.skip("no filter of calls is in force here")
    doing(f"go.set()\nworker.join()\n{REFUSE}str(came))")
    early = f"""
import importlib, os, threading, convert._reader as r
go, came = threading.Event(), []
def work():
    go.wait()
    for attempt in (lambda: os.chmod({str(file)!r}, 0o777), lambda: open({str(file.parent / "other")!r}).read()):
        try: attempt(); came.append("done")
        except OSError as error: came.append(type(error).__name__)
worker = threading.Thread(target=work)
real = importlib.import_module
def starting(name):
    if name.startswith("convert.formats."): worker.start()  # as a library's own thread
    return real(name)
importlib.import_module = starting
"""
    (file.parent / "other").write_text("secret")
    sandbox.START = sandbox.START.replace("import os, sys, convert._reader", early + "import os, sys, convert._reader")
    with pytest.raises(ConvertError) as told:
        sandbox.read(file)
    hidden = any("Landlock" in each for each in sandbox.protections()[0])
    assert str(told.value) == str(["PermissionError", "PermissionError" if hidden else "done"])


@linux
def test_privileges_are_dropped(file: Path, doing: Callable[[str], None]) -> None:
    doing(f"{REFUSE}open('/proc/self/status').read())")
    with pytest.raises(ConvertError) as told:
        sandbox.read(file)
    facts = dict(line.split(":\t", 1) for line in str(told.value).splitlines() if ":\t" in line)
    assert {
        facts[name].strip("0") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb") if os.geteuid() == 0 or name != "CapBnd"
    } == {""}
    assert facts["NoNewPrivs"] == "1"
    assert facts["Seccomp"] == ("2" if in_force() else facts["Seccomp"])


@linux
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root reads what is another's")
def test_root_still_reads_what_only_its_owner_may(file: Path) -> None:
    file.chmod(0o600)
    os.chown(file, 12345, 12345)
    with sandbox.read(file) as source:
        assert "no capabilities but to read others' files" in source.reader
        assert source.tensors["a.weight"].array().shape == (2, 3)
    # Docker's root has no privilege to read alone, but the one that includes it
    lacking = (
        f"import ctypes; ctypes.CDLL(None).prctl(24, 2, 0, 0, 0); import os, sys; os.execv(sys.executable, [sys.executable, '-c', {WHO!r}])"
    )
    here = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[1]), "WEIGHTS": str(file)}
    ran = subprocess.run([sys.executable, "-c", lacking], env=here, capture_output=True, text=True, check=True)
    assert "no capabilities but to read others' files" in ran.stdout
    os.chown(file, 0, 0)
    with sandbox.read(file) as source:
        assert "no capabilities," in source.reader


def test_a_reader_has_a_folder_of_its_own_which_goes_with_it(
    file: Path, tmp_path: Path, doing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    names = "'HOME', 'TMPDIR', 'TMP', 'XDG_CACHE_HOME'"
    doing(
        f"places = {{os.environ[n] for n in ({names})}} | {{os.getcwd()}}\n{REFUSE}' '.join([*places, oct(os.stat('.').st_mode & 0o777)]))"
    )
    with pytest.raises(ConvertError) as told:
        sandbox.read(file)
    place, mode = str(told.value).split()
    assert Path(place).parent == temporary
    assert sys.platform == "win32" or int(mode, 8) == stat.S_IRWXU
    assert not list(temporary.iterdir())
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    with sandbox.read(file):
        assert len(list(temporary.iterdir())) == 1
    assert not list(temporary.iterdir())

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EAGAIN, "no process")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ReaderUnavailable):
        sandbox.read(file)
    assert not list(temporary.iterdir())


def test_a_reader_starts_where_nothing_can_be_written(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError(errno.EROFS, "a read-only disk")

    monkeypatch.setattr("tempfile.mkdtemp", refuse)
    with sandbox.read(file) as source:
        assert list(source.tensors) == ["a.weight"]


@linux
def test_libraries_that_are_links_to_files_elsewhere_are_read(
    file: Path, tmp_path: Path, doing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv installs them if it is told to, and Bazel."""
    for name in ("linked_early", "linked_late"):
        real, seen_at = tmp_path / "cache" / name / name, tmp_path / "site-packages" / name
        (real / "inner").mkdir(parents=True)
        (seen_at / "inner").mkdir(parents=True)
        for part in ("__init__.py", "inner/__init__.py"):
            (real / part).write_text("WORD = 'found'\n")
            (seen_at / part).symlink_to(real / part)
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    doing(f"from linked_late.inner import WORD\n{REFUSE}WORD)")
    monkeypatch.setattr(sandbox, "START", sandbox.START.replace("import os, sys, convert", "import linked_early, os, sys, convert"))
    with pytest.raises(ConvertError, match=r"^found$"):
        sandbox.read(file)


def test_a_command_says_once_what_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    older = "import convert._reader as r\nr.enclose = lambda *_: r.Protections(missing=['no walls: it can leave'])\nmain()\n"
    monkeypatch.setattr(sandbox, "START", BEHIND + older)
    monkeypatch.setattr(sandbox, "_said", set())
    assert main(["diff", str(file), str(file)]) == 0
    said = capsys.readouterr().err
    assert said.count("less protection here, see zoo doctor: no walls: it can leave") == 1


def test_what_protects_less_here_is_said_once(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    older = "import convert._reader as r\nfrom convert._confined import Kernel, enclose\n"
    older += "r.enclose = lambda inputs, folder, threads: enclose(inputs, folder, threads, Kernel(landlock=0))\nmain()\n"
    monkeypatch.setattr(sandbox, "START", BEHIND + older)
    monkeypatch.setattr(sandbox, "_said", set())
    with caplog.at_level(logging.WARNING, "convert"):
        for _ in range(2):
            sandbox.read(file).close()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("strangers' files are read with less protection here, see zoo doctor: ")
    assert not sys.platform.startswith("linux") or UNREADABLE in said[0]


@linux
def test_a_machine_that_has_it_all_misses_nothing() -> None:
    held, missing = sandbox.protections()
    assert bool(missing) == (not (in_force() and any("Landlock" in each for each in held))), missing
    assert {"no core dump", "no writing", "no locked memory"} <= set(held)


def test_a_processor_without_a_table_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not _calls.known()
    with pytest.raises(OSError, match="no table"):
        _calls.forbid(None, False, False)
    assert not _calls.noting(None, 3)


def test_a_system_that_is_not_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    made = _confined.enclose([])
    assert made.held == []
    assert made.missing == ["darwin has no protection of files and network: a file that takes its reader over can do what you can"]
