"""How a training shows its steps: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    from zoo.stylizing.learning import Terms

Told: TypeAlias = "Callable[[int, Terms], None]"
"""Gets a step's number and the means of its terms since the last call."""
Show: TypeAlias = "Callable[[int, int], AbstractContextManager[Told]]"
"""Takes the number of steps and how many an earlier call has done, and shows them while its `with` block runs."""


@contextmanager
def bar(steps: int, done: int = 0, console: Console | None = None, wanted: bool = True) -> Iterator[Told]:
    """Show a bar on a console, standard error if left out, where that is a terminal and a bar is wanted.

    Example:
        >>> with bar(10) as told:  # doctest: +SKIP
        ...     told(1, Terms(11.0, 1.0, 1.0, 1.0))
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from weights.screen import Screen

    shown = console or Screen(stderr=True)
    text = "step {task.completed}/{task.total}  style {task.fields[style]:.3f}  content {task.fields[content]:.3f}"
    columns = SpinnerColumn(), BarColumn(), TextColumn(text), TimeRemainingColumn()
    nan = float("nan")
    with Progress(*columns, console=shown, transient=True, disable=not (wanted and shown.is_terminal)) as bars:
        task = bars.add_task("", total=steps, completed=done, style=nan, content=nan)
        yield lambda step, terms: bars.update(task, completed=step, style=terms.style, content=terms.content)
