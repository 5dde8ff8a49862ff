"""How long a GPU takes, by events: kernels inside CUDA graphs, models around their calls, rivals in turns; and calls of a CPU."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from statistics import median
from typing import Any

import torch

Call = Callable[[], object]


class NotCapturable(RuntimeError):
    """A call that can't be captured into a CUDA graph: it synchronises, reads a value back, or allocates where it must not."""


MOST_LAUNCHES = 50
"""Launches in one graph: enough that a replay of 2 us kernels outlasts the CPU's cost of the replay."""

LEAST_REPLAY_US = 300.0
"""A graph of fewer launches than `MOST_LAUNCHES` lasts at least about this long."""


LONG_US = 5_000.0
"""A call that takes so long is captured alone and replayed but a few times: how long it takes shows, and there may be a hundred such."""

LONG_REPLAYS = 2

SPARE = 2**30
"""Bytes that the allocator may keep for nobody while training is prepared. What one stream or graph has freed, no other one gets."""

LEAST_CALLS = 5
"""Calls of a CPU that are timed, however long they take."""

_by_turn: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("zoo.kernels.measuring.timing", default=None)


@contextlib.contextmanager
def measured_by(do: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """Let other threads make the measurements of this block that capture graphs.

    While anything is captured no thread may wait for the whole device, so that nothing can be captured beside calls of a user's.

    Args:
        do: does a call and returns its answer.
    """
    token = _by_turn.set(do)
    try:
        yield
    finally:
        _by_turn.reset(token)


def is_measured_by_others() -> bool:
    """Tell whether this is a thread for which others measure."""
    return _by_turn.get() is not None


def graph_time_us(call: Call, *, repeats: int | None = None, target_ms: float = 4.0, sparing: bool = False) -> float:
    """Return the median GPU time of one `call` in microseconds, measured inside a CUDA graph of several of them.

    Python's launch cost doesn't count: the launches follow each other on the GPU as they will in the captured network. Inputs that
    fit the L2 cache are found there, as the network's next layer finds them. Two kernels may overlap where they ask for it.

    Args:
        call: launches work on the current stream of the current device; it is called a few times to warm up.
        repeats: launches in the graph; left out, as many as make a replay last `LEAST_REPLAY_US`.
        target_ms: GPU time to spend on replays, milliseconds.
        sparing: whether much memory that calls have left goes back to the driver before the graph is captured, and behind it. That waits
            for the device, so it is for calls that nobody's own run beside.

    Returns:
        Microseconds of one call.

    Raises:
        NotCapturable: the call can't be captured, with the cause.
    """
    do = _by_turn.get()
    return _apart(call, repeats, target_ms, sparing) if do is None else do(lambda: _apart(call, repeats, target_ms, False))


def _apart(call: Call, repeats: int | None, target_ms: float, sparing: bool) -> float:
    """Measure on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            us = _graph_time_us(call, stream, repeats, target_ms, sparing)
    finally:
        if sparing:
            let_go()
    torch.cuda.current_stream().wait_stream(stream)
    return us


def let_go() -> None:
    """Give the driver what the current device's allocator keeps for nobody, where that is more than `SPARE`."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > SPARE:
        torch.cuda.empty_cache()


def _graph_time_us(call: Call, stream: torch.cuda.Stream, repeats: int | None, target_ms: float, sparing: bool) -> float:
    call()  # compiles, loads, creates handles
    launched = _between(call, stream)
    if sparing:
        let_go()
    if repeats is None and launched >= LONG_US:
        us = median(_replays(_record(call, 1), stream, LONG_REPLAYS))
        if us >= LONG_US / 2:  # else it was the CPU that took so long
            return us
    count = repeats or max(2, min(MOST_LAUNCHES, round(LEAST_REPLAY_US / max(launched, 1.0))))
    graph = _record(call, count)
    graph.replay()
    once = _between(graph.replay, stream)
    if repeats is None and count < MOST_LAUNCHES and once < LEAST_REPLAY_US / 2:  # Python's launch cost hid how short the call is
        count = min(MOST_LAUNCHES, round(count * LEAST_REPLAY_US / max(once, 1.0)))
        graph = _record(call, count)
        graph.replay()
        once = _between(graph.replay, stream)
    times = _replays(graph, stream, max(3, min(60, round(1000 * target_ms / max(once, 1.0)))))
    return median(times) / count


def cpu_time_us(call: Call, *, seconds: float = 0.5) -> float:
    """Return the microseconds of one `call` on a CPU: the median of the faster half, for other work makes calls slower, never faster.

    Args:
        call: computes on the CPU; two calls warm up.
        seconds: for how long it is called, at least five times.
    """
    times: list[float] = []
    for _ in range(2):
        call()
    until = time.perf_counter() + seconds
    while len(times) < LEAST_CALLS or time.perf_counter() < until:
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return 1e6 * median(sorted(times)[: (len(times) + 1) // 2])


def event_time_us(call: Call, *, target_ms: float = 200.0, warmups: int = 3) -> float:
    """Return the median time between events around one `call`, in microseconds: what a caller in a loop sees.

    Args:
        call: a whole model's forward, for example; launch costs count where the GPU waits for them.
        target_ms: time to spend, milliseconds.
        warmups: calls before the first that counts.

    Returns:
        Microseconds of one call.
    """
    stream = torch.cuda.current_stream()
    for _ in range(warmups):
        call()
    inner = calls_of_a_sample(_between(call, stream))
    samples = max(5, min(100, round(1000 * target_ms / max(_between(call, stream, inner), 1.0))))
    return median(_between(call, stream, inner) / inner for _ in range(samples))


def alternate(calls: Mapping[str, Call], rounds: int = 20, *, warmups: int = 3) -> dict[str, list[float]]:
    """Time rivals in turns, so that a clock that drifts or a neighbour that wakes up hits all of them alike.

    Args:
        calls: a call by name.
        rounds: samples of each call; every round times each call once, beginning with another one each time.
        warmups: calls of each before the first round.

    Returns:
        The microseconds of one call by name, a sample a round.
    """
    stream = torch.cuda.current_stream()
    inner = {}
    for name, call in calls.items():
        for _ in range(warmups):
            call()
        inner[name] = calls_of_a_sample(_between(call, stream))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for _ in range(rounds):
        for name in order:
            times[name].append(_between(calls[name], stream, inner[name]) / inner[name])
        order = order[1:] + order[:1]
    return times


def _between(call: Call, stream: torch.cuda.Stream, count: int = 1) -> float:
    """Time `count` calls on a stream that was idle before, in microseconds."""
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.synchronize()
    before.record(stream)
    for _ in range(count):
        call()
    after.record(stream)
    after.synchronize()
    return 1000 * before.elapsed_time(after)


def calls_of_a_sample(us: float) -> int:
    """Return how many calls behind each other make a sample: 2 ms, long beside an event's resolution, and four where 100 ms allow.

    The first of them begins on an idle GPU, which waits while the CPU prepares it; in a loop the GPU has the call before to do.

    Args:
        us: what a call takes, microseconds.
    """
    us = max(us, 1.0)
    return max(1, min(50, max(round(2_000 / us), min(4, round(100_000 / us)))))


def _replays(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, count: int) -> list[float]:
    """Time replays queued behind each other: on an idle GPU the event before would stamp the CPU's launch latency too."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    graph.replay()
    events[0].record(stream)
    for event in events[1:]:
        graph.replay()
        event.record(stream)
    stream.synchronize()
    return [1000 * before.elapsed_time(after) for before, after in itertools.pairwise(events)]


def _record(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` calls on the current stream; where there is no room, once more with all that other streams have kept."""
    try:
        return _captured(call, count)
    except NotCapturable as error:
        if not isinstance(error.__cause__, torch.OutOfMemoryError):
            raise
    torch.cuda.empty_cache()  # what a capture itself can't do
    return _captured(call, count)


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Capture what the block launches on the current stream; where the block fails, that is all that is said."""
    graph.capture_begin(capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with warnings.catch_warnings(), contextlib.suppress(RuntimeError):
            warnings.simplefilter("ignore")  # that the graph is empty, where there was no room for the first map
            graph.capture_end()
        release_generator(torch.device("cuda"))
        raise
    graph.capture_end()


def release_generator(device: torch.device) -> None:
    """Let calls draw random numbers again: PyTorch 2.11 leaves a GPU's generator waiting for a graph whose capture failed.

    The next number is the one that would have come next.
    """
    with contextlib.suppress(RuntimeError):  # the capture's own error is what has to be told
        index = torch.cuda.current_device() if device.index is None else device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


def _captured(call: Call, count: int) -> torch.cuda.CUDAGraph:
    """Capture `count` calls on the current stream.

    Not by `torch.cuda.graph`, which collects garbage and empties the allocator's cache each time: tuning captures hundreds.
    """
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with recording(graph):
            for _ in range(count):
                call()
    except (RuntimeError, ValueError, TypeError) as error:
        raise NotCapturable(f"can't be captured into a CUDA graph: {str(error).splitlines()[0] if str(error) else error!r}") from error
    return graph
