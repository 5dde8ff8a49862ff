"""Which of a file's modules is which of ours, without a table: by shape, by who feeds whom, by order, by name; unique or refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from convert.core import Row, by_module
from convert.network import Layer
from convert.source import Source
from convert.steps import Shape
from convert.topology import Domains, Web, groups, of_graph, of_layers, pair, prune, refine
from weights.errors import ConvertError

SHOWN = 12
NEAR = 0.15
"""By how much a name must be nearer to ours than every rival's, as a part of both names' words."""

OPS = {"conv": ("conv", "depthwise"), "depthwise": ("conv", "depthwise"), "transposed": ("transposed",), "linear": ("dense", "conv")}
"""What the graph may call a layer of each of our kinds; a dense layer is a convolution here and there."""


class NoUniqueMatch(ConvertError):
    """No pairing of a file's modules with ours fits, or more than one does.

    Attributes:
        ambiguous: groups of ours and of theirs that nothing tells apart.
        missing: ours that nothing of theirs fits.
        unmatched: theirs that nothing of ours takes.
    """

    ambiguous: Sequence[tuple[list[str], list[str]]] = ()
    missing: Sequence[str] = ()
    unmatched: Sequence[str] = ()


def match(source: Source, layers: Sequence[Layer], shapes: Mapping[str, Shape]) -> list[Row]:
    """Derive which of the file's modules is which of ours.

    Candidates fit by kind and shape. They are struck out one after the other by who feeds whom, where the file has a graph; by the
    order of concatenations; by names that are equal; by the file's order, where one of two modules needs the other's result and
    the file lists in that order all that is known; and by names that are near. What is left must be one answer.

    Args:
        source: a file whose tensors have names.
        layers: our network's, as `convert.network.layers` lists them.
        shapes: of our state dict.

    Returns:
        A row for each of our modules, in the order in which they compute.

    Raises:
        NoUniqueMatch: two answers fit or none does; the message lists all open groups and all leftovers with names and shapes.
        ConvertError: the file keeps only an order.
    """
    if source.positional:
        raise ConvertError(f"{source.path} names no tensors, so nothing tells which is which; give the naming whose order it has")
    answers: dict[str, list[Row]] = {}
    failed: list[NoUniqueMatch] = []
    for spatial in ("hw", "wh") if source.spatial == "unknown" else (source.spatial,):
        try:
            answers[spatial] = _Problem(source, layers, shapes, swapped=spatial == "wh").solve()
        except NoUniqueMatch as error:
            failed.append(error)
    if not answers:
        raise min(failed, key=lambda error: len(error.missing))
    hw, wh = answers.get("hw"), answers.get("wh")
    if hw is not None and wh is not None and hw != wh:
        raise NoUniqueMatch(f"{source.path}: one pairing fits if its kernels are height by width, another if they are width by height")
    return hw if hw is not None else answers["wh"]


def compatible(
    layer: Layer, ours: Mapping[str, Shape], theirs: Mapping[str, Shape], *, bias_may_go: bool, name: str, scale: bool = False
) -> Row | None:
    """Tell the row that makes their module `name` our `layer`, or None where kind or shapes don't fit.

    Args:
        layer: ours.
        ours, theirs: shapes by PyTorch's leaf, in PyTorch's form.
        bias_may_go: whether a bias that only theirs has can go into a BatchNorm: only norms read this layer.
        name: of their module.
        scale: whether theirs is a scale and a shift, which a BatchNorm becomes that is written without statistics.
    """
    adds = tuple(leaf for leaf in theirs if leaf not in ours)
    lacks = tuple(leaf for leaf in ours if leaf not in theirs)
    kind = layer.kind
    if "running_mean" in ours or "running_mean" in theirs:
        spare = {"running_mean", "running_var"} if scale and {"weight", "bias"} <= ours.keys() else {"weight", "bias"}
        fits = not adds and set(lacks) <= spare and all(ours[leaf] == theirs[leaf] for leaf in theirs)
        return Row(name, layer.name, "norm", lacks=lacks) if fits and kind == "norm" else None
    if kind in ("norm", "other"):
        fits = not adds and not lacks and all(ours[leaf] == theirs[leaf] for leaf in theirs)
        return Row(name, layer.name, "norm") if fits and set(theirs) <= {"weight", "bias"} else None
    if "weight" not in theirs or set(lacks) - {"bias"} or adds not in ((), ("bias",)) or (adds and not bias_may_go):
        return None
    if "bias" in ours and "bias" in theirs and ours["bias"] != theirs["bias"]:
        return None
    row = _weights(layer, ours["weight"], theirs["weight"])
    return Row(name, layer.name, row, adds, lacks) if row is not None else None


def _weights(layer: Layer, ours: Shape, theirs: Shape) -> str | None:
    if ours == theirs:
        return "conv" if layer.kind == "depthwise" else layer.kind
    if layer.kind == "linear" and len(theirs) == 4 and theirs[0] == ours[0]:
        return "linear_from_conv" if theirs[1:] == (layer.grid or (ours[1], 1, 1)) else None
    flat = len(theirs) == 2 and len(ours) == 4 and theirs == (ours[0], ours[1] * ours[2] * ours[3])
    return "conv_from_linear" if flat and layer.kind == "conv" and layer.groups == 1 else None


class _Problem:
    """One file against one network: candidates, and how they are struck out."""

    def __init__(self, source: Source, layers: Sequence[Layer], shapes: Mapping[str, Shape], *, swapped: bool) -> None:
        self.source = source
        self.theirs = by_module(source.tensors)
        self.leaves = by_module({name: tuple(shape) for name, shape in shapes.items()})
        if not any("running_mean" in held for held in self.theirs.values()):
            layers = folded(layers)
            gone = {name for name, held in self.leaves.items() if "running_mean" in held} - {layer.name for layer in layers}
            self.leaves = {name: held for name, held in self.leaves.items() if name not in gone}
        self.layers = {layer.name: layer for layer in layers}
        self.web = of_layers(layers)
        self.their_web = of_graph(source.graph, set(self.theirs)) if source.graph else None
        ops = {node.name: node.op for node in source.graph.nodes} if source.graph else {}
        held = {name: {leaf: _swapped(stored.shape, swapped) for leaf, stored in tensors.items()} for name, tensors in self.theirs.items()}
        self.rows: dict[tuple[str, str], Row] = {}
        self.domains: Domains = {}
        silent = {name for name, tensors in self.theirs.items() if "bias" in tensors and tensors["bias"].adds_nothing}
        for name, layer in self.layers.items():
            ours = self.leaves.get(name, {})
            found: set[str] = set()
            may_go = layer.kind != "norm" and (layer.eps is not None or only_norms_read(name, self.web, self.layers))
            for other, theirs in held.items():
                row = compatible(
                    layer,
                    ours,
                    theirs,
                    bias_may_go=may_go or (layer.kind != "norm" and other in silent),
                    name=other,
                    scale=ops.get(other) == "scale",
                )
                if row and ops.get(other, "") in ("", *OPS.get(layer.kind, (ops.get(other),))):
                    self.rows[name, other] = row
                    found.add(other)
            self.domains[name] = found

    def solve(self) -> list[Row]:
        """Strike out until one answer is left, or say why there is none."""
        uncalled = [name for name in self.leaves if name not in self.layers]
        chosen = pair(self.domains)
        if len(chosen) < len(self.domains) or len(chosen) < len(self.theirs) or uncalled:
            gone = [*(name for name in self.domains if name not in chosen), *uncalled]
            raise self._refused("do not fit each other by kind and shape", missing=gone, unmatched=set(self.theirs) - set(chosen.values()))
        prune(self.domains)
        if self.their_web is not None:
            refine(self.domains, self.web, self.their_web)
            if not prune(self.domains):
                gone = [name for name, options in self.domains.items() if not options]
                raise self._refused("fit each other by shape, but not by who feeds whom", missing=gone)
            self._try(lambda domains: refine(domains, self.web, self.their_web, by_order=True) if self.their_web else None)
        for strike in (self._by_equal_names, self._by_order, self._by_near_names):
            if any(len(options) > 1 for options in self.domains.values()):
                self._try(strike)
                if self.their_web is not None:
                    self._try(lambda domains: refine(domains, self.web, self.their_web) if self.their_web else None)
        if rest := groups(self.domains):
            raise self._refused("fit each other in more than one way", ambiguous=rest)
        return [self.rows[name, next(iter(options))] for name, options in self.domains.items()]

    def _try(self, strike: Callable[[Domains], None]) -> None:
        """Strike out on a copy, and keep the result if it still has an answer: a hint that contradicts the facts is none."""
        copy = {name: set(options) for name, options in self.domains.items()}
        strike(copy)
        if prune(copy):
            self.domains = copy

    def _by_order(self, domains: Domains) -> None:
        """Let one that needs another's result come behind it in the file, where that agrees with all that is known."""
        place = {name: number for number, name in enumerate(self.theirs)}
        alphabetical = list(self.theirs) == sorted(self.theirs, key=lambda name: re.split(r"[./]", name))
        if alphabetical:  # an order of names says nothing but what their numbers say
            place = {name: number for number, name in enumerate(sorted(self.theirs, key=_numbered))}
        for members, options in groups(domains):
            if alphabetical and len({_template(name) for name in options}) > 1:
                continue
            for late in members:  # in the order in which they compute, so one walk there and one back settle all bounds
                first = max((min(map(place.__getitem__, domains[m]), default=0) for m in members if m in self.web.before[late]), default=-1)
                domains[late] = {option for option in domains[late] if place[option] > first}
            for early in reversed(members):
                ends = (max(map(place.__getitem__, domains[m]), default=0) for m in members if early in self.web.before[m])
                last = min(ends, default=len(place))
                domains[early] = {option for option in domains[early] if place[option] < last}
        if self._out_of_order(domains, place, alphabetical):  # then the order of this file means nothing
            domains.update({name: set() for name in domains})

    def _out_of_order(self, domains: Domains, place: Mapping[str, int], alphabetical: bool) -> bool:
        """Tell whether the file lists, anywhere, a layer behind one of its kind that needs it."""
        settled = {name: next(iter(options)) for name, options in domains.items() if len(options) == 1}
        return any(
            place[settled[early]] > place[other] and not (alphabetical and _template(settled[early]) != _template(other))
            for late, other in settled.items()
            for early in self.web.before[late]
            if early in settled and self.layers[early].kind == self.layers[late].kind
        )

    def _by_equal_names(self, domains: Domains) -> None:
        for members, options in groups(domains):
            named = {name: {option for option in options if _words(option) == _words(name)} for name in members}
            if all(len(found) == 1 for found in named.values()):
                for name in members:
                    domains[name] &= named[name]

    def _by_near_names(self, domains: Domains) -> None:
        for members, _ in groups(domains):
            pairs = [(name, option) for name in members for option in domains[name]]
            score = {both: SequenceMatcher(None, *map(_words, both), autojunk=False).ratio() for both in pairs}
            for name in members:
                best = max(domains[name], key=lambda option: (score[name, option], option))
                rivals = [score[name, option] for option in domains[name] if option != best]
                rivals += [score[other, best] for other in members if other != name and (other, best) in score]
                if score[name, best] >= max(rivals, default=0.0) + NEAR:
                    domains[name] = {best}

    def _refused(
        self,
        why: str,
        *,
        ambiguous: Sequence[tuple[list[str], list[str]]] = (),
        missing: Sequence[str] = (),
        unmatched: Sequence[str] | set[str] = (),
    ) -> NoUniqueMatch:
        left = [name for name in self.theirs if name in unmatched]
        lines = [f"{self.source.path}: its {len(self.theirs)} modules and our {len(self.leaves)} {why}."]
        for members, options in ambiguous[:SHOWN]:
            theirs = ", ".join(_tensors(name, self._held(name)) for name in options[:SHOWN])
            lines.append(f"  ours {', '.join(_tensors(name, self.leaves[name]) for name in members[:SHOWN])} may each be any of {theirs}")
        lines += [f"  ours {_tensors(name, self.leaves.get(name, {}))} has no counterpart there" for name in missing[:SHOWN]]
        lines += [f"  theirs {_tensors(name, self._held(name))} has no counterpart here" for name in left[:SHOWN]]
        hidden = sum(max(0, len(names) - SHOWN) for names in (ambiguous, missing, left))
        lines += [f"  and {hidden} more"] if hidden else []
        lines.append(
            "Give zoo convert or zoo add the naming with --from, or a file that carries the same network's graph (Keras, ONNX, Caffe)."
            if ambiguous
            else "Is it this network, with this number of classes? zoo inspect lists what the file has."
        )
        error = NoUniqueMatch("\n".join(lines))
        error.ambiguous, error.missing, error.unmatched = list(ambiguous), list(missing), left
        return error

    def _held(self, name: str) -> dict[str, Shape]:
        return {leaf: stored.shape for leaf, stored in self.theirs[name].items()}


def folded(layers: Sequence[Layer]) -> list[Layer]:
    """Leave out each BatchNorm that is the only one to read a convolution, which then has its `eps`: the file has them folded."""
    known = {layer.name: layer for layer in layers}
    web = of_layers(layers)
    into = {
        layer.name: layer.inputs[0]
        for layer in layers
        if layer.kind == "norm"
        and layer.direct
        and len(layer.inputs) == 1
        and layer.inputs[0] in known
        and known[layer.inputs[0]].kind != "norm"
        and web.outputs[layer.inputs[0]] == (layer.name,)
    }
    eps = {into[name]: known[name].eps for name in into}
    kept = [layer for layer in layers if layer.name not in into]
    return [replace(layer, inputs=tuple(into.get(fed, fed) for fed in layer.inputs), eps=eps.get(layer.name, layer.eps)) for layer in kept]


def only_norms_read(name: str, web: Web, layers: Mapping[str, Layer]) -> bool:
    """Tell whether all that reads a layer is norms, with nothing between, so that they can take its bias up."""
    readers = web.outputs[name]
    return bool(readers) and all(layers[reader].kind == "norm" and layers[reader].direct for reader in readers)


def _swapped(shape: Shape, swapped: bool) -> Shape:
    return (*shape[:2], shape[3], shape[2]) if swapped and len(shape) == 4 else shape


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())


def _template(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _numbered(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)]


def _tensors(name: str, held: Mapping[str, Shape]) -> str:
    shapes = ", ".join(f"{leaf} {'x'.join(map(str, shape))}" for leaf, shape in held.items())
    return f"{name or '(root)'} ({shapes})"
