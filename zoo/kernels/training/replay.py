"""Call what was recorded again, under autograd, with the network's own parameters as they are at each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.training.recompute import Remade, noting, remaking, without_keeping
from zoo.kernels.training.record import Call, Recording, Ref, name_of
from zoo.kernels.training.rounding import rounded, to_round

Key = tuple[int, int]
"""A chain among all that could be found: the value that it makes, and its rank among those that make the same."""

Without = dict[Key, str]
"""Chains that are not used, and why."""


class Moved(Exception):
    """A parameter isn't where or what it was when the network was recorded."""


@dataclass(eq=False, slots=True)
class Chain:
    """Calls that one kernel does.

    Attributes:
        op: its name, as `why` shows it.
        run: takes the tensors of `reads` in order, and returns the one that the last call makes.
        reads: values.
        makes: the value.
        calls: what it stands for, in order.
        note: why it isn't used; empty where it is.
        norm: the options of a BatchNorm at its beginning.
        row_in: where the statistics of its first map are, if another chain has taken them.
        row_out: where it puts the statistics of what it makes; it returns them beside it.
        branch_in: where what it reads last is, if another chain hands it on.
        branch_out: where it hands on what it reads first, to whose one other reader; that one's gradient is added to its own.
        beside: the call that is this other reader, by its place in the recording, where it is no chain.
        pieces: chains and calls that it could be divided into.
        rank: tells it apart from other chains that make the same value.
        whole: it is so many layers that it is compared as a network is, all tensors of a kind together.
        fresh: what it reads last is a residual, whose gradient it makes anew for nobody else.
        frees: a map that what it stands for would keep for the way back is not kept.
        drawn: what it reads that hangs on no data, as random numbers do, and has no gradient.
        keeps_no_map: its gradient needs no map that it reads.
        yields: it is left to PyTorch's compiler where that runs what makes its first map or what reads its result: both in one pass.
        remakes: what it makes can be made again from what it keeps anyway; then `run` is told so by `again=True`, and doesn't keep it.
    """

    op: str
    run: Callable[..., Any]
    reads: tuple[int, ...]
    makes: int
    calls: tuple[Call, ...]
    note: str = ""
    norm: dict[str, Any] | None = None
    row_in: int | None = None
    row_out: int | None = None
    branch_in: int | None = None
    branch_out: int | None = None
    beside: int | None = None
    pieces: tuple[Any, ...] = ()
    rank: int = 0
    whole: bool = False
    fresh: bool = False
    frees: bool = False
    drawn: frozenset[int] = frozenset()
    keeps_no_map: bool = False
    yields: bool = False
    remakes: bool = False

    @property
    def key(self) -> Key:
        """What says in `Without` that this chain isn't used: others may make the same value."""
        return self.makes, self.rank

    @property
    def layers(self) -> str:
        """The modules whose work it does; of many the one that holds them."""
        names = list(dict.fromkeys(call.layer for call in self.calls if call.layer))
        paths = [name.split(".") for name in names]
        together = [parts[0] for parts in zip(*paths, strict=False) if len(set(parts)) == 1]
        return ".".join(together) if self.whole and together else " ".join(names)


@dataclass(eq=False, slots=True)
class Beside(Call):
    """A call that reads first what a chain hands on."""

    call: Call
    handed: int

    @classmethod
    def of(cls, call: Call, handed: int) -> Beside:
        """Return a call as one that reads `handed` instead of its first argument; `call` stays what it was."""
        return cls(**{f.name: getattr(call, f.name) for f in fields(Call)}, call=call, handed=handed)

    @property
    def moved(self) -> Call:
        """The call that is made."""
        return replace(self.call, args=(Ref(self.handed), *self.args[1:]), reads=(self.handed, *self.reads[1:]))


Step = Call | Chain


@dataclass(eq=False, slots=True)
class Bound:
    """A step, or several, with what they need at every call looked up: what computes into the slots, and which are let go behind it."""

    run: Callable[[list[Any]], Any]
    frees: tuple[int, ...]


@dataclass(eq=False)
class Replay:
    """The steps of a recording, in order.

    Args:
        recording: of a network.
        steps: calls and chains that stand for them.
        counters: parameters and buffers that each call only adds an integer to, by the integer.
        remade: maps that steps don't keep but make again on the way back.
        rounds: whether weights are rounded for autocast many at once.
        together: what computes several steps at once, by the places of the first of them and of the one behind the last.
    """

    recording: Recording
    steps: list[Step]
    counters: dict[int, list[int]] = field(default_factory=dict)
    remade: Remade = field(default_factory=Remade)
    rounds: bool = True
    together: dict[tuple[int, int], Callable[[list[Any]], None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._bound = bind(self._told(), [leaf for leaf in self.recording.outputs if isinstance(leaf, Ref)], keep=self._kept())
        self._room = 1 + max([len(self.recording.values), *(number for chain in self.chains for number in values_of(chain))])
        for index, numbers in self.remade.maps.items():
            self._bound[index].run = without_keeping(self._bound[index].run, numbers)
        for norm, conv in self.remade.convs.items():
            self._make_again(norm, conv)
        self._rounds, self._to = to_round(self.recording, self.steps) if self.rounds else ([], None)
        for (first, end), run in sorted(self.together.items(), reverse=True):
            gone = tuple(number for bound in self._bound[first:end] for number in bound.frees)
            self._bound[first:end] = [Bound(run, gone)]
        self._constants = [(v.number, v.constant) for v in self.recording.values if v.constant is not None]

    def _told(self) -> list[Step]:
        """Return the steps, those told that can make again what is not kept."""
        gone = {number for numbers in self.remade.maps.values() for number in numbers}
        return [
            replace(step, run=remaking(step.run)) if isinstance(step, Chain) and step.remakes and step.makes in gone else step
            for step in self.steps
        ]

    def _make_again(self, norm: int, conv: int) -> None:
        """Let a BatchNorm not keep what a convolution made, and that one leave in a slot of theirs how."""
        call = self.steps[conv]
        assert isinstance(call, Call)
        makes, how, self._room = int(call.result), self._room, self._room + 1
        moved = call.moved if isinstance(call, Beside) else call
        dtype, again = self.recording.values[makes].dtype, moved.reads[0] in self.remade.maps.get(conv, ())
        behind = self.steps[norm]
        twice = isinstance(behind, Chain) and any(behind.makes in numbers for numbers in self.remade.maps.values())
        self._bound[conv].run = noting(self._bound[conv].run, moved, how, dtype, again, twice)
        self._bound[norm].run = without_keeping(self._bound[norm].run, (), (makes, how))

    def _kept(self) -> set[int]:
        return {v.number for v in self.recording.values if v.place is not None or v.constant is not None}

    @property
    def chains(self) -> list[Chain]:
        """The chains that are used."""
        return [step for step in self.steps if isinstance(step, Chain)]

    def at(self, network: nn.Module) -> Places:
        """Find the places of parameters and buffers in a network of the recorded structure."""
        return Places(self.recording, network)

    def slots(self, places: Places, leaves: Sequence[Any]) -> list[Any]:
        """Return a list with a place for each value, filled with what is there before the first step.

        Raises:
            Moved: a parameter is not what it was.
        """
        slots: list[Any] = [None] * self._room
        for index, number in self.recording.inputs:
            slots[number] = leaves[index]
        for number, constant in self._constants:
            slots[number] = constant
        places.fill(slots)
        return slots

    def __call__(self, places: Places, leaves: Sequence[Any]) -> Any:
        """Run the network: flat arguments in, what it returns out."""
        slots = self.slots(places, leaves)
        if self.counters:
            with torch.no_grad():
                for count, numbers in self.counters.items():
                    torch._foreach_add_([slots[number] for number in numbers], count)  # pyright: ignore[reportPrivateImportUsage]
        if self._to is not None:
            for number, weight in zip(self._rounds, rounded([slots[n] for n in self._rounds], self._to), strict=True):
                slots[number] = weight
        for step in self._bound:
            step.run(slots)
            for number in step.frees:
                slots[number] = None
        outputs = [slots[leaf] if isinstance(leaf, Ref) else leaf for leaf in self.recording.outputs]
        return outputs[0] if self.recording.spec.is_leaf() else pytree.tree_unflatten(outputs, self.recording.spec)


class Places:
    """Where a network keeps what a recording reads: looked up at each call, for optimisers, averages and FSDP put other tensors there."""

    def __init__(self, recording: Recording, network: nn.Module) -> None:
        self._found: list[tuple[int, dict[str, Any], str, tuple[int, ...], torch.dtype]] = []
        self._tied: list[tuple[dict[str, Any], str, dict[str, Any], str]] = []
        for value in recording.values:
            if value.place is not None:
                self._found.append((value.number, *_slot(network, *value.place), value.shape, value.dtype))
                for other in recording.tied.get(value.place, ()):
                    self._tied.append((*_slot(network, *value.place), *_slot(network, *other)))

    def fill(self, slots: list[Any]) -> None:
        """Put the present tensors into a list by their numbers; Moved where one is another kind of thing now."""
        for number, holder, name, shape, dtype in self._found:
            tensor: Any = holder.get(name)
            if type(tensor) not in _PLAIN or tensor.dtype != dtype or tensor.shape != shape:
                raise Moved(name)
            slots[number] = tensor
        for holder, name, other, other_name in self._tied:
            if holder[name] is not other.get(other_name):
                raise Moved(other_name)


_PLAIN = (nn.Parameter, Tensor, nn.Buffer)


def _slot(network: nn.Module, path: str, name: str) -> tuple[dict[str, Any], str]:
    try:
        owner = network.get_submodule(path)
    except AttributeError as error:
        raise Moved(path) from error
    return (owner._parameters if name in owner._parameters else owner._buffers), name  # pyright: ignore[reportReturnType]


def bind(steps: Sequence[Step], wanted: Sequence[int], keep: set[int]) -> list[Bound]:
    """Make steps quick to run: arguments prepared, and each value let go behind its last reader, as a forward's variables go.

    Those that are `wanted` at the end, or to `keep`, are not let go.
    """
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        makes = (*step.reads, *values_of(step)) if isinstance(step, Chain) else step.makes
        for number in (*_reads(step), *makes):
            last[number] = index
    gone: dict[int, list[int]] = {}
    for number, index in last.items():
        if number not in wanted and number not in keep:
            gone.setdefault(index, []).append(number)
    runners = (_chain_runner(step) if isinstance(step, Chain) else _call_runner(step) for step in steps)
    return [Bound(run, tuple(gone.get(index, ()))) for index, run in enumerate(runners)]


def values_of(chain: Chain) -> tuple[int, ...]:
    """Return the values that a chain makes, takes from others and hands on."""
    return (chain.makes, *(n for n in (chain.row_in, chain.row_out, chain.branch_in, chain.branch_out) if n is not None))


def _reads(step: Step) -> tuple[int, ...]:
    if isinstance(step, Chain):
        return step.reads if step.branch_in is None else (*step.reads[:-1], step.branch_in)
    return step.moved.reads if isinstance(step, Beside) else step.reads


def _chain_runner(chain: Chain) -> Callable[[list[Any]], None]:
    run, reads, makes, row_in = chain.run, _reads(chain), chain.makes, chain.row_in
    beside = [number for number in (chain.row_out, chain.branch_out) if number is not None]

    def step(slots: list[Any]) -> None:
        slots[makes] = run(*[slots[number] for number in reads])

    def step_with_rows(slots: list[Any]) -> None:
        arguments = [slots[number] for number in reads]
        made = run(*arguments) if row_in is None else run(*arguments, row=slots[row_in])
        if not beside:
            slots[makes] = made
        else:
            for number, value in zip((makes, *beside), made, strict=True):
                slots[number] = value

    return step if row_in is None and not beside else step_with_rows


def _maker(value: Any) -> Callable[[list[Any]], Any] | None:
    """Return what makes an argument of the values in it, None where there are none: many times as fast as PyTorch's trees of anything."""
    if isinstance(value, Ref):
        number = int(value)
        return lambda slots: slots[number]
    if type(value) in (tuple, list, dict):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        parts = [(key, make) for key in keys if (make := _maker(value[key])) is not None]
        if not parts:
            return None
        template: Any = value if isinstance(value, dict) else list(value)
        whole = tuple if isinstance(value, tuple) else None

        def fill(slots: list[Any]) -> Any:
            made = template.copy()
            for key, make in parts:
                made[key] = make(slots)
            return made if whole is None else whole(made)

        return fill
    leaves, spec = pytree.tree_flatten(value)
    if not any(isinstance(leaf, Ref) for leaf in leaves):
        return None
    return lambda slots: pytree.tree_unflatten([slots[leaf] if isinstance(leaf, Ref) else leaf for leaf in leaves], spec)


def _call_runner(call: Call) -> Callable[[list[Any]], None]:
    call = call.moved if isinstance(call, Beside) else call
    func, result = call.func, call.result
    template = list(call.args)
    refs = [(index, int(arg)) for index, arg in enumerate(call.args) if isinstance(arg, Ref)]
    made = [(index, make) for index, arg in enumerate(call.args) if not isinstance(arg, Ref) and (make := _maker(arg)) is not None]
    by_name = None if not call.kwargs else _maker(call.kwargs) or (lambda slots: call.kwargs)
    flat = type(result) in (tuple, list) and all(isinstance(leaf, Ref) for leaf in result)

    def call_it(slots: list[Any]) -> Any:
        args = template.copy()
        for index, number in refs:
            args[index] = slots[number]
        for index, make in made:
            args[index] = make(slots)
        return func(*args) if by_name is None else func(*args, **by_name(slots))

    def step(slots: list[Any]) -> None:
        out = call_it(slots)
        if isinstance(result, Ref):
            slots[result] = out
            return
        refs, leaves = (result, out) if flat else (pytree.tree_leaves(result), pytree.tree_leaves(out))
        for ref, leaf in zip(refs, leaves, strict=True):
            if isinstance(ref, Ref):
                slots[ref] = leaf

    if call.grad and call.autocast is None:
        return step

    def inside(slots: list[Any]) -> None:
        casts = call.autocast
        device = next((slots[n].device.type for n in call.reads), "cpu")
        with (
            nullcontext() if call.grad else torch.no_grad(),
            nullcontext() if casts is None else torch.autocast(device, casts[1], casts[0]),
        ):
            step(slots)

    return inside


def counters(recording: Recording) -> tuple[dict[int, list[int]], set[int]]:
    """Find the calls that only count, as BatchNorm's `num_batches_tracked`: the buffers by what is added, and the calls' indices."""
    found: dict[int, list[int]] = {}
    calls: set[int] = set()
    read: dict[int, int] = {}
    for call in recording.calls:
        for number in call.reads:
            read[number] = read.get(number, 0) + 1
    for index, call in enumerate(recording.calls):
        if name_of(call.func) == "add_" and len(call.args) == 2 and not call.kwargs and isinstance(call.args[0], Ref):
            value, count = recording.values[call.args[0]], call.args[1]
            counts = type(count) is int and value.place is not None and value.dtype == torch.int64
            if counts and read[value.number] == 1 and call.args[0] not in recording.outputs:
                found.setdefault(count, []).append(value.number)
                calls.add(index)
    return found, calls
