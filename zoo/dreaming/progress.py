"""How a dream shows its steps: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Show: TypeAlias = Callable[[str, int, int], AbstractContextManager[Callable[[int], None]]]
"""Takes what is done, the number of steps and how many are finished; gives what to call with the steps that were finished since. A step
of a picture that is cut into tiles counts as many as there are tiles."""


@contextmanager
def bar(name: str, total: int, done: int, console: Console | None = None, wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """Show a bar with steps and time left on a console, standard error if left out, where that is a terminal and a bar is wanted.

    Example:
        >>> with bar("dreaming", 40, 0) as advance:  # doctest: +SKIP
        ...     advance(1)
    """
    from rich import progress

    from weights.screen import Screen

    shown = console or Screen(stderr=True)
    columns = progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn()
    quiet = not (wanted and shown.is_terminal)
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=shown, disable=quiet) as bars:
        task = bars.add_task(name, total=total, completed=done)
        yield lambda steps: bars.advance(task, steps)
