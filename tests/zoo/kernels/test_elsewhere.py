"""What is computed elsewhere: in one other thread, as here, and its errors come back."""

from __future__ import annotations

import threading
from contextvars import ContextVar

import pytest
import torch

from zoo.kernels.elsewhere import elsewhere
from zoo.kernels.stopwatch import phase, stopwatch

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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        convolve(True)
    kernels = sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or [])
    assert (kernels > 4) == apart
