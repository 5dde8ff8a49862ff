"""Measurements of one thread that others make, when it is their turn: while anything is captured nobody may wait for the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from zoo.kernels.measuring.stopwatch import Stopped, still_wanted

SHARE = 0.1
"""Seconds that a thread measures for others at a time."""
NEXT = 0.005
"""Seconds that it waits for the next thing to measure."""


class _Turn:
    """A call that waits to be made, on a device. The answer or the error is left here."""

    def __init__(self, call: Callable[[], Any], device: int | None) -> None:
        self._call, self._device = call, device
        self._lock = threading.Lock()
        self._running = self._cancelled = False
        self._done = threading.Event()
        self._answer: Any = None
        self._error: Exception | None = None

    def cancel(self) -> bool:
        """Have it not made; False where it is being made."""
        with self._lock:
            self._cancelled = not self._running
            return self._cancelled

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer

    def make(self, quiet: bool) -> bool:
        """Make the call, unless it was cancelled, and tell whether it was made; `quiet` says that nothing else runs on the device."""
        with self._lock:
            if self._cancelled:
                return False
            self._running = True
        try:
            with self._where():
                if self._device is not None and not quiet:
                    torch.cuda.synchronize()  # what was called before would be measured too
                self._answer = self._call()
        except Exception as error:  # the thread that waits for it knows what to make of it
            self._error = error
        except BaseException:  # an interrupt: another thread will make it
            with self._lock:
                self._running = False
            raise
        self._done.set()
        return True

    def _where(self) -> AbstractContextManager[object]:
        return nullcontext() if self._device is None else torch.cuda.device(self._device)


_waiting: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
_measuring = threading.Lock()


def wait_for(call: Callable[[], Any]) -> Any:
    """Wait until another thread has made a call for this one, on this one's device, and return its answer or raise its error.

    Raises:
        Stopped: what this thread makes is no longer wanted; nothing of the call runs any more.
    """
    turn = _Turn(call, torch.cuda.current_device() if torch.cuda.is_initialized() else None)
    _waiting.put(turn)
    while not turn.wait(0.1):
        try:
            still_wanted()
        except Stopped:
            if turn.cancel():
                raise
    return turn.result()


def measure(seconds: float = SHARE) -> None:
    """Make the calls that other threads wait for, for about so many seconds; nothing where another thread does.

    A thread does this that nothing captures in and that may wait: one that calls networks.
    """
    if _waiting.empty() or not _measuring.acquire(blocking=False):
        return
    try:
        until, quiet = time.monotonic() + seconds, False
        while time.monotonic() < until:
            try:
                turn = _waiting.get(timeout=NEXT)
            except queue.Empty:
                return
            try:
                quiet = turn.make(quiet) or quiet
            except BaseException:
                _waiting.put(turn)
                raise
    finally:
        _measuring.release()


@contextmanager
def nobody_measures() -> Iterator[None]:
    """Do what waits for a device, or captures, while no other thread measures."""
    with _measuring:
        yield
