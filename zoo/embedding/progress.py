"""A bar with images, speed and time left, where a person is watching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def bar(name: str, total: int, done: int, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr if that is a terminal, nothing otherwise; yields what to call with the images that were finished since."""
    if not wanted or sys.stderr is None or not sys.stderr.isatty():
        yield lambda images: None
        return
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        Speed(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as shown:
        task = shown.add_task(name, total=total, completed=done)
        yield lambda images: shown.advance(task, images)
