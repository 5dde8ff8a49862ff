"""Measurements of one thread that others make, when it is their turn: while anything is captured nobody may wait for the device."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from zoo.kernels.measuring.stopwatch import Stopped, still_wanted

NEXT = 0.005
"""Seconds that whoever measures waits for the next thing to measure."""


@dataclass(slots=True)
class _Turn:
    call: Callable[[], Any]
    device: int | None
    answer: Future[Any] = field(default_factory=Future)

    def where(self) -> AbstractContextManager[object]:
        return nullcontext() if self.device is None else torch.cuda.device(self.device)


_waiting: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
_measuring = threading.Lock()


def wait_for(call: Callable[[], Any]) -> Any:
    """Wait until another thread has made a call for this one, on this one's device, and return its answer or raise its error.

    Raises:
        Stopped: what this thread makes is no longer wanted.
    """
    turn = _Turn(call, torch.cuda.current_device() if torch.cuda.is_initialized() else None)
    _waiting.put(turn)
    while True:
        try:
            return turn.answer.result(timeout=0.1)
        except NotYet:
            if turn.answer.done():
                raise
            try:
                still_wanted()
            except Stopped:
                turn.answer.cancel()
                raise


def measure(seconds: float) -> None:
    """Make the calls that other threads wait for, for about so many seconds; nothing where another thread does.

    A thread does this that nothing captures in and that may wait: one that calls networks.
    """
    if _waiting.empty() or not _measuring.acquire(blocking=False):
        return
    try:
        until, idle = time.monotonic() + seconds, False
        while time.monotonic() < until:
            try:
                turn = _waiting.get(timeout=NEXT)
            except queue.Empty:
                return
            if not turn.answer.set_running_or_notify_cancel():
                continue
            try:
                with turn.where():
                    if turn.device is not None and not idle:
                        torch.cuda.synchronize()  # what was called before would be measured too
                        idle = True
                    turn.answer.set_result(turn.call())
            except BaseException as error:  # the thread that waits for it knows what to make of it
                turn.answer.set_exception(error)
                if not isinstance(error, Exception):
                    raise
    finally:
        _measuring.release()
