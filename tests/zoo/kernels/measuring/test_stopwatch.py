"""What making a plan took is told by phase: none is counted twice, none is lost."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from zoo import fast, why
from zoo.kernels.measuring.stopwatch import REST, phase, stopwatch, told


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A time that stands still until a test moves it."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_seconds_of_an_inner_phase_are_not_the_outer_ones(clock: list[float]) -> None:
    with stopwatch() as seconds:
        clock[0] += 1
        with phase("checking"):
            clock[0] += 2
            with phase("compiling"):
                clock[0] += 4
            clock[0] += 8
        with phase("compiling"):
            clock[0] += 16
        clock[0] += 32
    assert seconds == {REST: 33, "checking": 10, "compiling": 20}


def test_a_plan_that_waits_for_another_says_so() -> None:
    from zoo.kernels.plans import build

    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with build._alone():
            held.set()
            free.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    threading.Timer(0.05, free.set).start()
    with stopwatch() as seconds, build._alone():
        pass
    holder.join()
    assert seconds["waiting for another plan"] > 0.03


def test_an_error_ends_its_phases(clock: list[float]) -> None:
    def fail() -> None:
        with phase("checking"), phase("timing"):
            clock[0] += 1
            raise ValueError("wrong")

    with stopwatch() as seconds:
        with pytest.raises(ValueError, match="wrong"):
            fail()
        clock[0] += 2
    assert seconds == {REST: 2, "checking": 0, "timing": 1}


def test_nothing_is_counted_without_a_stopwatch_nor_in_another_thread(clock: list[float]) -> None:
    def elsewhere() -> None:
        with phase("checking"):
            clock[0] += 1

    elsewhere()
    with stopwatch() as seconds:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seconds == {REST: 1}


def test_the_longest_is_told_first_and_the_least_not_at_all() -> None:
    assert told({"tracing": 0.1, "timing": 4.0, "compiling": 8.04}) == "made in 12.1 s: compiling 8.0, timing 4.0"


@pytest.mark.parametrize("train", [False, True])
def test_why_tells_what_a_plan_took(train: bool) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).train(train)
    start = time.perf_counter()
    made = fast(network, "cpu", train=train) if train else fast(network, "cpu", example=torch.rand(1, 3, 8, 8))
    made(torch.rand(1, 3, 8, 8))
    gone = time.perf_counter() - start
    seconds = why(made).plans[0].seconds
    assert {"tracing", "checking" if train else "making and timing engines"} <= seconds.keys()
    assert 0 < sum(seconds.values()) <= gone
    assert told(seconds) in str(why(made))
