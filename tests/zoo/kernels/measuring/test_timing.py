"""How many calls a sample of a clock is of, and captures that find no room."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, cast

import pytest
import torch

from zoo.kernels.measuring import timing
from zoo.kernels.measuring.timing import calls_of_a_sample


@pytest.mark.parametrize(("us", "count"), [(0.0, 50), (10, 50), (100, 20), (1_000, 4), (6_000, 4), (31_000, 3), (60_000, 2), (300_000, 1)])
def test_a_sample_is_of_calls_behind_each_other(us: float, count: int) -> None:
    assert calls_of_a_sample(us) == count


@pytest.mark.parametrize(("failures", "emptied"), [(0, 0), (1, 1), (2, 1)])
def test_a_capture_without_room_is_tried_again_with_all_that_is_kept(failures: int, emptied: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, done = iter(range(failures)), list[str]()

    def captured(call: Any, count: int) -> Any:
        if next(left, None) is not None:
            raise timing.NotCapturable("no room") from torch.OutOfMemoryError("no room")
        return f"graph of {count}"

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    with pytest.raises(timing.NotCapturable) if failures == 2 else contextlib.nullcontext():
        assert timing._record(lambda: None, 3) == "graph of 3"
    assert len(done) == emptied


@pytest.mark.parametrize("ends", [True, False])
def test_a_block_that_fails_is_told_by_its_own_error_alone(ends: bool) -> None:
    """PyTorch warns of a graph that is empty, and refuses to end a capture that a library has broken off."""

    class Graph:
        begun = ended = False

        def capture_begin(self, capture_error_mode: str) -> None:
            self.begun = True

        def capture_end(self) -> None:
            self.ended = True
            warnings.warn("The CUDA Graph is empty", stacklevel=1)
            if not ends:
                raise RuntimeError("the capture is invalid")

    graph = Graph()
    with pytest.raises(torch.OutOfMemoryError, match="no room"), timing.recording(cast(Any, graph)):
        raise torch.OutOfMemoryError("no room")
    assert graph.begun
    assert graph.ended


def test_what_cannot_be_captured_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def captured(call: Any, count: int) -> Any:
        raise timing.NotCapturable("it synchronises") from RuntimeError("it synchronises")

    monkeypatch.setattr(timing, "_captured", captured)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("nothing lacks room"))
    with pytest.raises(timing.NotCapturable):
        timing._record(lambda: None, 3)


@pytest.mark.parametrize(
    ("us", "launches", "replays"), [(4_999.0, 2, 3), (5_000.0, 1, timing.LONG_REPLAYS), (90_000.0, 1, timing.LONG_REPLAYS)]
)
def test_a_long_call_is_replayed_but_a_few_times(us: float, launches: int, replays: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called, stream = list[str](), object()

    class Graph:
        def replay(self) -> None:
            called.extend(["replayed"] * launches)

    def record(call: Any, count: int) -> Any:
        assert count == launches
        return Graph()

    def several(graph: Graph, on: Any, count: int) -> list[float]:
        assert (on, count) == (stream, replays)
        return [count * us] * count

    def between(call: Any, on: Any) -> float:
        call()
        return us * launches if called[-1] == "replayed" else us

    monkeypatch.setattr(timing, "_record", record)
    monkeypatch.setattr(timing, "_replays", several)
    monkeypatch.setattr(timing, "_between", between)
    found = timing._graph_time_us(lambda: called.append("called"), cast(Any, stream), None, 4.0, False)
    assert found == replays * us / launches
    assert called.count("called") == 2
    assert called.count("replayed") == (2 * launches if launches > 1 else 0)


def test_a_short_call_for_which_the_cpu_took_long_is_launched_often(monkeypatch: pytest.MonkeyPatch) -> None:
    between, counts = iter((9_000.0, 40.0, 200.0, 1_000.0)), list[int]()

    class Graph:
        def replay(self) -> None: ...

    def record(call: Any, count: int) -> Any:
        counts.append(count)
        return Graph()

    monkeypatch.setattr(timing, "_record", record)
    monkeypatch.setattr(timing, "_replays", lambda graph, stream, count: [20.0 * counts[-1]] * count)
    monkeypatch.setattr(timing, "_between", lambda call, stream: next(between))
    assert timing._graph_time_us(lambda: None, cast(Any, None), None, 4.0, False) == 20.0
    assert counts == [1, 2, 15]


@pytest.mark.parametrize(
    ("reserved", "sparing", "emptied"), [(timing.SPARE, True, 0), (timing.SPARE + 3, True, 2), (timing.SPARE + 3, False, 0)]
)
def test_what_a_measurement_leaves_goes_back_where_it_is_much(
    reserved: int, sparing: bool, emptied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    did = list[str]()

    class Stream:
        def wait_stream(self, other: Any) -> None: ...

    class Graph:
        def replay(self) -> None: ...

    def record(call: Any, count: int) -> Any:
        did.append("captured")
        return Graph()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: did.append("emptied"))
    monkeypatch.setattr(timing, "_record", record)
    monkeypatch.setattr(timing, "_replays", lambda graph, stream, count: [9_000.0])
    monkeypatch.setattr(timing, "_between", lambda call, stream: 9_000.0)
    assert timing.graph_time_us(lambda: did.append("called"), sparing=sparing) == 9_000.0
    assert did == (["called", "emptied", "captured", "emptied"] if emptied else ["called", "captured"])


def test_memory_stays_where_others_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    told = list[bool]()

    def apart(call: Any, repeats: Any, target_ms: float, sparing: bool) -> float:
        told.append(sparing)
        return 1.0

    monkeypatch.setattr(timing, "_apart", apart)
    with timing.measured_by(lambda call: call()):
        assert timing.graph_time_us(lambda: None, sparing=True) == 1.0
    timing.graph_time_us(lambda: None, sparing=True)
    assert told == [False, True]
