"""The screen: no word of a file moves the cursor or colours anything, whoever forgot to escape it."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from weights.screen import Screen
from weights.wording import escape, printable

ATTACK = "cat\x1b[2J\x1b]0;owned\x07\x9b31m\rdog\u202e"


def screen() -> Screen:
    return Screen(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)


def told(made: Screen) -> str:
    assert isinstance(made.file, io.StringIO)
    return made.file.getvalue()


@pytest.mark.parametrize("kind", ["text", "markup", "table", "column", "object"])
def test_control_characters_of_others_are_replaced(kind: str) -> None:
    made, table = screen(), Table("name")
    table.add_row(ATTACK)
    shown = {"text": Text(ATTACK), "markup": f"[bold]{ATTACK}[/bold]", "table": table, "column": Table(ATTACK), "object": [ATTACK]}
    made.print(shown[kind])
    text = told(made)
    for bad in ("\x1b[2J", "\x1b]0", "\x07", "\x9b", "\r", "\u202e"):
        assert bad not in text
    assert "cat" in text


def test_our_own_colours_and_lines_stay() -> None:
    made = screen()
    made.print("[red]no[/red]\nyes")
    assert told(made) == "\x1b[31mno\x1b[0m\nyes\n"


def test_a_checkpoints_name_is_drawn_as_it_is_written() -> None:
    made = screen()
    made.print("no source delivered Johnson:candy: nobody", markup=False)
    made.print("Johnson:candy: nobody")
    assert told(made) == "no source delivered Johnson:candy: nobody\nJohnson:candy: nobody\n"


def test_words_are_escaped_once_for_all_commands() -> None:
    assert escape("[red]a\x1b[1m\nb") == "\\[red]a\ufffd[1m\ufffdb"
    assert escape("a\nb", lines=True) == "a\nb"
    assert printable("a\tb\u00e9\n") == "a\ufffdb\u00e9\ufffd"
