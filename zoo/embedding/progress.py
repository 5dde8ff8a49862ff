"""How a job shows its images: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Show: TypeAlias = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]
"""Takes what is done, the number of images and how many are finished; gives what to call with the images that were finished since."""


@contextmanager
def bar(name: str, total: int, done: int, console: Console | None = None, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar with images, speed and time left on a console, standard error if left out, where that is a terminal and a bar is wanted.

    Example:
        >>> with bar("embedding by ResNet50", 1000, 0) as advance:  # doctest: +SKIP
        ...     advance(256)
    """
    from rich import progress
    from rich.text import Text

    from weights.screen import Screen

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")

    shown = console or Screen(stderr=True)
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), Speed()
    quiet = not (wanted and shown.is_terminal)
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=shown, disable=quiet) as bars:
        task = bars.add_task(name, total=total, completed=done)
        yield lambda images: bars.advance(task, images)
