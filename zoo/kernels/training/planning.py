"""What a kind of call will run: recorded, checked, timed, and the same in all processes that exchange statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.parity import Parity
from zoo.kernels.comparing.precision import casts_of
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.measuring.stopwatch import phase
from zoo.kernels.reports.report import Row
from zoo.kernels.training import choosing, kernels, shared
from zoo.kernels.training.chains import steps_of
from zoo.kernels.training.checking import Check, Verdict, replay_of
from zoo.kernels.training.compiling import compiled_chains
from zoo.kernels.training.contest import WAYS, Contest, served, stretches_of
from zoo.kernels.training.record import Recording, record
from zoo.kernels.training.replay import Chain, Replay, Without
from zoo.kernels.training.segments import TAKEN, Segment
from zoo.kernels.tuning.choices import Choices

IMAGES = 16
"""Images that a check computes with, where a batch has more."""
COMPILED = "compiled"
"""What `why` calls the kernel of what PyTorch's compiler runs."""


@dataclass(slots=True)
class Checked:
    """A replay that has passed."""

    replay: Replay
    rows: list[Row]
    parity: Parity | None
    notes: list[str]


@dataclass(slots=True)
class Known:
    """What was found before: another number of images needs no other check, and no shape needs to be timed twice."""

    verdicts: dict[Any, Verdict] = field(default_factory=dict)
    slow: dict[Any, Without] = field(default_factory=dict)
    times: choosing.Times = field(default_factory=choosing.Times)
    most: int = 0
    """Launch parameters that are tried for each kernel before it is timed."""
    recompute: bool | None = None
    """What of `remade` is asked for."""
    lost: set[Any] = field(default_factory=set)
    """Kinds of recordings, as of `verdicts`, for which a CPU's compiler lost: it isn't asked again for another number of images."""

    def keep(self, device: torch.device) -> None:
        """Use what earlier processes have measured on a device, and keep what this one will."""
        if self.times.choices is None:
            self.times = choosing.Times(Choices(device))


def checked(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: Known,
    clock: choosing.Timer | None = None,
    learns: bool = True,
) -> Checked:
    """Record a network, and replace of its chains those that compute what they should and are faster.

    The network is in the mode to be recorded, under the autocast to be recorded. What is found is added to `known`. The `clock` times
    chains, so that none stays that is slower than PyTorch, and PyTorch's compiler; on a CPU, whose chains are PyTorch's functions, the
    compiler alone. None times nothing. Without gradients, where nothing `learns`, the compiler is not asked.

    Raises:
        Untraceable: it can't be recorded, or without any chain a replay still computes something else; here or in another process.
    """
    device = device_of((args, kwargs))
    with phase("tracing"):
        recording = record(network, args, kwargs, device)
    key, own = _kind(recording, device), kernels.on_kernels(device)
    shapes = (key, *(recording.values[number].shape for _, number in recording.inputs))
    try:
        check = None if key in known.verdicts else _check(network, recording, args, kwargs, device, known.recompute)
        wanted = [] if check is None else [check.recording]
        if recording not in wanted and (check is not None or (own and clock is not None and shapes not in known.slow)):
            wanted.append(recording)
        with compiled_chains(*wanted) as wait:
            with phase("checking"):
                verdict = known.verdicts[key] if check is None else check.verdict()
            wait()
        slow: Without = {}
        if own and clock is not None:
            with casts_of(device), shared.alone(), phase("timing"):
                slow = known.slow.get(shapes) or choosing.slower(recording, verdict.without, known.times, clock, known.most)
            known.times.save()
        outcome = verdict.without, slow
    except Untraceable as error:
        verdict, outcome = Verdict(), error
    except (RuntimeError, ValueError, TypeError) as error:  # a kernel that fails at another shape, or no room for the copies
        verdict, outcome = Verdict(), Untraceable(f"it can't be checked: {type(error).__name__}: {first_line(error)}")
    verdict.without, slow = shared.agreed(recording.calls, outcome)
    known.verdicts[key], known.slow[shapes] = verdict, slow
    without = slow | verdict.without
    steps, _, counted = steps_of(recording, without)
    notes = [f"{kind}: {parity}" for kind, parity in verdict.errors.items()]
    worst = _worst(verdict.errors)
    compiled: list[Row] = []
    whole = False
    if clock is None or not learns or key in known.lost:
        replay = replay_of(recording, steps, counted, known.recompute, verdict.beside)
    else:
        with phase("comparing"):
            ways = WAYS[1:] if own else WAYS[-1:]
            contest = Contest(network, recording, args, kwargs, clock, known.times, ways=ways)
            won = served(contest, without, known.recompute, verdict.beside)
        replay, worst, without, whole = won.replay, _worst(won.errors) or worst, won.without, won.way == "whole"
        notes += won.notes
        if not own and won.way == "chains":
            known.lost.add(key)
            if not won.notes:
                notes.append("PyTorch's compiler was given nothing: no calls side by side are such that it may gain by them")
        compiled = [_row(recording, segment) for segment in stretches_of(replay)]
    found = [] if whole else [chain for chain in steps_of(recording, without)[1] if chain.note != TAKEN]
    rows = [_chain_row(recording, chain, known.times) for chain in found]
    if replay.remade:
        notes.append(f"{len(replay.remade)} maps are not kept but computed again on the way back")
    if not own and clock is None:
        notes.append(
            f'on a {device.type.upper()} PyTorch\'s functions compute all of this, and nothing is timed; tune="full" tries its compiler'
        )
    return Checked(replay, rows + compiled, worst, notes)


def _worst(errors: dict[str, Parity]) -> Parity | None:
    return max(errors.values(), key=lambda p: p.fast / max(p.eager, 1e-12), default=None)


def _chain_row(recording: Recording, chain: Chain, times: choosing.Times) -> Row:
    """Return how `why` shows a chain: its kernel and time, or those of PyTorch's functions and the reason."""
    ours, theirs = choosing.measured(recording, chain, times)
    shape = recording.values[chain.makes].shape
    return Row(chain.layers, "aten" if chain.note else chain.op, shape, theirs if chain.note else ours, theirs, note=chain.note)


def _row(recording: Recording, segment: Segment) -> Row:
    """Return how `why` shows what the compiler runs: from the first layer to the last."""
    layers = list(dict.fromkeys(call.layer for call in segment.calls if call.layer))
    between = layers[0] if len(layers) == 1 else f"{layers[0]} to {layers[-1]}" if layers else ""
    return Row(between, COMPILED, recording.values[segment.makes[-1]].shape, note=f"{len(segment.calls)} calls")


def device_of(arguments: Any) -> torch.device:
    """Return where the first tensor of a tree lies; a CPU if there is none."""
    return next((leaf.device for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)), torch.device("cpu"))


def _check(
    network: nn.Module, recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, recompute: bool | None
) -> Check:
    """Return the check of a network: with `IMAGES` at most, if it computes each image as it does beside more."""
    if (fewer := _few(args, kwargs)) is not None:
        few = record(network, *fewer, device)
        if _kind(few, device) == _kind(recording, device):
            return Check(network, few, *fewer, device, recompute)
    return Check(network, recording, args, kwargs, device, recompute)


def _kind(recording: Recording, device: torch.device) -> Any:
    """Return what a verdict holds for: the calls and the shapes without the number of images."""
    casts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    shapes = tuple(value.shape[1:] if value.place is None else value.shape for value in recording.values)
    return tuple((call.name, call.layer) for call in recording.calls), shapes, casts


def _few(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Cut arguments to `IMAGES`; None where there are no more."""
    counts = {leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()}
    if len(counts) != 1 or counts <= set(range(IMAGES + 1)):
        return None
    return pytree.tree_map(lambda leaf: leaf[:IMAGES] if isinstance(leaf, Tensor) and leaf.dim() else leaf, (args, kwargs))
