"""Where the seconds of making a plan go, phase by phase: `why` tells a user, and whoever wants to make it quicker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REST = "other"
"""What is in no phase."""

_running: ContextVar[Stopwatch | None] = ContextVar("zoo.kernels.measuring.stopwatch", default=None)


class Stopped(BaseException):
    """What is being made is no longer wanted. It is no `Exception`, for handlers of those would go on."""


class Stopwatch:
    """Seconds by phase, which other threads may read while it runs, and a way to stop what it measures."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.unwanted = threading.Event()
        """Set when what is made is no longer wanted: the next phase raises `Stopped`."""
        self._phase, self._since = REST, time.perf_counter()

    def running(self) -> tuple[str, float]:
        """Return the phase that runs now, and the seconds of all."""
        return self._phase, sum(list(self.seconds.values())) + time.perf_counter() - self._since

    def turn(self, phase: str) -> str:
        """Count what has gone for the phase that ends, begin another, and return the one that ended."""
        now, ended = time.perf_counter(), self._phase
        self.seconds[ended] = self.seconds.get(ended, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return ended


@contextmanager
def stopwatch(watch: Stopwatch | None = None) -> Iterator[dict[str, float]]:
    """Measure the phases of this block, in this thread; the seconds of each are in what is yielded, behind the block."""
    watch = Stopwatch() if watch is None else watch
    token = _running.set(watch)
    try:
        yield watch.seconds
    finally:
        watch.turn(REST)
        _running.reset(token)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count the seconds of this block for a phase, but those of phases inside of it; without a stopwatch nothing is counted."""
    watch = _running.get()
    if watch is None:
        yield
        return
    outer = watch.turn(name)
    try:
        still_wanted()
        yield
    finally:
        watch.turn(outer)


def still_wanted() -> None:
    """Raise `Stopped` where what is being made is no longer wanted."""
    if (watch := _running.get()) is not None and watch.unwanted.is_set():
        raise Stopped


def told(seconds: dict[str, float]) -> str:
    """Say how long everything took and what took how long, the longest first, parts of less than a twentieth left out."""
    total = sum(seconds.values())
    parts = [f"{name} {s:.1f}" for name, s in sorted(seconds.items(), key=lambda entry: -entry[1]) if s >= 0.05 * total]
    return f"made in {total:.1f} s: {', '.join(parts)}"
