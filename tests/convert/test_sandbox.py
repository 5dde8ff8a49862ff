"""Strangers' files are read in a process of their own: what comes back is the same, and what goes wrong there is an error here."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import mmap
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile import seeds

from convert import _calls, formats, sandbox
from convert._kept import Kept
from convert.formats import safetensors
from convert.formats._hdf5 import Hdf5
from convert.formats._picklemachine import Machine
from convert.source import Source
from convert.steps import Cast
from weights import ConvertError, LimitExceeded, MalformedFile, ReaderCrashed, ReaderUnavailable, UnsafeFormat

BEHIND = sandbox.START.removesuffix("main()\n")
"""What starts a reader, up to its work."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.savez(tmp_path / "x.npz", **{"a.weight": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2), "a.bias": np.zeros(2)})
    return tmp_path / "x.npz"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let another program stand where the reader does, from when it is ready; it has `confine`, and `asked`, the first question."""

    def replaced(code: str) -> None:
        first = "import sys, os, json\nfrom convert._confined import close, enclose\nasked = json.loads(sys.stdin.buffer.readline())\n"
        first += "def confine(inputs, *limits):\n    made = enclose(inputs)\n    close(made, inputs, *limits)\n    return made\n"
        monkeypatch.setattr(sandbox, "START", BEHIND + first + answering("json.dumps({'protections': []})") + code)

    return replaced


def children(parent: int) -> set[int]:
    """List the processes that one has started and not yet buried."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            if int(stat.read_text().rpartition(")")[2].split()[1]) == parent:
                found.add(int(stat.parent.name))
    return found


def answering(words: str) -> str:
    return f"text = ({words}).encode()\nos.write(1, len(text).to_bytes(8, 'little') + text)\nsys.stdin.buffer.readline()\n"


def same(ours: Source, theirs: Source) -> None:
    for field in fields(Source):
        if field.name not in ("tensors", "layout", "close", "reader"):
            assert repr(getattr(ours, field.name)) == repr(getattr(theirs, field.name)), field.name
    assert list(ours.tensors) == list(theirs.tensors)
    for name, there in theirs.tensors.items():
        here = ours.tensors[name]
        assert (here.origin, here.shape, here.stored_dtype, here.convention) == (
            there.origin,
            there.shape,
            there.stored_dtype,
            there.convention,
        )
        assert repr(here.steps) == repr(there.steps)
        assert np.ascontiguousarray(here.load()).tobytes() == np.ascontiguousarray(there.load()).tobytes()
    assert (ours.layout is None) == (theirs.layout is None)
    if ours.layout is not None and theirs.layout is not None:
        assert dict(ours.layout.leaves) == {kind: tuple(leaves) for kind, leaves in theirs.layout.leaves.items()}
        for kind, leaves in theirs.layout.leaves.items():
            for stored in theirs.tensors.values():
                for leaf in leaves:
                    try:
                        wanted = repr(theirs.layout.steps(kind, leaf, stored.stored_shape))
                    except (ValueError, LookupError):
                        with pytest.raises(ValueError):  # noqa: PT011  whatever the reader said
                            ours.layout.steps(kind, leaf, stored.stored_shape)
                    else:
                        assert repr(ours.layout.steps(kind, leaf, stored.stored_shape)) == wanted


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the numbers of the system calls that readers were refused."""
    numbers, end = list[int](), sandbox._end

    def noting(process: subprocess.Popen[bytes], folder: str | None, reading: int | None) -> None:
        with contextlib.suppress(BlockingIOError):  # nothing was written
            numbers.extend(number for (number,) in struct.iter_unpack("<i", os.read(reading, 4000) if reading is not None else b""))
        end(process, folder, reading)

    monkeypatch.setattr(sandbox, "_end", noting)
    return numbers


@pytest.mark.parametrize("format", sorted(formats.formats()))
def test_a_file_reads_the_same_in_a_process_of_its_own(format: str, tmp_path: Path, refused: list[int]) -> None:
    path = seeds(format, tmp_path)[0]
    with sandbox.read(path, format) as ours, formats.read(path, format) as theirs:
        same(ours, theirs)
        assert bool(ours.reader) == (format != "safetensors")
    assert [_calls.name(number) for number in refused] == []


@pytest.mark.parametrize("format", sorted(set(formats.formats()) - {"safetensors"}))
def test_a_format_is_told_by_the_first_bytes_and_nothing_is_parsed_here(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed = []

    def parse(*_: object, **__: object) -> None:
        parsed.append(format)
        raise AssertionError("this process parses a stranger's file")

    paths = seeds(format, tmp_path)[:2]
    for module in formats.formats().values():
        monkeypatch.setattr(module, "read", parse)
    for owner, name in ((zipfile.ZipFile, "__init__"), (Hdf5, "__init__"), (Machine, "run"), (json, "load"), (mmap, "mmap")):
        monkeypatch.setattr(owner, name, parse)
    for path in paths:
        with sandbox.read(path) as found:
            assert found.format == format
    assert parsed == []


@pytest.mark.long
@pytest.mark.parametrize("format", sorted(formats.formats()))
def test_every_seed_reads_the_same_in_a_process_of_its_own(format: str, tmp_path: Path, refused: list[int]) -> None:
    for path in seeds(format, tmp_path):
        with sandbox.read(path, format) as ours, formats.read(path, format) as theirs:
            same(ours, theirs)
    assert [_calls.name(number) for number in refused] == []


def test_bytes_that_were_read_are_those_that_are_parsed(tmp_path: Path) -> None:
    path = seeds("pytorch", tmp_path)[0]
    data = path.read_bytes()
    path.write_bytes(b"another file by now")
    with sandbox.read(path, "pytorch", data=data) as ours:
        assert len(ours.tensors) == 9
        assert ours.tensors["0.weight"].array().shape == (4, 3, 3, 3)


def test_readers_errors_come_through_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(b"PK\3\4 not an archive at all")
    with pytest.raises(MalformedFile) as here:
        formats.read(tmp_path / "x.npz", "npz")
    with pytest.raises(MalformedFile) as there:
        sandbox.read(tmp_path / "x.npz", "npz")
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))
    with pytest.raises(FileNotFoundError):
        sandbox.read(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("code", "signal", "words"),
    [
        ("os.kill(os.getpid(), 11)", "SIGSEGV", "died of SIGSEGV"),
        ("os.abort()", "SIGABRT", "died of SIGABRT"),
        ("os._exit(7)", None, "ended with exit code 7"),
        ("confine([], 0, 1)\nwhile True: pass", "SIGXCPU", "ended by the limit of processor time"),
    ],
)
def test_a_reader_that_dies_is_a_typed_error_with_its_cause(file: Path, reader: Any, code: str, signal: str | None, words: str) -> None:
    reader(code)
    with pytest.raises(ReaderCrashed, match=words) as crash:
        sandbox.read(file)
    assert crash.value.signal == signal
    assert crash.value.path == str(file)
    assert "x.npz" in str(crash.value)


@pytest.mark.parametrize("code", ["import a_library_that_is_damaged", "import os; os._exit(3)", "import os; os.kill(os.getpid(), 11)"])
def test_a_reader_that_never_gets_ready_is_this_machines_fault(file: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "START", code)
    with pytest.raises(ReaderUnavailable, match=r"x\.npz: it .* before it was ready\. The file was not looked at") as error:
        sandbox.read(file)
    assert not isinstance(error.value, ConvertError)


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.ENOMEM, errno.ENOENT, errno.EMFILE, None], ids=str)
def test_a_machine_that_starts_no_process_is_no_bad_file(file: Path, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(code, os.strerror(code)) if code else RuntimeError("can't start new thread")

    before = children(os.getpid())
    monkeypatch.setattr(*((subprocess, "Popen", refuse) if code else (threading.Timer, "start", refuse)))
    with pytest.raises(ReaderUnavailable, match=r"no process could be started to read .*x\.npz: .*The file was not looked at"):
        sandbox.read(file)
    gc.collect()
    assert not children(os.getpid()) - before
    monkeypatch.undo()
    sandbox.read(file).close()  # the next try needs no help


def test_a_reader_without_room_for_the_bytes_is_this_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = seeds("pytorch", tmp_path)[0]

    def refuse(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(ReaderUnavailable, match="Too many open files"):
        sandbox.read(path, "pytorch", data=path.read_bytes())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="files in memory are Linux's")
@pytest.mark.parametrize("busy", [False, True], ids=["free", "its pages are held by the kernel"])
def test_bytes_that_are_lent_cant_be_changed_any_more(busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that moves a page of the file refuses to seal it: CI met that once in thousands of runs."""
    import fcntl

    ask, refused = fcntl.fcntl, []

    def refuse(file: int, what: int, value: int = 0) -> int:
        if busy and what == fcntl.F_ADD_SEALS and value & fcntl.F_SEAL_WRITE:
            refused.append(value)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return ask(file, what, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with sandbox._held(b"as they are") as held:
        assert held is not None
        for change in (lambda: os.pwrite(held, b"other", 0), lambda: os.ftruncate(held, 1), lambda: os.ftruncate(held, 100)):
            with pytest.raises(PermissionError):
                change()
        with pytest.raises(PermissionError):
            mmap.mmap(held, 0)
        with pytest.raises(PermissionError):
            ask(held, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        assert os.pread(held, 100, 0) == b"as they are"
    assert bool(refused) == busy
    path = seeds("pytorch", tmp_path)[0]
    with sandbox.read(path, "pytorch", data=path.read_bytes()) as source, sandbox.read(path, "pytorch") as expected:
        assert list(source.tensors) == list(expected.tensors)


def test_a_reader_can_blame_nothing_but_the_file(file: Path, reader: Any) -> None:
    """What was taken over may not have its caller believe that a disk is full, or a source gone."""
    for kind in ("NoSpace", "SourceUnavailable", "ReaderUnavailable", "datetime", "WeightsError", "SystemExit"):
        reader(answering(f"json.dumps({{'error': [{kind!r}, 'words'], 'log': []}})"))
        with pytest.raises(MalformedFile, match=r"x\.npz can't be read: words"):
            sandbox.read(file)


def test_a_reader_that_hangs_is_ended_at_the_deadline(file: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "OPENING_S", 0.5)
    reader("import time\ntime.sleep(600)")
    begun = time.monotonic()
    with pytest.raises(ReaderCrashed, match=r"the deadline of \d s") as crash:
        sandbox.read(file)
    assert time.monotonic() - begun < 300  # it would sleep twice as long
    assert crash.value.limit is not None


def test_what_a_reader_has_started_ends_with_it_at_the_deadline(file: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only without a filter of calls; such a process would hold the pipe open that is waited at."""
    monkeypatch.setattr(sandbox, "OPENING_S", 0.5)
    reader("import subprocess, time\nsubprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)")
    begun = time.monotonic()
    with pytest.raises(ReaderCrashed, match=r"the deadline of \d s"):
        sandbox.read(file)
    assert time.monotonic() - begun < 300  # it would sleep twice as long


@pytest.mark.parametrize("own", ["", ", start_new_session=True"])
def test_a_reader_that_ended_itself_leaves_nothing_running_and_nobody_waiting(
    own: str, file: Path, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has started holds the pipe; where even that has a group of its own, the deadline is kept all the same."""
    monkeypatch.setattr(sandbox, "OPENING_S", 1.0)
    sleeps = f"[sys.executable, '-c', 'import time; time.sleep(600)']{own}"
    reader(
        f"import subprocess\nstarted = subprocess.Popen({sleeps}, stdin=subprocess.DEVNULL)\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(started.pid))\nos._exit(3)"
    )
    begun = time.monotonic()
    with pytest.raises(ReaderCrashed):
        sandbox.read(file)
    assert time.monotonic() - begun < 300  # it would sleep twice as long
    pid = int((tmp_path / "pid").read_text())
    if own:
        os.kill(pid, 9)
    else:
        for _ in range(100):
            if not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text():
                return
            time.sleep(0.05)
        pytest.fail(f"{pid} still runs")


def test_a_small_file_of_which_much_is_told_is_refused(file: Path, reader: Any) -> None:
    reader(answering("'[' + '0.1,' * 2_000_000 + '1]'"))
    with pytest.raises(LimitExceeded, match="more than can be told of it"):
        sandbox.read(file)


def test_an_interrupt_ends_the_reader_too(file: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader("import time\ntime.sleep(60)")
    before, found = children(os.getpid()), set[int]()

    def interrupted(*_: Any) -> None:
        found.update(children(os.getpid()) - before)
        raise KeyboardInterrupt

    exactly, answers = sandbox._exactly, iter(range(3))
    monkeypatch.setattr(sandbox, "_exactly", lambda *parts: exactly(*parts) if next(answers) < 2 else interrupted())
    with pytest.raises(KeyboardInterrupt):
        sandbox.read(file)
    assert len(found) == 1
    assert children(os.getpid()) == before


def test_a_reader_that_asks_for_more_memory_than_its_file_needs_gets_none(file: Path, reader: Any) -> None:
    reader(
        "confine([], 10, 9)\nimport convert._reader as r\ndef big():\n    return bytearray(3 * 2**30)\n"
        "r._tell(os.fdopen(1, 'wb', buffering=0), big, r._Heard())"
    )
    with pytest.raises(LimitExceeded, match="more memory"):
        sandbox.read(file)


@pytest.mark.parametrize(
    "words",
    [
        "'no JSON'",
        "'[]'",
        "'{}'",
        "json.dumps({'source': {}, 'log': []})",
        "'[' * 100000",
        "json.dumps({'source': {**GOOD, 'tensors': [['a', 'a', [2**50], '<f4', [], None]]}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'tensors': [['a', 'a', [-1], '<f4', [], None]]}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'tensors': [['a', 'a', [2], '|O8', [], None]]}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'tensors': [['a', 'a', [2], '<f4', [['Reshape', 5, 5]], None]]}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'tensors': [['a', 'a', [2], '<f4', [['os.system', 'x']], None]]}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'facts': {'a': 5}}, 'log': []})",
        "json.dumps({'source': {**GOOD, 'graph': [[['a', 'relu', ['b'], {'dict': []}]], []]}, 'log': []})",
    ],
)
def test_an_answer_that_no_reader_gives_is_believed_in_nothing(file: Path, reader: Any, words: str) -> None:
    good = {
        "path": "x", "format": "npz", "framework": "x", "tensors": [], "positional": False, "graph": None, "flatten": "chw",
        "spatial": "hw", "facts": {}, "preprocessing": {"dict": []}, "notes": [], "layout": None,
    }  # fmt: skip
    reader(f"GOOD = json.loads('''{json.dumps(good)}''')\n" + answering(words))
    with pytest.raises(ReaderCrashed, match="answer nonsense"):
        sandbox.read(file)


def test_limits_are_in_proportion_to_all_that_a_format_may_open(tmp_path: Path, reader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader(answering("json.dumps({'error': ['MalformedFile', str(asked['size_bytes'])], 'log': []})"))

    def weighed(path: Path, format: str) -> int:
        with pytest.raises(MalformedFile) as told:
            sandbox.read(path, format)
        return int(str(told.value))

    home = tmp_path / "home"
    (home / "saved" / "variables").mkdir(parents=True)
    for name, size in {"model.onnx": 10, "model.data": 2000, "other": 500, "saved/saved_model.pb": 7, "saved/variables/data": 9000}.items():
        (home / name).write_bytes(bytes(size))
    (home / "link").symlink_to(home / "saved" / "variables" / "data")
    assert weighed(home / "model.onnx", "npz") == 10
    assert weighed(home / "model.onnx", "onnx") == 10 + 2000 + 500 + 7 + 9000
    assert weighed(home / "saved", "flax") == 7 + 9000
    assert weighed(home / "model", "tensorflow") == 10 + 2000 + 500 + 7 + 9000  # what its files share is no file
    # a folder may be somebody's home: not all of it is looked at, but the file that was named, or the whole folder that was
    monkeypatch.setattr(sandbox, "MOST_COMPANIONS", 0)
    assert weighed(home / "model.onnx", "onnx") == 10
    assert weighed(home / "saved", "flax") == 7 + 9000
    monkeypatch.setattr(sandbox, "MOST_COMPANIONS", 3)
    assert weighed(home / "model.onnx", "onnx") <= 10 + 2000 + 500


def test_claims_beyond_the_file_are_refused_here_too(file: Path, reader: Any) -> None:
    told = "json.dumps({'source': {'path': 'x', 'format': 'npz', 'framework': 'x', 'tensors': [['a', 'a', [2**34], '<f4', [], None]], "
    told += (
        "'positional': False, 'graph': None, 'flatten': 'chw', 'spatial': 'hw', 'facts': {}, 'preprocessing': {'dict': []}, 'notes': [], "
    )
    reader(answering(f"({told} 'layout': None}}, 'log': []}}))"))
    with pytest.raises(LimitExceeded, match="claims tensors"):
        sandbox.read(file)
    reader("os.write(1, (2**40).to_bytes(8, 'little'))\nsys.stdin.buffer.readline()")
    with pytest.raises(LimitExceeded, match="more than can be told"):
        sandbox.read(file)


def test_a_reader_that_was_taken_over_finds_nothing_to_do(file: Path, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each protection forbids is tried; where the kernel has none of a kind, it is not named among those in force."""
    (tmp_path / "secret").write_text("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    reader(
        "active = confine(asked['inputs'], 10, 9).held\nfound = {}\n"
        "def attempt(name, what):\n    try:\n        found[name] = str(what())\n"
        "    except OSError as error:\n        found[name] = 'refused'\n"
        "import socket\n"
        "attempt('socket', lambda: socket.socket())\nattempt('fork', os.fork)\nattempt('kill', lambda: os.kill(os.getppid(), 0))\n"
        f"attempt('program', lambda: os.execv('/bin/true', ['true']))\nattempt('read', lambda: open({str(tmp_path / 'secret')!r}).read())\n"
        f"attempt('list', lambda: os.listdir({str(tmp_path)!r}))\nattempt('write', lambda: open({str(tmp_path / 'new')!r}, 'w'))\n"
        f"attempt('remove', lambda: os.unlink({str(tmp_path / 'secret')!r}))\n"
        "attempt('input', lambda: open(asked['inputs'][0], 'rb').read(2))\n"
        "found['environment'] = [name for name in os.environ if 'TOKEN' in name]\n"
        + answering("json.dumps({'error': ['MalformedFile', json.dumps([found, active])], 'log': []})")
    )
    with pytest.raises(MalformedFile) as told:
        sandbox.read(file)
    found, active = json.loads(str(told.value))
    assert found.pop("environment") == []
    assert found.pop("input") == "b'PK'"
    inside = {"socket": "seccomp", "fork": "seccomp", "kill": "seccomp", "program": "seccomp"}
    inside |= {"read": "Landlock", "list": "Landlock", "write": "Landlock", "remove": "Landlock"}
    for what, protection in inside.items():
        if any(protection in each for each in active):
            assert found[what] == "refused", what
    assert {"no core dump", "no writing"} <= set(active)
    assert not (tmp_path / "new").exists()


def test_a_closed_file_and_a_dropped_one_leave_no_process(file: Path) -> None:
    before = children(os.getpid())
    source = sandbox.read(file)
    (first,) = children(os.getpid()) - before
    source.close()
    assert first not in children(os.getpid())
    with pytest.raises(ConvertError, match="closed"):
        source.tensors["a.bias"].load()
    before = children(os.getpid())
    dropped = sandbox.read(file)
    (second,) = children(os.getpid()) - before
    del source, dropped
    gc.collect()
    assert second not in children(os.getpid())


@pytest.mark.parametrize("busy", [False, True])
def test_a_reader_ends_with_the_process_that_asked(busy: bool, file: Path) -> None:
    code = "import pathlib, threading, time; from convert import sandbox\n"
    if busy:
        works = "import convert._reader as r\ndef give(*_):\n    while True: pass\nr._give = give\nmain()"
        code += f"sandbox.START = {BEHIND + works!r}\n"
    code += f"s = sandbox.read(pathlib.Path({str(file)!r}))\n"
    if busy:
        code += "threading.Thread(target=s.tensors['a.bias'].load, daemon=True).start()\ntime.sleep(0.5)\n"
    code += "print('open', flush=True)\ninput()"
    here = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[1]), "TMPDIR": str(file.parent)}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=here) as asking:
        assert asking.stdout is not None
        assert asking.stdout.readline() == b"open\n"
        (pid,) = children(asking.pid)
        asking.kill()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "(zombie)" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    pytest.fail(f"reader {pid} still runs")


def test_reading_a_pickle_of_torchs_needs_no_torch(tmp_path: Path) -> None:
    path = seeds("pytorch", tmp_path)[0]
    code = f"import sys; from pathlib import Path; from convert import formats; s = formats.read(Path({str(path)!r}))\n"
    code += "[t.array() for t in s.tensors.values()]; assert 'torch' not in sys.modules"
    here = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", code], env=here, check=True)


def test_code_in_a_pickle_is_named_and_not_run_there_either(tmp_path: Path) -> None:
    (tmp_path / "x.pth").write_bytes(b"\x80\x02cposix\nsystem\nX\x04\x00\x00\x00true\x85R.")
    with pytest.raises(UnsafeFormat, match="posix"):
        sandbox.read(tmp_path / "x.pth", "pytorch")


@pytest.mark.parametrize("ending", ["npz", "pth", "safetensors"])
def test_tensors_that_lie_in_the_file_as_they_are_are_copied_from_file_to_file(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a.weight": torch.randn(40, 30, 3, 3), "a.bias": torch.randn(40), "turned": torch.randn(30, 50).T, "none": torch.zeros(0, 3)}
    path = tmp_path / f"x.{ending}"
    if ending == "npz":
        np.savez(path, **{name: tensor.numpy() for name, tensor in state.items()})
    elif ending == "pth":
        torch.save(state, path)
    else:
        safetensors.save(state, path)
    poured: list[int] = []
    pour = Kept.pour
    monkeypatch.setattr(Kept, "pour", lambda kept, file, start, count, name: (poured.append(count), pour(kept, file, start, count, name)))
    with sandbox.read(path) as source:
        safetensors.save_stored(source.tensors, tmp_path / "made.safetensors")
        safetensors.save_stored({name: one.then(Cast("float32", "float32")) for name, one in source.tensors.items()}, tmp_path / "read")
    assert max(poured) == 4 * 40 * 30 * 9
    assert (tmp_path / "made.safetensors").read_bytes() == (tmp_path / "read").read_bytes()
    made = safetensors.tensors(bytearray((tmp_path / "made.safetensors").read_bytes()))
    assert all(torch.equal(made[name], tensor) for name, tensor in state.items())


def test_a_disk_that_copies_nothing_itself_is_no_obstacle(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.EXDEV, "two disks")

    monkeypatch.setattr(os, "copy_file_range", refuse, raising=False)
    with sandbox.read(file) as source:
        safetensors.save_stored(source.tensors, tmp_path / "made.safetensors")
        for name, tensor in safetensors.tensors(bytearray((tmp_path / "made.safetensors").read_bytes())).items():
            assert np.array_equal(tensor.numpy(), source.tensors[name].array())


def test_tensors_of_a_file_that_was_replaced_are_those_that_were_read(file: Path, tmp_path: Path) -> None:
    with sandbox.read(file) as source:
        np.savez(tmp_path / "other.npz", **{"a.weight": np.zeros((2, 3, 2, 2), np.float32), "a.bias": np.ones(2)})
        (tmp_path / "other.npz").replace(file)
        assert source.tensors["a.weight"].array().sum() == sum(range(24))


@pytest.mark.parametrize("place", [-1, 10**9, 2.5, "0", True, [0]])
def test_a_place_that_no_file_has_is_nonsense(place: Any, file: Path, reader: Any) -> None:
    told = {"dtype": "<f4", "shape": [2, 3, 2, 2], "bytes": 96, "at": place}
    tensors = [["a.weight", "a.weight", [2, 3, 2, 2], "<f4", [], None]]
    said = {"path": "", "format": "npz", "framework": "", "tensors": tensors, "positional": False, "graph": None, "flatten": "chw"}
    said |= {"spatial": "hw", "facts": {}, "preprocessing": {"dict": []}, "notes": [], "layout": None}
    first = answering(f"json.dumps({{'source': json.loads({json.dumps(said)!r}), 'log': []}})")
    reader(first + answering(repr(json.dumps(told))))
    with sandbox.read(file) as source, pytest.raises(ReaderCrashed, match=r"nonsense.*not where it was said to be"):
        source.tensors["a.weight"].load()
