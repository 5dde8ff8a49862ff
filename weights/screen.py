"""Where we print: a rich console on which no word of a file moves the cursor or colours the screen, whoever forgot to escape it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from weights.wording import printable


class Screen(Console):
    """A console that replaces control characters in all that it shows; styles and bars are its own and stay.

    ``Johnson:candy:`` stays too, where rich would draw a sweet.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Leave it to the command: rich would exit with 1, and `zoo list | head` is no failure."""
        raise BrokenPipeError

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, and clean the words."""
        for segment in super().render(renderable, options):
            plain = segment.control or segment.text.isprintable() or segment.text == "\n"
            yield segment if plain else Segment(printable(segment.text, lines=True), segment.style)
