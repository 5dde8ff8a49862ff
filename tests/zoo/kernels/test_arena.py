"""Maps of a run lie over each other in one piece of memory, and never over one that is still needed."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zoo.kernels.passes import understand
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.plans import arena
from zoo.kernels.plans import plan as planning
from zoo.kernels.plans.arena import ALIGNED, Changed, Layout, Piece, Served, Watched, at_once, laid_out, layout, pooled
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import guess
from zoo.kernels.tuning.steps import COMPUTED, Setting

CPU = torch.device("cpu")
MIB = 2**20


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


class Bottleneck(nn.Module):
    """A wide map, which is read by the next layer and by the shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.narrow = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 24, 1), nn.Conv2d(24, 12, 1)
        self.inner, self.back = nn.Conv2d(12, 16, 3, padding=1), nn.Conv2d(16, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.relu(self.wide(torch.relu(self.first(x))))
        return torch.relu(self.back(torch.relu(self.inner(torch.relu(self.narrow(wide))))) + wide)


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


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator without grains: small maps would all fit into the least that it takes."""
    monkeypatch.setattr(arena, "GRAINS", ((0, 2**63, 1),))
    monkeypatch.setattr(arena, "WASTED", 2.0)  # for small maps' ends are rounded to multiples of `ALIGNED`


@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("network", [Joined().eval(), Bottleneck().eval()], ids=["joined", "bottleneck"])
def test_a_run_in_an_arena_gives_the_same_bits(network: nn.Module, device: torch.device) -> None:
    x = torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        made = program(network, x)
        plan = Plan(made)
        expected = plan.eager([x])
        forms = plan._buffers
        with Watched(device) as watched:
            made.run(forms, lambda *_: gc.collect())  # Triton's interpreter keeps what it ran on until then
        pieces = [p for p in watched.pieces if p.ours]
        found = layout(pieces)
        assert found is not None
        assert found.nbytes < 0.85 * sum(-(-p.nbytes // ALIGNED) * ALIGNED for p in pieces)
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
    large = [piece(50 * MIB if born % 3 else 1000, born, born + 2, ours=born % 3 > 0) for born in range(9)]
    assert layout(large) is not None
    assert layout([piece(50 * MIB, 0, 1), piece(50 * MIB, 1, 2, ours=False)]) is None  # beside each other they would need twice as much
    assert layout([]) is None


def test_the_allocators_pools_grow_by_whole_grains() -> None:
    assert pooled([piece(1000, 0, 2), piece(2000, 1, 3)]) == 2 * MIB
    assert pooled([piece(MIB, 0, 2), piece(MIB + 1, 1, 3)]) == 22 * MIB
    assert layout([piece(2 * MIB, 0, 2), piece(100, 1, 3, ours=False)]) is not None  # 4 MiB instead of 22
    assert layout([piece(2 * MIB, 0, 2), piece(2 * MIB, 1, 3, ours=False)]) is None  # the library's takes 20 alone


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


@pytest.mark.usefixtures("captures", "fine")
@pytest.mark.parametrize(("differs", "arena", "shares"), [(False, True, True), (False, False, False), (True, True, False)])
def test_a_capture_is_served_unless_a_kernel_asks_for_other_memory_in_each_call(
    differs: bool, arena: bool, shares: bool, device: torch.device
) -> None:  # fmt: skip
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
    plan.close()
    assert not plan.shares
