"""What whoever waits sees: bars on a terminal, or whatever its caller gives instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from weights.progress import count_bar


class Watch:
    """Shows the work on candidates: a bar of images on a terminal, and nothing anywhere else. Derive from it to show it otherwise.

    Args:
        wanted: whether a terminal sees anything.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted

    def images(self, name: str, total: int, done: int) -> AbstractContextManager[Callable[[int], None]]:
        """Show images that are embedded, as `weights.progress.Show` says."""
        return count_bar(name, total, done, wanted=self.wanted)

    def say(self, line: str) -> None:
        """Tell what is being done now, or was found."""

    @contextmanager
    def step(self, line: str) -> Iterator[None]:
        """Tell of something that takes a while."""
        self.say(line)
        yield
