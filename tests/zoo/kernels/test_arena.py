"""Maps of a run lie over each other in one piece of memory, and never over one that is still needed."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import zoo
from tests.zoo.kernels.networks import settled
from zoo.kernels.passes import understand
from zoo.kernels.plans import plan as planning
from zoo.kernels.plans.arena import ALIGNED, Changed, Layout, Piece, Served, Watched, at_once, laid_out, layout
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import guess
from zoo.kernels.tuning.steps import COMPUTED, Setting

CPU = torch.device("cpu")


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


def program(network: nn.Module, x: Tensor) -> Program:
    setting = Setting(CPU, torch.float32)
    graph, places = understand(network, (x,), {})
    chosen = {node: guess(node, places, setting) for node in graph.steps() if node.op in COMPUTED}
    return Program(graph, places, chosen, setting, Weights())


def served(made: Program, forms: list[list[Tensor]], found: Layout) -> tuple[list[Tensor], Tensor]:
    memory = torch.full((found.nbytes,), 255, dtype=torch.uint8)  # NaN, of any floating type
    serving = Served(found, memory)
    with serving:
        outputs = made.run(forms)
    serving.done()
    return outputs, memory


@pytest.mark.parametrize("network", [Joined().eval(), settled(zoo.ResNet20)], ids=["joined", "ResNet20"])
def test_a_run_in_an_arena_gives_the_same_bits(network: nn.Module) -> None:
    x = torch.randn(2, 3, 12, 10)
    with torch.inference_mode():
        made = program(network, x)
        forms = [[x.contiguous(memory_format=torch.channels_last) for _ in made.forms_of(0)]]
        expected = made.run(forms)
        with Watched(CPU) as watched:
            made.run(forms)
        pieces = watched.pieces
        found = layout(pieces)
        assert found is not None
        assert found.nbytes < 0.6 * sum(p.nbytes for p in pieces)
        for _ in range(2):  # what an earlier run has left changes nothing
            outputs, memory = served(made, forms, found)
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        inside = range(memory.data_ptr(), memory.data_ptr() + found.nbytes)
        assert any(out.data_ptr() in inside for out in outputs)


def test_another_run_is_noticed() -> None:
    def run(*sizes: int) -> list[Tensor]:
        return [torch.empty(size) for size in sizes]

    with Watched(CPU) as watched:
        kept = run(3000, 4000)
    found = layout(watched.pieces)
    assert found is not None
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
    large = [piece(1000, 0, 2), piece(1000, 1, 3, ours=False), piece(1000, 2, 4), piece(1000, 3, 5, ours=False)]
    assert layout(large) is not None
    assert layout([piece(5000, 0, 1), piece(5000, 1, 2, ours=False)]) is None  # beside each other they would need twice as much
    assert layout([]) is None


class Graph:
    """Stands for a CUDA graph: a replay runs nothing, for what was captured has run."""

    def capture_begin(self, **options: object) -> None: ...
    def capture_end(self) -> None: ...
    def replay(self) -> None: ...


class Stream:
    def __init__(self, *args: object) -> None: ...
    def wait_stream(self, other: Stream) -> None: ...


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that takes part in captures."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(planning, "growing", nullcontext)


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize(("keeps", "arena", "shares"), [(False, True, True), (False, False, False), (True, True, False)])
def test_a_capture_is_served_unless_a_kernel_keeps_memory_from_call_to_call(keeps: bool, arena: bool, shares: bool) -> None:
    x = torch.randn(2, 3, 12, 10)
    with torch.inference_mode():
        plan = Plan(program(Joined().eval(), x))
        expected = plan.eager([x])
        bound = plan.program.bound
        node = list(bound)[2]
        inner, kept = bound[node], list[Tensor]()

        def keeping(inputs: list[Tensor], out: Tensor | None) -> Tensor:
            if not kept:
                kept.append(torch.empty(777))
            return inner(inputs, out)

        if keeps:
            bound[node] = keeping
        plan.capture(arena)
    assert plan.shares == shares
    assert plan._graph is not None
    assert all(torch.equal(a, b) for a, b in zip(plan._outputs, expected, strict=True))
    plan.close()
    assert not plan.shares
