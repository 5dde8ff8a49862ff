"""The engines that a CPU has for a network, and the fastest of them for the shapes of its inputs."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.kernels.engines import judge, onnxruntime, openvino, pytorch
from zoo.kernels.engines.engine import EAGER, Chosen, Engine, Plain
from zoo.kernels.engines.export import EngineError, Exported, Form, export, first_line, recast
from zoo.kernels.engines.judge import Judge
from zoo.kernels.engines.race import Bound, Trial, fastest
from zoo.kernels.errors import Untraceable

Apart = Callable[[int], bool]
"""Tells whether a batch may be computed in parts of so many images."""

IMAGE = 3 * 224 * 224
"""Numbers of an image as most networks take it: parts are of one or two such, whose maps a core's cache may hold."""
SAME = 1e-2
"""Relative difference of two answers to the same input up to which threads may have added in another order, in a narrow type."""
MEANT = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.float64: "float64"}


def candidates(
    network: nn.Module,
    example: tuple[Tensor, ...],
    dtype: torch.dtype = torch.float32,
    *,
    output: Any = None,
    apart: Apart | None = None,
    compiler: bool = False,
) -> list[Engine]:
    """List the engines, those that can't be built included.

    Args:
        network: in eval mode, on the CPU.
        example: its inputs, tensors of the shapes to run.
        dtype: to compute in where the processor has it: torch.float32, torch.bfloat16 or torch.float16.
        output: what the network returns for the example, if that is known already.
        apart: tells whether the batch may be computed in parts of so many images (`passes.apart`); None if it may not.
        compiler: let PyTorch's compiler compete, which takes half a minute to build.

    Returns:
        The most promising first; "eager" last.
    """
    if output is None:
        output = Plain(network)(*example)
    own = next((tensor.dtype for tensor in network.parameters() if tensor.is_floating_point()), example[0].dtype)
    said = "" if own == dtype else f"the network itself computes in its own type, {MEANT.get(own, own)}"
    last = Engine(EAGER, own, False, lambda: Plain(network), note=said)
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
    own_ways = [_pytorch(network, example, form, dtype, name) for name in (("compile",) if compiler else ()) + ("channels_last",)]
    return [whole, *parted, _onnxruntime(shared, form, dtype), *own_ways, last]


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
    compiler: bool = False,
) -> Chosen:
    """Build every engine, refuse those that compute something else, and keep the fastest.

    While they are timed, each engine holds its copy of the weights; those that lose are freed before this returns.

    Args:
        network: in eval mode, on the CPU; not changed.
        example: its inputs, real-looking, of the shapes to run.
        dtype: to compute in where the processor has it.
        bound: measures an engine's error; `Judge` of the network unless given.
        cached: the engine that won before for this network, machine and shapes: only that one is built and checked, and the others if it
            fails.
        progress: is told, in a few words, what is being done.
        budget: seconds to spend on timing, about; up to twice as many for `FEWEST_ROUNDS`.
        apart: tells whether the batch may be computed in parts, see `candidates`.
        compiler: let PyTorch's compiler compete.

    Raises:
        Untraceable: the network gives another answer for the same input in the next call.
        Exception: whatever the network itself raises for the example.
    """
    say = progress or (lambda text: None)
    output, second = Plain(network)(*example), Plain(network)(*example)
    if judge.error([second], [output]) > SAME:
        raise Untraceable("it gives another answer for the same input in the next call")
    bound = bound or Judge(network, example, output)
    trial = Trial(bound, say)
    if cached is not None:  # of parts, which are traced for that, only if it is one
        known = candidates(network, example, dtype, output=output, apart=apart if "/" in cached else None, compiler=cached == "compile")
        if any(engine.name == cached and trial.admit(engine) for engine in known):
            return trial.chosen(cached, {})
    for engine in candidates(network, example, dtype, output=output, apart=apart, compiler=compiler):
        if engine.name not in trial.refused:
            trial.admit(engine)
    seconds, winner = fastest(trial, example, budget)
    return trial.chosen(winner, seconds)


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


def _pytorch(network: nn.Module, example: tuple[Tensor, ...], form: Form, dtype: torch.dtype, name: str) -> Engine:
    computes = pytorch.precision(dtype)
    note = "" if computes == dtype else f"this processor has no {MEANT[dtype]}: PyTorch computes in float32"
    return Engine(name, computes, True, lambda: pytorch.build(network, example, form, computes, name == "compile"), note=note)


def _absent(package: str) -> str:
    found = importlib.util.find_spec(package) is not None
    return "" if found else f"{package} is not installed: pip install 'kernelzoo[cpu]'"


def _never() -> Callable[..., Any]:
    raise EngineError("there is nothing to build")
