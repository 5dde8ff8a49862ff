"""Several processes that prepare networks on one GPU, of which only one measures at a time: compiling takes most of the time.

Each kernel's timing waits until no other process times anything; while whole networks are timed the other processes are stopped. What
a network takes until it is ready is longer then, and says little.

    python recipes/bench_panel.py --at-once 5 torchvision:mnasnet1_0@128 timm:ghostnet_100@128 …
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

Measure = Callable[[str, Any], str]
DRAIN = 0.05
"""Seconds until what stopped processes had asked of the GPU is done: kernels of milliseconds, a queue of them at most."""
PATIENCE = 60.0
"""Seconds that the lock of a process that died may be held by one that measures."""


class Turns:
    """The GPU, as one of several processes sees it.

    Args:
        lock: of whoever measures.
        others: the processes' ids, 0 where one has not begun or has ended.
        place: which of them this one is.
    """

    def __init__(self, lock: Any, others: Any, place: int) -> None:
        self._lock, self._others, self._place = lock, others, place
        self._measures = False
        others[place] = os.getpid()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let no other process measure while the block runs; inside of another turn it is that one's."""
        if self._measures:
            yield
            return
        with self._lock:
            self._measures = True
            try:
                yield
            finally:
                self._measures = False

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the other processes stand still while the block runs; inside of a turn nobody else measures, which has to do."""
        if self._measures:
            yield
            return
        with self.turn():
            told = [pid for place, pid in enumerate(self._others) if pid and place != self._place]
            try:
                for pid in told:
                    os.kill(pid, signal.SIGSTOP)
                if told:
                    time.sleep(DRAIN)
                yield
            finally:
                for pid in told:
                    os.kill(pid, signal.SIGCONT)

    def share(self) -> None:
        """Have everything that is timed by events, or by the host's clock of `zoo bench`, wait for its turn; and share the processor."""
        from zoo.bench import clock
        from zoo.kernels.compilation import workers
        from zoo.kernels.measuring import timing
        from zoo.kernels.plans import rival
        from zoo.kernels.training.contest import Contest

        def within(turn: Callable[[], AbstractContextManager[None]], way: Callable[..., Any]) -> Callable[..., Any]:
            def timed(*args: Any, **named: Any) -> Any:
                with turn():
                    return way(*args, **named)

            return timed

        timing._apart = within(self.turn, timing._apart)
        timing._between = within(self.alone, timing._between)  # `event_time_us` is made of these
        timing.alternate = rival.alternate = within(self.alone, timing.alternate)
        clock._turns = within(self.alone, clock._turns)
        workers.MOST = max(2, (os.cpu_count() or 1) // len(self._others))
        begun = Contest.__init__

        def begin(contest: Contest, *args: Any, **named: Any) -> None:
            begun(contest, *args, **named)
            contest.clock = within(self.alone, contest.clock)  # of whole steps: what others compute meanwhile would decide it

        Contest.__init__ = begin  # pyright: ignore[reportAttributeAccessIssue]

    def end(self) -> None:
        """Be stopped no more."""
        with self._lock:
            self._others[self._place] = 0


def measured(cells: Sequence[str], measure: Measure, options: Any) -> Iterator[str]:
    """Yield a line for each cell, as they come: what `measure` returns of it, or what it stumbled over.

    Args:
        cells: what is measured.
        measure: a function of a module, of a cell and options.
        options: `at_once` says how many processes there are; with one, nothing but this process is used, and errors are raised.
    """
    if options.at_once == 1:
        for cell in cells:
            yield measure(cell, options)
            gc.collect()
        return
    context = multiprocessing.get_context("spawn")
    waiting, lines, others = context.Queue(), context.Queue(), context.Array("i", options.at_once)
    for cell in [*cells, *[None] * options.at_once]:
        waiting.put(cell)
    lock = context.Lock()
    started = [
        context.Process(target=_work, args=(waiting, lines, measure, options, lock, others, place)) for place in range(options.at_once)
    ]
    for process in started:
        process.start()
    left = dict(enumerate(started))
    try:
        while left:
            try:
                place, line = lines.get(timeout=2)
            except queue.Empty:
                for place in [place for place, process in left.items() if not process.is_alive()]:
                    yield f"a process ended with {left.pop(place).exitcode}, and what it measured has no line"
                    if not _released(lock, others, place):
                        raise RuntimeError("it died while it measured, so that the others would wait for ever") from None
                continue
            if line is None:
                left.pop(place, None)
            else:
                yield line
    finally:
        for process in left.values():
            process.kill()  # which ends a stopped one too
        for process in started:
            process.join()


def _released(lock: Any, others: Any, place: int) -> bool:
    """Forget a process that died, and tell whether it held the lock of those that measure."""
    if not lock.acquire(timeout=PATIENCE):
        return False
    others[place] = 0
    lock.release()
    return True


def _work(waiting: Any, lines: Any, measure: Measure, options: Any, lock: Any, others: Any, place: int) -> None:
    turns = Turns(lock, others, place)
    turns.share()
    try:
        while (cell := waiting.get()) is not None:
            try:
                lines.put((place, measure(cell, options)))
            except (Exception, SystemExit) as error:  # the other networks are measured all the same
                lines.put((place, f"{cell}: {type(error).__name__}: {error}"))
            gc.collect()
    finally:
        turns.end()
        lines.put((place, None))


def processes(parser: argparse.ArgumentParser) -> None:
    """Add the option that says how many."""
    parser.add_argument("--at-once", type=_count, default=1, metavar="N", help="processes that prepare networks; default %(default)s")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return number
