"""Where the seconds of making a plan go, phase by phase: `why` tells a user, and whoever wants to make it quicker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

REST = "other"
"""What is in no phase."""

_running: ContextVar[_Stopwatch | None] = ContextVar("zoo.kernels.measuring.stopwatch", default=None)


class _Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase, self._since = REST, time.perf_counter()

    def turn(self, phase: str) -> str:
        """Count what has gone for the phase that ends, begin another, and return the one that ended."""
        now, ended = time.perf_counter(), self._phase
        self.seconds[ended] = self.seconds.get(ended, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return ended


@contextmanager
def stopwatch() -> Iterator[dict[str, float]]:
    """Measure the phases of this block, in this thread; the seconds of each are in what is yielded, behind the block."""
    watch = _Stopwatch()
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
        yield
    finally:
        watch.turn(outer)


def told(seconds: dict[str, float]) -> str:
    """Say how long everything took and what took how long, the longest first, parts of less than a twentieth left out."""
    total = sum(seconds.values())
    parts = [f"{name} {s:.1f}" for name, s in sorted(seconds.items(), key=lambda entry: -entry[1]) if s >= 0.05 * total]
    return f"made in {total:.1f} s: {', '.join(parts)}"
