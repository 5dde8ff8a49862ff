"""Forks of a server are there at once. They end with whoever asked for them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.zoo.kernels.compilation.processes import gone
from zoo.kernels.compilation import fork_server
from zoo.kernels.compilation.fork_server import Forked, ForkServer

ROOT = Path(__file__).parents[4]
PROGRAM = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from zoo.kernels.compilation.fork_server import serve

def work(told, answers):
    answers.write(b"%d %d\\n" % (os.getpid(), os.getppid()))
    answers.flush()
    for line in told:
        if line == b"stick\\n":
            time.sleep(600)
        if line == b"die\\n":
            os._exit(9)
        answers.write(line.upper())
        answers.flush()

serve(work)
"""


class Closing(ForkServer):
    """Closes what it has forked too, as its users do."""

    def __init__(self, program: str) -> None:
        super().__init__([sys.executable, "-c", program], os.environ)
        self.forked: list[Forked] = []

    def fork(self) -> Forked:
        self.forked.append(super().fork())
        return self.forked[-1]


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = Closing(PROGRAM.format(root=str(ROOT)))
    yield server
    server.close()
    for process in server.forked:
        process.close()


def numbers(process: Forked) -> tuple[int, int]:
    own, parent = process.stdout.readline().split()
    return int(own), int(parent)


def ask(process: Forked, line: bytes) -> bytes:
    process.stdin.write(line)
    process.stdin.flush()
    return process.stdout.readline()


def test_processes_are_forks_of_one_and_answer_apart(server: ForkServer) -> None:
    processes = [server.fork() for _ in range(3)]  # before it can have begun
    own, parents = zip(*map(numbers, processes), strict=True)
    assert len(set(own)) == 3
    assert len(set(parents)) == 1
    assert [ask(process, b"%d a\n" % number) for number, process in enumerate(processes)] == [b"0 A\n", b"1 A\n", b"2 A\n"]
    assert not any(process.has_ended() for process in processes)


def test_a_default_timeout_of_the_callers_sockets_is_none_of_theirs(request: pytest.FixtureRequest) -> None:
    socket.setdefaulttimeout(0.2)
    request.addfinalizer(lambda: socket.setdefaulttimeout(None))
    server: ForkServer = request.getfixturevalue("server")
    time.sleep(1)  # in which the server has waited for longer than that
    process = server.fork()
    numbers(process)
    assert not process.has_ended()
    assert ask(process, b"a\n") == b"A\n"
    assert not server.has_ended()


def test_closing_waits_for_nobody_who_has_the_socket_too(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    number, parent = numbers(server.fork())
    held = os.dup(server._control.fileno())  # as a process has that was forked from this one
    monkeypatch.setattr(fork_server, "PATIENCE", 60.0)
    server.close()
    os.close(held)
    assert server._process.returncode == 0  # it ended by itself
    assert gone(parent)
    assert not Path(f"/proc/{number}").exists()  # waited for too


def test_one_that_dies_takes_no_other_along(server: ForkServer) -> None:
    dies, stays = server.fork(), server.fork()
    number, _ = numbers(dies)
    numbers(stays)
    assert ask(dies, b"die\n") == b""
    assert dies.has_ended()
    assert gone(number)
    assert ask(stays, b"b\n") == b"B\n"
    assert not server.has_ended()


def test_one_that_is_told_nothing_more_ends(server: ForkServer) -> None:
    process = server.fork()
    number, _ = numbers(process)
    process.close()
    assert process.has_ended()
    assert gone(number)


def test_closing_ends_a_process_that_is_stuck(server: ForkServer) -> None:
    process = server.fork()
    number, _ = numbers(process)
    process.stdin.write(b"stick\n")
    process.stdin.flush()
    server.close()
    assert gone(number)
    assert process.has_ended()
    with pytest.raises(OSError, match=r"."):
        server.fork()


def test_a_server_that_still_imports_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ForkServer([sys.executable, "-c", "import time; time.sleep(600)"], os.environ)
    process = server.fork()
    waited: list[float | None] = []
    wait = server._process.wait
    monkeypatch.setattr(server._process, "wait", lambda timeout=None: (waited.append(timeout), wait(timeout))[1])
    server.close()
    assert waited == [0, None]  # killed between
    assert server.has_ended()
    assert process.has_ended()
    process.close()


def test_a_server_that_is_killed_takes_its_processes_along(server: ForkServer) -> None:
    process = server.fork()
    number, parent = numbers(process)
    process.stdin.write(b"stick\n")
    process.stdin.flush()
    os.kill(parent, signal.SIGKILL)
    assert gone(number)
    assert process.has_ended()
    server._process.wait()
    assert server.has_ended()


def test_a_server_that_never_begins_has_no_processes() -> None:
    server = ForkServer(["/bin/false"], os.environ)
    with suppress(OSError):  # it may be gone already
        process = server.fork()
        assert process.stdout.readline() == b""
        assert process.has_ended()
        process.close()
    server.close()
    with pytest.raises(OSError, match=r"."):
        ForkServer(["/no/such/program"], os.environ)
