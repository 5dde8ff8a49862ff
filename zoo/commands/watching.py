"""What whoever waits sees of a long job: a bar on a terminal; in a log, a line an epoch or a minute. A resumed job says so first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from weights.progress import count_bar
from zoo.finetuning.progress import Epoch, Told
from zoo.finetuning.progress import bar as steps_bar
from zoo.stylizing.progress import bar as style_bar

if TYPE_CHECKING:
    from zoo.stylizing.learning import Terms

EVERY_S = 60.0
"""Seconds between lines in a log."""
Clock = Callable[[], float]


@contextmanager
def watched_steps(steps: int, done: int, *, console: Console, clock: Clock = time.monotonic) -> Iterator[Told]:
    """Show the steps of a run, as `zoo.finetuning.progress.Show` says."""
    if 0 < done < steps:
        _say(console, f"resumed: {done:,} of {steps:,} steps are done already")
    if console.is_terminal:
        with steps_bar(steps, done, console) as told:
            yield told
        return
    begun = last = clock()

    def step(number: int, loss: float, images_s: float) -> None:
        nonlocal last
        if (now := clock()) - last >= EVERY_S:
            last = now
            left = (now - begun) / max(1, number - done) * (steps - number)
            _say(console, f"step {number:,} of {steps:,}: loss {loss:.4f}, {images_s:,.0f} images/s{_remaining(left)}")

    def epoch(end: Epoch) -> None:
        nonlocal last
        last = clock()
        right = f", {100 * end.metrics.accuracy:.1f} % of {end.metrics.count:,} right" if end.metrics else ""
        left = (clock() - begun) / max(1, end.step - done) * (steps - end.step)
        _say(console, f"epoch {end.epoch:.4g} of {end.epochs:.4g}: loss {end.loss:.4f}{right}{_remaining(left)}")

    yield Told(step, lambda what: _say(console, what) if what else None, epoch)


@contextmanager
def watched(name: str, total: int, done: int, *, console: Console, clock: Clock = time.monotonic) -> Iterator[Callable[[int], None]]:
    """Show a job that counts images, steps or frames, as `weights.progress.Show` says."""
    if done:
        _say(console, f"resumed: {done:,} of {total:,} are done already")
    if console.is_terminal:
        with count_bar(name, total, done, console) as advance_bar:
            yield advance_bar
        return
    begun = last = clock()
    now_done = done

    def advance(count: int) -> None:
        nonlocal last, now_done
        now_done += count
        if (now := clock()) - last >= EVERY_S:
            last, rate = now, (now_done - done) / (now - begun)
            speed, left = f", {rate:,.0f}/s" if rate >= 1 else "", _remaining((total - now_done) / max(rate, 1e-9)) if total else ""
            _say(console, f"{name}: {now_done:,}{f' of {total:,}' if total else ''}{speed}{left}")

    yield advance


@contextmanager
def watched_style(steps: int, done: int, *, console: Console, clock: Clock = time.monotonic) -> Iterator[Callable[[int, Terms], None]]:
    """Show the steps of a style's training, as `zoo.stylizing.progress.Show` says."""
    if 0 < done < steps:
        _say(console, f"resumed: {done:,} of {steps:,} steps are done already")
    if console.is_terminal:
        with style_bar(steps, done, console) as told_bar:
            yield told_bar
        return
    begun = last = clock()

    def told(step: int, terms: Terms) -> None:
        nonlocal last
        if (now := clock()) - last >= EVERY_S or step == steps:
            last = now
            left = (now - begun) / max(1, step - done) * (steps - step)
            _say(console, f"step {step:,} of {steps:,}: style {terms.style:.3f}, content {terms.content:.3f}{_remaining(left)}")

    yield told


def _remaining(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f", about {seconds / 60:,.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"


def _say(console: Console, line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
