"""Timing in turns: throughput of calls behind each other, and the latency of one call that is waited for."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from zoo.kernels.engines.race import SETTLE
from zoo.kernels.memory.workspaces import clear_workspaces

Calls = Mapping[str, Callable[[], object]]
Samples = dict[str, list[float]]
BLOCK_US = 30_000.0
"""A sample on the CPU is as many calls as last about this long."""


@dataclass(frozen=True, slots=True)
class Clock:
    """How calls are timed.

    Both take calls by name and a number of rounds, and return the microseconds of one call by name, a sample a round.
    """

    throughput: Callable[[Calls, int], Samples]
    latency: Callable[[Calls, int], Samples]


def clock(device: torch.device) -> Clock:
    """Return the device's clock: events on a GPU, for throughput; the host's clock around one call and its end, for latency."""
    if device.type == "cuda":
        from zoo.kernels.measuring.timing import alternate

        return Clock(lambda calls, rounds: alternate(calls, rounds), lambda calls, rounds: _turns(calls, rounds, 1, torch.cuda.synchronize))
    return Clock(
        lambda calls, rounds: _turns(calls, rounds, None, settle_s=SETTLE),
        lambda calls, rounds: _turns(calls, rounds, 1, settle_s=SETTLE),
    )


def _turns(calls: Calls, rounds: int, inner: int | None, wait: Callable[[], object] = lambda: None, settle_s: float = 0.0) -> Samples:
    """Time each call once a round, in another order each time; `inner` calls make a sample, None chooses.

    The order is drawn: in a cycle the same call would always pay for the threads that the same other one leaves spinning.
    """
    counts = {name: inner or max(1, min(50, round(BLOCK_US / max(_span(call, 1, wait), 1.0)))) for name, call in calls.items()}
    times: Samples = {name: [] for name in calls}
    order = list(calls)
    drawn = random.Random(0)
    for _ in range(rounds):
        drawn.shuffle(order)
        for name in order:
            _settle(calls[name], settle_s)
            times[name].append(_span(calls[name], counts[name], wait) / counts[name])
    return times


def _settle(call: Callable[[], object], seconds: float) -> None:
    """Wait until the threads of who came before have come to rest, then make a call that does not count."""
    if seconds:
        time.sleep(seconds)
        call()


def _span(call: Callable[[], object], count: int, wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait()
    return 1e6 * (time.perf_counter() - start)


def median_and_spread(samples: list[float]) -> tuple[float, float, float]:
    """Return the median, the 10th and the 90th percentile, interpolated linearly between samples."""
    middle, low, high = np.percentile(samples, (50, 10, 90)).tolist()
    return middle, low, high


class Memory:
    """What a way holds on a GPU between its calls, and what a call takes on top, apart from all other ways.

    What it holds is its live tensors and the private pools of its CUDA graphs, whose memory nobody else can use although the
    allocator counts it as free. cuBLAS's workspace, 32 MiB on an H100, is nobody's: PyTorch keeps one for all, and a way that lets it go
    takes no less for that. One that a graph holds for itself counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            gc.collect()
            clear_workspaces()  # which may lie in pools of graphs that are gone
            torch.cuda.empty_cache()  # those would go later, and count as less than nothing
        self.held = self._held()

    def peak_mib(self, call: Callable[[], object]) -> float | None:
        """Return the peak during a call, in MiB above what was there when this was made; None on a CPU."""
        if self.device.type != "cuda":
            return None
        held = self._held() - self.held
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        result = call()
        torch.cuda.synchronize(self.device)
        transient = torch.cuda.max_memory_allocated(self.device) - before
        del result
        return (held + transient) / 2**20

    def _held(self) -> int:
        if self.device.type != "cuda":
            return 0
        gc.collect()
        clear_workspaces()
        matrix = torch.ones(16, 16, dtype=torch.float16, device=self.device)
        torch.mm(matrix, matrix)  # so that one is there, and no more, whoever ran before
        del matrix
        torch.cuda.synchronize(self.device)
        return torch.cuda.memory_allocated(self.device) + pooled(torch.cuda.memory_snapshot(), self.device.index or 0)


def pooled(segments: list[dict[str, Any]], index: int) -> int:
    """Return the bytes of private pools that no live tensor holds, from the allocator's snapshot."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if segment.get("device", 0) == index and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
    )
