"""How a run shows its steps: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

Tell: TypeAlias = Callable[[int, float, float], None]
"""Is called with a step's number, its loss and the images per second since the last call."""
Busy: TypeAlias = Callable[[str], None]
"""Is called with what takes long before the next step, and with "" when that is done."""
Show: TypeAlias = Callable[[int], AbstractContextManager[tuple[Tell, Busy]]]
"""Takes the number of steps, and shows them while its `with` block runs."""


@contextmanager
def bar(steps: int, console: Console | None = None, wanted: bool = True) -> Iterator[tuple[Tell, Busy]]:
    """Show a bar on a console, standard error if left out, where that is a terminal and a bar is wanted.

    Example:
        >>> with bar(10) as (tell, busy):  # doctest: +SKIP
        ...     tell(1, 2.3, 120.0)
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    shown = console or Console(stderr=True)
    text = "{task.description}step {task.completed}/{task.total}  loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} images/s"
    columns = SpinnerColumn(), BarColumn(), TextColumn(text), TimeRemainingColumn()
    with Progress(*columns, console=shown, transient=True, disable=not (wanted and shown.is_terminal)) as bars:
        task = bars.add_task("", total=steps, loss=float("nan"), speed=0.0)
        yield (
            lambda step, loss, images_s: bars.update(task, completed=step, loss=loss, speed=images_s),
            lambda what: bars.update(task, description=f"{what}  " if what else ""),
        )
