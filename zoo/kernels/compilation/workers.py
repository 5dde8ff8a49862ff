"""Compile kernels in processes of their own, which need no GPU and leave what they make in Triton's cache on disk.

Compilers written in Python wait for each other within a process: MobileNetV2 took four minutes so on an H200. A process here
gets a step without its numbers, launches the kernel on memory that it never touches, and stops before the launch itself.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zoo.kernels.compilation import fingerprint
from zoo.kernels.compilation.cache_notes import Compiled, expected_place
from zoo.kernels.compilation.compiler_process import BEGIN, Work, send
from zoo.kernels.compilation.fork_server import Forked, ForkServer
from zoo.kernels.measuring.stopwatch import phase, still_wanted

MOST = 16
"""Processes at a time."""

FEW_CORES = 4
"""Up to so many cores compile all; of more, one is left to the caller, who traces and compares meanwhile."""

WORTH = 5
"""Missing kernels for which processes are started where a launch could compile them too: they need some seconds to start."""

_log = logging.getLogger("zoo.kernels")
_expected: set[Path] = set()
"""Caches without notes that processes were started for."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a task was not compiled, and whether it never will be."""

    index: int
    reason: str
    always: bool


class Compilers:
    """Processes that compile for GPUs of one compute capability; they start when tasks are expected or there, and end with `close`.

    Args:
        capability: of the GPU.
        worth: how many kernels have to be missing for processes to be started.
    """

    def __init__(self, capability: tuple[int, int], worth: int = WORTH) -> None:
        self._target, self._worth = target(capability), worth
        self._server: ForkServer | None = None
        self._idle: list[Forked] = []
        self._starting = threading.Lock()
        self._closed = False
        self._begun: threading.Thread | None = None

    def expect(self, about: int) -> None:
        """Start processes for about so many kernels where nothing was ever compiled: then a plan will ask for some, whatever is known.

        A process does that once for a cache, which may be one that can't be written.
        """
        if about < self._worth:
            return
        place = expected_place()
        if place in _expected or (place.exists() and not Compiled(self._target).empty()):
            return
        _expected.add(place)
        self._processes(about)
        fingerprint.begin()  # which the notes need, while the network is traced

    def prepare(self, tasks: Sequence[Work]) -> None:
        """Start the processes that `compile` will use for these tasks, if it will; they are ready after some seconds."""
        if len(tasks) >= self._worth:
            missing = _missing([task.key for task in tasks], tasks, Compiled(self._target))
            if len(missing) >= self._worth:
                self._processes(len(missing))

    def begin(self, tasks: Sequence[Work], seconds: float | None = None) -> None:
        """Compile tasks while the caller does something else, as many as the time allows; `compile` waits for that, and `close` ends it."""
        assert self._begun is None

        def quietly() -> None:
            try:
                self._compiled(tasks, seconds, None)
            except Exception as error:  # closed meanwhile, say; what is not compiled then is compiled when it is asked for
                _log.debug("not compiled beside: %s: %s", type(error).__name__, error)

        self._begun = threading.Thread(target=quietly, name="zoo compiling", daemon=True)
        self._begun.start()

    def compile(
        self, tasks: Sequence[Work], seconds: float | None = None, progress: Callable[[int, int, str], None] | None = None
    ) -> set[int]:
        """Compile as many tasks as the time allows, in their order, those of one key once; what was compiled before is left out.

        What `begin` was given comes first, however long it takes.

        Args:
            tasks: kernels; the most promising first.
            seconds: after which no more is begun, and what is under way is left; None waits for all.
            progress: called with (done, total, step).

        Returns:
            Which of them are in Triton's cache now; and those that their first call has to compile, where too few are missing for
            processes, or no process answers. What can't be compiled is in neither.
        """
        if self._begun is not None:
            with phase("compiling"):
                while self._begun.is_alive():
                    still_wanted()
                    self._begun.join(0.1)
            self._begun = None
        return self._compiled(tasks, seconds, progress)

    def _compiled(self, tasks: Sequence[Work], seconds: float | None, progress: Callable[[int, int, str], None] | None) -> set[int]:
        if len(tasks) < self._worth:
            return set(range(len(tasks)))
        keys = [task.key for task in tasks]
        compiled = Compiled(self._target)
        missing = _missing(keys, tasks, compiled)
        if len(missing) >= self._worth:
            with phase("compiling"):
                if not self._compile(missing, compiled, seconds, progress):
                    missing = {}
        return {index for index, key in enumerate(keys) if key in missing or compiled.has(key)}

    def _compile(
        self,
        missing: dict[str, Work],
        compiled: Compiled,
        seconds: float | None,
        progress: Callable[[int, int, str], None] | None,
    ) -> bool:
        """Compile, and note what was done; tell whether the rest is left to its first call, because no process has answered in time."""
        tasks = list(missing.values())
        waiting, done, failed = deque(range(len(tasks))), list[int](), list[Failure]()
        processes = self._processes(len(tasks))
        shared = (processes, self._start, tasks, waiting, done, failed)
        threads = [threading.Thread(target=_feed, args=(place, *shared), daemon=True) for place in range(len(processes))]
        for thread in threads:
            thread.start()
        until, late = None if seconds is None else time.monotonic() + seconds, False
        try:
            while any(thread.is_alive() for thread in threads):
                still_wanted()
                if late := until is not None and time.monotonic() > until:
                    waiting.clear()
                    self.rest()
                if progress is not None:
                    progress(len(done), len(tasks), tasks[done[-1] if done else 0].name)
                next((thread for thread in threads if thread.is_alive()), threads[0]).join(0.1)
        except BaseException:  # an interrupt, or a stop: nobody begins another one
            waiting.clear()
            self.close()
            raise
        finally:
            compiled.add([tasks[index].key for index in list(done)], [tasks[one.index].key for one in list(failed) if one.always])
        self._idle = self._there(processes)
        for failure in failed:
            _log.debug("not compiled: %s", failure.reason)
        return not (done or failed or late)

    def _processes(self, tasks: int) -> list[Forked]:
        """Return as many processes as tasks and cores ask for, those that are still there and new ones."""
        self._idle = self._there(self._idle)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with suppress(OSError):  # fewer will do
            while len(self._idle) < min(MOST, tasks, cores - (cores > FEW_CORES)):
                self._idle.append(self._start())
        return self._idle

    @staticmethod
    def _there(processes: Sequence[Forked]) -> list[Forked]:
        """Return those that have not ended."""
        there = [process for process in processes if not process.has_ended()]
        for process in processes:
            if process not in there:
                process.close()
        return there

    def _start(self) -> Forked:
        with self._starting:
            if self._closed:
                raise OSError("no more is to be compiled")
            return self._serving().fork()

    def _serving(self) -> ForkServer:
        """Return the process that forks the others, a new one where there is none."""
        if self._server is None or self._server.has_ended():
            if self._server is not None:
                self._server.close()
            loaded = [name for name in list(sys.modules) if name.startswith("zoo.kernels.")]  # tasks are of these
            self._server = ForkServer([sys.executable, "-c", BEGIN, self._target, *loaded], _environment())
        return self._server

    def rest(self) -> None:
        """End the processes until there is something to compile again."""
        with self._starting:
            server, self._server = self._server, None
        if server is not None:
            server.close()
        for process in self._idle:
            process.close()
        self._idle = []

    def close(self) -> None:
        """End the processes for good."""
        self._closed = True
        self.rest()
        if self._begun is not None and self._begun is not threading.current_thread():
            self._begun.join(5)
            self.rest()  # what it had started when this began


def target(capability: tuple[int, int]) -> str:
    """Return what kernels are compiled for, as notes and processes are told."""
    return str(10 * capability[0] + capability[1])


def _missing(keys: Sequence[str], tasks: Sequence[Work], compiled: Compiled) -> dict[str, Work]:
    """Return the tasks of which nothing is noted by their keys, in their order, those of one key once."""
    missing: dict[str, Work] = {}
    for key, task in zip(keys, tasks, strict=True):
        if not compiled.knows(key):
            missing.setdefault(key, task)
    return missing


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if kept.get("TRITON_CACHE_DIR"):  # Triton would note paths that hold from this folder only
        kept["TRITON_CACHE_DIR"] = str(expected_place().parent)
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def _feed(
    place: int,
    processes: list[Forked],
    start: Callable[[], Forked],
    tasks: Sequence[Work],
    waiting: deque[int],
    done: list[int],
    failed: list[Failure],
) -> None:
    """Give a process one task after the other until none is left; another takes its place if a compiler dies, unless it never began."""
    while waiting:
        process, answers, index = processes[place], 0, -1
        with suppress(IndexError, OSError, EOFError, ValueError, pickle.UnpicklingError):  # ValueError: `close` has closed the pipe
            while True:
                index = waiting.popleft()
                send(process.stdin, tasks[index].portable())
                reason, always = pickle.load(process.stdout)
                answers += 1
                if reason:
                    failed.append(Failure(index, reason, always))
                else:
                    done.append(index)
        if not answers or not waiting:
            return
        failed.append(Failure(index, f"{tasks[index].name}: the compiler died", False))
        process.close()
        with suppress(OSError):
            processes[place] = start()
