"""Work in a thread that ends, and with it what PyTorch keeps for a thread: how cuDNN computes each convolution."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Do = Callable[[Callable[[], T]], T]


@contextmanager
def elsewhere() -> Iterator[Do[Any]]:
    """Yield a function that does a call in another thread, the same each time, and waits for its answer or error.

    PyTorch asks cuDNN once for each shape, TF32 allowed or not, and thread: where `torch.backends.cudnn.benchmark` is off it keeps the
    first guess, and whoever turns that on later gets the guess and no search. What is computed here leaves no such trace, but for
    gradients, which autograd computes in a thread of its own. The thread has this one's device, stream, default device, gradient mode
    and context variables, and no autocast.
    """
    with ThreadPoolExecutor(1, "zoo.kernels.measuring.fresh_thread") as pool:

        def do(call: Callable[[], T]) -> T:
            answer = pool.submit(contextvars.copy_context().run, _as_here(call))
            try:
                return answer.result()
            except BaseException:
                wait([answer])  # the caller's flags, which go now, are also for what is computed there
                raise

        try:
            yield do
        finally:
            if torch.cuda.is_initialized():
                with suppress(RuntimeError):  # of a device that is lost: its error is on the way
                    do(torch.cuda.synchronize)  # what runs still needs what the thread keeps


def _as_here(call: Callable[[], T]) -> Callable[[], T]:
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    learns, infers, default = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_device()

    def called() -> T:
        if stream is not None:
            torch.cuda.set_device(stream.device)  # for good: to go back to the thread's first would make a context on GPU 0
        on = torch.cuda.stream(stream) if stream is not None else nullcontext()
        there = default if default.type != "cpu" else nullcontext()
        with on, there, torch.inference_mode(infers), torch.set_grad_enabled(learns):
            return call()

    return called
