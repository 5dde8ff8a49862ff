"""From a network and arguments of one shape to something that runs and has been checked: the passes in their order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels import ops
from zoo.kernels.compiling import Compilers, Task
from zoo.kernels.parity import FLOAT32_FLOOR, Parity, Reference, natural_images, own_dtype
from zoo.kernels.passes.fold import fold
from zoo.kernels.passes.fuse import fuse
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.lower import lower
from zoo.kernels.passes.place import Place, place
from zoo.kernels.passes.trace import Untraceable, trace
from zoo.kernels.plans.balance import Means, balance, mean_inputs, noise_like
from zoo.kernels.plans.plan import Plan, give_back
from zoo.kernels.plans.program import COMPUTED, Program, StepFailed
from zoo.kernels.progress import bar
from zoo.kernels.report import PlanReport, Row
from zoo.kernels.tuning.candidates import ATEN, Candidate, Setting, Weights, arguments, reference_op
from zoo.kernels.tuning.choices import Choices
from zoo.kernels.tuning.choose import Decision, choose, errors, precise

_BUILDING = threading.RLock()
"""Flags of cuDNN, TF32 and the collector are the process's: two plans made at once would disturb, and time, each other."""
REPLAYS = 3
"""Times that a graph's answers are compared before it is used: a race is not lost every time."""
CHECKED_IMAGES = 16
"""At least so many different images are compared before a plan is used: the error of one image's logits scatters."""


@dataclass(slots=True)
class Built:
    """A checked plan: `run` takes the tensors among the arguments and returns the flat outputs."""

    run: Callable[[list[Tensor]], list[Any]]
    spec: Any
    report: PlanReport


class Options(Protocol):
    """What a plan needs to know of the fast network."""

    device: torch.device
    dtype: torch.dtype
    tune: Any
    tf32: bool
    progress: bool


def understand(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device | None = None
) -> tuple[Graph, dict[Node, Place]]:
    """Trace, lower, fold, fuse and place: everything that needs no device and no clock."""
    graph = trace(network, args, kwargs, device)
    lower(graph)
    fold(graph)
    fuse(graph)
    return graph, place(graph)


def build_gpu(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], options: Options, weights: Weights, choices: Choices
) -> Built:
    """Make a plan for arguments of these shapes on a GPU, check it, capture it.

    Raises:
        Untraceable: the network can't be traced, or can't be reproduced even layer by layer.
    """
    own = own_dtype(network)
    typed = pytree.tree_map(lambda leaf: leaf.to(own) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, (args, kwargs))
    tensors = _tensors(typed)
    if not tensors:
        raise Untraceable(f"{type(network).__name__} is given no tensor")
    with _BUILDING, torch.cuda.device(options.device), _as_untraceable(network):
        graph, places = understand(network, typed[0], typed[1], options.device)
        if any(leaf.numel() == 0 for leaf in tensors):
            return empty(graph, options, network)
        setting = Setting(options.device, options.dtype, options.tf32)
        batches = _batches(typed, tensors, options.device)
        reference = Reference(network, options.device, options.dtype, options.tf32, batches)
        if not math.isfinite(reference.eager):
            raise Untraceable(f"plain eager itself gives infinity or NaN in {options.dtype}; take a dtype with a larger range")
        if options.dtype == torch.float32:
            plan, report = _planned(graph, places, setting, options, weights, choices, batches, reference)
        else:
            if weights.means is None:
                weights.means = _means(network, graph, places, batches, setting)
            balance(graph, weights.means, setting)
            try:
                plan, report = _planned(graph, places, setting, options, weights, choices, batches, reference)
            except Unlike as first:  # by chance plain rounding may be the better one for this network
                graph, places = understand(network, typed[0], typed[1], options.device)
                balance(graph, {}, setting)
                try:
                    plan, report = _planned(graph, places, setting, options, Weights(), choices, batches, reference)
                except Unlike:
                    raise first from None
        report.shapes = [tuple(t.shape) for t in tensors]
        plan.release()
        give_back(options.device)
        return Built(plan, graph.spec, report)


def _planned(
    graph: Graph,
    places: dict[Node, Place],
    setting: Setting,
    options: Options,
    weights: Weights,
    choices: Choices,
    batches: list[Any],
    reference: Reference,
) -> tuple[Plan, PlanReport]:
    """Choose the kernels of a graph, compare it with the network, and capture it."""
    capability = torch.cuda.get_device_capability(options.device)
    with bar("choosing kernels", options.progress) as progress, closing(Compilers(capability)) as compilers:
        decision = choose(graph, places, setting, options.tune, choices, compilers, progress)
        if decision.tuned:  # timed as if a kernel of ours came behind them
            lonely = Program(graph, places, decision.chosen, setting, weights, overlapping=True).lonely()
            compilers.compile([Task(node, places, setting, decision.chosen[node], followed=False) for node in lonely])
    plan, parity, notes = _checked(graph, places, decision, setting, weights, choices, batches, reference)
    plan, parity = _captured(plan, parity, decision, weights, batches, reference)
    return plan, PlanReport([], _rows(graph, decision, setting, notes), parity, [plan.note] if plan.note else [])


class Unlike(Untraceable):
    """A plan computes something else than the network, and no single step is to blame."""


@contextmanager
def _as_untraceable(network: nn.Module) -> Iterator[None]:
    """Turn a failure of a plan into the reason why the network runs unchanged; the network's own refusals stay as they are."""
    try:
        yield
    except (Untraceable, ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise Untraceable(
            f"{type(network).__name__} could not be planned: {type(error).__name__}: {reason[0] if reason else ''}"
        ) from error


def empty(graph: Graph, options: Options, network: nn.Module) -> Built:
    """A batch of no images has outputs without elements; where an output has some nevertheless, the network has to compute them."""
    if any(isinstance(leaf, Node) and torch.Size(leaf.shape).numel() for leaf in graph.outputs):
        raise Untraceable(f"{type(network).__name__} makes something of an empty tensor")
    made = [torch.empty(leaf.shape, dtype=leaf.dtype, device=options.device) if isinstance(leaf, Node) else leaf for leaf in graph.outputs]
    return Built(
        lambda _: [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in made],
        graph.spec,
        PlanReport([], notes=["an empty batch"]),
    )


def _batches(typed: Any, tensors: list[Tensor], device: torch.device) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Make arguments of the same shapes with other pictures, as many as `CHECKED_IMAGES` asks for."""
    leaves, spec = pytree.tree_flatten(typed)
    count = max(1, tensors[0].shape[0]) if tensors[0].dim() else 1
    made = []
    for seed in range(-(-CHECKED_IMAGES // count)):
        drawn = [
            natural_images(tuple(leaf.shape), device, seed) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in leaves
        ]
        made.append(pytree.tree_unflatten(drawn, spec))
    return made


def _means(network: nn.Module, graph: Graph, places: dict[Node, Place], batches: list[Any], setting: Setting) -> Means:
    """Measure what comes into each layer, on pictures and on noise, few of them: float32 needs more memory than the plan will."""
    if len(batches) == 1:

        def few(leaf: Any) -> Any:
            return leaf[:CHECKED_IMAGES] if isinstance(leaf, Tensor) and leaf.dim() else leaf

        batches = pytree.tree_map(few, batches)
        try:
            args, kwargs = batches[0]
            graph, places = understand(network, args, kwargs, setting.device)
        except Exception:  # the network insists on its batch; rounded to the nearest it may still pass
            return {}
    pictures = [_tensors(batch) for batch in batches]
    return mean_inputs(graph, places, [pictures, [[noise_like(leaf) for leaf in tensors] for tensors in pictures]], setting)


def _tensors(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]


def _checked(
    graph: Graph,
    places: dict[Node, Place],
    decision: Decision,
    setting: Setting,
    weights: Weights,
    choices: Choices,
    batches: list[Any],
    reference: Reference,
) -> tuple[Plan, Parity, dict[Node, str]]:
    """Compare a plan with the network; while it fails, take ATen's operators for the layers whose own error is too large."""
    notes: dict[Node, str] = {}
    floor = FLOAT32_FLOOR if setting.dtype == torch.float32 else 0.0
    while True:
        plan = Plan(Program(graph, places, decision.chosen, setting, weights, overlapping=True))  # the kernels that the graph will hold
        try:
            outputs = [_floats(plan.eager(_tensors(batch))) for batch in batches]
        except StepFailed as failure:
            if decision.chosen[failure.node].op == ATEN:
                raise
            _fall_back(failure.node, str(failure).splitlines()[0], decision, choices, notes)
            choices.save()
            continue
        parity = reference.compare(outputs)
        if parity.passes(floor):
            return plan, parity, notes
        culprits = _culprits(plan, decision, setting, batches[0])
        if not culprits:
            raise Unlike(f"its plan does not reproduce it: {parity}")
        for node, reason in culprits.items():
            _fall_back(node, reason, decision, choices, notes)
        choices.save()


def _fall_back(node: Node, reason: str, decision: Decision, choices: Choices, notes: dict[Node, str]) -> None:
    notes[node] = f"{decision.chosen[node].op} fell back: {reason}"
    decision.chosen[node] = Candidate(ATEN)
    if decision.found.pop(node, None) is not None:
        choices.forget(decision.keys[node])


def _captured(
    plan: Plan, parity: Parity, decision: Decision, weights: Weights, batches: list[Any], reference: Reference
) -> tuple[Plan, Parity]:
    """Capture a plan and compare what its graph answers, call upon call as a user makes them; give up overlap, then the graph, if it fails.

    In a graph kernels follow each other without the pauses that the first check had between them.
    """
    graph, places, setting = plan.program.graph, plan.program.places, plan.setting
    given = [_tensors(batch) for batch in batches]
    floor = FLOAT32_FLOOR if setting.dtype == torch.float32 else 0.0
    fault = ""
    for overlapping in (True, False):
        tried = Plan(Program(graph, places, decision.chosen, setting, weights, overlapping))
        try:
            tried.capture()
        except Exception as error:  # a step that synchronises, or a library that allocates
            fault = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            break
        found = max((reference.compare(_answers(tried, given)) for _ in range(REPLAYS)), key=lambda parity: parity.fast)
        if found.passes(floor):
            tried.note = f"its kernels don't overlap: where they did, the graph had {fault}" if fault else ""
            return tried, found
        tried.close()
        fault = f"a relative error of {found.fast:.1e}"
    alone = Plan(Program(graph, places, decision.chosen, setting, weights))
    alone.note = f"runs without a CUDA graph: {fault}"
    return alone, parity


def _answers(plan: Plan, given: list[list[Tensor]]) -> list[list[Tensor]]:
    """Answer each batch right behind other images: a kernel that reads too early would find the same batch's values, and seem right."""
    found = []
    for tensors in given:
        plan([t.flip(0).neg() if t.is_floating_point() and t.dim() else t for t in tensors])
        found.append(_floats(plan(tensors)))
    return found


def _floats(outputs: list[Any]) -> list[Tensor]:
    return [leaf.clone() for leaf in outputs if isinstance(leaf, Tensor)]


def _culprits(plan: Plan, decision: Decision, setting: Setting, batch: Any) -> dict[Node, str]:
    """Return the steps that are worse than ATen's on the values that reach them, or the worst of the rest, with the errors."""
    tensors = _tensors(batch)
    images = dict(zip(plan.program.graph.inputs, tensors, strict=True))
    found: dict[Node, tuple[float, float, float]] = {}

    def probe(node: Node, inputs: list[Any], value: Any) -> None:
        if decision.chosen[node].op == ATEN:
            return
        given = [
            images[s].to(setting.dtype).contiguous(memory_format=torch.channels_last) if s.op == "input" else x
            for s, x in zip(node.inputs, inputs, strict=True)
        ]
        expected = precise(node, given, setting)
        from zoo.kernels.tuning.candidates import bind

        mine, theirs = max(errors(value, expected)), max(errors(bind(node, Candidate(ATEN), setting)(given, None), expected))
        found[node] = (mine / max(theirs, 1e-9), mine, theirs)

    plan.eager(tensors, probe)
    worst = sorted(found, key=lambda node: found[node][0], reverse=True)
    bad = [node for node in worst if found[node][0] > 1.1] or worst[:1]
    return {node: f"error {found[node][1]:.1e}, ATen's {found[node][2]:.1e}" for node in bad}


def _rows(graph: Graph, decision: Decision, setting: Setting, notes: dict[Node, str]) -> list[Row]:
    from zoo.kernels.roofline import floor_us, limits

    rows = []
    ceilings = limits(setting.device)
    for node in graph.steps():
        if node.op not in COMPUTED:
            continue
        choice, candidate = decision.found.get(node), decision.chosen.get(node, Candidate(ATEN))
        row = Row(", ".join(node.layers), str(candidate), node.shape, note=notes.get(node, ""))
        if choice is not None:
            row.us, row.replaced_us = choice.us, choice.aten_us
            flop, size = cost(node, setting)
            row.roofline = floor_us(flop, size, setting.dtype, ceilings) / choice.us if choice.us and size else None
        rows.append(row)
    return rows


def cost(node: Node, setting: Setting) -> tuple[int, int]:
    """Return the floating-point operations and the bytes of a step: each input and output once."""
    if node.op in ("squeeze_excite", "depthwise_squeeze"):
        return 0, sum(_bytes(n, setting) for n in (*node.inputs, node)) if node.op == "depthwise_squeeze" else _bytes(
            node.inputs[0], setting
        )
    name = reference_op(node)
    meta = Setting(torch.device("meta"), setting.dtype, setting.tf32)
    inputs = {
        role: torch.empty(source.shape, dtype=setting.dtype, device="meta") for role, source in zip(node.roles, node.inputs, strict=True)
    }
    return ops.load(name).cost(**inputs, **arguments(node, name, meta))


def _bytes(node: Node, setting: Setting) -> int:
    return torch.Size(node.shape).numel() * setting.dtype.itemsize
