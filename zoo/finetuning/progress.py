"""How a run shows its steps: a bar on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from rich.console import Console

    from zoo.finetuning.metrics import Metrics


class Epoch(NamedTuple):
    """The end of an epoch, or of a run that ends within one.

    Attributes:
        step: optimiser steps that are done.
        epoch: epochs that are done, 2.5 in the middle of the third.
        epochs: of the whole run.
        loss: mean of the epoch's steps, in nats.
        metrics: what was measured at this step; None where nothing was.
    """

    step: int
    epoch: float
    epochs: float
    loss: float
    metrics: Metrics | None


class Told(NamedTuple):
    """What a run calls while it runs.

    Attributes:
        step: gets a step's number, its loss and the images per second since the last call.
        busy: gets what takes long before the next step, and "" when that is done.
        epoch: gets the end of each epoch.
    """

    step: Callable[[int, float, float], None]
    busy: Callable[[str], None]
    epoch: Callable[[Epoch], None]


Show: TypeAlias = Callable[[int, int], AbstractContextManager[Told]]
"""Takes the number of steps and how many an earlier run has done, and shows them while its `with` block runs."""


def show_of(progress: bool | Show, first: bool = True) -> Show:
    """Return what shows the steps: what a caller gives, a bar, or nothing; nothing in any process but the first.

    Example:
        >>> with show_of(False)(10, 0) as told:
        ...     told.step(1, 2.3, 120.0)
    """
    return progress if callable(progress) and first else partial(bar, wanted=bool(progress) and first)


@contextmanager
def bar(steps: int, done: int = 0, console: Console | None = None, wanted: bool = True) -> Iterator[Told]:
    """Show a bar on a console, standard error if left out, where that is a terminal and a bar is wanted.

    Example:
        >>> with bar(10) as told:  # doctest: +SKIP
        ...     told.step(1, 2.3, 120.0)
    """
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

    from weights.screen import Screen

    shown = console or Screen(stderr=True)
    text = "{task.description}step {task.completed}/{task.total}  loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} images/s"
    columns = SpinnerColumn(), BarColumn(), TextColumn(text), TimeRemainingColumn()
    with Progress(*columns, console=shown, transient=True, disable=not (wanted and shown.is_terminal)) as bars:
        task = bars.add_task("", total=steps, completed=done, loss=float("nan"), speed=0.0)
        yield Told(
            lambda step, loss, images_s: bars.update(task, completed=step, loss=loss, speed=images_s),
            lambda what: bars.update(task, description=f"{what}  " if what else ""),
            lambda epoch: None,
        )
