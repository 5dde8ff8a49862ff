"""Engines against each other: which compute the network at all, and of those the fastest, timed in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.engines.engine import EAGER, Chosen, Engine
from zoo.kernels.engines.export import first_line
from zoo.kernels.engines.judge import Judge

Bound = Callable[[Callable[..., Any], torch.dtype], tuple[float, float]]
"""Takes an engine's call and the type it computes in, runs it on inputs of its choice; returns the error and the largest allowed."""

SETTLE = 0.06
"""Seconds of rest before an engine's turn: the one before leaves threads that spin, onnxruntime's for most of that."""
TURN = 0.03
"""Seconds of calls that count in an engine's turn, at least."""
ROUNDS = 8
FEWEST_ROUNDS = 3
"""Rounds that are held even for twice the budget: on a machine that does other work, one says little."""
HOPELESS = ((2.0, 1.3), (1.5, 1.1))
"""How many times slower than the fastest an engine may be and stay, after one round and after more; the second if half the time is over."""


class Trial:
    """What became of each engine so far."""

    def __init__(self, bound: Bound, say: Callable[[str], None]) -> None:
        self.bound, self.say = bound, say
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, Callable[..., Any]] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        self.refused: dict[str, str] = {}

    def admit(self, engine: Engine) -> bool:
        """Build an engine and compare its output; say whether it may compete."""
        self.engines[engine.name] = engine
        self.say(f"building {engine.name}")
        try:
            call = engine.build()
            if engine.name == EAGER:  # what the others are measured against, and all there is if they are wrong
                self.calls[engine.name] = call
                self.errors[engine.name] = self._own(call, engine.precision)
                return True
            found, allowed = self.bound(call, engine.precision)
        except Exception as error:  # an engine fails in any way whatever, and there is another
            self.refused[engine.name] = first_line(error)
            return False
        self.errors[engine.name] = (found, allowed)
        if not found <= allowed:
            self.refused[engine.name] = f"computes something else: relative error {found:.2g}, allowed {allowed:.2g}"
            return False
        self.calls[engine.name] = call
        return True

    def _own(self, call: Callable[..., Any], dtype: torch.dtype) -> tuple[float, float]:
        try:
            return self.bound(call, dtype)
        except Exception:  # there is nothing to compare it with but itself
            return 0.0, 0.0

    def chosen(self, name: str, seconds: dict[str, float]) -> Chosen:
        engine = self.engines[name]
        notes = [engine.note] if engine.note else []
        if engine.copies_weights:
            notes.append(f"{name} holds a copy of the weights in a layout of its own, and does not follow changes of the network's")
        lost = self.bound.eager(engine.precision) if isinstance(self.bound, Judge) else 0.0
        return Chosen(
            self.calls[name], name, engine.precision, engine.copies_weights, seconds, self.errors, self.refused, tuple(notes), lost
        )


def undisturbed(times: list[float]) -> float:
    """Return the median of the faster half: what else a machine does makes calls slower, never faster, and may hit half of a few."""
    return statistics.median(sorted(times)[: (len(times) + 1) // 2])


def fastest(trial: Trial, example: tuple[Tensor, ...], budget: float) -> tuple[dict[str, float], str]:
    """Time engines in turns, so that what slows the machine down for a while slows all of them; drop those that can't win.

    Returns:
        The seconds of one call by name, and the fastest of those that were timed to the end.
    """
    taken: dict[str, list[float]] = {name: [] for name in trial.calls}
    running = list(taken)
    levels: dict[str, float] = {}
    until = time.perf_counter() + budget
    for count in range(1, ROUNDS + 1):
        trial.say(f"timing {', '.join(running)}: round {count}")
        for name in running:
            try:
                taken[name].extend(turn(trial.calls[name], example))
            except Exception as error:
                if name == EAGER:
                    raise
                trial.refused[name] = first_line(error)
                del taken[name]
        levels = {name: undisturbed(times) for name, times in taken.items()}
        running = [name for name in running if name in levels] or list(levels)  # the network itself is always there
        best = min(levels[name] for name in running)
        left = until - time.perf_counter()
        most = best * HOPELESS[count > 1][left < budget / 2]
        running = [name for name in running if levels[name] <= most]
        if len(running) == 1 or left < -budget or (count >= FEWEST_ROUNDS and left < 0):
            break
    return levels, min(running, key=levels.__getitem__)


def turn(call: Callable[..., Any], example: tuple[Tensor, ...]) -> list[float]:
    """Return how long calls took that no engine before disturbs; of short ones the first, with cold caches, does not count."""
    time.sleep(SETTLE)
    first = _seconds(call, example)
    times = [first] if first > SETTLE else []
    while sum(times) < TURN:
        times.append(_seconds(call, example))
    return times


def _seconds(call: Callable[..., Any], example: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    call(*example)
    return time.perf_counter() - start
