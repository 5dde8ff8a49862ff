"""Stretches of calls that no chain takes, run by PyTorch's compiler, forward and backward: between chains, or the whole network.

A stretch is compiled on the tensors that come first, under the autocast of that moment, by AOTAutograd and Inductor. It holds for these
shapes and for what asks for a gradient; where something else comes, or no gradient is wanted, the calls run one by one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.precision import casts_of
from zoo.kernels.compilation.inductor import graph_compiled
from zoo.kernels.training.calls import DROPOUT, NEW, arguments, plainly
from zoo.kernels.training.kernels import on_kernels
from zoo.kernels.training.record import Call, Recording, Ref
from zoo.kernels.training.replay import Beside, Bound, Chain, Step, Without, bind, values_of
from zoo.kernels.training.residual_streams import fused
from zoo.kernels.training.shared import shared_batch_norm
from zoo.kernels.training.windows import attended

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
"""Takes a graph of functions and the tensors it is for, and returns what computes the same."""

LEAST = 2
"""Calls of a stretch that compute something: alone, PyTorch's own function is as fast."""

_VIEWS = {
    "reshape", "view", "permute", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "__getitem__", "chunk", "split",
    "unbind", "contiguous", "detach", "size", "swapaxes", "movedim", "t", "expand_as", "view_as", "select", "narrow",
}  # fmt: skip
_LIBRARIES = {"conv1d", "conv2d", "conv3d", "linear", "matmul", "bmm", "mm", "scaled_dot_product_attention"}
"""Calls that a library computes, compiled or not; a stretch of nothing else gains nothing."""
_DRAWS = {
    "bernoulli", "bernoulli_", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "uniform_", "normal_",
    "normal", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "multinomial", "poisson", "rrelu", "gumbel_softmax",
    "fractional_max_pool2d", "trunc_normal_",
}  # fmt: skip
_ATTENTION = {
    "query": None, "key": None, "value": None, "attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False,
}  # fmt: skip


def inductor(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
    """Compile by PyTorch's own compiler, so that a step may be gone back through twice.

    A compiled stretch has no second derivative.
    """
    from torch._functorch import config

    config.donated_buffer = False  # for good: it is asked again on the way back, where another backward may follow
    return graph_compiled(graph, given)


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of steps, all of them calls: the places of the first and of the one behind the last."""

    first: int
    end: int


def drawn(call: Call) -> bool:
    """Tell whether a call draws random numbers, which a compiler would draw otherwise."""
    name = call.name
    if "dropout" in name:
        given = arguments(call, DROPOUT)
        return given is None or bool(given["training"] and given["p"])
    if name == "scaled_dot_product_attention":
        given = arguments(call, _ATTENTION)
        return given is None or bool(given["dropout_p"])
    if name == "multi_head_attention_forward":  # query, key, value, width, heads, in_proj and bias, two k, v biases, zeros, then dropout_p
        training = call.kwargs.get("training", True)
        return bool(training and (call.args[_DROPOUT_P] if len(call.args) > _DROPOUT_P else call.kwargs.get("dropout_p", 1.0)))
    return name in _DRAWS


_DROPOUT_P = 10


def early(recording: Recording, steps: Sequence[Step]) -> list[Step]:
    """Put what is drawn without regard to data, as stochastic depth's numbers, before everything else, in the order that it had.

    Where something is drawn that hangs on data, as dropout's masks, nothing is moved: the generator would give each another number.
    """
    fixed: dict[int, int] = {}
    """What hangs on no data, by value, and the place of its call."""
    drawn_at: list[int] = []
    changed: dict[int, Call] = {}
    memories: dict[int, list[int]] = {}
    for index, step in enumerate(steps):
        if not isinstance(step, Call):
            continue
        call = step
        if call.name in NEW and call.args and isinstance(call.args[0], Ref) and plainly(call) and isinstance(call.result, Ref):
            call = _new(recording, call)
        free = not isinstance(step, Beside) and plainly(call) and all(number in fixed for number in call.reads)
        if free:
            changed[index] = call
            for number in call.makes:
                fixed[number] = index
            for memory in {*call.writes, *(recording.values[n].memory for n in call.makes)}:
                memories.setdefault(memory, []).append(index)
        if drawn(call):
            if not free:
                return list(steps)
            drawn_at.append(index)
    moved: set[int] = set()
    waiting = list(drawn_at)
    while waiting:
        index = waiting.pop()
        if index in moved:
            continue
        moved.add(index)
        call = changed[index]
        waiting += [fixed[number] for number in call.reads]
        waiting += [at for number in (*call.reads, *call.makes) for at in memories.get(recording.values[number].memory, ())]
    return [changed[index] for index in sorted(moved)] + [step for index, step in enumerate(steps) if index not in moved]


def _new(recording: Recording, call: Call) -> Call:
    """Return a call of `new_empty` and its like as one of `torch.empty`, which reads nothing."""
    value = recording.values[int(call.result)]
    function = {"new_empty": torch.empty, "new_zeros": torch.zeros, "new_ones": torch.ones}[call.name]
    options = {"dtype": value.dtype, "device": recording.device}
    return replace(call, func=function, args=(value.shape,), kwargs=options, reads=())


def stretches(recording: Recording, steps: Sequence[Step], left: frozenset[int] = frozenset()) -> list[Stretch]:
    """Find the runs of calls that can be compiled and may gain by it; steps in `left`, by their places, stay as they are."""
    found: list[Stretch] = []
    begun, own = 0, set[int]()
    for index in range(len(steps) + 1):
        step = steps[index] if index < len(steps) else None
        if step is None or index in left or not _compilable(recording, step, own):
            if _worth(recording, steps[begun:index]):
                found.append(Stretch(begun, index))
            begun, own = index + 1, set()
        else:
            assert isinstance(step, Call)
            outside = {recording.values[number].memory for number in step.reads} - own
            own |= {recording.values[number].memory for number in step.makes} - outside
    return found


def _compilable(recording: Recording, step: Step, own: set[int]) -> bool:
    """Tell whether a call may be a part of a stretch whose own tensors are in the memories `own`."""
    if not isinstance(step, Call) or isinstance(step, Beside) or not plainly(step) or drawn(step) or step.func is shared_batch_norm:
        return False
    places = {v.memory for n in step.reads if (v := recording.values[n]).place is not None and v.place[1] in _STATISTICS}
    return step.writes <= own | places


_STATISTICS = {"running_mean", "running_var"}
"""Buffers that a compiled BatchNorm may write."""


def yielding(recording: Recording, steps: Sequence[Step]) -> Without:
    """Return the chains that yield to the compiler, by their key: it runs what makes the first map that they read, or reads what they make.

    Stochastic depth behind a layer scale or before a layer norm, say, is one pass with it. Between convolutions it is a chain's.
    """
    makers = {number: step for step in steps for number in ((step.makes,) if isinstance(step, Chain) else step.makes)}
    read: dict[int, list[Step]] = {}
    for step in steps:
        for number in step.reads:
            read.setdefault(number, []).append(step)

    def moves(step: Step | None) -> bool:
        return isinstance(step, Call) and step.name in _VIEWS and bool(step.reads)

    def computes(step: Step | None, own: set[int]) -> bool:
        return isinstance(step, Call) and step.name not in _VIEWS | _LIBRARIES and _compilable(recording, step, own)

    def made_by_calls(step: Step | None) -> set[int]:
        """Return the memories that a call writes to, if a call made what was there before."""
        found = step.writes if isinstance(step, Call) else frozenset[int]()
        others = {recording.values[n].memory for n in (step.reads if step is not None else ()) if not isinstance(makers.get(n), Call)}
        return {*found} - others

    def before(number: int) -> Step | None:
        while moves(step := makers.get(number)):
            number = step.reads[0] if step is not None else number
        return step

    def behind(number: int) -> list[Step]:
        waiting, seen, found = [number], {number}, list[Step]()
        while waiting:
            number = waiting.pop()
            for step in read.get(number, ()):
                found.append(step)
                fresh = set(step.makes) - seen if isinstance(step, Call) and moves(step) and step.reads[0] == number else set[int]()
                seen |= fresh
                waiting += fresh
        return found

    chains = [step for step in steps if isinstance(step, Chain) and step.yields]
    yields: Without = {}
    for chain in chains:
        maker, own = before(chain.reads[0]), {recording.values[chain.makes].memory}
        if computes(maker, made_by_calls(maker)) or any(computes(reader, own) for reader in behind(chain.makes)):
            yields[chain.key] = TAKEN
    return yields


TAKEN = "PyTorch's compiler takes it with what is around it"
"""Why a chain that yields is not used."""


def _worth(recording: Recording, calls: Sequence[Step]) -> bool:
    words = [call.name for call in calls if isinstance(call, Call) and call.name not in _VIEWS]
    return len(words) >= LEAST and any(word not in _LIBRARIES for word in words)


@dataclass(eq=False)
class Segment:
    """A stretch at work.

    Attributes:
        calls: what it stands for, in order.
        reads: the values that it takes.
        makes: those that somebody behind it reads.
        compiler: what compiles it.
        plain: the calls as they run one by one.
        made: what was compiled for stretches of the same calls, which blocks of a network are: by `meaning`, and what it was compiled for.
        fuses: whether kernels are to go back through streams and attention in windows.
        fused: what they do go back through, once it was compiled here.
    """

    recording: Recording
    calls: tuple[Call, ...]
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    compiler: Compiler
    plain: list[Bound]
    made: dict[Any, Callable[..., Any]]
    fuses: bool = False
    fused: tuple[str, ...] = ()
    _made: dict[Any, Callable[..., Any]] = field(default_factory=dict)
    _strides: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, slots: list[Any]) -> None:
        """Compute what is read behind it into its slots."""
        given = [slots[number] for number in self.reads]
        run = self._compiled(given)
        if run is None:
            for bound in self.plain:
                bound.run(slots)
                for number in bound.frees:
                    slots[number] = None
            return
        given = [_laid(x, strides) for x, strides in zip(given, self._strides, strict=True)]
        with casts_of(self.recording.device):
            for number, value in zip(self.makes, run(*given), strict=True):
                slots[number] = value

    def _compiled(self, given: list[Any]) -> Callable[..., Any] | None:
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return None
        form = tuple((tuple(x.shape), x.dtype, x.device, x.requires_grad) for x in given)
        if (run := self._made.get(form)) is None and not self._made:  # another form was not compared with anything
            self._strides = [x.stride() for x in given]
            meaning = (*self.meaning(), form, *self._strides)
            if (run := self.made.get(meaning)) is None:
                with casts_of(self.recording.device):
                    run = self.made[meaning] = self.compiler(self._graph(), given)
            self._made[form] = run
        return run

    def meaning(self) -> tuple[Any, ...]:
        """Return what is computed, without the values' numbers. Segments of one meaning compute the same."""
        places = {number: place for place, number in enumerate(self.reads)}
        told: list[Any] = [len(self.reads)]
        for call in self.calls:
            for number in call.makes:
                places.setdefault(number, len(places))
            leaves, spec = pytree.tree_flatten((call.args, call.kwargs, call.result))
            parts = [places[leaf] if isinstance(leaf, Ref) else _said(leaf) for leaf in leaves]
            told.append((call.func, str(spec), tuple(parts), call.grad, call.autocast))
        return *told, tuple(places[number] for number in self.makes)

    def _graph(self) -> fx.GraphModule:
        graph = fx.Graph()
        given = tuple(graph.placeholder(f"value_{number}") for number in self.reads)
        found = graph.call_function(self._function(), given)
        graph.output(tuple(graph.call_function(operator.getitem, (found, index)) for index in range(len(self.makes))))
        return fx.GraphModule(nn.Module(), graph)

    def _function(self) -> Callable[..., list[Any]]:
        calls, through = list(self.calls), []
        for name, together in _TOGETHER.items() if self.fuses else ():
            before, calls = calls, together(self.recording, calls, self.makes)
            through += [name] if calls != before else []
        self.fused = tuple(through)
        bounds = bind(calls, self.makes, set(self.reads))
        room = 1 + max((*self.reads, *self.makes, *(n for call in calls for n in call.makes)))

        def stretch(*given: Tensor) -> list[Any]:
            slots: list[Any] = [None] * room
            for number, value in zip(self.reads, given, strict=True):
                slots[number] = value
            for bound in bounds:
                bound.run(slots)
            return [slots[number] for number in self.makes]

        return stretch


_TOGETHER: dict[str, Callable[[Recording, Sequence[Call], Sequence[int]], list[Call]]] = {
    "windows": lambda *stretch: attended(*stretch),
    "norms and activations": lambda *stretch: fused(*stretch),
}
"""What puts calls together whose way back is a kernel's, by what `why` calls it."""

_WRITTEN = (
    bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, slice, type(None), type(...),
)  # fmt: skip
"""Arguments of calls that `repr` writes down whole."""


def _said(leaf: Any) -> tuple[type, Any]:
    """Return what tells an argument from others: of what may be large, as NumPy's arrays, which object it is."""
    return type(leaf), repr(leaf) if type(leaf) in _WRITTEN else id(leaf)


def _laid(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor as it lay when the stretch was compiled, itself if it does."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def segments(
    recording: Recording, steps: Sequence[Step], found: Sequence[Stretch], compiler: Compiler, fuses: bool = True
) -> dict[int, Segment]:
    """Return the segments of some stretches, by the place of their first step; kernels go back through parts of them if it `fuses`."""
    fuses = fuses and on_kernels(recording.device)
    outputs = {int(leaf) for leaf in recording.outputs if isinstance(leaf, Ref)}
    last: dict[int, int] = {}
    for index, step in enumerate(steps):
        for number in step.reads if isinstance(step, Call) else (*step.reads, *values_of(step)):
            last[number] = index
        if isinstance(step, Beside):
            last[step.handed] = index
    made: dict[int, Segment] = {}
    known: dict[Any, Callable[..., Any]] = {}
    for stretch in found:
        calls = tuple(step for step in steps[stretch.first : stretch.end] if isinstance(step, Call))
        own = {number for call in calls for number in call.makes}
        reads = tuple(dict.fromkeys(number for call in calls for number in call.reads if number not in own))
        makes = tuple(number for number in sorted(own) if number in outputs or last.get(number, -1) >= stretch.end)
        if makes:
            plain = bind(calls, makes, set(reads))
            made[stretch.first] = Segment(recording, calls, reads, makes, compiler, plain, known, fuses)
    return made
