"""Processes that have torch and the zoo already, for tests that need one of their own and not its start, which takes four seconds.

`python()` stands for `sys.executable`: behind it a small client gives its arguments, environment, folder and standard streams to one
process of this worker that has imported torch and the zoo, which forks, and the client ends as the fork does. Who kills the client
kills the fork.

`compiler()` is such a command, of one word, whose process has Triton too, as it compiles for GPUs and not as it is interpreted here.

`reader()` stands for the process that `convert.sandbox` starts for a file. It is a fork of one that has imported what every reader
does, and gives up the same from then on: tests whose files are no strangers' need not wait a sixth of a second for each.
"""

from __future__ import annotations

import atexit
import builtins
import fcntl
import importlib
import json
import os
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

ROOT = str(Path(__file__).parents[1])
HEAVY = {
    "zoo": ["torch", "zoo.catalogue", "zoo.pretrained.trained", "zoo.finetuning.run", "zoo.images"],
    "compilers": ["torch", "triton", "zoo.catalogue", "zoo.kernels.compilation.workers", "zoo.kernels.tuning.tasks", "zoo.kernels.ops"],
}
"""What takes seconds to import, by the process that has it for those that it forks."""
MOST_BYTES = 2**17
"""Of what a client says: its arguments and environment."""


@cache
def place(what: str = "zoo") -> str:
    """Start the process that forks, once a worker, and tell where it listens; it ends with this one, whose pipe it reads."""
    folder = tempfile.mkdtemp(prefix="preloaded")
    if what in HEAVY:
        environment = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
        if what == "compilers":
            environment.pop("TRITON_INTERPRET", None)
        command = [sys.executable, __file__, "serve", f"{folder}/socket", what]
    else:
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        own = json.dumps([ROOT, *(entry for entry in sys.path if Path(entry).is_absolute())])
        command = [sys.executable, "-I", "-S", "-X", "utf8", __file__, "serve", f"{folder}/socket", own]
    serving = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert serving.stdin is not None
    assert serving.stdout is not None
    atexit.register(ended, serving, folder)
    assert serving.stdout.readline() == b"ready\n"
    return f"{folder}/socket"


def ended(serving: subprocess.Popen[bytes], folder: str) -> None:
    assert serving.stdin is not None
    serving.stdin.close()
    serving.wait(300)
    for name in ("socket", "python"):
        Path(folder, name).unlink(missing_ok=True)
    Path(folder).rmdir()


def python() -> list[str]:
    """The beginning of a command, before `-c`, `-m` or a file."""
    return [sys.executable, "-I", "-S", __file__, "ask", place()]


@cache
def compiler() -> str:
    """Name a program that does what Python does, for who starts no command but one program."""
    where = Path(place("compilers")).with_name("python")
    where.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", __file__, "ask", place("compilers")])} "$@"\n')
    where.chmod(0o755)
    return str(where)


class Reader:
    """What `convert.sandbox` asks of a `subprocess.Popen`, of a fork that is another process's child."""

    def __init__(self, told: Mapping[str, Any], descriptors: tuple[int, ...]) -> None:
        theirs, questions = os.pipe()
        answers, back = os.pipe()
        quiet = os.open(os.devnull, os.O_WRONLY)
        try:
            self.link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
            self.link.connect(place("readers"))
            message = json.dumps({**told, "descriptors": descriptors}).encode()
            socket.send_fds(self.link, [message], [theirs, back, quiet, *descriptors])
            self.pid = int(self.link.recv(100))
        finally:
            for end in (theirs, back, quiet):
                os.close(end)
        self.returncode: int | None = None
        self.stdin: IO[bytes] = os.fdopen(questions, "wb", buffering=0)
        self.stdout: IO[bytes] = os.fdopen(answers, "rb", buffering=0)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self.link.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(int(self.link.recv(100)))
            except TimeoutError as error:
                raise subprocess.TimeoutExpired("reader", timeout or 0) from error
            self.link.close()
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended just now
                os.kill(self.pid, signal.SIGKILL)


def reader(descriptors: tuple[int, ...], environment: Mapping[str, str], folder: str | None) -> Reader:
    """Do what `convert.sandbox._started` does."""
    from convert import sandbox

    kept = {name: os.environ[name] for name in sandbox.KEPT if name in os.environ} | sandbox.ALONE | dict(environment)
    here = {"", str(Path.cwd())}
    places = [ROOT, *(entry for entry in sys.path if entry not in here and Path(entry).is_absolute())]
    told = {"environment": kept | dict.fromkeys(sandbox.OWN, folder or os.devnull), "folder": folder or os.sep, "places": places}
    return Reader(told, descriptors)


def ask(where: str, arguments: list[str]) -> NoReturn:
    """Be the client: end as the fork ends."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST_BYTES)
        link.connect(where)
        told = {"arguments": arguments, "environment": dict(os.environ), "folder": str(Path.cwd())}
        socket.send_fds(link, [json.dumps(told).encode()], [0, 1, 2])
        status = json.loads(link.recv(100))
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


def serve(where: str, places: str) -> None:
    """Import, then fork for each client, until the worker that started this is gone.

    Args:
        where: to listen.
        places: of `HEAVY`, or where a reader looks for modules.
    """
    heavy = HEAVY.get(places, [])
    if not heavy:
        sys.path[:] = json.loads(places)
        for name in ("weights", "convert"):  # as convert.sandbox.START has them
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [f"{ROOT}/{name}"]
        from convert import _reader, formats

        assert _reader.main

        for format in formats.formats():
            importlib.import_module(f"convert.formats.{format}")
    for name in heavy:
        importlib.import_module(name)
    if places == "compilers":
        sys.modules["zoo.kernels.ops"].discover()

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(where)
    listening.listen()
    hears, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    os.write(1, b"ready\n")
    links: dict[socket.socket, int] = {}
    while True:
        ready, _, _ = select.select([0, hears, listening, *links], [], [])
        if 0 in ready:
            for child in links.values():
                os.kill(child, signal.SIGKILL)
            os._exit(0)
        if hears in ready:
            os.read(hears, 1000)
            for link, child in list(links.items()):
                ended_child, status = os.waitpid(child, os.WNOHANG)
                if ended_child:
                    del links[link]
                    with suppress(OSError):  # where the client was killed, and this child then too
                        link.send(str(status).encode())
                    link.close()
        for link in [link for link in ready if link in links]:
            os.kill(links[link], signal.SIGKILL)  # the client has nothing to say but that it is gone
        if listening in ready:
            link, _ = listening.accept()
            message, streams, _, _ = socket.recv_fds(link, MOST_BYTES, 9)
            if not (child := os.fork()):
                try:
                    (run if heavy else read)(json.loads(message), streams)
                finally:
                    os._exit(70)
            links[link] = child
            if not heavy:
                link.send(str(child).encode())
            for stream in streams:
                os.close(stream)


def read(told: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the fork: a reader, as `convert.sandbox.START` begins one."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    high = [fcntl.fcntl(stream, fcntl.F_DUPFD, 500) for stream in streams]  # out of the way of the numbers that they get
    for number, stream in zip((0, 1, 2, *told["descriptors"]), high, strict=True):
        os.dup2(stream, number)
    low = 3
    for number in sorted(told["descriptors"]):
        os.closerange(low, number)
        low = number + 1
    os.closerange(low, 1000)
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.path[:] = told["places"]
    sys.modules["convert._reader"].main()
    os._exit(0)


def run(told: dict[str, Any], streams: list[int]) -> NoReturn:
    """Be the fork: what Python would be behind these arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, 1000)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)  # so that it stays when a program puts another in its place
    sys.stderr.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(told["environment"])
    os.chdir(told["folder"])
    sys.path[1:1] = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry not in ("", *sys.path[1:])]
    arguments = told["arguments"]
    while arguments[0] == "-W":
        action, _, category = arguments[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        arguments = arguments[2:]
    code = 1
    try:
        if arguments[0] == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
            exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
        elif arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], str(Path.cwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            sys.stderr.write(f"{left.code}\n")
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    serve(*sys.argv[2:])
