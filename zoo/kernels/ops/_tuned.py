"""Launch parameters found by timing, by all that a time depends on; ops that train look here before they trust the first guess.

Inside `tuning`, which a first step runs in, every launch that nobody has tuned yet is timed with some of its configs, into memory of its
own: the step computes what it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]

_found: dict[tuple[Any, ...], Config] = {}
_guessed: dict[tuple[Any, ...], Config] = {}
_most = 0  # of the process: the way back runs in a thread of autograd's


@contextmanager
def tuning(most: int = 6) -> Iterator[None]:
    """Time up to `most` configs of what is launched on a GPU in the body, by one thread at a time and not inside a capture."""
    global _most
    before, _most = _most, most
    try:
        yield
    finally:
        _most = before


def key(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return all that a launch's time depends on."""
    return name, *[
        (str(a.device), a.dtype, a.shape, a.stride() if a.dim() == 4 else ())
        if isinstance(a, Tensor)
        else str(tuple(a) if isinstance(a, list | tuple) else a)  # a torch.Size is the tuple that it holds
        for a in args
    ]


def chosen(name: str, args: tuple[Any, ...], candidates: Callable[[], list[Config]], run: Callable[[Config], object]) -> Config:
    """Return the config to launch with.

    Args:
        name: the op's.
        args: what its time depends on.
        candidates: lists the configs, the best guess first.
        run: launches with a config, into memory of its own.

    Returns:
        The fastest one where it was timed, else the first.
    """
    known, most = key(name, args), _most
    if known in _found:
        return _found[known]
    if not most:
        if known not in _guessed:  # listing takes milliseconds where candidates are weighed, and a step asks a hundred times
            _guessed[known] = candidates()[0]
        return _guessed[known]
    configs = candidates()
    times: dict[int, float] = {}
    with tuning(0), torch.no_grad():
        for index, config in enumerate(configs[:most]):
            try:
                times[index] = _time(lambda config=config: run(config))
            except Exception as error:  # a config that doesn't fit this device is left out; the first must run everywhere
                if index == 0 or type(error).__name__ != "OutOfResources":
                    raise
    _found[known] = configs[min(times, key=lambda index: times[index])]
    return _found[known]


def _time(run: Callable[[], object]) -> float:
    from zoo.kernels.measuring.timing import graph_time_us

    return graph_time_us(run, target_ms=1)
