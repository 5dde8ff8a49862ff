"""A bar with bytes, speed and time left, where a person is watching."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator


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
