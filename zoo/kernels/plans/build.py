"""From a network and arguments of one shape to a plan on a GPU that has been checked: passes, balance, choice, proof."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import in_own_dtype, tensors_of
from zoo.kernels.comparing.parity import Reference
from zoo.kernels.comparing.sample_images import natural_images, noise_like
from zoo.kernels.compilation.workers import Compilers
from zoo.kernels.errors import Untraceable, first_line
from zoo.kernels.measuring.fresh_thread import elsewhere
from zoo.kernels.measuring.stopwatch import phase, still_wanted
from zoo.kernels.measuring.timing import is_measured_by_others
from zoo.kernels.measuring.turns import measure, nobody_measures
from zoo.kernels.memory.workspaces import give_back
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place, copied
from zoo.kernels.passes.trace import trace
from zoo.kernels.plans.balance import Means, balance, mean_inputs
from zoo.kernels.plans.contest import Whole, contested, key, remembered
from zoo.kernels.plans.plan import Plan
from zoo.kernels.plans.program import compiled_for
from zoo.kernels.plans.proving import Unlike, captured, checked
from zoo.kernels.plans.rows import rows, untimed
from zoo.kernels.reports.built_plan import Built, empty
from zoo.kernels.reports.progress_bar import bar
from zoo.kernels.reports.report import PlanReport
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.choose import Decision, choose, kernels
from zoo.kernels.tuning.request import Request
from zoo.kernels.tuning.steps import Setting
from zoo.kernels.tuning.tasks import Task

_log = logging.getLogger("zoo.kernels")
_BUILDING = threading.RLock()
"""Flags of cuDNN, TF32 and the collector are the process's: two plans made at once would disturb, and time, each other."""
CHECKED_IMAGES = 16
"""At least so many different images are compared before a plan is used: the error of one image's logits scatters."""


class Narrowing(Protocol):
    """What makes of a graph one in 8 bits, and says what its answers have to be."""

    @property
    def eager(self) -> float:
        """The error of plain eager, where it has such a type; 0 where it has none."""
        ...

    def apply(self, graph: Graph, places: dict[Node, Place]) -> None:
        """Change a graph, fused and placed."""
        ...

    def batches(self, count: int, device: torch.device) -> list[Any]:
        """Return arguments for so many images each, whose answers are known."""
        ...

    def compare(self, outputs: list[list[Tensor]]) -> Any:
        """Return how near the answers to these are, as `Reference.compare` does."""
        ...


def begin_gpu(request: Request, *, contest: bool = True, narrowing: Narrowing | None = None) -> Callable[[], Built]:
    """Choose the kernels of a plan for arguments of these shapes, compare it, and return what captures it, which takes a second or two.

    What captures drops workspaces that other threads may be using, so it has to run in the thread that calls the network.

    Args:
        request: network, arguments and options.
        contest: let PyTorch's compiler compete for the whole network.
        narrowing: what lets layers compute in 8 bits; of a network that takes one tensor of images.

    Raises:
        Untraceable: the network can't be traced, or can't be reproduced even layer by layer.
    """
    network, options, weights = request.network, request.options, request.weights
    typed = in_own_dtype(network, (request.args, request.kwargs))
    tensors = tensors_of(typed)
    if not tensors:
        raise Untraceable(f"{type(network).__name__} is given no tensor")
    capability = torch.cuda.get_device_capability(options.device)
    with (
        _alone(),
        torch.cuda.device(options.device),
        _as_untraceable(network),
        closing(Compilers(capability)) as compilers,
        elsewhere() as do,
    ):
        if any(leaf.numel() == 0 for leaf in tensors):  # of which no pass makes anything
            blank = empty(trace(network, typed[0], typed[1], options.device), options.device, network)
            return lambda: blank

        def again(islands: bool) -> tuple[Graph, dict[Node, Place]]:
            return understand(network, typed[0], typed[1], options.device, islands, options.dtype)

        with phase("reference"):  # drawn by the processor, before processes want it too
            batches = _batches(typed, tensors, options.device) if narrowing is None else narrowing.batches(len(tensors[0]), options.device)
        compiles = options.tune != "none" or not weights.planned  # of later shapes, guesses share most kernels with the first's
        with phase("starting processes"):
            compilers.expect(sum(bool(layer._parameters) for layer in network.modules()) if compiles else 0)
        with phase("tracing"):
            graph, places = again(islands=True)
            if narrowing is not None:
                narrowing.apply(graph, places)
        setting = Setting(options.device, options.dtype, options.tf32)
        with phase("listing kernels"):  # processes begin, or compile, while the reference is computed
            if missing := kernels(graph, places, setting, options.tune, request.choices):
                compilers.prepare(missing)
            elif narrowing is None and compiles:
                _begin(compilers, graph, places, setting, request)
        with phase("reference"):
            reference: Any = narrowing or do(lambda: Reference(network, options.device, options.dtype, options.tf32, batches))
        if not math.isfinite(reference.eager):
            raise Untraceable(f"plain eager itself gives infinity or NaN in {options.dtype}; take a dtype with a larger range")
        tensors = tensors_of(batches[0])
        spec = graph.spec
        dtypes: list[torch.dtype | None] = [leaf.dtype if isinstance(leaf, Node) else None for leaf in graph.outputs]
        whole = Whole(network, typed, dtypes, batches, reference, options, request.choices, key(graph, setting))
        if contest:
            with phase("PyTorch's compiler"):
                known = remembered(whole)
            if known is not None:
                known[1].shapes = [tuple(t.shape) for t in tensors]
                give_back(options.device)
                served = Built(known[0], spec, known[1])
                return lambda: served

        def planned(graph: Graph, places: dict[Node, Place], weights: Weights) -> Callable[[], tuple[Plan, PlanReport]]:
            return _planned(graph, places, setting, replace(request, weights=weights), compilers, batches, reference)

        if options.dtype == torch.float32:
            try:
                capture = planned(graph, places, weights)
            except Unlike:  # by chance the compiler's order of summation may be the worse one
                graph, places = again(islands=False)
                capture = planned(graph, places, weights)
        else:
            with phase("rounding weights"):
                means: Means = do(lambda: _means(network, graph, places, batches, setting)) if weights.means is None else weights.means
                weights.means = means
                balance(graph, means, setting, weights.rounded)
            try:
                capture = planned(graph, places, weights)
            except Unlike as first:  # by chance plain rounding may be the better one for this network
                if narrowing is not None:
                    raise
                graph, places = again(islands=False)
                balance(graph, {}, setting)
                try:
                    capture = planned(graph, places, Weights())
                except Unlike:
                    raise first from None

    def finish() -> Built:
        with _alone(), nobody_measures(), torch.cuda.device(options.device), _as_untraceable(network):
            with phase("capturing"):
                plan, report = capture()
            report.shapes = [tuple(t.shape) for t in tensors]
            rival = None
            if contest:
                with phase("PyTorch's compiler"):
                    rival = contested(plan, report, whole)
            if rival is None:
                plan.release()
            else:
                plan.close()
                weights.clear()
            give_back(options.device)
            return Built(plan if rival is None else rival, spec, report)

    return finish


def _planned(
    graph: Graph,
    places: dict[Node, Place],
    setting: Setting,
    request: Request,
    compilers: Compilers,
    batches: list[Any],
    reference: Reference,
) -> Callable[[], tuple[Plan, PlanReport]]:
    """Choose the kernels of a graph, compare it with the network, and return what captures it."""
    options, weights, choices = request.options, request.weights, request.choices
    with bar("choosing kernels", options.progress) as progress:
        decision = choose(graph, places, setting, options.tune, choices, compilers, progress)
        if options.tune != "none" or not weights.planned:
            compilers.compile(_tasks(graph, places, setting, decision), None, progress)
    compilers.rest()  # their memory may be needed
    weights.planned = True
    with phase("checking"):
        plan, parity, notes = checked(graph, places, decision, setting, weights, choices, batches, reference)

    def capture() -> tuple[Plan, PlanReport]:
        served, found = captured(plan, parity, decision, weights, batches, reference)
        brought = sum(choices.is_shipped(decision.keys[node]) for node in decision.found)
        note = f'{brought} kernels are those that were fastest on another {choices.facts["device"]}; tune="full" times them here'
        said = [*untimed(graph), *([served.note] if served.note else []), *([note] if brought else [])]
        return served, PlanReport([], rows(graph, decision, setting, notes), found, said)

    return capture


def _begin(compilers: Compilers, graph: Graph, places: dict[Node, Place], setting: Setting, request: Request) -> None:
    """Begin to compile the kernels of a plan of which nothing has to be timed; the choice changes a graph, so it has a copy."""
    try:
        graph, places = copied(graph, places)
        compilers.begin(_tasks(graph, places, setting, choose(graph, places, setting, "none", request.choices, compilers)))
    except Exception as error:  # an argument that can't be copied, say: they are compiled when they are chosen
        _log.debug("not compiled beside: %s: %s", type(error).__name__, error)


def _tasks(graph: Graph, places: dict[Node, Place], setting: Setting, decision: Decision) -> list[Task]:
    """Return the kernels that a plan launches."""
    compiled = compiled_for(graph, places, decision.chosen, setting)
    return [Task(node, places, setting, decision.chosen[node], *how) for node, how in compiled.items()]


def is_building() -> bool:
    """Tell whether another thread makes a plan."""
    if _BUILDING.acquire(blocking=False):
        _BUILDING.release()
        return False
    return True


@contextmanager
def _alone() -> Iterator[None]:
    """Make one plan at a time; a thread that calls networks does meanwhile what another's plan waits for."""
    with phase("waiting for another plan"):
        while not _BUILDING.acquire(timeout=0.02):
            still_wanted()
            if not is_measured_by_others():
                measure()
    try:
        yield
    finally:
        _BUILDING.release()


@contextmanager
def _as_untraceable(network: nn.Module) -> Iterator[None]:
    """Turn a failure of a plan into the reason why the network runs unchanged; the network's own refusals stay as they are."""
    try:
        yield
    except (Untraceable, ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(network).__name__} could not be planned: {type(error).__name__}: {first_line(error)}"
        raise Untraceable(reason, lasting=False) from error


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
            graph, places = understand(network, args, kwargs, setting.device, dtype=setting.dtype)
        except Exception:  # the network insists on its batch; rounded to the nearest it may still pass
            return {}
    pictures = [tensors_of(batch) for batch in batches]
    return mean_inputs(graph, places, [pictures, [[noise_like(leaf) for leaf in tensors] for tensors in pictures]], setting)
