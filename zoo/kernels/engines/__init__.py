"""Inference engines for CPUs: which are there, and which is the fastest for one network and the shapes of its inputs.

    openvino         optional; bfloat16 and float16 where the processor has them
    openvino/2 …     the same for two images of a batch at a time, several times at once
    onnxruntime      optional; float32
    channels_last    PyTorch, BatchNorm folded, channels_last
    eager            the network itself, unchanged: always there, and always right

An engine is the network at one moment, for one set of shapes. It holds a copy of most weights in a layout of its own (VGG19: 0.6 GB)
and reads the rest from the network's memory, which it keeps alive. Of weights that are changed in place later it follows some and not
others: it must be made anew.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.engines import onnxruntime, openvino, pytorch
from zoo.kernels.engines.export import EngineError, Exported, Form, export, first_line, recast
from zoo.kernels.engines.parity import Parity

__all__ = ["Bound", "Chosen", "Engine", "EngineError", "Parity", "candidates", "choose"]

Bound = Callable[[Callable[..., Any], torch.dtype], tuple[float, float]]
"""Takes an engine's call and the type it computes in, runs it on inputs of its choice; returns the error and the largest allowed."""

Apart = Callable[[int], bool]
"""Tells whether a batch may be computed in parts of so many images."""

EAGER = "eager"
SETTLE = 0.06
"""Seconds of rest before an engine's turn: the one before leaves threads that spin, onnxruntime's for most of that."""
TURN = 0.03
"""Seconds of calls that count in an engine's turn, at least."""
ROUNDS = 8
FEWEST_ROUNDS = 3
"""Rounds that are held even for twice the budget: on a machine that does other work, one says little."""
IMAGE = 3 * 224 * 224
"""Numbers of an image as most networks take it: parts are of one or two such, whose maps a core's cache may hold."""
HOPELESS = ((2.0, 1.3), (1.5, 1.1))
"""How many times slower than the fastest an engine may be and stay, after one round and after more; the second if half the time is over."""
MEANT = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}


@dataclass(frozen=True)
class Engine:
    """A way to run a network on the CPU.

    Attributes:
        name: "openvino", "onnxruntime", "channels_last" or "eager"; "openvino/2" for two images at a time.
        precision: the type it computes in, which may be wider than the one asked for.
        copies_weights: whether it holds a second copy of the weights, and does not follow changes of the network's.
        why_not: why it can't be built here; empty if it can.
        note: what the reader of a report should know.
        make: builds it; called by `build`.
    """

    name: str
    precision: torch.dtype
    copies_weights: bool
    make: Callable[[], Callable[..., Any]]
    why_not: str = ""
    note: str = ""

    def build(self) -> Callable[..., Any]:
        """Make it ready to run.

        Returns:
            What takes the network's inputs (float tensors of any type, any memory format, the example's shapes) and returns its output:
            the same structure and types, in tensors that no later call overwrites. Threads may call it at once.

        Raises:
            EngineError: it is not installed, or can't run this network.
        """
        if self.why_not:
            raise EngineError(self.why_not)
        return self.make()


@dataclass(frozen=True)
class Chosen:
    """The engine that won.

    Attributes:
        call: the engine, built; see `Engine.build`.
        name: its name.
        precision: the type it computes in.
        copies_weights: whether it holds a copy of the weights.
        seconds: of one call, as `undisturbed` says, by the name of each engine that was timed.
        errors: (relative error, largest allowed) by the name of each engine that ran; (0, 0) of an "eager" that compares only with itself.
        refused: why not, by the name of each engine that was absent, failed or was wrong.
        notes: what a report should say.
    """

    call: Callable[..., Any]
    name: str
    precision: torch.dtype
    copies_weights: bool
    seconds: dict[str, float] = field(default_factory=dict)
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def candidates(
    network: nn.Module, example: tuple[Tensor, ...], dtype: torch.dtype = torch.float32, *, output: Any = None, apart: Apart | None = None
) -> list[Engine]:
    """List the engines, those that can't be built included.

    Args:
        network: in eval mode, on the CPU.
        example: its inputs, tensors of the shapes to run.
        dtype: to compute in where the processor has it: torch.float32, torch.bfloat16 or torch.float16.
        output: what the network returns for the example, if that is known already.
        apart: tells whether the batch may be computed in parts of so many images (`passes.apart`); None if it may not.

    Returns:
        The most promising first; "eager" last.
    """
    if output is None:
        output = _Plain(network)(*example)
    own = next((tensor.dtype for tensor in network.parameters() if tensor.is_floating_point()), example[0].dtype)
    last = Engine(EAGER, own, False, lambda: _Plain(network))
    try:
        form = Form.of(output)
    except EngineError as error:
        absent = partial(Engine, precision=torch.float32, copies_weights=True, make=_never, why_not=str(error))
        return [*(absent(name) for name in ("openvino", "onnxruntime", "channels_last")), last]
    single = cache(partial(recast, network, torch.float32))  # one copy for all exports
    shared = _Shared(lambda: export(single(), example, form))
    whole = _openvino(shared, form, dtype)
    sizes = [] if apart is None or whole.why_not else [part for part in parts(example) if apart(part)]

    def of(part: int) -> _Shared:
        return _Shared(lambda: export(single(), tuple(tensor[:part] for tensor in example), form), shared)

    parted = [_in_parts(of(part), example, form, dtype, part) for part in sizes]
    return [whole, *parted, _onnxruntime(shared, form, dtype), _channels_last(network, example, form, dtype), last]


def parts(example: tuple[Tensor, ...]) -> list[int]:
    """Return of how many images parts of a batch may be: about one and about two `IMAGE`s, by numbers that divide the batch."""
    images, numbers = example[0].shape[0], sum(tensor.numel() for tensor in example)
    possible = [count for count in range(1, images) if images % count == 0]
    wanted = images * IMAGE / numbers
    return sorted({min(possible, key=lambda count: abs(math.log(count / (many * wanted)))) for many in (1, 2)}) if possible else []


def choose(
    network: nn.Module,
    example: tuple[Tensor, ...],
    dtype: torch.dtype = torch.float32,
    *,
    bound: Bound | None = None,
    cached: str | None = None,
    progress: Callable[[str], None] | None = None,
    budget: float = 10.0,
    apart: Apart | None = None,
) -> Chosen:
    """Build every engine, refuse those that compute something else, and keep the fastest.

    While they are timed, each engine holds its copy of the weights; those that lose are freed before this returns.

    Args:
        network: in eval mode, on the CPU; not changed.
        example: its inputs, real-looking, of the shapes to run.
        dtype: to compute in where the processor has it.
        bound: measures an engine's error; `Parity` of the network unless given.
        cached: the engine that won before for this network, machine and shapes: only that one is built and checked, and the others if it
            fails.
        progress: is told, in a few words, what is being done.
        budget: seconds to spend on timing, about; up to twice as many for `FEWEST_ROUNDS`.
        apart: tells whether the batch may be computed in parts, see `candidates`.

    Raises:
        Exception: whatever the network itself raises for the example.
    """
    say = progress or (lambda text: None)
    output = _Plain(network)(*example)
    bound = bound or Parity(network, example, output)
    trial = _Trial(bound, say)
    if cached is not None:  # of parts, which are traced for that, only if it is one
        known = candidates(network, example, dtype, output=output, apart=apart if "/" in cached else None)
        if any(engine.name == cached and trial.admit(engine) for engine in known):
            return trial.chosen(cached, {})
    for engine in candidates(network, example, dtype, output=output, apart=apart):
        if engine.name not in trial.refused:
            trial.admit(engine)
    seconds, fastest = _race(trial, example, budget)
    return trial.chosen(fastest, seconds)


class _Trial:
    """What became of each engine so far."""

    def __init__(self, bound: Bound, say: Callable[[str], None]) -> None:
        self.bound, self.say = bound, say
        self.engines: dict[str, Engine] = {}
        self.calls: dict[str, Callable[..., Any]] = {}
        self.errors: dict[str, tuple[float, float]] = {}
        self.refused: dict[str, str] = {}

    def admit(self, engine: Engine) -> bool:
        """Build an engine and compare its output; say whether it may compete."""
        self.engines[engine.name] = engine
        self.say(f"building {engine.name}")
        try:
            call = engine.build()
            if engine.name == EAGER:  # what the others are measured against, and all there is if they are wrong
                self.calls[engine.name] = call
                self.errors[engine.name] = self._own(call, engine.precision)
                return True
            found, allowed = self.bound(call, engine.precision)
        except Exception as error:  # an engine fails in any way whatever, and there is another
            self.refused[engine.name] = first_line(error)
            return False
        self.errors[engine.name] = (found, allowed)
        if not found <= allowed:
            self.refused[engine.name] = f"computes something else: relative error {found:.2g}, allowed {allowed:.2g}"
            return False
        self.calls[engine.name] = call
        return True

    def _own(self, call: Callable[..., Any], dtype: torch.dtype) -> tuple[float, float]:
        try:
            return self.bound(call, dtype)
        except Exception:  # there is nothing to compare it with but itself
            return 0.0, 0.0

    def chosen(self, name: str, seconds: dict[str, float]) -> Chosen:
        engine = self.engines[name]
        notes = [engine.note] if engine.note else []
        if engine.copies_weights:
            notes.append(f"{name} holds a copy of the weights in a layout of its own, and does not follow changes of the network's")
        return Chosen(self.calls[name], name, engine.precision, engine.copies_weights, seconds, self.errors, self.refused, tuple(notes))


def undisturbed(times: list[float]) -> float:
    """Return the median of the faster half: what else a machine does makes calls slower, never faster, and may hit half of a few."""
    return statistics.median(sorted(times)[: (len(times) + 1) // 2])


def _race(trial: _Trial, example: tuple[Tensor, ...], budget: float) -> tuple[dict[str, float], str]:
    """Time engines in turns, so that what slows the machine down for a while slows all of them; drop those that can't win.

    Returns:
        The seconds of one call by name, and the fastest of those that were timed to the end.
    """
    taken: dict[str, list[float]] = {name: [] for name in trial.calls}
    running = list(taken)
    levels: dict[str, float] = {}
    until = time.perf_counter() + budget
    for count in range(1, ROUNDS + 1):
        trial.say(f"timing {', '.join(running)}: round {count}")
        for name in running:
            try:
                taken[name].extend(_turn(trial.calls[name], example))
            except Exception as error:
                if name == EAGER:
                    raise
                trial.refused[name] = first_line(error)
                del taken[name]
        levels = {name: undisturbed(times) for name, times in taken.items()}
        running = [name for name in running if name in levels] or list(levels)  # the network itself is always there
        best = min(levels[name] for name in running)
        left = until - time.perf_counter()
        most = best * HOPELESS[count > 1][left < budget / 2]
        running = [name for name in running if levels[name] <= most]
        if len(running) == 1 or left < -budget or (count >= FEWEST_ROUNDS and left < 0):
            break
    return levels, min(running, key=levels.__getitem__)


def _turn(call: Callable[..., Any], example: tuple[Tensor, ...]) -> list[float]:
    """Return how long calls took that no engine before disturbs; of short ones the first, with cold caches, does not count."""
    time.sleep(SETTLE)
    first = _seconds(call, example)
    times = [first] if first > SETTLE else []
    while sum(times) < TURN:
        times.append(_seconds(call, example))
    return times


def _seconds(call: Callable[..., Any], example: tuple[Tensor, ...]) -> float:
    start = time.perf_counter()
    call(*example)
    return time.perf_counter() - start


class _Shared:
    """The exported graph, made when the first engine wants it; failing takes as long as succeeding, so it is not tried twice.

    Args:
        make: exports.
        whole: of a graph for a part of a batch, that for all of it: where that one failed, this one does.
    """

    def __init__(self, make: Callable[[], Exported], whole: _Shared | None = None) -> None:
        self.make, self.whole, self.made, self.why_not = make, whole, None, ""

    def get(self) -> Exported:
        if why_not := self.why_not or (self.whole.why_not if self.whole else ""):
            raise EngineError(why_not)
        if self.made is None:
            try:
                self.made = self.make()
            except Exception as error:
                self.why_not = first_line(error)
                raise EngineError(self.why_not) from error
        return self.made


def _in_parts(shared: _Shared, example: tuple[Tensor, ...], form: Form, dtype: torch.dtype, part: int) -> Engine:
    """A core with images of its own waits for no other behind each layer, and its maps stay in its cache."""
    count = example[0].shape[0] // part
    made = _openvino(shared, form, dtype, count)
    together = openvino.streams(count)
    said = f"{part} image{'s' if part > 1 else ''} at a time{f', {together} such parts at once' if together > 1 else ''}"
    return replace(made, name=f"{made.name}/{part}", note="; ".join(filter(None, (said, made.note))))


def _openvino(shared: _Shared, form: Form, dtype: torch.dtype, count: int = 1) -> Engine:
    absent = _absent("openvino") or _absent("onnx")
    try:
        computes = torch.float32 if absent else openvino.precision(dtype)
    except Exception as error:  # an installation that is broken
        absent, computes = f"openvino can't be imported: {first_line(error)}", torch.float32
    note = "" if computes == dtype else f"this processor has no {MEANT[dtype]}: openvino computes in float32"
    return Engine("openvino", computes, True, lambda: openvino.build(shared.get(), form, computes, count), absent, note)


def _onnxruntime(shared: _Shared, form: Form, dtype: torch.dtype) -> Engine:
    absent = _absent("onnxruntime") or _absent("onnx")
    note = "" if dtype == torch.float32 else f"onnxruntime has no {MEANT[dtype]} on CPUs: it computes in float32"
    return Engine("onnxruntime", torch.float32, True, lambda: onnxruntime.build(shared.get(), form), absent, note)


def _channels_last(network: nn.Module, example: tuple[Tensor, ...], form: Form, dtype: torch.dtype) -> Engine:
    computes = pytorch.precision(dtype)
    note = "" if computes == dtype else f"this processor has no {MEANT[dtype]}: PyTorch computes in float32"
    return Engine("channels_last", computes, True, lambda: pytorch.build(network, example, form, computes), note=note)


def _absent(package: str) -> str:
    found = importlib.util.find_spec(package) is not None
    return "" if found else f"{package} is not installed: pip install 'kernelzoo[cpu]'"


def _never() -> Callable[..., Any]:
    raise EngineError("there is nothing to build")


class _Plain:
    """The network itself, without gradients."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __call__(self, *given: Tensor) -> Any:
        with torch.no_grad():
            return self.network(*given)
