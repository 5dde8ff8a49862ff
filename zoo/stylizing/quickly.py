"""The quickest way of running a style network at one size: each way is compared with the network's own float32 answer, then timed."""

from __future__ import annotations

import copy
import logging
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from zoo.kernels import fast
from zoo.kernels.measuring.timing import release_generator

log = logging.getLogger("zoo")

APART = 1.0
"""Levels of 0..255 by which a way's painting may differ from float32's in the mean."""
ROUNDS = 5
Run: TypeAlias = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """A way of running a network.

    Attributes:
        name: for whoever asks which was taken.
        run: takes and gives (1, 3, H, W), float32.
        apart: mean difference from float32, in levels of 0..255.
        ms: median time of a painting.
    """

    name: str
    run: Run
    apart: float
    ms: float


_found: weakref.WeakKeyDictionary[nn.Module, dict[Any, Way]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def quickest(network: nn.Module, x: Tensor) -> Way:
    """Prepare every way for pictures of one size, and return the quickest of those that paint the same; found once for each size.

    On a GPU these are float32 with TensorFloat-32, half precision, half precision compiled by torch.compile, both replayed as a CUDA graph,
    and the zoo's kernels; on a CPU float32 and the zoo's engines. A way that fails, as a compiler may, is logged and left out.

    Args:
        network: in eval mode.
        x: a picture, (1, 3, H, W) of 0..255, float32, on the network's device.

    Example:
        >>> quickest(network, x).name  # doctest: +SKIP
        'half precision, compiled, as a CUDA graph'
    """
    known = _found.setdefault(network, {})
    key = tuple(x.shape), x.device
    if key not in known:
        right = network(x)
        ways = [way for name, make in _candidates(network, x) if (way := _tried(name, make, x, right)) is not None]
        known[key] = min(ways, key=lambda way: way.ms)
        log.info(
            "painting %dx%d by %s: %.2f ms, %.2f levels apart", x.shape[3], x.shape[2], known[key].name, known[key].ms, known[key].apart
        )
    return known[key]


def _candidates(network: nn.Module, x: Tensor) -> Iterator[tuple[str, Callable[[], Run]]]:
    yield "float32", lambda: lambda image: _with_tf32(network, image)
    if x.device.type == "cuda":
        yield "half precision, as a CUDA graph", lambda: _captured(_halved(network, compiled=False), x)
        yield "half precision, compiled, as a CUDA graph", lambda: _captured(_halved(network, compiled=True), x)
        yield "the zoo's kernels", lambda: _kernels(network, x, torch.float16)
    else:
        yield "the zoo's engines", lambda: _kernels(network, x, None)


def _tried(name: str, make: Callable[[], Run], x: Tensor, right: Tensor) -> Way | None:
    try:
        run = make()
        apart = float((run(x).float().clamp(0, 255) - right.clamp(0, 255)).abs().mean())
        if not apart <= APART:
            log.info("%s paints otherwise, by %.2f levels in the mean: left out", name, apart)
            return None
        return Way(name, run, apart, _median_ms(run, x))
    except Exception as error:  # whatever a compiler, a kernel or the memory stumbles over; float32 is left
        if name == "float32":
            raise
        if x.is_cuda:
            release_generator(x.device)
        log.info("%s can't run this network: %s", name, error)
        return None


def _median_ms(run: Run, x: Tensor) -> float:
    times: list[float] = []
    for _ in range(ROUNDS):
        _wait(x)
        begun = time.perf_counter()
        run(x)
        _wait(x)
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def _with_tf32(network: nn.Module, x: Tensor) -> Tensor:
    with _tf32():
        return network(x)


@contextmanager
def _tf32() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _halved(network: nn.Module, compiled: bool) -> Run:
    """Copy a network into half precision, channels last."""
    half: Any = copy.deepcopy(network)
    half = half.to(torch.float16, memory_format=torch.channels_last).eval().requires_grad_(False)
    called = torch.compile(half, dynamic=False) if compiled else half
    return lambda x: called(x.to(torch.float16, memory_format=torch.channels_last)).float()


def _captured(run: Run, x: Tensor) -> Run:
    """Capture a way in a CUDA graph; its answer is a copy, for the next replay writes over the graph's own.

    The graph reads the way's own weights, which live as long as the replay does.
    """
    held = x.clone()
    side = torch.cuda.Stream(x.device)
    side.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(side):
        for _ in range(3):
            run(held)
    torch.cuda.current_stream(x.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(held)
    kept = run, out

    def replay(image: Tensor) -> Tensor:
        held.copy_(image)
        graph.replay()
        return kept[1].clone()

    return replay


def _kernels(network: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Run:
    told: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    return fast(copy.deepcopy(network).eval(), x.device, **told)
