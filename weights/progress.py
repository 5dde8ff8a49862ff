"""Bars where a person is watching: of a download, with bytes; and of any job that counts, which its caller may show otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Show: TypeAlias = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]
"""Takes what is done, how many there are, 0 where nobody knows, and how many are finished; gives what to call with those finished since."""


@contextlib.contextmanager
def bar(name: str, wanted: bool = True) -> Generator[Callable[[int, int | None], None]]:
    """Show a bar on stderr if that is a terminal, nothing otherwise; yields what to call with (bytes done, bytes in total)."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress

    from weights.screen import Screen

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Screen(stderr=True)) as shown:
        task = shown.add_task(name, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)


@contextlib.contextmanager
def count_bar(name: str, total: int, done: int, console: Console | None = None, wanted: bool = True) -> Generator[Callable[[int], None]]:
    """Show a bar with a count, speed and time left on a console, standard error if left out, where that is a terminal; it is a `Show`.

    Example:
        >>> with count_bar("embedding by ResNet50", 1000, 0) as advance:  # doctest: +SKIP
        ...     advance(256)
    """
    from rich import progress
    from rich.text import Text

    from weights.screen import Screen

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            speed = task.speed or 0.0
            return Text(f"{speed:,.{0 if speed >= 10 else 1}f}/s" if speed else "", style="progress.data.speed")

    shown = console or Screen(stderr=True)
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), Speed()
    quiet = not (wanted and shown.is_terminal)
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=shown, disable=quiet) as bars:
        task = bars.add_task(name, total=total or None, completed=done)
        yield lambda count: bars.advance(task, count)


def show_of(progress: bool | Show) -> Show:
    """Return what shows a job: what its caller gave, else a bar if one is wanted."""
    return progress if callable(progress) else partial(count_bar, wanted=progress)
