"""Maps of a run lie over each other in one piece of memory, and never over one that is still needed."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.zoo.kernels.mapped import Bottleneck, Collecting, Gated, Joined, program
from zoo.kernels.plans.arena import (
    ALIGNED,
    Changed,
    Layout,
    Piece,
    Served,
    Watched,
    asked_at_once,
    laid_out,
    layouts,
    left_to_allocator,
    segment,
)
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import Program

CPU = torch.device("cpu")
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A machine that does other things besides says nothing of a layout."""


def at_once(pieces: list[Piece]) -> int:
    """The most bytes that are there together."""
    return max((sum(q.nbytes for q in pieces if q.born <= p.born < q.dies) for p in pieces), default=0)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("nbytes", "taken", "asked"),
    [
        (1, 2 * MIB, 1),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 10 * MIB, 10 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB, 12 * MIB),
        (33 * MIB, 34 * MIB, 34 * MIB),
    ],
)
def test_what_the_allocator_takes_at_least(nbytes: int, taken: int, asked: int) -> None:
    assert segment(nbytes) == taken
    assert asked_at_once(nbytes) == asked


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [1, MIB, MIB + 1, 9 * MIB, 10 * MIB + 1, 33 * MIB])
def test_the_allocator_takes_no_more(nbytes: int) -> None:
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.empty(asked_at_once(nbytes), dtype=torch.uint8, device="cuda")
    assert sum(each["total_size"] for each in pool.snapshot()) == segment(nbytes)
    del kept


def piece(nbytes: int, born: int, dies: int, ours: bool = True) -> Piece:
    return Piece(((nbytes,), torch.uint8, torch.contiguous_format), nbytes, born, dies, ours)


@UNHURRIED
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


@UNHURRIED
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 8), st.booleans()), max_size=30))
def test_what_is_left_to_the_allocator_needs_no_more_room_than_libraries_do(drawn: list[tuple[int, int, bool]]) -> None:
    pieces = [piece(nbytes, born, born + life, ours) for born, (nbytes, life, ours) in enumerate(drawn)]
    left = left_to_allocator(pieces)
    theirs, ours = [p for p in pieces if not p.ours], [p for p in pieces if p.ours]
    assert left <= {p.born for p in ours}
    assert at_once([*theirs, *(p for p in ours if p.born in left)]) == at_once(theirs)
    found = [each.nbytes for each in layouts(pieces)]
    assert found == sorted(set(found))


def test_small_pieces_need_no_room_beside_the_arena() -> None:
    """Two of 3 MiB that a library makes, one after the other, and a small one."""
    large, small = 3 * MIB, MIB
    pieces = [piece(large, 0, 2), piece(large, 1, 3, ours=False), piece(small, 2, 4, ours=False), piece(large, 3, 5, ours=False)]
    assert {each.beside for each in layouts(pieces)} == {large}
    assert {each.beside for each in layouts([piece(large, 0, 2), piece(small, 1, 3, ours=False)])} == {0}


def test_no_network_is_too_deep_to_look_through() -> None:
    """A chain of equal maps, every seventh a library's: as many peaks as maps, all alike."""
    pieces = [piece(10**6, born, born + 3, born % 7 > 0) for born in range(1000)]
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


class Shrunk(nn.Module):
    """Shortcuts of option A: every other pixel, and channels of zeros; and margins of other numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 3, 5))
        x = self.last(nn.functional.pad(x, (1, 2, 0, 3), value=-2.0))
        return nn.functional.pad(torch.ops.aten.constant_pad_nd(x, []), (0, 0, 0, 0, 1, -2))  # a margin of nothing, and one that cuts off


def test_margins_lie_in_the_arena_and_slices_in_what_they_show(device: torch.device) -> None:
    network, x = Shrunk().eval().to(device), torch.randn(2, 3, 12, 10, device=device)
    with torch.inference_mode():
        made = program(network, x)
        plan = Plan(made)
        (found,) = plan.eager([x])
        assert found.shape == (2, 3, 9, 8)
        torch.testing.assert_close(found, network(x))
        with Collecting(x.device) as watched:
            made.run(plan._buffers)
        shapes = [piece.form[0] for piece in watched.pieces if piece.ours]
    assert {(2, 16, 6, 5), (2, 16, 9, 8)} <= set(shapes)
    assert (2, 8, 6, 5) not in shapes  # the margin is put around the map's own pixels
    assert [piece.form for piece in watched.pieces if not piece.ours and piece.form[0] in shapes] == []


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


WATCHING = """
import sys
import torch
from zoo.kernels.plans.arena import Watched

with Watched(torch.device("cpu")) as watched:
    kept = torch.empty(8) + 1
print(len(watched.pieces) > 0, "torch._dynamo" in sys.modules)
"""


def test_who_watches_a_run_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", WATCHING], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
