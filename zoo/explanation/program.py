"""What a network computes, as two halves of a graph around a tap: what lies before is only run, what lies behind is differentiated."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from zoo.explanation.apart import apart
from zoo.explanation.geometry import Axis
from zoo.explanation.traces import traced
from zoo.extraction.receptive_fields import Reach
from zoo.extraction.taps import BODY, EMBEDDING, LOGITS, Places, UnknownTap
from zoo.networks.layers import Conv2dEven, Conv2dSame
from zoo.networks.model import Model
from zoo.networks.vit import Attention

INPUT = "input"
"""The tap of the images themselves."""
WIDEST = 1024
"""Weights of a filter that a BatchNorm is folded into for one pass: of more, scaling them takes longer than the norm of so small a map."""
Rule = Callable[[fx.Node, Any, tuple[Any, ...], dict[str, Any]], Any]
"""Computes a node in another way, given its layer (None for a function) and its arguments; NotImplemented leaves it as it is."""


class CannotExplain(ValueError):
    """A method has no definition for this network, target or tap; the message names what it has none for, and what to do.

    Attributes:
        argument: "method", "target" or "at", where that is given a value that no method would take; else None.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument


@dataclass(frozen=True, slots=True)
class Layout:
    """Where channels, rows and columns of a tap's tensor are.

    Attributes:
        axis: of the channels: 1 in maps (B, C, H, W), 3 in maps (B, H, W, C), 2 in tokens (B, L, C).
        special: tokens before those of the patches.
    """

    axis: int
    special: int = 0

    def map_of(self, x: Tensor, ratio: float = 1.0) -> Tensor:
        """Return (B, C, H, W) of a tap's tensor or of its gradient; `ratio` is the images' height over their width."""
        if self.axis == 1:
            return x
        if self.axis == 3:
            return x.permute(0, 3, 1, 2)
        patches = x[:, self.special :].transpose(1, 2)
        rows = round(math.sqrt(patches.shape[2] * ratio))
        return patches.unflatten(2, (rows, -1))

    def tensor_of(self, x: Tensor, like: Tensor) -> Tensor:
        """Return what `map_of` undoes, the special tokens as they are in `like`."""
        if self.axis == 1:
            return x
        if self.axis == 3:
            return x.permute(0, 2, 3, 1)
        return torch.cat([like[:, : self.special].expand(x.shape[0], -1, -1), x.flatten(2).transpose(1, 2)], 1)


class Program:
    """A network cut at a tap. It shares the network's numbers and nothing else.

    Attributes:
        at: the tap as messages name it.
        tap, result: nodes of `graph`.
        layout: of the tap's tensor.
        first_patch: of a transformer's tokens, the first that stands for a patch; None of other networks.
        read: of a transformer's tokens, those that its head reads, each slice by its mean.
        ends: "logits" or "embedding".
        feature: whether `features` takes the tap by its name.
        alone: whether all that lies behind the tap depends on the image through it only.
        reach: where the tap's cells lie in the images, by the layers' own numbers; None where that isn't known.
    """

    def __init__(self, network: nn.Module, at: str | None, device: torch.device, result: str = LOGITS, fold: bool = True) -> None:
        """Cut `network` at `at`: a tap of `features`, "input", or None for the last map that the head reads.

        With `fold`, each BatchNorm is folded into the layer that it alone reads; before a tap, only where that costs less than it saves.

        Raises:
            UnknownTap: there is no such place.
            CannotExplain: the place is no map, or a foreign module is given without a place.
            ValueError: the network has no graph.
        """
        self.name, self.ends = type(network).__name__, result
        own = apart(network, device)
        self.dtype = next((p.dtype for p in own.parameters()), torch.float32)
        written, places = traced(own)
        ends = {LOGITS: written.result} if places is None else {LOGITS: written.result, EMBEDDING: places.names[EMBEDDING]}
        if result not in ends:
            raise CannotExplain(f"{self.name} is no network of the zoo, so it has no {result!r}; explain a class of its output instead")
        self.graph, self.result = written.graph, ends[result]
        self.closed = written.closed
        self.layers: dict[str, nn.Module] = dict(own.named_modules())
        self._tensors = own
        self.first_patch = own.first_patch if isinstance(own, Model) else None
        self.read: tuple[slice, ...] = getattr(own, "read", ()) or (slice(self.first_patch, None),)
        self.reach: tuple[Reach, Reach] | None = None
        if at == INPUT:
            self.at, self.tap, self.layout = INPUT, written.input, Layout(1)
            self.reach = (Reach(), Reach())
        elif isinstance(own, Model) and places is not None:
            self.at, self.tap = self._usual(own, places) if at is None else self._named(places, at)
            self._describe(own, places)
        elif at is None:
            raise CannotExplain(
                f"{self.name} is no network of the zoo: name the layer whose map is explained, explain(model, images, at=…)"
            )
        elif at not in written.outputs:
            raise UnknownTap(f"{self.name} has no layer {at!r} on its way; it has {', '.join(list(written.outputs)[:8])}, …")
        else:
            self.at, self.tap, self.layout = at, written.outputs[at], Layout(1)
        self._without_writing()
        self.before, self.behind, self.kept = self._halves()
        self.folded = self._fold(WIDEST if at != INPUT else None) if fold else {}
        self.alone = self.kept == [self.tap]
        self.feature = places is not None and self.at in places.trace.outputs
        self._float32()
        self._front = self._affine() if at == INPUT else []

    def _usual(self, own: Model, places: Places) -> tuple[str, fx.Node]:
        """Find the last map whose cells the head reads: before a last max pool, and before the last attention where one token is read."""
        outputs = places.trace.outputs
        if own.first_patch is not None and getattr(own, "class_read", False):
            last = [name for name in outputs if isinstance(self.layers.get(name), Attention)][-1]
            node = places.trace.inputs[last]
            named = next((name for name, other in outputs.items() if other is node), last)
            return named, node
        node = outputs[BODY]
        while node.op == "call_module" and isinstance(self.layers[str(node.target)], nn.MaxPool2d):
            node = node.all_input_nodes[0]
        names = [name for name, other in outputs.items() if other is node and name != BODY]
        return min(names, key=lambda name: (name.count("."), len(name)), default=BODY), node

    def _named(self, places: Places, at: str) -> tuple[str, fx.Node]:
        found = places.find(at)
        if len(found) > 1:
            raise CannotExplain(
                f"{at!r} means {len(found)} tensors of {self.name}, {', '.join(list(found)[:3])}, …; name one of them", "at"
            )
        return at, places.names[next(iter(found.values()))]

    def _describe(self, own: Model, places: Places) -> None:
        known = places.facts[self.tap]
        rank = None if known.shape is None else len(known.shape)
        if rank == 2 and (own.first_patch is not None or known.axis == 2):
            self.layout = Layout(2, own.first_patch or 0)
        elif rank in (3, None):
            self.layout = Layout(known.axis if rank else 1)
            self.reach = known.reach if own.first_patch is None else None
        else:
            shape = known.shape
            raise CannotExplain(f"{self.at!r} of {self.name} is no map but {shape} for one image; name a layer before the pooling", "at")

    def _without_writing(self) -> None:
        """Let no operation write into its input, so that a tap holds what it held when it was computed."""
        for node in self.graph.nodes:
            if node.kwargs.get("inplace"):
                node.kwargs = {**node.kwargs, "inplace": False}
            name = node.target if node.op == "call_method" else ""
            if name.endswith("_") and not name.endswith("__"):
                node.target = name.rstrip("_")
            if node.op == "call_function" and (plain := PLAIN.get(node.target)):
                node.target = plain

    def _fold(self, widest: int | None) -> dict[fx.Node, fx.Node]:
        """Fold each BatchNorm into the convolution or dense layer that it alone reads; returns the BatchNorms' nodes with their layers'.

        With `widest`, only into filters of so many weights at most.
        """
        folded: dict[fx.Node, fx.Node] = {}
        runs: dict[str, int] = {}
        pairs: list[tuple[nn.Module, Any]] = []
        for node in self.graph.nodes:
            if node.op == "call_module":
                runs[str(node.target)] = runs.get(str(node.target), 0) + 1
        for node in self.graph.nodes:
            norm = self._layer(node)
            if not isinstance(norm, nn.BatchNorm2d | nn.BatchNorm1d) or norm.running_mean is None:
                continue
            source = node.args[0]
            layer = self._layer(source)
            if not isinstance(source, fx.Node) or layer is None or len(source.users) != 1 or source in (*self.kept, self.result):
                continue
            if runs[str(source.target)] != 1 or getattr(layer, "parametrizations", None):
                continue
            alike = type(layer) is nn.Linear or (type(layer) in CONVOLUTIONS and isinstance(norm, nn.BatchNorm2d))
            if alike and (widest is None or _weights_of_a_filter(layer) <= widest):
                folded[node] = source
                pairs.append((layer, norm))
        for source, fused in zip(folded.values(), _fused(pairs), strict=True):
            self.layers[str(source.target)] = fused
        return folded

    def _layer(self, node: Any) -> nn.Module | None:
        return self.layers[str(node.target)] if isinstance(node, fx.Node) and node.op == "call_module" else None

    def layer(self, node: fx.Node) -> nn.Module | None:
        """Return the layer of a node; None of a function's."""
        return self._layer(node)

    def _halves(self) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
        """Return the nodes before the tap, those behind it, and what the latter read of the former, the tap first.

        What depends on no image, such as a table of position biases, is computed by whichever half reads it.
        """
        needed, seen = {self.result, self.tap}, {node for node in self.graph.nodes if node.op == "placeholder"}
        for node in reversed(self.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        moved = {self.tap}
        for node in self.graph.nodes:
            if node is not self.tap and moved.intersection(node.all_input_nodes):
                moved.add(node)
            if seen.intersection(node.all_input_nodes):
                seen.add(node)
        if not isinstance(self.result, fx.Node):
            kind = next((of.__name__ for of in (dict, tuple, list) if isinstance(self.result, of)), type(self.result).__name__)
            raise CannotExplain(f"{self.name} answers a {kind}; explain a module that returns its logits alone")
        if self.result not in moved:
            raise CannotExplain(f"nothing that {self.name} answers depends on {self.at!r}; name a layer on the way to its output")
        nodes = [node for node in self.graph.nodes if node in needed]
        behind = [node for node in nodes if node in moved and node is not self.tap]
        before = [node for node in nodes if node not in moved or node is self.tap]
        self._head = [node for node in nodes if node in set(behind) or node not in seen]
        read = {source for node in self._head for source in node.all_input_nodes} - set(self._head) - {self.tap}
        return before, behind, [self.tap, *(node for node in before if node in read)]

    def _float32(self) -> None:
        """Compute what lies behind the tap in float32, whatever the network's type: its cells' weights are sums of small terms."""
        twins: dict[str, nn.Module] = {}
        for node in self._head:
            if node.op == "call_module":
                name = str(node.target)
                if any(p.is_floating_point() and p.dtype in (torch.float16, torch.bfloat16) for p in self.layers[name].parameters()):
                    twins[name] = apart(self.layers[name], dtype=torch.float32)
        self._behind_layers: Mapping[str, nn.Module] = {**self.layers, **twins} if twins else self.layers

    def behind_layer(self, node: fx.Node) -> nn.Module | None:
        """Return the layer of a node behind the tap, in float32."""
        return self._behind_layers[str(node.target)] if node.op == "call_module" else None

    def body(self, x: Tensor) -> list[Tensor]:
        """Run what lies before the tap, without gradients: the tap's tensor, and what else the rest reads, in float32."""
        x = x if self.at == INPUT else x.to(self.dtype)
        with torch.no_grad():
            values = self._run(self.before, {}, self.kept, self.layers, x, None)
        return [_wide(values[node]) for node in self.kept]

    def tapped(self, x: Tensor) -> Tensor:
        """Run what lies before the tap, with gradients: its map (B, C, H, W), in float32."""
        values = self._run(self.before, {}, [self.tap], self.layers, x.to(self.dtype), None)
        return self.layout.map_of(_wide(values[self.tap]))

    def head(self, kept: Sequence[Tensor], rule: Rule | None = None) -> Tensor:
        """Run what lies behind the tap on what `body` returns, with gradients where its tensors ask for them: (B, classes)."""
        values = self._run(self._head, dict(zip(self.kept, kept, strict=True)), [self.result], self._behind_layers, None, rule)
        return values[self.result]

    def _affine(self) -> list[fx.Node]:
        """Return the nodes that follow the images one by one while each is a sum of weighted pixels and a bias: a first convolution."""
        found, node = [], self.tap
        while len(node.users) == 1 and node is not self.result:
            (node,) = node.users
            layer = self._layer(node)
            sums = node in self.folded or isinstance(layer, nn.Identity) or (type(layer) is nn.Conv2d and layer.padding_mode == "zeros")
            if not sums or len(node.all_input_nodes) != 1 or getattr(layer, "parametrizations", None):
                break
            found.append(node)
        return found if node is not self.result else []

    def front(self, x: Tensor) -> Tensor:
        """Of a program that is cut at the images, run what begins it as sums of weighted pixels; the images, where nothing does."""
        if not self._front:
            return x
        return self._run(self._front, {self.tap: x}, [self._front[-1]], self._behind_layers, None, None)[self._front[-1]]

    def rest(self, found: Tensor) -> Tensor:
        """Run what lies behind `front` on what that returns: (B, classes)."""
        if not self._front:
            return self.head([found])
        given: dict[fx.Node, Any] = {self.tap: None, **dict.fromkeys(self._front), self._front[-1]: found}
        return self._run(self._head, given, [self.result], self._behind_layers, None, None)[self.result]

    def values(self, kept: Sequence[Tensor]) -> dict[fx.Node, Any]:
        """Run what lies behind the tap, and return what each node gives."""
        return self._run(self._head, dict(zip(self.kept, kept, strict=True)), None, self._behind_layers, None, None)

    def _run(
        self,
        nodes: list[fx.Node],
        values: dict[fx.Node, Any],
        kept: list[fx.Node] | None,
        layers: Mapping[str, nn.Module],
        x: Tensor | None,
        rule: Rule | None,
    ) -> dict[fx.Node, Any]:
        """Compute nodes in their order; with `kept`, what no later one reads is freed."""
        last: dict[fx.Node, fx.Node] = {}
        if kept is not None:
            last = {source: node for node in nodes for source in node.all_input_nodes}
        for node in nodes:
            if node in values:
                continue
            if node in self.folded:
                values[node] = values[self.folded[node]]
            else:
                values[node] = self._value(node, values, layers, x, rule)
            for source in node.all_input_nodes if kept is not None else ():
                if last[source] is node and source not in (kept or ()):
                    del values[source]
        return values

    def _value(
        self, node: fx.Node, values: dict[fx.Node, Any], layers: Mapping[str, nn.Module], x: Tensor | None, rule: Rule | None
    ) -> Any:
        target: Any = node.target
        if node.op == "placeholder":
            return x
        if node.op == "get_attr":
            found = operator.attrgetter(target)(self._tensors)
            return _wide(found) if x is None else found
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
        layer = layers[target] if node.op == "call_module" else None
        if rule is not None and (made := rule(node, layer, args, kwargs)) is not NotImplemented:
            return made
        if layer is not None:
            return layer(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        return target(*args, **kwargs)

    def named(self, node: fx.Node) -> str:
        """Name a node as its user knows it: "layer3.0.conv1, a Conv2d"; "silu()"."""
        layer = self._layer(node)
        if layer is not None:
            return f"{node.target}, a {type(layer).__name__}"
        return f"{getattr(node.target, '__name__', node.target)}()"

    def axes(self, height: int, width: int, image: Tensor) -> tuple[Axis, Axis]:
        """Tell where a map's rows and columns lie in the images, in pixels: by receptive fields, else in equal parts."""
        found: list[Axis] = []
        for axis, (cells, pixels) in enumerate(((height, image.shape[-2]), (width, image.shape[-1]))):
            reach = self.reach[axis] if self.reach else None
            fits = reach is not None and abs(cells * reach.step - pixels) <= 2 * reach.step
            found.append(Axis((reach.first + reach.last) / 2, reach.step) if reach and fits else Axis.even(cells, pixels))
        return found[0], found[1]

    def modules(self) -> Iterator[tuple[fx.Node, nn.Module | None]]:
        """Yield every node behind the tap with its layer."""
        for node in self.behind:
            yield node, self.behind_layer(node)


def _weights_of_a_filter(layer: nn.Module) -> int:
    weight = layer._parameters["weight"]
    assert weight is not None
    return weight[0].numel()


def _fused(pairs: Sequence[tuple[nn.Module, Any]]) -> list[nn.Module]:
    """Return layers whose weights and biases do what the BatchNorm behind each does, the factors computed in float64.

    All BatchNorms are computed at once: of a small network on a GPU, one after the other takes longer than a batch of images.
    """
    if not pairs:
        return []

    def long(tensors: Iterator[Tensor | None], otherwise: float) -> Tensor:
        """Join vectors, one for each BatchNorm."""
        given = zip(tensors, pairs, strict=True)
        return torch.cat([torch.full_like(norm.running_var, otherwise) if one is None else one for one, (_, norm) in given]).double()

    sizes = [len(norm.running_var) for _, norm in pairs]
    eps = torch.tensor([norm.eps for _, norm in pairs], dtype=torch.float64).repeat_interleave(torch.tensor(sizes))
    variance = long((norm.running_var for _, norm in pairs), 1.0)
    factors = (variance + eps.to(variance.device)).rsqrt() * long((norm.weight for _, norm in pairs), 1.0)
    shifts = long((layer._parameters.get("bias") for layer, _ in pairs), 0.0) - long((norm.running_mean for _, norm in pairs), 0.0)
    shifts = shifts * factors + long((norm.bias for _, norm in pairs), 0.0)
    found = []
    for (layer, _), factor, shift in zip(pairs, factors.split(sizes), shifts.split(sizes), strict=True):
        weight = layer._parameters["weight"]
        assert weight is not None
        memory = torch.channels_last if weight.dim() == 4 else torch.contiguous_format  # which makes convolutions faster everywhere
        scaled = torch.empty_like(weight, memory_format=memory)
        torch.mul(weight, factor.to(weight.dtype).view(-1, *[1] * (weight.dim() - 1)), out=scaled)
        found.append(copied(layer, weight=nn.Parameter(scaled, False), bias=nn.Parameter(shift.to(weight.dtype), False)))
    return found


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


CONVOLUTIONS = (nn.Conv2d, Conv2dSame, Conv2dEven)
"""Kinds whose weights are used as they are: others normalise them first."""
PLAIN: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    F.relu_: F.relu,
    torch.relu_: torch.relu,
}
"""Functions that write into their input, and those that do not."""


def relu_of(node: fx.Node, layer: nn.Module | None) -> float | None:
    """Tell whether a node is a ReLU, as a module or a function: the value that it is cut off at, infinity for most; None of others."""
    if layer is not None:
        return 6.0 if isinstance(layer, nn.ReLU6) else math.inf if isinstance(layer, nn.ReLU) else None
    if node.target in (F.relu6,):
        return 6.0
    if node.target in (F.relu, torch.relu) or (node.op == "call_method" and node.target == "relu"):
        return math.inf
    if node.target in (torch.clamp, torch.clamp_min) or (node.op == "call_method" and node.target in ("clamp", "clamp_min")):
        low = node.kwargs.get("min", node.args[1] if len(node.args) > 1 else None)
        high = node.kwargs.get("max", node.args[2] if len(node.args) > 2 else None)
        return math.inf if low == 0 and high is None else None
    return None


def copied(layer: nn.Module, **tensors: Tensor | None) -> nn.Module:
    """Return a layer of the same kind and settings with other parameters."""
    twin = copy.copy(layer)
    twin.__dict__["_parameters"] = {**layer._parameters, **tensors}
    return twin
