"""Processes that are forked from one which has imported torch and Triton already.

Sixteen processes that import both take every core for seconds, while the plan that asks for them is traced and compared beside. So
one imports, and the others are its forks: they are there at once, and share its memory. Python's own `multiprocessing.forkserver` is one
for the whole program, and its processes import the program's `__main__` again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NoReturn

FORK = b"f"
"""What the server is told, together with the descriptor of the new process's socket."""
READY = b"r"
"""What the server says before it forks."""
PATIENCE = 1.0
"""Seconds that a server gets to end its processes."""
_DIES_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""


class Forked:
    """A process that was asked for, by its socket; what it is told before it is there waits.

    Attributes:
        stdin: what it reads.
        stdout: what it answers.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.stdin: IO[bytes] = link.makefile("wb")
        self.stdout: IO[bytes] = link.makefile("rb")

    def has_ended(self) -> bool:
        """Tell whether it has ended, or never will begin."""
        try:
            return not self._link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            return True

    def close(self) -> None:
        """Tell it nothing more: it ends, as soon as it has answered what it was told."""
        with suppress(OSError):  # a thread that waits for an answer gets none
            self._link.shutdown(socket.SHUT_RDWR)
        for end in (self.stdin, self.stdout, self._link):
            with suppress(OSError):
                end.close()


class ForkServer:
    """A process that runs `serve` and forks.

    Args:
        command: what starts it.
        environment: its environment.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        if not hasattr(os, "fork") or not hasattr(socket, "send_fds"):
            raise OSError("no process can be forked here")
        self._control, theirs = _pair()
        quiet = subprocess.DEVNULL
        try:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=quiet, stderr=quiet, env=dict(environment)
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def fork(self) -> Forked:
        """Ask for a process, without waiting for it.

        Raises:
            OSError: the server has ended.
        """
        ours, theirs = _pair()
        try:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Forked(ours)

    def has_ended(self) -> bool:
        """Tell whether the server has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End it and its processes, whatever they do; while it imports, it has none."""
        try:
            ready = self._control.recv(len(READY), socket.MSG_DONTWAIT) == READY
        except OSError:  # it has said nothing yet, or is closed
            ready = False
        with suppress(OSError):  # a process that was forked from this one meanwhile may hold the socket too
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(PATIENCE if ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(work: Callable[[IO[bytes], IO[bytes]], None]) -> NoReturn:
    """Fork a process for each socket that comes by stdin. When whoever sends them is gone, end all.

    Args:
        work: what such a process does: it reads the first and answers into the second, and ends when nothing more comes.
    """
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control.send(READY)
    server = os.getpid()
    children: list[int] = []
    while True:
        told, descriptors = b"", list[int]()
        with suppress(ConnectionError):  # whoever asked is gone, and has not heard all
            told, descriptors, _, _ = socket.recv_fds(control, len(FORK), 1)
        if not told:
            for child in children:  # none was waited for, so that no number is another's yet
                os.kill(child, signal.SIGKILL)
            for child in children:
                os.waitpid(child, 0)
            os._exit(0)
        if not (child := os.fork()):
            try:
                _die_with(server)
                control.close()
                link = socket.socket(fileno=descriptors[0])
                work(link.makefile("rb"), link.makefile("wb"))
            finally:
                os._exit(0)
        children.append(child)
        os.close(descriptors[0])


def _pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that wait, whatever this process has as its sockets' default timeout."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.settimeout(None)
    return pair


def _die_with(server: int) -> None:
    """End when the server is killed, where the system can do that."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != server:  # it was killed before
        os._exit(0)
