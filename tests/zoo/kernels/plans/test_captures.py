"""What a captured run takes: one arena where that is less, the allocator where not, and nothing of what did not fit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.zoo.kernels.mapped import Collecting, Joined, program
from zoo.kernels.plans import plan as planning
from zoo.kernels.plans.arena import Layout, Piece, _layout
from zoo.kernels.plans.plan import Plan, Way


class Graph:
    """Stands for a CUDA graph: a replay runs nothing, for what was captured has run."""

    def capture_begin(self, **options: object) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


class Stream:
    def __init__(self, *args: object) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """A CPU that takes part in captures; a GPU does."""
    if device.type == "cuda":
        return
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "native")
    monkeypatch.setattr(planning, "growing", nullcontext)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    ("differs", "arena", "pools", "shares"),
    [
        (False, True, [10**6, 0], True),
        (False, False, [10**6, 0], False),
        (True, True, [10**6, 0], False),
        (False, True, [10**6] * 2, False),
    ],
    ids=["served", "apart", "asks for other memory in each call", "takes no less"],
)
def test_a_capture_is_served_where_that_can_be_and_saves_memory(
    differs: bool, arena: bool, pools: list[int], shares: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "pool_bytes", lambda graph: pools.pop(0) if len(pools) > 1 else pools[0])
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        expected = plan.eager([x])
        bound = plan.program.bound
        node = list(bound)[2]
        inner, kept = bound[node], list[Tensor]()

        def differing(inputs: list[Tensor], out: Tensor | None) -> Tensor:
            kept.append(torch.empty(777 if len(kept) == 1 else 0, device=x.device))
            return inner(inputs, out)

        if differs:
            bound[node] = differing
        plan.capture(arena)
        assert plan.shares == shares
        assert plan._graph is not None
        plan._graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(plan._outputs, expected, strict=True))


@pytest.mark.usefixtures("captures")
def test_what_comes_in_lies_where_maps_do_that_are_made_after_it_was_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [10**6, 0]
    monkeypatch.setattr(planning, "pool_bytes", lambda graph: pools.pop(0))
    first, x = torch.randn(2, 2, 3, 12, 10, device=device)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        expected = [y.clone() for y in plan.eager([x])]
        ((apart,),) = plan._buffers
        with Collecting(x.device) as watched:
            plan._run(plan._made_anew())
        image, *rest = (piece for piece in watched.pieces if piece.ours)
        assert image.form[0] == apart.shape
        assert image.dies < rest[-1].born
        plan.capture()
        ((inside,),) = plan._buffers
        assert plan._memory is not None
        assert inside.untyped_storage().data_ptr() == plan._memory.untyped_storage().data_ptr()
        for _ in range(1 if device.type == "cpu" else 2):  # over what the run before has left there; the interpreter is slow
            plan.eager([first])
            found = plan.eager([x])
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            if device.type == "cuda":
                plan([first])
                assert all(torch.equal(a, b) for a, b in zip(plan([x]), expected, strict=True))
        plan.close()
        ((again,),) = plan._buffers
        assert again.untyped_storage().nbytes() == apart.nbytes
        assert all(torch.equal(a, b) for a, b in zip(plan.eager([x]), expected, strict=True))
    plan.close()
    assert not plan.shares


@pytest.mark.gpu
def test_a_graphs_memory_is_weighed() -> None:
    x = torch.randn(2, 3, 120, 100, device="cuda")
    with torch.inference_mode():
        network = Joined().eval()
        apart, served = (Plan(program(network, x)) for _ in range(2))
        apart.capture(False)
        served.capture()
        assert served.shares
        assert served._memory is not None
        beside = sum(buffer.nbytes for forms in apart._buffers for buffer in forms)  # the other's lie in its memory
        assert served._memory.numel() + planning.pool_bytes(served._graph) <= planning.pool_bytes(apart._graph) + beside
        assert all(torch.equal(a, b) for a, b in zip(served([x]), apart([x]), strict=True))


FULL = torch.OutOfMemoryError("no room")


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    ("pools", "arena"),
    [
        ([10**6, 0, 0], 0),
        ([10**6, 10**5, 0], 1),
        ([10**6, FULL, 0], 1),
        ([10**6, 0, FULL], 0),
        ([10**6, FULL, FULL], None),
        ([10**6, 10**6, 10**6], None),
        ([FULL, 10**5, 0], 1),
        ([FULL, 0, FULL], 0),
    ],
)
def test_of_two_arenas_the_smaller_is_kept_and_one_that_does_not_fit_bars_no_other(
    pools: list[Any], arena: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what each record says it took: maps apart, those with some left to the allocator, all in one piece of memory."""
    x = torch.randn(2, 3, 12, 10, device=device)
    record, lay_out, ways, held, took = Plan._record, planning.layouts, list[Any](), list[int](), list[Any]()

    def laid(pieces: list[Piece], held_at_first: int = 0, **named: int) -> list[Layout]:
        held.append(named.get("held", held_at_first))
        (plain,) = lay_out(pieces)
        beside = _layout(pieces, {max(p.born for p in pieces if p.ours)})
        ways.extend((None, beside, plain))
        return [beside, plain]

    def recording(self: Plan, stream: Any, way: Way) -> None:
        took.append(pools[ways.index(way.layout)])
        if took[-1] is FULL:
            raise FULL
        record(self, stream, way)

    monkeypatch.setattr(planning, "layouts", laid)
    monkeypatch.setattr(Plan, "_record", recording)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        monkeypatch.setattr(planning, "pool_bytes", lambda graph: took[-1])
        expected = plan.eager([x])
        plan.capture()
        assert held == [1]
        assert plan.shares == (arena is not None)
        assert took[-1] == pools[0 if arena is None else 1 + arena]
        assert plan._graph is not None
        plan._graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(plan._outputs, expected, strict=True))
        if plan._memory is not None:
            ((image,),) = plan._buffers
            assert image.untyped_storage().data_ptr() == plan._memory.untyped_storage().data_ptr()


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(
    ("apart", "beside", "inside", "tried", "best"),
    [
        (10**6, 10**6, 0, 3, 2),
        (10**6, 10**6, 2 * 10**6, 3, 0),
        (10**6, 10**5, 2 * 10**5, 3, 1),
        (10**6, 0, 0, 2, 1),
        (FULL, FULL, 0, 3, 2),
        (10**6, 10**5, FULL, 3, 1),
    ],
    ids=["least", "cut badly", "no less than beside", "nothing to share with", "alone fits", "does not fit"],
)
def test_an_arena_shares_one_piece_of_memory_with_what_libraries_make_where_that_takes_least(
    apart: Any, beside: Any, inside: Any, tried: int, best: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what the graph's memory is said to be: of maps apart, beside an arena, with the arena in it."""
    x = torch.randn(2, 3, 12, 10, device=device)
    record, ways_of, asked, recorded, ways = Plan._record, planning._ways, list[int](), list[int](), list[Way]()

    def some(pieces: list[Piece], held: int) -> list[Way]:
        ways.extend(way for way in ways_of(pieces, held) if way.layout is None or None not in way.layout.offsets)
        return ways

    def recording(self: Plan, stream: Any, way: Way) -> None:
        recorded.append(ways.index(way))
        asked.clear()
        if (apart, beside, inside)[recorded[-1]] is FULL:
            raise FULL
        record(self, stream, way)

    def empty(self: Plan, count: int) -> Tensor:
        asked.append(count)
        return torch.empty(count, dtype=torch.uint8, device=device)

    monkeypatch.setattr(planning, "_ways", some)
    monkeypatch.setattr(planning, "segment", lambda nbytes: nbytes)
    monkeypatch.setattr(planning, "asked_at_once", lambda nbytes: 2 * nbytes)
    monkeypatch.setattr(planning, "pool_bytes", lambda graph: (apart, beside, inside)[recorded[-1]])
    monkeypatch.setattr(Plan, "_record", recording)
    monkeypatch.setattr(Plan, "_bytes", empty)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        expected = plan.eager([x])
        plan.capture()
        assert [way.room > 0 for way in ways] == [False, False, True]
        assert recorded[:tried] == list(range(tried))
        assert recorded[-1] == best
        assert len(recorded) == tried + (best != tried - 1)
        layout = ways[best].layout
        assert plan.shares == (layout is not None)
        assert asked == ([] if layout is None else [layout.nbytes] if best == 1 else [2 * (layout.nbytes + layout.beside), layout.nbytes])
        assert plan._graph is not None
        plan._graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(plan._outputs, expected, strict=True))


def test_an_allocator_that_does_not_say_what_it_holds_is_given_one_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = [((size,), torch.uint8, torch.contiguous_format) for size in (4 << 20, 4 << 20, 2 << 20, 4 << 20)]
    lives = [(0, 2, True), (1, 3, True), (2, 4, False), (3, 4, True)]
    pieces = [Piece(form, form[0][0], born, dies, ours) for form, (born, dies, ours) in zip(forms, lives, strict=True)]
    for backend, rooms in (("native", [0, 0, 10 << 20]), ("cudaMallocAsync", [0, 0])):
        monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda backend=backend: backend)
        ways = planning._ways(pieces, 0)
        assert [way.room for way in ways] == rooms
        assert [None in way.layout.offsets for way in ways if way.layout is not None] == [False] * (len(rooms) - 1)


def test_room_is_made_and_nothing_is_written_there(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    plan = Plan(program(Joined().eval(), torch.randn(2, 3, 12, 10, device=device)))
    seven = [torch.full((1 << 16,), 7, dtype=torch.uint8, device=device) for _ in range(64)]  # what is given back here, room is made of
    torch.use_deterministic_algorithms(True)
    try:
        filled = bool((torch.empty(1 << 16, dtype=torch.uint8, device=device) == 255).all())
        del seven
        rooms = [plan._bytes(1 << 16) for _ in range(64)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert filled
    assert {room.shape for room in rooms} == {(1 << 16,)}
    assert {room.dtype for room in rooms} == {torch.uint8}
    assert not all(bool((room == 255).all()) for room in rooms)  # no tensor is compared in an assertion: pytest would list its bytes


@pytest.mark.gpu
@pytest.mark.alone  # cuDNN chooses by timing, and beside others it may choose what needs so much memory that nothing is laid out
def test_a_graphs_memory_is_no_more_than_what_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's map of 6 MiB and maps of ours: grown, the graph's memory would be 20 MiB, beside the arena."""
    x, record, ways = torch.randn(4, 3, 256, 256, device="cuda"), Plan._record, list[Way]()

    def recording(self: Plan, stream: Any, way: Way) -> None:
        ways.append(way)
        record(self, stream, way)

    monkeypatch.setattr(Plan, "_record", recording)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x, lambda node: node.shape == (4, 24, 128, 128)))
        expected = [y.clone() for y in plan.eager([x])]
        plan.capture()
        layout, room = ways[-1].layout, ways[-1].room
        assert layout is not None
        assert layout.beside > 6 << 20
        assert room == layout.nbytes + layout.beside
        assert planning.pool_bytes(plan._graph) <= max(room, 10 << 20) + (4 << 20)
        assert all(torch.equal(a, b) for a, b in zip(plan([x]), expected, strict=True))


@pytest.mark.usefixtures("captures")
def test_buffers_are_made_anew_when_what_they_lay_in_is_gone(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    made, given = Plan._made, list[Any]()
    monkeypatch.setattr(planning, "pool_bytes", lambda graph: 10**6)  # an arena never takes less

    def making(self: Plan) -> list[list[Tensor]]:
        given.append([getattr(self, name, None) for name in ("_memory", "_graph", "_buffers")])
        return made(self)

    with torch.inference_mode():
        monkeypatch.setattr(Plan, "_made", making)
        plan = Plan(program(Joined().eval(), x))
        plan.eager([x])
        plan.capture()
        assert not plan.shares
    assert len(given) == 2
    assert [thing for things in given for thing in things if thing] == []


@pytest.mark.usefixtures("captures")
def test_nothing_is_left_of_a_capture_that_does_not_fit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)

    def full(self: Plan, *given: Any) -> None:
        raise FULL

    monkeypatch.setattr(Plan, "_record", full)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        plan.eager([x])
        with pytest.raises(torch.OutOfMemoryError):
            plan.capture()
        assert not plan.shares
        assert plan._graph is None
