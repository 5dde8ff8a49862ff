"""How a job shows its images: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Advance: TypeAlias = Callable[[int], None]
"""Is called with the number of images that were finished since the last call."""
Show: TypeAlias = Callable[[str, int, int], AbstractContextManager[Advance]]
"""Takes what is done, the number of images and how many are finished, and shows them while its `with` block runs."""


@contextmanager
def nothing(name: str, total: int, done: int) -> Iterator[Advance]:
    """Show no image."""
    del name, total, done
    yield lambda images: None


@contextmanager
def bar(name: str, total: int, done: int, console: Console | None = None) -> Iterator[Advance]:
    """Show a bar with images, speed and time left on a console if that is a terminal, nothing otherwise.

    Args:
        name: what is done.
        total: images of the whole job.
        done: images that an earlier run finished.
        console: where; standard error if left out.

    Example:
        >>> with bar("embedding by ResNet50", 1000, 0) as advance:  # doctest: +SKIP
        ...     advance(256)
    """
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    shown = console or Console(stderr=True)
    if not shown.is_terminal:
        with nothing(name, total, done) as advance:
            yield advance
        return

    class Speed(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            return Text(f"{task.speed:,.0f} images/s" if task.speed else "", style="progress.data.speed")

    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(), Speed()
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=shown) as bars:
        task = bars.add_task(name, total=total, completed=done)
        yield lambda images: bars.advance(task, images)


def chosen(progress: bool | Show) -> Show:
    """Return what an argument `progress` asks for: a bar for True, nothing for False."""
    return (bar if progress else nothing) if isinstance(progress, bool) else progress
