"""A plan on a CPU: one engine for the whole network, the fastest that computes the same."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from zoo.kernels.comparing.copies import in_own_dtype, on_device, own_dtype
from zoo.kernels.comparing.parity import FLOAT32_FLOOR, Parity
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.engines.engine import NotFinite, Plain
from zoo.kernels.engines.export import finite, within
from zoo.kernels.engines.indices import is_index, rows_of
from zoo.kernels.engines.keep_nan import LARGEST
from zoo.kernels.errors import Untraceable
from zoo.kernels.measuring.stopwatch import phase
from zoo.kernels.passes.apart import alike, apart
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.lower import lower
from zoo.kernels.passes.trace import trace
from zoo.kernels.reports.built_plan import Built, empty
from zoo.kernels.reports.progress_bar import bar
from zoo.kernels.reports.report import PlanReport, Row
from zoo.kernels.tuning.choices import Choice
from zoo.kernels.tuning.request import Request

CPU = torch.device("cpu")
NOT_FINITE = "NaN or infinity was in a call, in its input or inside: the network itself answers such"
NO_INDEX = "a negative whole number, or an index beyond its table, was in a call: the network itself answers such"


def build_cpu(request: Request) -> Built:
    """Choose the fastest engine for arguments of these shapes on the CPU; every engine's output is compared first."""
    from zoo.kernels.engines import choose as engines

    network, options, weights, choices = request.network, request.options, request.weights, request.choices
    own = own_dtype(network)
    args, kwargs = in_own_dtype(network, (request.args, request.kwargs))
    leaves, spec = pytree.tree_flatten((args, kwargs))
    here = all(tensor.device.type == "cpu" for tensor in (*network.parameters(), *network.buffers()))
    if not here and weights.copy is None:
        weights.copy = on_device(network, CPU)
    model = OfTensors(evaluating(network if weights.copy is None else weights.copy), leaves, spec)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise Untraceable(f"{type(network).__name__} is given no tensor")
    example = tuple(natural_images(tuple(t.shape), t.device).to(own) if t.is_floating_point() else t.clone() for t in tensors)
    with phase("tracing"):
        graph = trace(network, args, kwargs)  # refuses what an engine would silently do only once, such as counting its calls
    if any(t.numel() == 0 for t in tensors):
        return empty(graph, options.device, network)
    rows = rows_of(graph)
    shapes = [tuple(t.shape) for t in tensors]
    key = key_of(network, graph, own, options.dtype, shapes)
    level = options.tune if options.tune in ("none", "full") else "quick"
    known = choices.get(key, level)
    with bar("choosing kernels", options.progress) as progress, phase("making and timing engines"):
        say = None if progress is None else lambda text: progress(0, 1, text)
        untimed = "onnxruntime" if options.tune == "none" else None
        cached, parts = known.op if known else untimed, apart_in(network, args, kwargs, graph)
        chosen = engines.choose(model, example, options.dtype, cached=cached, progress=say, apart=parts, compiler=level == "full")
    if chosen.seconds:
        mine, eager = chosen.seconds[chosen.name], chosen.seconds.get("eager", 0.0)
        choices.put(key, Choice(chosen.name, {}, 1e6 * mine, 1e6 * eager, len(chosen.seconds), level))
        choices.save()
        known = choices.get(key)
    error, _ = chosen.errors[chosen.name]
    row = Row(
        "the whole network",
        chosen.name,
        output_shape(graph),
        note="; ".join(f"{name}: {reason}" for name, reason in chosen.refused.items()),
    )
    if known is not None and known.op == chosen.name:
        row.us, row.replaced_us = known.us, known.aten_us or None
    parity = Parity(error, chosen.eager, example[0].shape[0] if example[0].dim() else 1, FLOAT32_FLOOR)
    report = PlanReport(shapes, [row], parity, list(chosen.notes))

    itself = engines.Plain(model) if chosen.name not in (engines.EAGER, "channels_last") else None  # PyTorch keeps NaN
    return Built(runner(chosen.call, itself, model, graph, own, report, rows), graph.spec, report)


def output_shape(graph: Graph) -> tuple[int, ...]:
    """Return the shape of the first tensor that a network gives, as a row of `why` shows it."""
    return next((tuple(leaf.shape) for leaf in graph.outputs if isinstance(leaf, Node)), ())


def runner(
    call: Callable[..., Any],
    itself: Callable[..., Any] | None,
    model: nn.Module,
    graph: Graph,
    own: torch.dtype,
    report: PlanReport,
    rows: Sequence[int] = (),
) -> Callable[[list[Tensor]], list[Any]]:
    """Return what answers a plan's calls by an engine, and by the network itself where NaN or infinity is.

    Args:
        call: the engine.
        itself: the network where the engine may lose NaN; None where it keeps it.
        model: the network as a function of its tensors.
        graph: of the network.
        own: the type that the engine is given.
        report: gets a note at the first such call.
        rows: that each input may name, see `rows_of`; none where no input has whole numbers.
    """
    flat = getattr(call, "flat", None) if graph.spec.is_leaf() else None  # without a structure that is taken apart again
    fits = partial(within, most=LARGEST)  # up to which engines notice what arises inside, see `keep_nan`

    def run(given: list[Tensor]) -> list[Any]:
        cast = [t if t.dtype is own or not t.is_floating_point() else t.to(own) for t in given]
        if itself is not None and rows and not all(map(is_index, cast, rows)):  # engines answer what PyTorch refuses
            if NO_INDEX not in report.notes:
                report.notes.append(NO_INDEX)
            return pytree.tree_leaves(Plain(model)(*cast))
        if itself is None or all(map(fits, cast)):
            with suppress(NotFinite):
                made = pytree.tree_leaves(call(*cast)) if flat is None else flat(*cast)
                if itself is None or all(finite(one) for one in made if isinstance(one, Tensor)):
                    return made
        if NOT_FINITE not in report.notes:
            report.notes.append(NOT_FINITE)
        return pytree.tree_leaves(Plain(model)(*cast))

    return run


def key_of(network: nn.Module, graph: Graph, own: torch.dtype, dtype: torch.dtype, shapes: list[tuple[int, ...]]) -> str:
    """Name what engines are chosen for: the operators, in the order in which they run, and the types; weights' values do not matter."""
    digest, numbers = hashlib.blake2s(digest_size=8), {node: number for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        digest.update(repr((node.said(), [numbers[source] for source in node.inputs])).encode())
    types = "as ".join(f"{each} ".removeprefix("torch.") for each in dict.fromkeys((own, dtype)))
    parameters = sum(p.numel() for p in network.parameters())
    return f"engine {type(network).__name__} {parameters} parameters {digest.hexdigest()} {types}{shapes}"


def apart_in(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], graph: Graph) -> Callable[[int], bool] | None:
    """Tell of which sizes parts of the batch may be: None if images are not answered one by one. The graph is lowered for that."""
    lower(graph)
    if not apart(graph):
        return None

    def fits(part: int) -> bool:
        some = pytree.tree_map(lambda leaf: leaf[:part] if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        try:
            smaller = trace(network, *some)
        except (Untraceable, ValueError):  # a number of images is written into it
            return False
        lower(smaller)
        return alike(graph, smaller)

    return fits


class OfTensors(nn.Module):
    """A network as a function of the tensors among its arguments."""

    def __init__(self, network: nn.Module, leaves: list[Any], spec: Any) -> None:
        super().__init__()
        self.network = network
        kept = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def arranged(tensors: tuple[Tensor, ...]) -> Any:
            given = list(kept)
            for index, tensor in zip(places, tensors, strict=True):
                given[index] = tensor
            return pytree.tree_unflatten(given, spec)

        self.arranged = arranged  # a function, which copies of this module share: torch 2.11 warns where a copy is made of a spec

    def forward(self, *tensors: Tensor) -> Any:
        """Call the network with these tensors in their places."""
        args, kwargs = self.arranged(tensors)
        return self.network(*args, **kwargs)


def evaluating(network: nn.Module) -> nn.Module:
    """Return the network in eval mode, a copy of its structure that shares its tensors, so that its own mode stays."""
    shared = {id(tensor): tensor for tensor in (*network.parameters(), *network.buffers())}
    return copy.deepcopy(network, shared).eval()
