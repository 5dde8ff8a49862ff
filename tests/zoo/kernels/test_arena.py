"""Maps of a run lie over each other in one piece of memory, and never over one that is still needed."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.kernels.passes import understand
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.plans import plan as planning
from zoo.kernels.plans.arena import ALIGNED, Changed, Layout, Piece, Served, Watched, _layout, laid_out, layouts, left_to_allocator
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import guess
from zoo.kernels.tuning.steps import COMPUTED, Setting

CPU = torch.device("cpu")


def at_once(pieces: list[Piece]) -> int:
    """The most bytes that are there together."""
    return max((sum(q.nbytes for q in pieces if q.born <= p.born < q.dies) for p in pieces), default=0)


def piece(nbytes: int, born: int, dies: int, ours: bool = True) -> Piece:
    return Piece(((nbytes,), torch.uint8, torch.contiguous_format), nbytes, born, dies, ours)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 8)), max_size=30))
def test_pieces_that_are_there_together_lie_apart(drawn: list[tuple[int, int]]) -> None:
    pieces = [piece(nbytes, born, born + life) for born, (nbytes, life) in enumerate(drawn)]
    offsets, nbytes = laid_out(pieces)
    assert at_once(pieces) <= nbytes <= sum(p.nbytes + ALIGNED for p in pieces)
    for (a, at), (b, bt) in combinations(zip(pieces, offsets, strict=True), 2):
        assert at % ALIGNED == 0
        if b.born < a.dies:
            assert at + a.nbytes <= bt or bt + b.nbytes <= at


def test_holes_are_filled() -> None:
    """A bottleneck's maps, in units of the narrow ones: three narrow, then a wide one and its shortcut, which an allocator puts behind."""
    narrow, wide = 100 * ALIGNED, 400 * ALIGNED
    pieces = [piece(narrow, 0, 4), piece(narrow, 1, 3), piece(narrow, 2, 5), piece(wide, 3, 5), piece(wide, 4, 7), piece(narrow, 5, 6)]
    assert laid_out(pieces)[1] == at_once(pieces) == 2 * wide + narrow


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 8), st.booleans()), max_size=30))
def test_what_is_left_to_the_allocator_needs_no_more_room_than_libraries_do(drawn: list[tuple[int, int, bool]]) -> None:
    pieces = [piece(nbytes, born, born + life, ours) for born, (nbytes, life, ours) in enumerate(drawn)]
    left = left_to_allocator(pieces)
    theirs, ours = [p for p in pieces if not p.ours], [p for p in pieces if p.ours]
    assert left <= {p.born for p in ours}
    assert at_once([*theirs, *(p for p in ours if p.born in left)]) == at_once(theirs)
    found = [each.nbytes for each in layouts(pieces)]
    assert found == sorted(set(found))


def test_no_network_is_too_deep_to_look_through() -> None:
    """A chain of equal maps, every seventh a library's: as many peaks as maps, all alike."""
    pieces = [piece(10**6, born, born + 3, born % 7 > 0) for born in range(1500)]
    start = time.process_time()
    layouts(pieces)
    assert time.process_time() - start < 20


def test_maps_lie_where_a_library_makes_one_later() -> None:
    """Two residual blocks and a library's convolution: the first block's shortcut and the second's sum lie where that makes its map."""
    wide, narrow = 400 * ALIGNED, 200 * ALIGNED
    shortcut, first, inner, second = piece(wide, 0, 3), piece(wide, 1, 5), piece(narrow, 3, 5), piece(wide, 4, 7)
    after, theirs, third = piece(wide, 5, 8), piece(wide, 7, 9, ours=False), piece(wide, 8, 9)
    pieces = [shortcut, first, piece(narrow, 2, 3), inner, second, after, piece(narrow, 6, 7), theirs, third]
    best, plain = layouts(pieces)
    assert plain.nbytes == 2 * wide + narrow
    assert best.nbytes == wide + narrow
    assert [offset is None for offset in best.offsets] == [True, False, False, False, True, False, False, False]
    held, *_ = layouts(pieces, held=1)
    assert None not in held.offsets[:1]
    assert best.nbytes < held.nbytes < plain.nbytes


class Joined(nn.Module):
    """Shortcuts, a concatenation, a view that outlives its map's name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 24, 1)
        self.narrow, self.back = nn.Conv2d(24, 8, 3, padding=1), nn.Conv2d(8, 24, 1)
        self.last = nn.Conv2d(32, 5, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.first(x))
        wide = self.wide(x)
        narrow = torch.relu(self.narrow(torch.relu(wide)))
        wide = torch.relu(self.back(narrow) + wide)
        y = self.last(torch.cat([narrow, wide], 1))
        return y.flatten(2), y.mean((2, 3))


class Bottleneck(nn.Module):
    """A wide map, which is read by the next layer and by the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1), nn.Conv2d(24, 12, 1)
        self.inner, self.back = nn.Conv2d(12, 16, 3, padding=1), nn.Conv2d(16, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.wide(torch.relu(self.first(x))))
        return torch.relu(self.back(torch.relu(self.inner(torch.relu(self.narrow(wide))))) + wide)


class Gated(nn.Module):
    """A map that makes its own gate, and is read for the last time where that is applied."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.first, self.inner, self.gate = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.last = nn.Conv2d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        z = torch.relu(y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True))) + x)
        out = self.last(z)
        return out + y[:, :4, 1:-1, 1:-1] if self.again else out


class Collecting(Watched):
    """Lets go of what Triton's interpreter keeps until it is collected."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.empty.memory_format:
            gc.collect()
        return super().__torch_dispatch__(func, types, args, kwargs)


def program(network: nn.Module, x: Tensor) -> Program:
    setting = Setting(x.device, torch.float32)
    graph, places = understand(network, (x,), {})
    chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
    return Program(graph, places, chosen, setting, Weights())


def served(made: Program, forms: list[list[Tensor]], found: Layout) -> tuple[list[Tensor], Tensor]:
    memory = torch.full((found.nbytes,), 255, dtype=torch.uint8, device=forms[0][0].device)  # NaN, of any floating type
    serving = Served(found, memory)
    with serving:
        outputs = made.run(forms)
    serving.done()
    return outputs, memory


@pytest.mark.parametrize("network", [Joined().eval(), Bottleneck().eval(), Gated(False).eval()], ids=["joined", "bottleneck", "gated"])
def test_a_run_in_an_arena_gives_the_same_bits(network: nn.Module, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        made = program(network, x)
        plan = Plan(made)
        expected = plan.eager([x])
        forms = plan._buffers
        with Collecting(x.device) as watched:
            made.run(forms)
        pieces = [replace(p, nbytes=-(-p.nbytes // ALIGNED) * ALIGNED) for p in watched.pieces if p.ours]
        (found,) = layouts(pieces)
        together = device.type == "cuda" and isinstance(network, Gated)  # whose three pieces there are all there at once
        assert found.nbytes <= 1.05 * at_once(pieces)
        assert together or at_once(pieces) < sum(p.nbytes for p in pieces)
        for _ in range(2):  # what an earlier run has left changes nothing
            outputs, memory = served(made, forms, found)
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
            assert (memory != 255).any()  # it was there that they were computed


def test_another_run_is_noticed() -> None:
    def run(*sizes: int) -> list[Tensor]:
        return [torch.empty(size) for size in sizes]

    with Watched(CPU) as watched:
        kept = run(3000, 4000)
    (found,) = layouts(watched.pieces)
    assert len(kept) == len(found.offsets) == 2
    memory = torch.empty(found.nbytes, dtype=torch.uint8)
    for sizes in ((3000, 4000, 500), (3000, 4001)):
        with pytest.raises(Changed, match="number"), Served(found, memory):
            run(*sizes)
    serving = Served(found, memory)
    with serving:
        run(3000)
    with pytest.raises(Changed, match=r"1 pieces .* 2 before"):
        serving.done()


def test_a_map_lives_as_long_as_a_view_of_it() -> None:
    with Watched(CPU) as watched:
        view = torch.empty((2, 3, 4, 5), memory_format=torch.channels_last)[:, 1:]
        other = torch.empty(100)
        del view
        last = torch.empty(50, dtype=torch.float64)
    first, second, third = watched.pieces
    assert (first.dies, second.dies) == (2, 4)
    assert third.nbytes == last.nbytes == other.nbytes
    assert first.form == ((2, 3, 4, 5), torch.float32, torch.channels_last)


def test_what_libraries_make_themselves_is_left_to_the_allocator() -> None:
    x = torch.randn(1, 4, 6, 6)
    with Watched(CPU) as watched:
        y = torch.relu(torch.empty(144) + 1)
        x = torch.relu(x + 1)
    ours = [p.ours for p in watched.pieces]
    assert ours.count(True) == 1
    assert len(ours) > 3
    assert y.numel() == x.numel()
    assert layouts(watched.pieces)[-1].nbytes == y.numel() * 4
    assert not layouts([p for p in watched.pieces if not p.ours])


def test_what_is_left_is_made_by_the_allocator() -> None:
    def run() -> list[int]:
        first = torch.empty(5000)
        first_at, first = first.data_ptr(), torch.empty(100)
        theirs = torch.zeros(6000)  # a library's
        return [first_at, first.data_ptr(), theirs.data_ptr()]

    with Watched(CPU) as watched:
        run()
    left, plain = layouts(watched.pieces)
    assert left.offsets[0] is None
    assert None not in plain.offsets
    memory = torch.empty(left.nbytes, dtype=torch.uint8)
    with Served(left, memory) as serving:
        first, second, _ = run()
    serving.done()
    inside = range(memory.data_ptr(), memory.data_ptr() + left.nbytes)
    assert first not in inside
    assert second in inside


class Scratching(Watched):
    """Believes that whatever a library does takes a thousand bytes for a while."""

    asked = 0

    def _freed(self) -> int:
        self.asked += 1
        return 1000 * (self.asked // 2)


def test_what_a_library_makes_for_a_while_is_there_with_what_it_reads_and_returns() -> None:
    with Scratching(CPU) as watched:
        first = torch.empty(500)
        second = torch.cat([first, first])
        del first
        third = torch.empty(100)
    pieces = watched.pieces
    (scratch,) = [p for p in pieces if p.nbytes == 1000]
    assert not scratch.ours
    assert scratch.dies == scratch.born + 1
    assert sorted(p.nbytes for p in pieces if p.born <= scratch.born < p.dies) == [1000, 2000, second.nbytes]
    assert [p.born for p in pieces] == list(range(len(pieces)))
    assert sorted(p.nbytes for p in pieces if p.born <= pieces[-1].born < p.dies) == [third.nbytes, second.nbytes]


def test_the_second_map_of_a_join_dies_with_its_reader() -> None:
    """The wide map that it was made with is read again at the end of the block; that one lived on beside it."""
    x = torch.randn(2, 3, 12, 10)
    with torch.inference_mode():
        network = Bottleneck().eval()
        graph, places = understand(network, (x,), {})
        apply(graph, merges(graph, places)[:1], places)
        made = Program(graph, places, {}, Setting(CPU, torch.float32), Weights())
        assert [step.op for step in made.steps] == ["conv", "join", "second", "conv", "conv"]
        with Watched(CPU) as watched:
            (y,) = made.run([[x.contiguous(memory_format=torch.channels_last)]])
        torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-5)
    dead = [p.dies for p in watched.pieces if p.form[0] == (2, 12, 12, 10)]
    assert max(dead) <= max(p.born for p in watched.pieces if p.form[0] == (2, 24, 12, 10))


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
    monkeypatch.setattr(planning, "pool_bytes", lambda graph: pools.pop(0))
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
        for _ in range(2):  # over what the run before has left there
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
        assert served._memory.numel() + planning.pool_bytes(served._graph) < planning.pool_bytes(apart._graph)
        assert all(torch.equal(a, b) for a, b in zip(served([x]), apart([x]), strict=True))


@pytest.mark.parametrize("again", [False, True])
def test_an_element_wise_step_writes_over_what_nobody_reads_again(again: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Gated(again).eval().to(device)
        made = program(network, x)
        plan = Plan(made)
        seen: list[bool] = []
        plan.eager([x], lambda node, inputs, value: seen.append(node.op == "pointwise" and value.data_ptr() == inputs[0].data_ptr()))
        (y,) = plan.eager([x])
        torch.testing.assert_close(y, network(x), rtol=1e-4, atol=1e-5)
    gated = [node for node in made.steps if node.op == "pointwise" and len(node.inputs) == 3]
    assert len(gated) == 1
    assert (gated[0] in made._in_place) != again
    assert seen
    assert not any(seen)  # who looks at a step sees what went in


class Shortened(Bottleneck):
    """A bottleneck whose shortcut is an output too, or is read as a map besides, or ends with its sum."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = torch.relu(self.wide(torch.relu(self.first(x))))
        inner = torch.relu(self.inner(torch.relu(self.narrow(wide))))
        y = torch.relu(self.back(inner) + wide)
        return (
            (self.narrow(y), self.narrow(wide))
            if self.use == "again"
            else (self.narrow(y), wide)
            if self.use == "output"
            else (self.narrow(y),)
        )


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("use", ["", "again", "output"])
def test_a_sum_is_written_over_its_shortcut_where_nobody_reads_that_again(use: str, merged: bool, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Shortened(use).eval().to(device)
        graph, places = understand(network, (x,), {})
        if merged:
            apply(graph, [merge for merge in merges(graph, places) if merge.node.argument("residual") is not None][:1], places)
        setting = Setting(x.device, torch.float32)
        chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
        made = Program(graph, places, chosen, setting, Weights(), overlapping=True)
        (added,) = [node for node in made.steps if "residual" in node.roles]
        assert added.op == ("join" if merged else "conv")
        assert made._in_place == ({} if use else {added: added.roles.index("residual")})
        plan = Plan(made)
        with Watched(x.device) as watched:
            found = plan.eager([x])
        for got, wanted in zip(found, network(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert sum(p.form[0] == (2, 24, 12, 10) for p in watched.pieces) == (2 if use else 1)


class Seen(nn.Module):
    """A map of which an output is a view, and which a gate and a sum would be written over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        seen = y.flatten(2)
        return seen, self.last(torch.relu(y * torch.sigmoid(x.mean((2, 3), keepdim=True)) + x)[:, :3])


def test_what_an_output_is_a_view_of_stays(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        network = Seen().eval().to(device)
        made = program(network, x)
        assert all(node.shape[2:] == (1, 1) for node in made._in_place)  # the gate
        for got, wanted in zip(Plan(made).eager([x]), network(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_what_pytorch_made_is_not_written_over(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        made = program(Gated(False).eval(), x)
        (node,) = made._in_place
        setting = Setting(x.device, torch.float32)
        chosen = {step: guess(step, made.places, setting) for step in made.steps if step.op in COMPUTED and step is not node.inputs[0]}
        assert not Program(made.graph, made.places, chosen, setting, Weights())._in_place


class Flat(nn.Module):
    """Its last sum is an output by way of a view, in the network's own dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        y = self.inner(x)
        return torch.relu(y * torch.sigmoid(y.mean((2, 3), keepdim=True)) + x).flatten(1)


def test_a_last_step_keeps_the_bits_of_the_networks_own_dtype(device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    setting = Setting(x.device, torch.bfloat16)
    with torch.inference_mode():
        graph, places = understand(Flat().eval(), (x,), {})
        chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
        (y,) = Plan(Program(graph, places, chosen, setting, Weights())).eager([x.bfloat16()])
    assert y.dtype == torch.float32
    assert (y != y.bfloat16().float()).float().mean() > 0.2


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

    def recording(self: Plan, stream: Any, serving: Served | None) -> None:
        took.append(pools[ways.index(None if serving is None else serving._layout)])
        if took[-1] is FULL:
            raise FULL
        record(self, stream, serving)

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
