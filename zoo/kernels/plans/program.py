"""Steps bound to kernels, run one after the other; a CUDA graph records exactly this run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import bound, run_aten
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.place import Buffer, Place
from zoo.kernels.plans.arena import Changed
from zoo.kernels.plans.segment import Segment
from zoo.kernels.tuning.binding import Bound, Weights, Workspace, bind, packing
from zoo.kernels.tuning.steps import ATEN, COMPUTED, FOREIGN, IMAGE_OPS, OVERWRITES, UNPLACED, Candidate, Setting

Probe = Callable[[Node, list[Any], Any], None]


class StepFailed(RuntimeError):
    """A step's kernel raised; `node` says which step."""

    def __init__(self, node: Node, error: Exception) -> None:
        super().__init__(f"{', '.join(node.layers)}: {type(error).__name__}: {error}")
        self.node = node


def compiled_for(
    graph: Graph, places: dict[Node, Place], chosen: dict[Node, Candidate], setting: Setting
) -> dict[Node, tuple[bool, torch.dtype | None]]:
    """Return the steps with kernels of ours, and what they are compiled for: whether another of ours follows, and another dtype."""
    steps = list(graph.steps())
    ours = _ours(steps, chosen)
    followed = _followed(steps, places, ours)
    return {node: (node in followed, _written(graph, node, chosen[node], setting)) for node in steps if node in ours}


def _results(graph: Graph) -> set[Node]:
    return {leaf for leaf in graph.outputs if isinstance(leaf, Node)}


def _ours(steps: Sequence[Node], chosen: dict[Node, Candidate]) -> set[Node]:
    """Return the steps with kernels of ours."""
    return {node for node in steps if node.op in COMPUTED and chosen.get(node, Candidate(ATEN)).op not in FOREIGN}


def _followed(steps: Sequence[Node], places: dict[Node, Place], ours: set[Node]) -> set[Node]:
    """Return the steps that, as the next that launches anything, are kernels of ours, with no copy between them."""
    found = set[Node]()
    follows = False  # of the step behind the one that is looked at
    for node in reversed(steps):
        if follows and node in ours and not (node in places and node.op in UNPLACED):
            found.add(node)
        if not (node.op in ("view", "item") or (node.op == "second" and node not in places)):
            follows = node in ours
    return found


def _written(graph: Graph, node: Node, candidate: Candidate, setting: Setting) -> torch.dtype | None:
    """Let a last layer that can write the network's own dtype do so: float32 logits from the float32 accumulator."""
    able = candidate.op in ("conv", "global_pool", "pointwise", ATEN) and node.op in ("conv", "mean", "pointwise")
    if not able or node.dtype == setting.dtype or not node.dtype.is_floating_point or node.attrs.get("groups", 1) != 1:
        return None
    results, readers = _results(graph), [n for n in graph.nodes if node in n.inputs]
    viewed = len(readers) == 1 and node not in results and readers[0].op == "view" and readers[0] in results
    last = (node in results and not readers) or (viewed and not any(readers[0] in n.inputs for n in graph.nodes))
    return node.dtype if last else None


class Program:
    """A network at one input shape, ready to run.

    Args:
        graph: what to compute, placed and merged.
        places: where parts of concatenations lie.
        chosen: the candidate of each step of a `COMPUTED` kind; ATen's where a step is missing.
        setting: device and dtype.
        weights: where packed weights are kept.
        overlapping: lets each of our kernels that is followed by another of ours begin that one early.
        compiled: lets PyTorch's compiler run the islands.
    """

    def __init__(
        self,
        graph: Graph,
        places: dict[Node, Place],
        chosen: dict[Node, Candidate],
        setting: Setting,
        weights: Weights,
        overlapping: bool = False,
        compiled: bool = True,
    ) -> None:
        self.graph, self.places, self.setting = graph, places, setting
        self.steps = list(graph.steps())
        index = {node: i for i, node in enumerate(self.steps)}
        results = _results(graph)
        self.forms: dict[Node, list[tuple[str, dict[str, Any]]]] = {node: [] for node in graph.inputs}
        self.bound: dict[Node, Bound] = {}
        self._packed: dict[Node, str] = {}
        self._widened: dict[Node, torch.dtype] = {}
        workspace = Workspace()
        for node in self.steps:
            if node.op in COMPUTED:
                candidate = chosen.get(node, Candidate(ATEN))
                image = candidate.op in IMAGE_OPS
                if (out_dtype := _written(graph, node, candidate, setting)) is not None:
                    self._widened[node] = out_dtype
                self.bound[node] = bind(node, candidate, setting, weights, out_dtype, workspace)
                if image:
                    self._packed[node] = ""
            image = node in self._packed
            for source in node.inputs:
                if source.op == "input":
                    form = ("packed", packing(node, source.shape)) if image else ("map", {})
                    if image:
                        self._packed[node] = str(form[1])
                    if form not in self.forms[source]:
                        self.forms[source].append(form)
        for leaf in results:
            if leaf.op == "input" and ("map", {}) not in self.forms[leaf]:
                self.forms[leaf].append(("map", {}))
        last: dict[Node, int] = {}
        for i, node in enumerate(self.steps):
            for source in node.inputs:
                last[source] = i
        readers = {source for node in self.steps if node.op not in _ANY_LAYOUT for source in node.inputs}
        self._maps = {node for node in readers if len(node.shape) == 4}
        islands = [node for node in self.steps if node.op == "island"]
        self._segments = {node: Segment(node, setting, _read_as_maps(node, self._maps, self.steps), compiled) for node in islands}
        self._constants: dict[Node, Tensor] = {}
        self._overlaps = _followed(self.steps, places, _ours(self.steps, chosen)) if overlapping else set[Node]()
        self.dead: list[list[Node]] = [[] for _ in self.steps]
        for node, i in last.items():
            if (node in index or node.op == "input") and node not in results:
                self.dead[i].append(node)
        kernels = {node for node in self.bound if chosen.get(node, Candidate(ATEN)).op != ATEN}
        kept = results.union(places, self._widened, (node for node in self.steps if "stored" in node.attrs))
        self._in_place: dict[Node, int] = {}
        for node in kernels - kept:
            number = _overwritten(node, chosen[node])
            if number is not None and node.inputs[number] in self.dead[index[node]] and self._is_its_own(node, number, kernels):
                self._in_place[node] = number
        ends: dict[Buffer, int] = {}
        for node, spot in places.items():
            end = len(self.steps) if node in results else last.get(node, index.get(node, 0))
            ends[spot.buffer] = max(ends.get(spot.buffer, 0), end)
        self.ends: list[list[Buffer]] = [[] for _ in range(len(self.steps) + 1)]
        for buffer, i in ends.items():
            self.ends[i].append(buffer)

    def constants(self) -> Iterator[Tensor]:
        """Return the tensors that outputs may show and no step writes: constants that were read, and those that are outputs."""
        yield from self._constants.values()
        for leaf in self.graph.outputs:
            if isinstance(leaf, Node) and leaf.op == "const":
                yield leaf.attrs["tensor"]

    def _is_its_own(self, node: Node, number: int, kernels: set[Node]) -> bool:
        """Tell whether a step's input has memory of its result's size that nothing else shows: only kernels made or read it, no view."""
        x = node.inputs[number]
        readers = {step for step in self.steps if x in step.inputs and step.op != "second"}  # which is memory of its own
        return x in kernels and x not in self.places and x.shape == node.shape and readers <= kernels

    def run(self, inputs: Iterable[list[Tensor]], probe: Probe | None = None) -> list[Any]:
        """Compute the network's flat outputs.

        Args:
            inputs: for each tensor input its forms, in the order of `forms`; let go of when the last step that reads them has run.
            probe: is called with every computed step, its inputs and its value.
        """
        values = self._named(inputs)
        buffers: dict[Buffer, Tensor] = {}
        pairs: dict[Node, Any] = {}
        for i, node in enumerate(self.steps):
            value = self._step(node, values, buffers, pairs, probe)
            values[node] = value
            for dead in self.dead[i]:
                values.pop(dead, None)
                pairs.pop(dead, None)
            for buffer in self.ends[i]:
                buffers.pop(buffer, None)
        return [self._result(leaf, values) if isinstance(leaf, Node) else leaf for leaf in self.graph.outputs]

    def _named(self, inputs: Iterable[list[Tensor]]) -> dict[Node, Any]:
        """Return each tensor input's forms by their names."""
        return {
            node: {(kind, str(how)): tensor for (kind, how), tensor in zip(self.forms[node], tensors, strict=True)}
            for node, tensors in zip(self.graph.inputs, inputs, strict=True)
        }

    def _result(self, leaf: Node, values: dict[Any, Any]) -> Any:
        value: Tensor = leaf.attrs["tensor"].to(self.setting.device) if leaf.op == "const" else self._read(leaf, values, None)
        return value.to(leaf.dtype) if value.is_floating_point() and leaf.dtype.is_floating_point else value

    def _read(self, source: Node, values: dict[Any, Any], how: str | None) -> Any:
        if source.op == "input":
            return values[source]["map", "{}"] if how is None else values[source]["packed", how]
        if source.op == "const":
            if source not in self._constants:
                tensor: Tensor = source.attrs["tensor"].to(self.setting.device)
                tensor = tensor.to(self.setting.dtype) if tensor.is_floating_point() else tensor
                self._constants[source] = tensor.contiguous(memory_format=torch.channels_last) if source in self._maps else tensor
            return self._constants[source]
        return values[source]

    def _home(self, node: Node, buffers: dict[Buffer, Tensor]) -> Tensor | None:
        spot = self.places.get(node)
        if spot is None:
            return None
        if spot.buffer not in buffers:
            shape = spot.buffer.shape
            buffers[spot.buffer] = torch.empty(
                shape, dtype=self.setting.dtype, device=self.setting.device, memory_format=torch.channels_last
            )
        return buffers[spot.buffer][:, spot.offset : spot.offset + node.shape[1]]

    def _step(self, node: Node, values: dict[Any, Any], buffers: dict[Buffer, Tensor], pairs: dict[Node, Any], probe: Probe | None) -> Any:
        inputs = [self._read(source, values, self._packed.get(node)) for source in node.inputs]
        home = self._home(node, buffers)
        if node.op == "second":
            return self._settle(pairs.pop(node.inputs[0]), home)  # its only reader: it must not live as long as the first value
        if node.op == "cat":
            assert home is not None  # place() gives every concatenation one
            self._concatenate(node, inputs, home)
            return home
        if node in self.bound:
            with self._allowing(node):
                try:
                    value = self.bound[node](inputs, self._target(node, inputs, home, probe))
                except (torch.OutOfMemoryError, Changed):  # which say nothing of the kernel
                    raise
                except Exception as error:  # the compiler's own errors too: their classes share no base
                    raise StepFailed(node, error) from error
            if probe is not None:
                probe(node, inputs, value)
            if isinstance(value, tuple):
                value, pairs[node] = value
            return self._settle(value, home)
        value = self._move(node, inputs)
        return self._settle(value, home) if isinstance(value, Tensor) else value

    def _target(self, node: Node, inputs: list[Any], home: Tensor | None, probe: Probe | None) -> Tensor | None:
        """Return where a step writes; None where it makes a map. Who probes wants to see the inputs as they were."""
        if node in self._in_place and probe is None:
            return inputs[self._in_place[node]]
        return None if node.op in UNPLACED else home

    def _allowing(self, node: Node) -> AbstractContextManager[None]:
        if node not in self._overlaps:
            return nullcontext()
        from zoo.kernels.ops._overlap import followed_by_ours

        return followed_by_ours(True)

    def _settle(self, value: Tensor, home: Tensor | None) -> Tensor:
        """Copy a value that was computed elsewhere to its place."""
        if home is None or value.data_ptr() == home.data_ptr():
            return value
        home.copy_(value)
        return home

    def _concatenate(self, node: Node, inputs: list[Tensor], home: Tensor) -> None:
        mine, offset = self.places[node], 0
        for source, value in zip(node.inputs, inputs, strict=True):
            spot = self.places.get(source)
            there = spot is not None and spot.buffer is mine.buffer and spot.offset == mine.offset + offset
            if not there:
                home[:, offset : offset + source.shape[1]].copy_(value)
            offset += source.shape[1]

    def _move(self, node: Node, inputs: list[Any]) -> Any:
        match node.op:
            case "view":
                return self._laid(inputs[0].reshape(node.attrs["shape"]), node)
            case "rows":
                return inputs[0].permute(0, 2, 3, 1).reshape(node.shape)
            case "pad":
                top, bottom, left, right = node.attrs["padding"]
                return _padded(inputs[0], (left, right, top, bottom), node.attrs["value"])
            case "island":
                return self._segments[node](inputs)
            case "item":
                return self._dense(inputs[0][node.attrs["index"]], node)
            case "aten" if (margin := _margin(node)) is not None:
                return self._dense(_padded(inputs[0], *margin), node)
            case "aten":
                return self._dense(run_aten(node, inputs, self.setting.device), node)
            case _:
                raise NotImplementedError(f"no pass has made anything of {node}")

    def _dense(self, value: Any, node: Node) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point() and value.dtype != self.setting.dtype:
            value = value.to(self.setting.dtype)
        return self._laid(value, node)

    def _laid(self, value: Tensor, node: Node) -> Tensor:
        """Lay out as a map what a kernel reads; what only PyTorch's operators read may lie as it does."""
        if node not in self._maps or value.is_contiguous(memory_format=torch.channels_last):
            return value
        return _blank(value.shape, value).copy_(value)


_ANY_LAYOUT = ("view", "item", "aten", "island")
"""Steps that read values in whatever memory they lie."""


def _read_as_maps(island: Node, maps: set[Node], steps: Sequence[Node]) -> set[Node]:
    """Return the results of an island that kernels read as maps."""
    results: list[Node] = island.attrs["results"]
    if len(results) == 1:
        return set(results) if island in maps else set()
    return {results[item.attrs["index"]] for item in steps if item.op == "item" and item.inputs[0] is island and item in maps}


def _blank(shape: Sequence[int], like: Tensor) -> Tensor:
    """Ask for a map by the one call that an arena can answer; what an operator makes for itself lies outside of it."""
    form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=form)


def _margin(node: Node) -> tuple[Sequence[int], float] | None:
    """Return the widths and the value of the margin that an operator makes; None of another operator, and where it cuts off too."""
    if node.attrs["func"] is not torch.ops.aten.constant_pad_nd.default:
        return None
    _, widths, value = bound(node)
    return (widths, value) if all(width >= 0 for width in widths) else None


def _padded(x: Tensor, widths: Sequence[int], value: float) -> Tensor:
    """Return a map with a margin; widths as `torch.nn.functional.pad` takes them, none negative."""
    before = [*reversed(widths[::2])]
    first = x.dim() - len(before)
    shape = [*x.shape[:first], *(size + a + b for size, a, b in zip(x.shape[first:], before, reversed(widths[1::2]), strict=True))]
    out = _blank(shape, x).fill_(value)
    inner = out
    for axis, width in enumerate(before, first):
        inner = inner.narrow(axis, width, x.shape[axis])
    inner.copy_(x)
    return out


def _overwritten(node: Node, candidate: Candidate) -> int | None:
    """Return the number of the input that a step's kernel may write its result over, element by element; None if there is none."""
    role = OVERWRITES.get(candidate.op)
    if role not in node.roles:
        return None
    number = node.roles.index(role)
    return number if candidate.op == "pointwise" or node.inputs.count(node.inputs[number]) == 1 else None
