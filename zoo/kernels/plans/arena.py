"""One piece of memory for all maps of a run, in which those lie over each other that are never there at once.

An allocator hands out memory without knowing what will be asked for next, so that holes stay that nothing fits into, and a CUDA graph
keeps what was handed out while it was captured for ever. A plan runs the same steps each time: what one run asks for, and when it lets
that go, is known for all. So one run is `Watched`, its pieces are laid out, and the run that is captured is `Served`.

Only what Python asks for is served: maps and partial sums of the kernels here, not what libraries make for themselves, which lies beside
it, in room that is theirs for ever and empty most of the time. Some of ours are left to the allocator, which puts them there. What room it
needs for that is its affair, so an arena may take more than it saves; `Plan` captures a run in several ways and keeps the smallest.

What PyTorch's allocator asks CUDA for while a graph is captured grows by 20 MiB, and nobody else is given the rest. Asked for all that a
run needs at once, before anything else, it takes no more than that: arena and libraries' pieces are cut from one `segment`, but for those
of up to 1 MiB, which it puts into segments of 2 MiB.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Form = tuple[tuple[int, ...], torch.dtype, torch.memory_format]
"""Size, dtype and memory format of what is asked for."""

ALIGNED = 512
"""Bytes that every piece begins at a multiple of, as PyTorch's own allocator does."""
WORTH = 0.01
"""Share of what is there at most that a piece is, at least, to be left to the allocator."""
STARTS, MOST_LEFT = 4, 256
"""Pieces that are tried as the first to be left, and how many are left at most."""
SMALL, LEAST_SMALL, LEAST_LARGE, ROUNDED = 1 << 20, 2 << 20, 10 << 20, 2 << 20
"""Of PyTorch's allocator (c10/cuda/CUDACachingAllocator.cpp), bytes: pieces up to the first lie in segments of the second; a request of
the third or more gets a segment of its own size, rounded up to a multiple of the fourth."""
Bytes = np.ndarray[Any, np.dtype[np.int64]]
"""How many are there whenever a piece is made."""


class Changed(RuntimeError):
    """A run asks for other memory than the run before did."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Memory of a run.

    Attributes:
        form: what it was asked for as; of what libraries make, as what it came.
        nbytes: its bytes.
        born: its number in the order in which memory is made, that of libraries counted.
        dies: the number of the first that may lie over it.
        ours: whether Python asks for it, so that it can be served.
    """

    form: Form
    nbytes: int
    born: int
    dies: int
    ours: bool


class _Aside(TorchDispatchMode):
    """Sees the operators of a run. PyTorch's compiler is not loaded for it: what that has compiled runs without looking at functions."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell PyTorch to leave `__torch_dispatch__` as it is; the first call of a wrapped one loads the compiler, for seconds."""
        return False


class Watched(_Aside):
    """Notes what memory a run asks for, and until when; everything is done as it would be.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self._made: list[tuple[Form, int, bool]] = []
        self._dies: dict[int, int] = {}
        self._alive: dict[int, tuple[int, StorageWeakRef]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = _asked(func, args, kwargs, self.device)
        self._let_go()
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        freed = self._freed() if asked is None else 0
        out = func(*args, **kwargs)
        scratch = self._freed() - freed if asked is None else 0
        for leaf in tree_leaves(out):
            if not isinstance(leaf, Tensor) or leaf.device != self.device or not leaf.numel():
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._alive:
                form = asked or (tuple(leaf.shape), leaf.dtype, torch.contiguous_format)
                self._alive[storage._cdata] = len(self._made), StorageWeakRef(storage)
                self._made.append((form, storage.nbytes(), asked is not None))
        if scratch:  # there with what was read and what was made, and gone
            self._dies[len(self._made)] = len(self._made) + 1
            self._made.append((((scratch,), torch.uint8, torch.contiguous_format), scratch, False))
        return out

    def _freed(self) -> int:
        """Return the bytes that have ever been given back: what a library makes for itself is, before it returns."""
        return torch.cuda.memory_stats(self.device).get("allocated_bytes.all.freed", 0) if self.device.type == "cuda" else 0

    def _let_go(self) -> None:
        for key, (number, reference) in list(self._alive.items()):
            if reference.expired():
                self._dies[number] = len(self._made)
                del self._alive[key]

    @property
    def pieces(self) -> list[Piece]:
        """What was asked for, in this order; what was there at the end lives for ever."""
        end = len(self._made) + 1
        return [Piece(form, nbytes, born, self._dies.get(born, end), ours) for born, (form, nbytes, ours) in enumerate(self._made)]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the pieces of a run lie.

    Attributes:
        forms: of each piece, in the order in which they are asked for.
        offsets: bytes at which each begins, None for what is left to the allocator.
        nbytes: of the memory that holds the others.
        beside: bytes at most that are there at once of what libraries make and of what is left to the allocator, in pieces of more than
            `SMALL`: the allocator keeps smaller ones apart.
    """

    forms: tuple[Form, ...]
    offsets: tuple[int | None, ...]
    nbytes: int
    beside: int


class Served(_Aside):
    """Gives a run the memory that it asks for from an arena.

    Args:
        layout: of a run that was watched.
        memory: uint8 of its `nbytes`.

    Raises:
        Changed: something else is asked for.
    """

    def __init__(self, layout: Layout, memory: Tensor) -> None:
        super().__init__()
        self._layout, self._memory, self._next = layout, memory, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = _asked(func, args, kwargs, self._memory.device)
        if asked is None:
            return func(*args, **kwargs)
        if self._next == len(self._layout.forms) or self._layout.forms[self._next] != asked:
            raise Changed(f"memory of {asked} is asked for, as number {self._next}")
        offset = self._layout.offsets[self._next]
        self._next += 1
        if offset is None:
            return func(*args, **kwargs)
        size, dtype, form = asked
        flat = self._memory[offset : offset + prod(size) * dtype.itemsize].view(dtype)
        if form != torch.channels_last:
            return flat.view(size)
        n, c, h, w = size
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)

    def done(self) -> None:
        """Say that the run is at its end.

        Raises:
            Changed: it has asked for less.
        """
        if self._next != len(self._layout.forms):
            raise Changed(f"{self._next} pieces of memory were asked for, {len(self._layout.forms)} before")


def _asked(func: Any, args: Any, kwargs: dict[str, Any], device: torch.device) -> Form | None:
    """Return size, dtype and memory format where Python asks for memory on the device, dense and not empty."""
    if func is not torch.ops.aten.empty.memory_format or torch.device(kwargs.get("device") or "cpu") != device:
        return None
    size, form = tuple(args[0]), kwargs.get("memory_format") or torch.contiguous_format
    plain = not kwargs.get("pin_memory") and kwargs.get("layout") in (None, torch.strided)
    return (size, kwargs.get("dtype") or torch.get_default_dtype(), form) if plain and prod(size) else None


def layouts(pieces: list[Piece], held: int = 0) -> list[Layout]:
    """Lay the pieces of a run out that Python asks for, the way that ought to need the least first; none where there are no pieces.

    Args:
        pieces: of the run.
        held: how many of them, the first, somebody holds for ever, so that only an arena lets others lie over them.
    """
    plain = _layout(pieces, set())
    beside = _layout(pieces, left_to_allocator(pieces, held))
    return [each for each in (beside, plain) if each.nbytes and (each is plain or each.nbytes < plain.nbytes)]


def _layout(pieces: list[Piece], left: set[int]) -> Layout:
    ours = [piece for piece in pieces if piece.ours]
    offsets, nbytes = laid_out([piece for piece in ours if piece.born not in left])
    served = iter(offsets)
    beside = at_once([piece for piece in pieces if piece.nbytes > SMALL and (not piece.ours or piece.born in left)])
    return Layout(tuple(piece.form for piece in ours), tuple(None if p.born in left else next(served) for p in ours), nbytes, beside)


def at_once(pieces: list[Piece]) -> int:
    """Return the bytes at most that are there together."""
    return int(_there(pieces, 1 + max((piece.born for piece in pieces), default=0)).max())


def _there(pieces: list[Piece], end: int) -> Bytes:
    there = np.zeros(end, np.int64)
    for piece in pieces:
        there[piece.born : piece.dies] += piece.nbytes
    return there


def segment(nbytes: int) -> int:
    """Return the bytes of the least piece of memory that PyTorch's allocator asks CUDA for to hold so many."""
    return LEAST_SMALL if nbytes <= SMALL else max(LEAST_LARGE, -(-nbytes // ROUNDED) * ROUNDED)


def asked_at_once(nbytes: int) -> int:
    """Return what to ask the allocator for to get that `segment`."""
    return nbytes if nbytes <= SMALL else segment(nbytes)


def left_to_allocator(pieces: list[Piece], held: int = 0) -> set[int]:
    """Return by `born` which of our pieces lie best in the room that libraries need for theirs at other times.

    One after the other is taken out whose absence makes the most bytes of ours that are there together fewest, or least often so many.
    The first is each of the best few in turn, for the best one of all may bar better ones. Arguments as of `layouts`.
    """
    end = 1 + max((piece.born for piece in pieces), default=0)
    theirs, ours = (_there([piece for piece in pieces if piece.ours == mine], end) for mine in (False, True))
    movable = [piece for piece in pieces[held:] if piece.ours]
    ways = [_taken_out(movable, ours, theirs.max() - theirs, first) for first in _helpful(movable, ours, theirs.max() - theirs)[:STARTS]]
    return {piece.born for piece in min(ways, default=(0, []), key=lambda way: way[0])[1]}


def _taken_out(movable: list[Piece], ours: Bytes, free: Bytes, first: Piece) -> tuple[int, list[Piece]]:
    """Take pieces out as long as that helps, this one first; return the most bytes that are there then, and the pieces."""
    ours, free = ours.copy(), free.copy()
    out, found = list[Piece](), [first]
    while found and len(out) < MOST_LEFT:
        out.append(found[0])
        for there in (ours, free):
            there[found[0].born : found[0].dies] -= found[0].nbytes
        found = [piece for piece in _helpful(movable, ours, free) if piece not in out]
    return int(ours.max()), out


def _helpful(movable: list[Piece], ours: Bytes, free: Bytes) -> list[Piece]:
    """Return the pieces without which the most bytes are fewer, or less often there, and that fit beside libraries'; the best first."""
    most = int(ours.max())
    peaks = ours == most
    before, all_of_them = np.concatenate(([0], np.cumsum(peaks))), int(peaks.sum())
    found = []
    for piece in movable:
        times = slice(piece.born, piece.dies)
        if piece.nbytes < max(1, WORTH * most) or not (there := int(before[min(piece.dies, len(ours))] - before[piece.born])):
            continue
        if piece.nbytes > free[times].min():
            continue
        without = most
        if there == all_of_them:
            less = ours.copy()
            less[times] -= piece.nbytes
            without, there = int(less.max()), 0
        found.append(((without, -there), piece))
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def laid_out(pieces: list[Piece]) -> tuple[list[int], int]:
    """Return where each piece begins, and the bytes of all: the largest first, each as low as those allow that are there with it."""
    offsets, nbytes = [0] * len(pieces), 0
    placed: list[tuple[int, int, Piece]] = []
    for place, piece in sorted(enumerate(pieces), key=lambda pair: (-pair[1].nbytes, pair[1].born)):
        start = 0
        for low, high, other in placed:
            together = other.born < piece.dies and piece.born < other.dies
            if together and low < start + piece.nbytes and start < high:
                start = -(-high // ALIGNED) * ALIGNED
        offsets[place] = start
        insort(placed, (start, start + piece.nbytes, piece), key=lambda entry: entry[0])
        nbytes = max(nbytes, start + piece.nbytes)
    return offsets, nbytes
