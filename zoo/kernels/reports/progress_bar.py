"""The bar that shows how far tuning is."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, wanted: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Show a bar on stderr while the body runs, if that is a terminal; yield the function that moves it, or None."""
    if not wanted or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[step]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = None

        def move(done: int, total: int, step: str) -> None:
            nonlocal task
            if task is None:
                task = shown.add_task(what, total=total, step="")
            shown.update(task, completed=done, step=step[:60])

        yield move
