"""What runs a whole step fastest: chains, chains with PyTorch's compiler between them, or the compiler alone. Timed, then checked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.parity import Parity
from zoo.kernels.comparing.precision import casts_of
from zoo.kernels.errors import first_line
from zoo.kernels.training import shared
from zoo.kernels.training.chains import steps_of, without_any
from zoo.kernels.training.checking import Check, replay_of
from zoo.kernels.training.choosing import Timer, Times
from zoo.kernels.training.recompute import Remade, remade
from zoo.kernels.training.record import Recording
from zoo.kernels.training.replay import Replay, Step, Without
from zoo.kernels.training.segments import Compiler, Segment, early, inductor, segments, stretches, yielding
from zoo.kernels.tuning.choices import Choice

FASTER = 0.98
"""Share of the chains' time below which something else is served: two measurements of one thing differ by a hundredth or two."""
SURE = 1.5
"""How many times PyTorch's operators, in a graph too, take the chains' time, where the compiler is not asked: it was at most 1.4 times as
fast as the operators on the networks that were measured."""
FEW = 0.1
"""Share of the calls that chains have to stand for: with fewer, what lies between them is the whole."""
WAYS = ("chains", "islands", "whole")
_SAID = {"islands": "chains, and PyTorch's compiler between them", "whole": "PyTorch's compiler alone"}


@dataclass(slots=True)
class Won:
    """What is served.

    Attributes:
        replay: runs it.
        way: which of `WAYS` it is.
        errors: of it, where it was compared itself.
        notes: what there is to say of the others.
        us: microseconds of a call there and back, where it was timed.
        without: chains that it doesn't use, and why.
    """

    replay: Replay
    way: str = "chains"
    errors: dict[str, Parity] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    us: float | None = None
    without: Without = field(default_factory=dict)


class Contest:
    """The ways of one network at one shape, under the autocast of the moment; the network itself isn't touched.

    Args:
        network: in the mode that was recorded.
        recording: of it.
        args: of the call; what asks for a gradient now, here and of the parameters, is what is compiled for.
        kwargs: likewise.
        clock: microseconds of a call.
        times: where what was found is kept.
        compiler: compiles stretches.
        ways: those of `WAYS` that compete with the chains.
    """

    def __init__(
        self,
        network: nn.Module,
        recording: Recording,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        clock: Timer,
        times: Times,
        compiler: Compiler = inductor,
        ways: Sequence[str] = WAYS[1:],
    ) -> None:
        self.recording, self.clock, self.times, self.compiler, self.ways = recording, clock, times, compiler, ways
        self.check = Check(network, recording, args, kwargs, recording.device, learning=False)
        self.spec = pytree.tree_structure((args, kwargs))
        flags = [leaf.requires_grad for leaf in (*pytree.tree_leaves((args, kwargs)), *network.parameters()) if isinstance(leaf, Tensor)]
        casts = torch.is_autocast_enabled(recording.device.type), torch.get_autocast_dtype(recording.device.type)
        shapes = [(value.shape, value.dtype) for value in recording.values]
        said = [(call.name, call.reads, call.makes) for call in recording.calls], shapes
        self.key = f"training plan, {hashlib.sha256(str((said, flags, casts)).encode()).hexdigest()[:16]}"

    def won(self, without: Without, recompute: bool | None, beside: bool) -> Won:
        """Return the fastest way that is right; chains alone where nothing is faster by more than a measurement's error."""
        steps, _, counted = steps_of(self.recording, without)
        served = Won(replay_of(self.recording, steps, counted, recompute, beside), without=without)
        if any(call.func is shared.shared_batch_norm for call in self.recording.calls):
            return served  # a process whose compiler takes longer would keep the others waiting
        known, chains_us, operators = self._known(), None, 0.0
        if known == "chains":
            return served
        between = without | yielding(self.recording, steps)
        with casts_of(self.recording.device), shared.alone(), torch.enable_grad():
            if not known:
                chains_us = served.us = self.clock(self._step(served.replay))
                if "islands" in self.ways and (operators := self.clock(self._plain_step())) >= SURE * served.us:
                    self._keep(served, operators)
                    return served
            refused = False
            for way in [known] if known else self.ways:
                if way == "whole" and "islands" in self.ways and not known and not refused and self._is_little(between):
                    continue  # what lies between chains was the whole, and would be compiled twice
                if way == "whole" and served.way == "islands" and served.us is not None and operators >= SURE * served.us:
                    served.notes.append(f"{_SAID[way]}: not tried, for PyTorch's operators take {operators / served.us:.1f} times as long")
                    continue
                left = without_any(self.recording) if way == "whole" else between
                steps, _, _ = steps_of(self.recording, left)
                for fuses in (True, False):
                    replay = compiled(self.recording, steps, counted, self.compiler, recompute, beside, fuses)
                    if replay is None:  # nothing is left between chains
                        break
                    served, refused = self._better(way, replay, left, served)
                    if not refused or not _fused(replay):
                        break
        if not known:
            self._keep(served, chains_us)
        return served

    def _known(self) -> str:
        choices = self.times.choices
        kept = choices.get(self.key) if choices is not None else None
        return kept.op if kept is not None and kept.op in WAYS else ""

    def _keep(self, served: Won, other: float | None) -> None:
        if self.times.choices is not None:
            self.times.choices.put(self.key, Choice(served.way, us=round(served.us or 0.0, 2), aten_us=round(other or 0.0, 2)))
            self.times.save()

    def _is_little(self, without: Without) -> bool:
        """Tell whether chains stand for next to nothing of the network."""
        taken = sum(len(chain.calls) for chain in steps_of(self.recording, without)[1] if not chain.note)
        return taken < FEW * len(self.recording.calls)

    def _better(self, way: str, replay: Replay, left: Without, served: Won) -> tuple[Won, bool]:
        """Return the way if it is faster than what is served, and right. Else return what is served, with a note why.

        The second value tells whether the way was refused as wrong.
        """
        us, errors = 0.0, dict[str, Parity]()
        try:
            us = self.clock(self._step(replay))
            if served.us is not None and us > FASTER * served.us:
                served.notes.append(f"{_said(way, replay)}: {us / 1000:.2f} ms, no faster than {served.us / 1000:.2f}")
                return served, False
            errors, wrong = self.check.compared(replay)
        except Exception as error:  # whatever the compiler stumbles over, or no room for a comparison at this size
            wrong = f"{type(error).__name__}: {first_line(error)}"
        if wrong or not errors:
            served.notes.append(f"{_said(way, replay)}: not served, {wrong or 'nothing could be compared'}")
            return served, True
        beaten = f" instead of {served.us / 1000:.2f}" if served.us is not None else ""
        note = f"{_said(way, replay)}: {us / 1000:.2f} ms there and back{beaten}"
        return Won(replay, way, errors, [*served.notes, note], us, left), False

    def _step(self, replay: Replay) -> Callable[[], object]:
        """Return a call that runs a replay there and back on a copy of the network."""
        twin = self.check.twin()
        places = replay.at(twin)
        return self._there_and_back(twin, lambda leaves: replay(places, leaves))

    def _plain_step(self) -> Callable[[], object]:
        twin = self.check.twin()

        def call(leaves: list[Any]) -> Any:
            args, kwargs = pytree.tree_unflatten(leaves, self.spec)
            return twin(*args, **kwargs)

        return self._there_and_back(twin, call)

    def _there_and_back(self, twin: nn.Module, run: Callable[[list[Any]], Any]) -> Callable[[], object]:
        leaves = self.check.leaves(None, 0)
        asked = [t for t in (*leaves, *twin.parameters()) if isinstance(t, Tensor) and t.requires_grad]
        gradients: list[Tensor] = []

        def call() -> object:
            outputs = [out for out in pytree.tree_leaves(run(leaves)) if isinstance(out, Tensor) and out.requires_grad]
            if not gradients:
                gradients.extend(torch.randn_like(out) for out in outputs)
            return torch.autograd.grad(outputs, asked, gradients, allow_unused=True) if outputs else None

        return call


def served(contest: Contest, without: Without, recompute: bool | None, beside: bool) -> Won:
    """Hold a contest and return what it serves: the chains where there is no room for one, or a way fails.

    Nobody's random numbers are used up.
    """
    device = contest.recording.device
    try:
        with torch.random.fork_rng([device.index or 0] if device.type == "cuda" else []):
            return contest.won(without, recompute, beside)
    except RuntimeError as error:  # no room for a copy of the network beside the caller's, say
        if device.type == "cuda":
            torch.cuda.empty_cache()
        steps, _, counted = steps_of(contest.recording, without)
        note = f"PyTorch's compiler was not compared: {type(error).__name__}: {first_line(error)}"
        return Won(replay_of(contest.recording, steps, counted, recompute, beside), notes=[note], without=without)


def compiled(
    recording: Recording,
    steps: list[Step],
    counted: dict[int, list[int]],
    compiler: Compiler,
    recompute: bool | None,
    beside: bool,
    fuses: bool = True,
) -> Replay | None:
    """Return a replay whose stretches between chains the compiler runs; None where there are none.

    If it `fuses`, kernels go back through layer norms, sums, GELU and attention in windows inside of these, where kernels run.
    """
    steps = early(recording, steps)
    again = remade(recording, steps, recompute) if beside else Remade()
    left = frozenset((*again.maps, *again.convs, *again.convs.values()))
    found = segments(recording, steps, stretches(recording, steps, left), compiler, fuses)
    if not found:
        return None
    together = {(first, first + len(segment.calls)): segment for first, segment in found.items()}
    return Replay(recording, steps, counted, again, rounds=beside, together=dict[tuple[int, int], Callable[[list[Any]], None]](together))


def stretches_of(replay: Replay) -> list[Segment]:
    """Return what the compiler runs in a replay."""
    return [run for run in replay.together.values() if isinstance(run, Segment)]


def _fused(replay: Replay) -> list[str]:
    """Return what kernels go back through in what the compiler runs."""
    return sorted({name for segment in stretches_of(replay) for name in segment.fused}, reverse=True)


def _said(way: str, replay: Replay) -> str:
    """Name a way as `why` does."""
    through = _fused(replay)
    return f"{_SAID[way]}, {', '.join(through)} back by kernels" if through else _SAID[way]
