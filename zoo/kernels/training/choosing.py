"""Keep a chain where it is faster than what it stands for: both ways are timed, there and back, at the shapes of the recording."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zoo.kernels.training import kernels
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.record import Recording, Ref
from zoo.kernels.training.replay import Chain, Step, Without, bind, values_of
from zoo.kernels.tuning.choices import Choice, Choices

Timer = Callable[[Callable[[], object]], float]
"""Microseconds of a call."""


class Times:
    """What was measured, by what it depends on: a chain's microseconds, and those of what it would be divided into.

    Args:
        choices: where that is kept for other processes; None keeps it in this one.
    """

    def __init__(self, choices: Choices | None = None) -> None:
        self.choices = choices
        self._found: dict[Any, tuple[float, float]] = {}

    def get(self, key: Any) -> tuple[float, float] | None:
        """Return what was measured, here or by an earlier process."""
        if key not in self._found and self.choices is not None and (kept := self.choices.get(_text(key))) is not None:
            self._found[key] = kept.us, kept.aten_us
        return self._found.get(key)

    def put(self, key: Any, ours: float, theirs: float) -> None:
        """Note what was measured; `save` writes it."""
        self._found[key] = ours, theirs
        if self.choices is not None:
            self.choices.put(_text(key), Choice(key[0], us=round(ours, 2), aten_us=round(theirs, 2)))

    def save(self) -> None:
        """Write what is new."""
        if self.choices is not None:
            self.choices.save()


def _text(key: Any) -> str:
    """Name a chain in a file: what it is, of which shape, and a hash of everything."""
    op, shapes, *_ = key
    size, dtype = shapes[0]
    digest = hashlib.sha256(str(key).encode()).hexdigest()[:16]
    return f"training {op}, {'x'.join(map(str, size))} {str(dtype).removeprefix('torch.')}, {digest}"


MARGIN = 0.98
"""A chain that isn't faster by a fiftieth goes: each of PyTorch's own functions that stays needs no kernel to be compiled."""

EVEN = 1.02
"""One that keeps a map less stays where it is no slower than by a fiftieth."""


def timer(device: torch.device) -> Timer | None:
    """Return the clock of a device: a GPU's launches in a CUDA graph, a CPU's calls by the clock of the process; None of others."""
    from zoo.kernels.measuring.timing import NotCapturable, cpu_time_us, event_time_us, graph_time_us

    if device.type != "cuda":
        return cpu_time_us if device.type == "cpu" else None

    def time(call: Callable[[], object]) -> float:
        try:
            return graph_time_us(call, sparing=True)
        except NotCapturable:
            return event_time_us(call, target_ms=20.0)

    return time


def slower(recording: Recording, without: Without, known: Times, clock: Timer, most: int = 0) -> Without:
    """Return the chains that are no faster than PyTorch, or than the smaller chains in them, by their `key`, and why.

    Those in `without` are not used anyway. What is measured is added to `known`, after up to `most` launch parameters of each kernel were
    tried; 0 takes the first guesses.
    """
    found: Without = {}
    done: set[tuple[int, str]] = set()
    while True:
        _, chains, _ = steps_of(recording, without | found)
        fresh = [chain for chain in chains if not chain.note and (chain.makes, chain.op) not in done]
        if not fresh:
            return found
        saved = {chain.reads[0]: chain for chain in chains if chain.norm and not chain.note}
        for chain in fresh:
            done.add((chain.makes, chain.op))
            ours, theirs = times(recording, chain, saved.get(chain.makes), known, clock, most)
            if ours > (EVEN if chain.frees else MARGIN) * theirs:
                found[chain.key] = f"no faster: {ours:.0f} us, without it {theirs:.0f} us"


def times(recording: Recording, chain: Chain, behind: Chain | None, known: Times, clock: Timer, most: int = 0) -> tuple[float, float]:
    """Return the microseconds of a chain, and of what it would be divided into; for the BatchNorm `behind` it takes the statistics."""
    key = _key(recording, chain)
    if (found := known.get(key)) is None:
        pieces: Sequence[Step] = chain.pieces or chain.calls
        try:
            parts = chain.reads, chain.makes, chain.branch_out is not None, chain.drawn
            call = _there_and_back(recording, [chain], *parts)
            with kernels.tuning(recording.device, most):
                call()
            ours = clock(call)
            theirs = clock(_there_and_back(recording, pieces, *parts))
            if chain.whole and (apart := list(_apart(pieces))) != list(pieces):  # chains in it that would fall back make it no faster
                theirs = min(theirs, clock(_there_and_back(recording, apart, *parts)))
            if chain.row_out is not None and behind is not None:
                saved = _statistics_us(recording, behind, clock)
                ours -= saved
                theirs -= saved if any(isinstance(piece, Chain) and piece.row_out is not None for piece in pieces) else 0.0
            if chain.pieces:  # which may be slower than PyTorch themselves
                theirs = min(theirs, clock(_there_and_back(recording, chain.calls, *parts)))
        except RuntimeError:  # no room for both beside what the caller holds, say: the chain is right, and stays
            return 0.0, 0.0
        known.put(key, ours, theirs)
        return ours, theirs
    return found


def measured(recording: Recording, chain: Chain, known: Times) -> tuple[float, float] | tuple[None, None]:
    """Return what `times` has measured of a chain, if it has."""
    return known.get(_key(recording, chain)) or (None, None)


def _key(recording: Recording, chain: Chain) -> Any:
    """Return what a chain's time depends on; where in the network it is does not count."""
    shapes = tuple((recording.values[n].shape, recording.values[n].dtype) for n in (*chain.reads, chain.makes))
    names = {number: f"read {index}" for index, number in enumerate(chain.reads)}

    def named(leaf: Any) -> str:
        return names.setdefault(leaf, f"made {len(names)}") if isinstance(leaf, Ref) else repr(leaf)

    calls = tuple((call.name, str(pytree.tree_map(named, (call.args, call.kwargs, call.result)))) for call in chain.calls)
    images = {number for _, number in recording.inputs}  # whose gradient nobody needs
    free = tuple(number in images for number in chain.reads)
    hands = tuple(number is not None for number in (chain.row_in, chain.row_out, chain.branch_in, chain.branch_out))
    return chain.op, shapes, calls, free, hands, chain.fresh


def _there_and_back(
    recording: Recording,
    steps: Sequence[Step],
    reads: Sequence[int],
    makes: int,
    branches: bool = False,
    drawn: frozenset[int] = frozenset(),
) -> Callable[[], object]:
    """Return a call that computes steps and their gradients on made-up values, but of those `drawn`.

    Of `branches`, what is read first has a gradient of its own.
    """
    given = {number: _made_up(recording, number) for number in reads}
    images = {number for _, number in recording.inputs} | drawn
    if any(tensor.requires_grad and number not in images for number, tensor in given.items()):  # whose gradient nobody needs
        given = {number: tensor.requires_grad_(tensor.requires_grad and number not in images) for number, tensor in given.items()}
    rows = {step.row_out for step in steps if isinstance(step, Chain)}
    bound = bind([_alone(step, rows) for step in steps], [makes], set(reads))
    room = 1 + max(len(recording.values), *(n for step in steps for n in (values_of(step) if isinstance(step, Chain) else (0,))))
    asked = [tensor for tensor in given.values() if tensor.requires_grad]
    shape = recording.values[makes]
    gradient = [_map(torch.randn(shape.shape, dtype=torch.float32, device=recording.device).to(shape.dtype))]
    handed = next((step.branch_out for step in steps if isinstance(step, Chain) and step.branch_out is not None), reads[0])
    if branches:
        gradient.append(_map(torch.zeros_like(given[reads[0]])))

    def call() -> object:
        slots: list[Any] = [None] * room
        for number, tensor in given.items():
            slots[number] = tensor
        with torch.enable_grad():
            for step in bound:
                step.run(slots)
            return torch.autograd.grad([slots[makes], *([slots[handed]] if branches else [])], asked, gradient)

    return call


def _apart(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield steps with those that hand statistics on divided into what they are of."""
    for step in steps:
        if isinstance(step, Chain) and step.row_out is not None:
            yield from step.pieces or step.calls
        else:
            yield step


def _alone(step: Step, rows: set[int | None]) -> Step:
    """Return a chain that takes nothing from one that isn't there."""
    return replace(step, row_in=step.row_in if step.row_in in rows else None, branch_in=None) if isinstance(step, Chain) else step


def _made_up(recording: Recording, number: int) -> Tensor:
    value = recording.values[number]
    drawn = torch.rand(value.shape, dtype=torch.float32, device=recording.device) + 0.5
    drawn = drawn if value.place is not None else drawn - 1.0
    still = value.place is not None and value.place[1].startswith("running_")
    return _map(drawn.to(value.dtype)).requires_grad_(not still and value.dtype.is_floating_point)


def _map(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _statistics_us(recording: Recording, behind: Chain, clock: Timer) -> float:
    """Return what the BatchNorm behind saves where its statistics are there."""
    given = [_made_up(recording, number) for number in behind.reads]
    row = torch.rand((3, given[0].shape[1]), device=recording.device) + 0.5

    def run(**options: Any) -> object:
        with torch.no_grad():
            return behind.run(*given, **options)

    return max(0.0, clock(run) - clock(partial(run, row=row)))
