"""Work in a thread that ends, and with it what PyTorch keeps for a thread: how cuDNN computes each convolution."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Do = Callable[[Callable[[], T]], T]


@contextmanager
def elsewhere() -> Iterator[Do[Any]]:
    """Yield a function that does a call in another thread, the same each time, and waits for its answer or error.

    PyTorch asks cuDNN once for each shape and thread: where `torch.backends.cudnn.benchmark` is off it keeps the first guess, and whoever
    turns that on later, the user or a rival in a benchmark, gets the guess and no search. What is computed here leaves no such trace.
    The thread has this one's device, stream, gradient mode and context variables.
    """
    with ThreadPoolExecutor(1, "zoo.kernels.elsewhere") as pool:

        def do(call: Callable[[], T]) -> T:
            return pool.submit(contextvars.copy_context().run, _as_here(call)).result()

        yield do
        if torch.cuda.is_initialized():
            do(torch.cuda.synchronize)  # what runs still needs what the thread keeps


def _as_here(call: Callable[[], T]) -> Callable[[], T]:
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    learns, infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def called() -> T:
        on = torch.cuda.stream(stream) if stream is not None else nullcontext()  # which makes its device the current one
        with on, torch.inference_mode(infers), torch.set_grad_enabled(learns):
            return call()

    return called
