"""Where features can be taken from a network: its graph, and what "layer3.*", "stride/8", "embedding" and "relu4_2" mean in it."""

from __future__ import annotations

import difflib
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.nn import functional as F

from zoo.extraction.receptive_fields import Field, Reach, fields
from zoo.networks.model import Model

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
BODY, EMBEDDING, LOGITS, STRIDE, PATCHES = "body", "embedding", "logits", "stride/", "patches"
NEAREST = 5

_tracing = threading.Lock()  # torch.fx patches nn.Module for the whole process while it traces


class UnknownTap(ValueError):
    """A network has no place of this name to take features from; the message names the nearest, and what kinds there are.

    Attributes:
        argument: of the call, that names the place.
    """

    argument = "at"


@dataclass(frozen=True, slots=True)
class Tap:
    """A place in a network, and what is known of the tensor there without running anything.

    Attributes:
        key: of the tensor in the dict that `Features` returns.
        module: whose output it is; "body", "embedding" or "logits" where no module's is.
        channels: size of the channels' axis: 1 of maps and vectors, 2 of tokens (B, L, C), 3 of maps (B, H, W, C); None where a layer's
            shape can't be computed without its numbers.
        stride: pixels of the image between neighbours of the map; None where the place is no part of the image any more: behind a
            global pool, and in tokens.
        receptive_field: side in pixels of the square that one element depends on, of the longer side where they differ, regardless of
            the image's border; None as for `stride`. What gates (squeeze-and-excite) see, the whole image,
            is left out, and so is what attention sees, a window.
    """

    key: str
    module: str
    channels: int | None
    stride: int | None
    receptive_field: int | None
    unknown: str = ""
    """Of a map whose stride and field are not known: the layer behind which they are not, and why."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A network as a graph of leaf modules and functions, and which node is whose output.

    Attributes:
        graph: of ``head(body(x))``, or of ``head(x)``.
        outputs: the node of each module that ran, containers too, in the order in which they finished; where there is one, "body".
        inputs: the node that each module read first.
        closed: modules that could not be looked into, and why; they run as they are, and nothing inside is a place.
        body_end: how many of `outputs` belong to the body.
    """

    graph: fx.Graph
    outputs: dict[str, fx.Node]
    inputs: dict[str, fx.Node] = field(default_factory=dict)
    closed: dict[str, str] = field(default_factory=dict)
    body_end: int = 0

    @property
    def input(self) -> fx.Node:
        """The node of the images."""
        return next(iter(self.graph.nodes))

    @property
    def result(self) -> fx.Node:
        """The node of the logits."""
        return next(iter(reversed(self.graph.nodes))).args[0]  # pyright: ignore[reportReturnType]


class _Whole(nn.Module):
    """`Model.forward` without the check of its input and without auxiliary heads."""

    def __init__(self, network: Model, tracer: _Tracer, head_only: bool) -> None:
        super().__init__()
        self.network, self.head_only = network, head_only
        self.noted = [tracer]  # in a list, for it is no part of the module

    def forward(self, x: Tensor) -> Tensor:
        if not self.head_only:
            x = self.network.forward_body(x)
            self.noted[0].note(BODY, x)
            self.noted[0].body_end = len(self.noted[0].outputs)
        return self.network.forward_head(x)


class _Tracer(fx.Tracer):
    """Takes modules without children as operations, and notes the output of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, fx.Node] = {}
        self.inputs: dict[str, fx.Node] = {}
        self.closed: dict[str, str] = {}
        self.body_end = 0
        self.inlines = False
        """Whether layers without children that are not PyTorch's are looked into, too."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del module_qualified_name
        theirs = type(m).__module__.startswith(("torch.nn.", "torch.ao.")) and not isinstance(m, nn.Sequential)
        if self.inlines:
            return theirs
        return theirs or m._modules.keys() <= {"parametrizations"}  # which make a layer's parameters, and leave it a layer

    def path_of_module(self, mod: nn.Module) -> str:
        return super().path_of_module(mod).removeprefix("network.")

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self.path_of_module(m)
        first = next((a.node for a in (*args, *kwargs.values()) if isinstance(a, fx.Proxy)), None)
        if first is not None:
            self.inputs[name] = first
        before, ran, depth = len(self.graph.nodes), set(self.outputs), len(self.module_stack)
        try:
            result = super().call_module(m, forward, args, kwargs)
        except Exception as error:  # its flow depends on values, or on what only runs with numbers: it stays one operation
            if not name or self.is_leaf_module(m, name):
                raise
            for node in list(reversed(self.graph.nodes))[: len(self.graph.nodes) - before]:
                self.graph.erase_node(node)
            self.outputs = {inner: node for inner, node in self.outputs.items() if inner in ran}
            while len(self.module_stack) > depth:  # torch.fx leaves it as the error found it
                self.module_stack.popitem()
            self.closed[name] = str(error).partition("\n")[0]
            result = self.create_proxy("call_module", name, args, kwargs)
        self.note(name, result)
        return result

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Name parameters as the network does."""
        return super().create_node(kind, target.removeprefix("network.") if kind == "get_attr" else target, *args, **kwargs)

    def note(self, name: str, result: Any) -> None:
        if isinstance(result, fx.Proxy):
            self.outputs.pop(name, None)  # a module that runs twice counts with its last output
            self.outputs[name] = result.node


def trace(network: Model, head_only: bool = False) -> Trace:
    """Write down what `network` computes, without computing it, in the mode that it is in.

    Args:
        network: one of the zoo's, on any device; it is not changed.
        head_only: begin behind the body.

    Raises:
        ValueError: its flow depends on values or shapes, so that there is no one graph of it.
    """
    tracer = _Tracer()
    with _tracing:
        try:
            graph = tracer.trace(_Whole(network, tracer, head_only))
        except (TraceError, TypeError) as error:
            raise ValueError(f"{type(network).__name__} has no one graph: {error}") from error
    return Trace(graph, tracer.outputs, tracer.inputs, tracer.closed, tracer.body_end)


def trace_module(module: nn.Module) -> Trace:
    """Write down what any module computes of one tensor, looking into all layers but PyTorch's own.

    Raises:
        ValueError: its flow depends on values or shapes, so that there is no one graph of it.
    """
    tracer = _Tracer()
    tracer.inlines = True
    with _tracing:
        try:
            graph = tracer.trace(_Wrapped(module))
        except (TraceError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(module).__name__} has no one graph: {error}") from error
    return Trace(graph, tracer.outputs, tracer.inputs, tracer.closed, len(tracer.outputs))


class _Wrapped(nn.Module):
    """A module under the name that `_Tracer` leaves out of paths."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.network = module

    def forward(self, x: Tensor) -> Tensor:
        return self.network.forward(x)


@dataclass(slots=True)
class Places:
    """Every place of a network that a tap can name; `find` tells which a tap means."""

    network: Model
    trace: Trace
    names: dict[str, fx.Node] = field(init=False)
    paper: dict[str, str] = field(init=False)
    facts: dict[fx.Node, Field] = field(init=False)
    strides: dict[int, str] = field(init=False)
    unknown: str = field(init=False, default="")
    """The layer behind which maps have no stride that is known, and why; "" where all have."""

    def __post_init__(self) -> None:
        modules = dict(self.network.named_modules())
        self.facts = fields(self.trace.graph, self.network)
        self.names = {LOGITS: self.trace.result, EMBEDDING: self._embedding(modules), **self.trace.outputs}
        self.paper = {name: module for name, module in self.network.paper_names().items() if module in self.names}
        self.strides = {}
        for name in [*_units(self.network, list(self.trace.outputs)[: self.trace.body_end]), BODY]:
            known = self.facts[self.trace.outputs[name]]
            stride = known.stride
            self.unknown = self.unknown or known.unknown
            if stride is not None:
                self.strides.pop(stride, None)
                self.strides[stride] = name
        for stride, name in self.strides.items():  # layer2 rather than layer2.3 or body, which are the same tensor
            same = [n for n, node in self.trace.outputs.items() if node is self.trace.outputs[name] and n != BODY]
            self.strides[stride] = min(same, key=lambda n: n.count("."), default=name)
        if self.network.first_patch is not None:
            self.names[PATCHES] = self._patches(self.network.first_patch)
            self.strides = {self.network.size_multiple: PATCHES}

    def _patches(self, first: int) -> fx.Node:
        """Put the body's tokens of patches back into rows and columns: a map, each of whose pixels has seen the whole image."""
        stride, pixels = self.network.size_multiple, self.network.input_size
        side, node, graph = pixels // stride, self.trace.outputs[BODY], self.trace.graph
        channels = self.facts[node].channels
        with graph.inserting_after(node):
            node = graph.call_function(operator.getitem, (node, (slice(None), slice(first, None))))
        with graph.inserting_after(node):
            node = graph.call_method("transpose", (node, 1, 2))
        with graph.inserting_after(node):
            node = graph.call_method("unflatten", (node, 2, (side, side)))
        reach = Reach(0, pixels - 1, stride)
        self.facts[node] = Field(None if channels is None else (channels, side, side), 1, (reach, reach))
        return node

    def resized(self, stride: int) -> str:
        """Add the map of patches at another stride, resized by lines between its pixels, and return its name."""
        own, place, graph = self.network.size_multiple, f"{PATCHES}/{stride}", self.trace.graph
        node = self.names[PATCHES]
        known, side = self.facts[node], self.network.input_size // stride
        if stride != own:
            how = {"scale_factor": own / stride, "mode": "bilinear", "align_corners": False, "antialias": own < stride}
            with graph.inserting_after(node):
                node = graph.call_function(F.interpolate, (node,), how)
        reach = Reach(0, self.network.input_size - 1, stride)
        self.facts[node] = Field(None if known.channels is None else (known.channels, side, side), 1, (reach, reach))
        self.names[place] = node
        return place

    def _embedding(self, modules: Mapping[str, nn.Module]) -> fx.Node:
        """Find what the classifier reads, without the dropout before it; of a map, its mean over height and width.

        The classifier is found by its module, whatever that has become: wrapped by an adapter, several layers, or none. Where it was
        replaced together with what held it, that is the classifier.
        """
        classifier = self.network.classifiers[0]
        name = classifier
        while name and name not in self.trace.inputs:
            name = name.rpartition(".")[0]
        node: Any = self.trace.inputs.get(name)
        while isinstance(node, fx.Node) and node.op == "call_module" and isinstance(modules[str(node.target)], DROPOUTS):
            node = node.args[0]
        if not isinstance(node, fx.Node):
            raise ValueError(f"{classifier} of {type(self.network).__name__} reads no tensor of the network, so there is no embedding")
        known = self.facts[node]
        if known.sides is None:
            return node
        with self.trace.graph.inserting_after(node):
            mean = self.trace.graph.call_method("mean", (node, (2, 3) if known.axis == 1 else (1, 2)))
        self.facts[mean] = Field(None if known.channels is None else (known.channels,))
        return mean

    def find(self, tap: str) -> dict[str, str]:
        """Tell which places `tap` means: the key in the result -> the name of the place.

        Raises:
            UnknownTap: none.
        """
        if tap in self.names:
            return {tap: tap}
        if tap in self.paper:
            return {tap: self.paper[tap]}
        if tap.startswith(STRIDE):
            number = tap.removeprefix(STRIDE)
            if number.isdecimal() and int(number) in self.strides:
                return {tap: self.strides[int(number)]}
        elif any(letter in tap for letter in "*?["):
            parts = tap.split(".")
            found = [n for n in self.trace.outputs if _matches(n.split("."), parts)]
            found += [n for n in self.paper if _matches([n], parts)]
            if found:
                return {n: self.paper.get(n, n) for n in found}
        raise self._unknown(tap)

    def tap(self, key: str, name: str) -> Tap:
        """Describe the place `name`."""
        known = self.facts[self.names[name]]
        return Tap(key, name, known.channels, known.stride, known.receptive_field, known.unknown)

    def _unknown(self, tap: str) -> UnknownTap:
        kind = type(self.network).__name__
        strides = [f"{STRIDE}{stride}" for stride in sorted(self.strides)]
        modules = dict(self.network.named_modules())
        lines = [f"{kind} has no tap {tap!r}."]
        if inside := next((name for name in self.trace.closed if tap.startswith(f"{name}.")), None):
            lines = [f"{tap} lies in {inside} of {kind}, which can't be looked into: {self.trace.closed[inside]}."]
        elif tap in modules:
            lines = [f"{tap} of {kind} is no part of the way from the images to the logits, so there are no features of it."]
        elif tap.startswith(STRIDE):
            lines = [f"{kind} has no map at {tap!r}; it has {', '.join(strides) or 'none with a stride'}."]
            if self.unknown:
                lines.append(f"No stride is known behind {self.unknown}.")
            elif not strides:
                lines.append("Tokens have no stride: take them by a module's name.")
        known = [*self.names, *self.paper, *strides]
        short = {name.rpartition(".")[2]: name for name in reversed(known)}  # "denseblock2" is nearest to "features.denseblock2"
        near = [short.get(n, n) for n in difflib.get_close_matches(tap, dict.fromkeys([*known, *short]), n=2 * NEAREST, cutoff=0.5)]
        if near:
            lines.append(f"Nearest: {', '.join(list(dict.fromkeys(near))[:NEAREST])}.")
        top = [name for name in self.trace.outputs if "." not in name and name != BODY]
        parents = [name for name in top if next(modules[name].children(), None) is not None]
        kinds = [
            f"modules ({', '.join(parents[:2] or top[:2])}, …)",
            f'globs ("{(parents or top)[0]}.*")',
            ", ".join(strides),
            '"embedding", "body", "logits"',
        ]
        if self.paper:
            some = list(self.paper)
            kinds.append(f"the paper's names ({some[0]} to {some[-1]})")
        lines.append(f"A tap of it is one of: {'; '.join(kinds)}.")
        return UnknownTap("\n".join(lines))


def _matches(name: Sequence[str], pattern: Sequence[str]) -> bool:
    return len(name) == len(pattern) and all(fnmatchcase(part, wanted) for part, wanted in zip(name, pattern, strict=True))


def _units(network: nn.Module, ran: Sequence[str]) -> list[str]:
    """List the blocks among the modules that ran: children reached through Sequentials, of which one of layers alone is a block.

    So a DenseNet's transition is one, and its inner convolution, which only prepares the next map, is none.
    """

    def descend(module: nn.Module, prefix: str, depth: int) -> list[str]:
        found: list[str] = []
        for name, child in module.named_children():
            layers_only = all(next(part.children(), None) is None for part in child.children())
            if isinstance(child, nn.Sequential) and not (depth and layers_only):
                found += descend(child, f"{prefix}{name}.", depth + 1)
            else:
                found.append(prefix + name)
        return found

    units = set(descend(network, "", 0))
    return [name for name in ran if name in units]
