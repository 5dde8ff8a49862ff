"""The clock takes turns, and leaves out what somebody else's threads cost; its figures, and memory."""

from __future__ import annotations

import pytest
import torch

from zoo.bench import clock

CPU = torch.device("cpu")


def test_percentiles_lie_between_samples() -> None:
    assert clock.median_and_spread([1.0, 2.0]) == pytest.approx((1.5, 1.1, 1.9))
    assert clock.median_and_spread([7.0]) == (7.0, 7.0, 7.0)


def test_pools_of_a_graph_count_as_held() -> None:
    segments = [
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 10},
        {"device": 0, "segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
        {"device": 1, "segment_pool_id": (0, 1), "total_size": 100, "allocated_size": 30},
    ]
    assert clock.pooled(segments, 0) == 70


def test_the_hosts_clock_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "SETTLE", 1e-6)
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in "ab"}
    times = clock.clock(CPU).latency(calls, 40)
    assert [len(t) for t in times.values()] == [40, 40]
    rounds = ["".join(order[i : i + 4]) for i in range(0, 160, 4)]
    assert set(rounds) == {"aabb", "bbaa"}  # each once a round, and neither always behind the other


def test_calls_that_pay_for_other_engines_threads_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def call(name: str) -> None:
        nonlocal now, spins
        now += 1.0 if name == "heavy" else 0.01 + 0.02 * (now < spins)
        spins = now + 0.05 if name == "heavy" else spins

    spins = 0.0

    def rest(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now)
    monkeypatch.setattr(clock.time, "sleep", rest)
    calls = {name: lambda name=name: call(name) for name in ("heavy", "light")}
    for times in (clock.clock(CPU).latency(calls, 10), clock.clock(CPU).throughput(calls, 10)):
        assert times["light"] == pytest.approx([1e4] * 10)
        assert times["heavy"] == pytest.approx([1e6] * 10)
