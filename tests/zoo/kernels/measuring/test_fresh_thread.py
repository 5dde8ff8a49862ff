"""What is computed elsewhere: in one other thread, as here, and its errors come back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from zoo.kernels.errors import Untraceable
from zoo.kernels.measuring.fresh_thread import elsewhere
from zoo.kernels.measuring.stopwatch import phase, stopwatch

NUMBER = ContextVar("number", default=0)


def test_calls_are_made_in_one_other_thread_which_ends() -> None:
    with elsewhere() as do:
        threads = {do(threading.current_thread) for _ in range(3)}
        (thread,) = threads
        assert thread is not threading.current_thread()
        assert thread.is_alive()
    assert not thread.is_alive()


def test_they_are_made_as_here() -> None:
    NUMBER.set(7)
    x = torch.ones(3, requires_grad=True)
    with elsewhere() as do:
        assert do(NUMBER.get) == 7
        assert do(lambda: (2 * x).requires_grad)
        with torch.no_grad():
            assert not do(lambda: (2 * x).requires_grad)
        with torch.inference_mode():
            assert do(lambda: (2 * x).is_inference())
        assert not do(lambda: (2 * x).is_inference())


def test_their_seconds_are_counted_here() -> None:
    def work() -> None:
        with phase("inside"):
            pass

    with stopwatch() as seconds, elsewhere() as do:
        do(work)
    assert "inside" in seconds


def test_their_errors_come_back() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with elsewhere() as do:
        with pytest.raises(ValueError, match="wrong"):
            do(fail)
        assert do(lambda: 3) == 3


def test_they_make_tensors_where_they_are_made_here() -> None:
    with elsewhere() as do:
        with torch.device("meta"):
            assert do(lambda: torch.zeros(1)).is_meta
        assert not do(lambda: torch.zeros(1)).is_meta


def test_an_interrupt_waits_for_the_call_that_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    done, told = list[str](), Future.result

    def interrupted(self: Future[Any], timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    def work() -> None:
        time.sleep(0.1)
        done.append("done")

    with elsewhere() as do:
        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            do(work)
        assert done == ["done"]
        monkeypatch.setattr(Future, "result", told)


def test_a_plan_is_compared_with_what_was_computed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as a machine without a GPU comes: the reference is asked for in another thread, and so are the means for rounding."""
    from zoo.kernels.plans import build
    from zoo.kernels.tuning.binding import Weights
    from zoo.kernels.tuning.request import Options, Request

    threads, here = dict[str, threading.Thread](), threading.current_thread()

    class Reference:
        eager = 0.0

        def __init__(self, *given: Any) -> None:
            threads["reference"] = threading.current_thread()

    def means(*given: Any) -> Any:
        threads["means"] = threading.current_thread()
        raise Untraceable("far enough")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)  # a class, as PyTorch's: some ask what is an instance of it
    monkeypatch.setattr(build, "understand", lambda *given, **told: (SimpleNamespace(spec=None, outputs=[]), {}))
    monkeypatch.setattr(build, "key", lambda *given: "")
    monkeypatch.setattr(build, "remembered", lambda *given: None)
    idle = SimpleNamespace(expect=lambda about: None, prepare=lambda tasks: None, close=lambda: None)
    monkeypatch.setattr(build, "Compilers", lambda capability: idle)
    monkeypatch.setattr(build, "kernels", lambda *given: [])
    monkeypatch.setattr(build, "_begin", lambda *given: None)
    monkeypatch.setattr(build, "Reference", Reference)
    monkeypatch.setattr(build, "_means", means)
    options = Options(torch.device("cpu"), torch.bfloat16, "quick", tf32=False, progress=False)
    request = Request(nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8),), {}, options, Weights(), cast(Any, None))
    with pytest.raises(Untraceable, match="far enough"):
        build.begin_gpu(request)
    assert len({here, threads["reference"]}) == 2
    assert threads["means"] == threads["reference"]


@pytest.mark.gpu
def test_they_are_made_on_this_threads_stream() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), elsewhere() as do:
        assert do(torch.cuda.current_stream) == stream


@pytest.mark.gpu
@pytest.mark.parametrize("apart", [False, True], ids=["here", "elsewhere"])
def test_who_searches_later_finds_no_first_guess(apart: bool) -> None:
    """A search tries several kernels, a guess is one; a convolution that was guessed in the same thread is never searched for."""
    x = torch.randn(8, 24 + 8 * apart, 20, 20, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(40, x.shape[1], 3, 3, device="cuda", dtype=torch.float16).contiguous(memory_format=torch.channels_last)

    def convolve(benchmark: bool) -> None:
        with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, benchmark_limit=10, deterministic=False, allow_tf32=False):
            torch.nn.functional.conv2d(x, weight)
        torch.cuda.synchronize()

    if apart:
        with elsewhere() as do:
            do(lambda: convolve(False))
    else:
        convolve(False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:  # else a second one warns
        convolve(True)
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or [])
    assert (kernels > 4) == apart
