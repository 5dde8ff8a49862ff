"""Words of messages: numbers of things, and sentences inside of sentences."""

from __future__ import annotations


def counted(count: int, noun: str, plural: str = "") -> str:
    """Write a number and what it counts: "1 file", "1,200 files"; a `plural` that is not the noun and an s is given."""
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def clause(sentence: object) -> str:
    """Write an error or a sentence so that the one around it can go on: without the full stop at its end."""
    return str(sentence).rstrip().removesuffix(".")
