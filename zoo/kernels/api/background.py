"""Plans that are made while calls are answered without them: `fast(model, tune="background")`.

A thread traces, compiles and compares. What it has to measure on a GPU is done by the calls, a little behind each answer: measuring
captures CUDA graphs, and while anything is captured nobody may wait for the device.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.measuring.stopwatch import Stopped, Stopwatch, stopwatch
from zoo.kernels.measuring.timing import measured_by
from zoo.kernels.measuring.turns import wait_for

if TYPE_CHECKING:
    from zoo.kernels.reports.built_plan import Built

Finish = Callable[[], "Built"]
MOST = 8
"""Shapes that wait for a plan, and plans that wait for a call; those that were asked for first go where there are more."""
PAUSE = 2.0
"""Seconds that the next plan waits for the call that puts the last one in: both need the GPU for themselves."""
PATIENCE = 10.0
"""Seconds that the end of a process waits for a thread that makes a plan."""


@dataclass(slots=True)
class Job:
    """A shape that a plan is made for.

    Attributes:
        args: positional arguments of that shape, copies.
        kwargs: keyword arguments, likewise.
        named: what the shape is called.
        watch: how long it has taken, and what runs.
        finish: captures the plan, in the thread that calls; None until there is one.
        error: why there is none; None until that is known.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: str
    watch: Stopwatch = field(default_factory=Stopwatch)
    finish: Finish | None = None
    error: Untraceable | None = None

    @property
    def ended(self) -> bool:
        """Whether there is a plan, or none will be."""
        return self.finish is not None or self.error is not None


class Background:
    """Makes plans in one thread, one after the other; it ends when none is asked for, by `stop`, and with the process.

    Args:
        make: begins the plan of arguments (args, kwargs) and returns what finishes it.
        device: where calls run.
    """

    def __init__(self, make: Callable[[tuple[Any, ...], dict[str, Any]], Finish], device: torch.device) -> None:
        self._make, self._device = make, device
        self._lock = threading.Lock()
        self._jobs: dict[Any, Job] = {}
        self._waiting: list[Job] = []
        self._thread: threading.Thread | None = None
        self._running: Job | None = None
        self._stopped = False
        _alive.add(self)

    def ask(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], named: str) -> None:
        """Have a plan made for calls like this one, which was answered; nothing happens where it is being made."""
        with self._lock:
            if key in self._jobs or self._stopped:
                return
            own, named_own = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()  # another thread reads the copies, on another stream perhaps
            job = self._jobs[key] = Job(own, named_own, named)
            self._waiting.append(job)
            if len(self._waiting) > MOST:
                late = self._waiting.pop(0)
                self._jobs = {key: one for key, one in self._jobs.items() if one is not late}
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="zoo.kernels.api.background", daemon=True)
                self._thread.start()

    def made(self, key: Any) -> Job | None:
        """Return the job of a shape when it has ended, and forget it; None before."""
        job = self._jobs.get(key)
        if job is None or not job.ended:
            return None
        with self._lock:
            return self._jobs.pop(key, None)

    def busy(self) -> bool:
        """Tell whether a plan is being made, or waits to be finished."""
        return bool(self._jobs)

    def told(self) -> list[str]:
        """Say for each shape how far it is."""
        with self._lock:
            return [self._said(job) for job in self._jobs.values()]

    def _said(self, job: Job) -> str:
        until = "until then the network itself answers"
        if job.finish:
            return f"{job.named}: a plan is made, and the next call takes it"
        if job is not self._running:
            return f"{job.named}: waits for its plan; {until}"
        phase, seconds = job.watch.running()
        return f"{job.named}: a plan is being made for {seconds:.0f} s, now: {phase}; {until}"

    def stop(self) -> None:
        """Make no more plans, and let the one that is being made end at its next phase."""
        with self._lock:
            self._stopped = True
            self._waiting.clear()
            if self._running is not None:
                self._running.watch.unwanted.set()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the thread has ended."""
        thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            try:
                with stopwatch(job.watch), measured_by(wait_for):
                    job.finish = self._make(job.args, job.kwargs)
            except Stopped:
                pass
            except Untraceable as error:
                job.error = error
            except BaseException as error:  # whatever a network, a compiler or a full GPU raises: the caller is told by the next call
                job.error = Untraceable(f"{type(error).__name__}: {first_line(error)}", lasting=False)
            self._drop_old()

    def _drop_old(self) -> None:
        """Forget the plans that no call came for."""
        with self._lock:
            ended = [key for key, job in self._jobs.items() if job.ended]
            for key in ended[: max(0, len(ended) - MOST)]:
                del self._jobs[key]

    def _next(self) -> Job | None:
        until = time.monotonic() + (PAUSE if self._device.type == "cuda" else 0.0)
        while time.monotonic() < until and not self._stopped and any(job.finish for job in list(self._jobs.values())):
            time.sleep(0.02)
        with self._lock:
            self._running = self._waiting.pop(0) if self._waiting else None
            if self._running is None:
                self._thread = None
            return self._running


_alive: weakref.WeakSet[Background] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Let threads end before Python and CUDA do."""
    for one in list(_alive):
        one.stop()
    for one in list(_alive):
        one.join(PATIENCE)
