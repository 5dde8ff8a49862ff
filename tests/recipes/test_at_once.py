"""Processes that prepare at once measure one after the other, and what fails in one is told without ending the rest."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from recipes.at_once import Turns, measured


@pytest.mark.parametrize("at_once", [1, 2])
def test_every_cell_has_a_line(at_once: int) -> None:
    cells, options = ["one of {.at_once}", "another", "a third"], argparse.Namespace(at_once=at_once)
    assert sorted(measured(cells, str.format, options)) == ["a third", "another", f"one of {at_once}"]


def test_what_fails_is_a_line_of_its_own() -> None:
    lines = sorted(measured(["{.missing}", "{.at_once} processes"], str.format, argparse.Namespace(at_once=2)))
    assert lines[0] == "2 processes"
    assert lines[1].startswith("{.missing}: AttributeError: ")
    with pytest.raises(AttributeError):
        list(measured(["{.missing}"], str.format, argparse.Namespace(at_once=1)))


def leave(cell: str, options: Any) -> str:
    raise SystemExit(cell)


def die(cell: str, options: Any) -> str:
    os.kill(os.getpid(), signal.SIGKILL if cell == "dies" else 0)
    return f"{cell} of {options.at_once}"


def test_a_process_that_ends_is_told_and_nobody_waits_for_it() -> None:
    assert list(measured(["over"], leave, argparse.Namespace(at_once=2))) == ["over: SystemExit: over"]
    lines = sorted(measured(["dies", "lives"], die, argparse.Namespace(at_once=2)))
    assert lines == ["a process ended with -9, and what it measured has no line", "lives of 2"]


def test_the_others_stand_still_while_one_measures() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:
            others: Any = multiprocessing.get_context("spawn").Array("i", [0, other.pid, 0])
            turns = Turns(multiprocessing.get_context("spawn").Lock(), others, 0)
            with turns.alone():
                assert os.WIFSTOPPED(os.waitpid(other.pid, os.WUNTRACED)[1])
            assert os.WIFCONTINUED(os.waitpid(other.pid, os.WCONTINUED)[1])
            turns.end()
            assert list(others) == [0, other.pid, 0]
        finally:
            other.kill()
