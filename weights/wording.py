"""Words of messages: numbers of things, and sentences inside of sentences."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Write a number and what it counts: "1 file", "1,200 files"; a `plural` that is not the noun and an s is given."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def clause(sentence: object) -> str:
    """Write an error or a sentence so that the one around it can go on: without the full stop at its end."""
    return str(sentence).rstrip().removesuffix(".")


def printable(text: str, *, lines: bool = False) -> str:
    """Replace what would move the cursor or colour the screen, as the words of a hostile file might; with `lines`, lines stay lines."""
    return "".join(character if character.isprintable() or (lines and character == "\n") else "\ufffd" for character in text)


def escape(text: str, *, lines: bool = False) -> str:
    """Make others' words safe to print by rich: no markup either."""
    from rich.markup import escape as escape_markup

    return escape_markup(printable(text, lines=lines))
