"""Several processes that prepare networks on one GPU, of which only one measures at a time: compiling takes most of the time.

Each kernel's timing waits until no other process times anything; while a whole network is timed the other processes stand still. What
a network takes until it is ready is longer then, and says little.

    python recipes/bench_panel.py --at-once 5 torchvision:mnasnet1_0@128 timm:ghostnet_100@128 …
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

Measure = Callable[[str, Any], str]


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
    def alone(self) -> Iterator[None]:
        """Let the other processes stand still while the block runs."""
        with self._lock:
            told = [pid for place, pid in enumerate(self._others) if pid and place != self._place]
            for pid in told:
                os.kill(pid, signal.SIGSTOP)
            try:
                yield
            finally:
                for pid in told:
                    os.kill(pid, signal.SIGCONT)

    def share(self) -> None:
        """Have everything that is timed by events, or by the host's clock of `zoo bench`, wait for its turn."""
        from zoo.bench import clock
        from zoo.kernels.measuring import timing

        kernel, sample, span = timing._apart, timing._between, clock._span

        def one(*args: Any) -> float:
            with self._lock:
                self._measures = True
                try:
                    return kernel(*args)
                finally:
                    self._measures = False

        def some(way: Callable[..., float]) -> Callable[..., float]:
            def timed(*args: Any, **named: Any) -> float:
                if self._measures:  # a kernel's graph, which has the lock
                    return way(*args, **named)
                with self.alone():
                    return way(*args, **named)

            return timed

        timing._apart, timing._between, clock._span = one, some(sample), some(span)

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
    processes = [
        context.Process(target=_work, args=(waiting, lines, measure, options, lock, others, place)) for place in range(options.at_once)
    ]
    for process in processes:
        process.start()
    left = len(processes)
    while left:
        if (line := lines.get()) is None:
            left -= 1
        else:
            yield line
    for process in processes:
        process.join()


def _work(waiting: Any, lines: Any, measure: Measure, options: Any, lock: Any, others: Any, place: int) -> None:
    turns = Turns(lock, others, place)
    turns.share()
    while (cell := waiting.get()) is not None:
        try:
            lines.put(measure(cell, options))
        except Exception as error:  # the other networks are measured all the same
            lines.put(f"{cell}: {type(error).__name__}: {error}")
        gc.collect()
    turns.end()
    lines.put(None)


def processes(parser: Any) -> None:
    """Add the option that says how many."""
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="processes that prepare networks; default %(default)s")
