"""Processes that prepare at once measure one after the other, and what fails in one is told without ending the rest."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
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


def test_a_kernel_is_timed_in_one_turn_and_a_network_while_the_others_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    from zoo.bench import clock
    from zoo.kernels.compilation import workers
    from zoo.kernels.measuring import timing
    from zoo.kernels.plans import rival
    from zoo.kernels.training.contest import Contest

    monkeypatch.setattr(workers, "MOST", 16)
    monkeypatch.setattr(Contest, "__init__", Contest.__init__)  # put back behind this test, as the rest is

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as other:
        try:

            def stands_still(*args: object) -> bool:
                status = os.waitpid(other.pid, os.WUNTRACED | os.WNOHANG)
                stopped = status[0] != 0 and os.WIFSTOPPED(status[1])
                assert not lock.acquire(block=False), "somebody else could measure"
                return stopped

            lock = multiprocessing.get_context("spawn").Lock()
            for owner, name, way in (
                (timing, "_between", stands_still),
                (timing, "_apart", lambda: [timing._between(), timing._between()]),
                (timing, "alternate", lambda: [timing._between(), timing._between()]),
                (rival, "alternate", None),
                (clock, "_turns", stands_still),
            ):
                monkeypatch.setattr(owner, name, way)
            Turns(lock, multiprocessing.get_context("spawn").Array("i", [0, other.pid]), 0).share()
            found = list[object]()
            ways = (timing._apart, timing.alternate, rival.alternate, clock._turns, timing._between)
            timer = threading.Thread(target=lambda: found.extend(way() for way in ways), daemon=True)
            timer.start()
            timer.join(60)
            assert found == [[False, False], [True, False], [True, False], True, True]  # a process is reported as stopped once
            assert lock.acquire(block=False)
        finally:
            other.kill()
