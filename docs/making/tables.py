"""Markdown tables and the words around them, the same for every page that is written by a program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def generated(source: str) -> str:
    """Return the comment that says where a page comes from."""
    return f"<!-- written by `make docs-pages` from {source}: edit that -->"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Return a Markdown table.

    Args:
        headings: of the columns.
        rows: a cell for each column, as Markdown.
        right: the columns that are numbers, and stand to the right.
    """
    rule = ["--:" if column in right else "---" for column in range(len(headings))]
    lines = [f"| {' | '.join(headings)} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(cell(text) for text in row)} |" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Return text for a cell: on one line, and without a bar that would end it."""
    return " ".join(text.split()).replace("|", "\\|")


def page(*parts: str) -> str:
    """Join the parts of a page, a blank line between them."""
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"
