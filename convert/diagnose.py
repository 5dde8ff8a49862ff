"""Why a converted network does not compute what it did at home: the first layer that diverges, and the cause.

Every hypothesis is carried out. A cause is named only when it turns our numbers into theirs; when none does, the layer is named and
the cause is "unknown".
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert import _between_faults, _fault, _global_faults, _layer_faults, _probe, execute
from convert._fault import Fault, Site, Trial
from convert._windows import Pads, pair, resolve
from convert.certificate import OUTPUT, before_softmax, finite
from convert.graph import Graph, Node
from convert.kinds import is_array
from convert.network import modules_of
from convert.source import Source
from weights.errors import ConvertError

if TYPE_CHECKING:
    from torch import nn

UNKNOWN = "unknown"
NOTHING = "no fault"
NEAREST = 5
"""So many of the hypotheses that failed are shown, the nearest ones."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found.

    Attributes:
        theirs, ours: the first layer that diverges; "(output)" where only what the network returns does, None where nothing does or
            there was no graph to walk along.
        cause: a key of `convert._fault.MEANING`, or several joined by " and "; "unknown"; "no fault".
        explanation: sentences for people.
        before: the relative error there, max |ours - theirs| / max |theirs|; infinite where the shapes differ.
        after: what is left of it under the cause; None if there is none.
        remedy: what to do.
        tried: all hypotheses, in the order in which they were tried.
    """

    theirs: str | None
    ours: str | None
    cause: str
    explanation: str
    before: float
    after: float | None = None
    remedy: str = ""
    tried: list[Trial] = field(default_factory=list[Trial])

    @property
    def found(self) -> bool:
        return self.cause not in (UNKNOWN, NOTHING)

    def to_json(self) -> dict[str, Any]:
        """Describe it in what JSON has; an infinite error is None there."""
        tried = [{"hypothesis": trial.hypothesis, "error": finite(trial.error)} for trial in self.tried]
        told = {name: getattr(self, name) for name in ("theirs", "ours", "cause", "explanation", "remedy")}
        return {**told, "before": finite(self.before), "after": finite(self.after), "tried": tried}

    def __str__(self) -> str:
        if self.cause == NOTHING:
            return self.explanation
        where = f" at {self.theirs} ({self.ours})" if self.theirs else ""
        lines = [f"{self.cause}{where}: {self.explanation}"]
        lines.append(f"  relative error {self.before:.3g}" + ("" if self.after is None else f", {self.after:.3g} without the fault"))
        if self.remedy:
            lines.append(f"  {self.remedy}")
        elif self.tried:
            nearest = sorted(self.tried, key=lambda trial: trial.error)[:NEAREST]
            lines.append("  nearest of what was tried: " + "; ".join(f"{trial.hypothesis} ({trial.error:.2g})" for trial in nearest))
        return "\n".join(lines)


def diagnose(
    source: Source,
    pairs: Mapping[str, str],
    network: nn.Module,
    inputs_theirs: np.ndarray,
    inputs_ours: np.ndarray,
    *,
    moved: Collection[str] = (),
    tolerance: float = 1e-5,
) -> Diagnosis:
    """Walk along the source's graph to the first layer where ours diverges, and find out why.

    Args:
        source: with a graph, all of whose operations can be executed.
        pairs: their module to ours.
        network: ours; it is not changed.
        inputs_theirs, inputs_ours: the same images as each network is fed, (B, C, H, W). One or two suffice.
        moved: our convolutions that differ from theirs by a number per channel, a bias or a mean, which went into the layer behind. Any
            convolution of ours without a bias, in front of a norm, is compared as if it had theirs; a bias that then arrived nowhere
            shows at that norm.
        tolerance: the relative error up to which a layer counts as the same.

    Returns:
        The layer and the cause.

    Raises:
        ConvertError: there is no graph, or nothing here executes it.
    """
    graph = source.graph
    if graph is None or graph.unknown:
        why = "carries no graph" if graph is None else f"has {', '.join(graph.unknown)}, which nothing here executes"
        raise ConvertError(f"{source.path} {why}; `diagnose_outputs` needs only outputs")
    walk = _Walk(source, graph, pairs, network, inputs_theirs, inputs_ours, set(moved), tolerance)
    return walk.layers() or walk.output()


def diagnose_outputs(
    network: nn.Module, inputs: np.ndarray, outputs: np.ndarray | Sequence[np.ndarray], *, tolerance: float = 1e-4, seconds: float = 60
) -> Diagnosis:
    """Look for the change to our whole network, or to its images, with which it gives the source's outputs.

    Args:
        network: ours; it is not changed.
        inputs: (B, C, H, W) as ours takes them. One or two images suffice.
        outputs: theirs, logits or probabilities; of several, the first counts.
        tolerance: the relative error up to which outputs count as the same.
        seconds: how long to try; a large network at its full size takes seconds for each hypothesis.

    Returns:
        The cause, without a layer: outputs alone don't tell where.
    """
    wanted = np.asarray(outputs if is_array(outputs) else outputs[0], np.float64)
    search = _global_faults.explain(network, inputs, wanted, tolerance, seconds)
    if search.before <= tolerance:
        return Diagnosis(None, None, NOTHING, f"the outputs agree, relative error {search.before:.3g}", search.before)
    return _told(None, None, search.fault, search.before, search.said, search.tried)


class _Walk:
    """Both networks' values on the same images, and the way along the graph."""

    def __init__(
        self,
        source: Source,
        graph: Graph,
        pairs: Mapping[str, str],
        network: nn.Module,
        inputs_theirs: np.ndarray,
        inputs_ours: np.ndarray,
        moved: set[str],
        tolerance: float,
    ) -> None:
        self.source, self.graph, self.tolerance, self.images = source, graph, tolerance, (inputs_theirs, inputs_ours)
        self.nodes = {node.name: node for node in graph.nodes}
        self.order = [node for node in graph.nodes if node.name in pairs]
        self.pairs = {node.name: pairs[node.name] for node in self.order}
        self.moved = moved
        self.twin = _probe.twin(network)
        self.modules: dict[str, Any] = modules_of(self.twin)
        self.end = before_softmax(graph, graph.outputs[0])
        self.theirs = execute.run(source, inputs_theirs, keep={*self.pairs, self.end, graph.outputs[0]})
        self.passed = _probe.forward(self.twin, inputs_ours, list(self.pairs.values()), may_fail=True)
        self.agreed: dict[str, np.ndarray] = {}
        self.biases: dict[str, np.ndarray] = {}

    def layers(self) -> Diagnosis | None:
        for node in self.order:
            name, theirs = self.pairs[node.name], self.theirs[node.name]
            if name not in self.passed.inputs:
                explanation = f"our network never calls {name}" + (f": {self.passed.failed}" if self.passed.failed else "")
                return Diagnosis(node.name, name, UNKNOWN, explanation, float("inf"))
            ours = self.passed.outputs.setdefault(name, np.zeros((len(theirs), 0)))  # empty where the pass broke off
            bias = self._lost_bias(node)
            if bias is None and name in self.moved and ours.shape == theirs.shape:
                bias = (theirs - ours).mean((0, *range(2, ours.ndim)))  # a mean that was folded in: the norm behind must agree
            shifted = ours if bias is None or not ours.size else ours + bias.reshape(1, -1, *(1,) * (ours.ndim - 2))
            before = _probe.relative(shifted, theirs)
            if before > self.tolerance:
                return self._explain(node, before, bias)
            self.agreed[node.name] = theirs
            if bias is not None:
                self.biases[node.name] = bias
        return None

    def output(self) -> Diagnosis:
        last = self.graph.outputs[0]
        ours = self.passed.results[0] if self.passed.results else np.zeros((len(self.images[1]), 0))
        end = last if _probe.probabilities(ours) else self.end
        before = _probe.relative(ours, self.theirs[end])
        if before <= self.tolerance:
            said = f"{len(self.order)} layers and the output agree with what the file says, relative error {before:.3g}"
            return Diagnosis(None, None, NOTHING, said, before)
        tried: list[Trial] = []
        fault = self._between(end, ours, self._limit(before), tried, partial(_probe.aligned, theirs=ours))
        if fault is None and self.order:
            found = _layer_faults.match_columns(ours.reshape(len(ours), -1), self.theirs[end].reshape(len(ours), -1), self._limit(before))
            fault = None if found is None else Fault((_fault.HEAD,), found[0], found[1])
        return _told(
            OUTPUT,
            OUTPUT,
            fault,
            before,
            f"the layers with weights agree; the fault lies between {self._behind(end)} and the output",
            tried,
        )

    def _explain(self, node: Node, before: float, bias: np.ndarray | None) -> Diagnosis:
        name = self.pairs[node.name]
        site, start, shaped = self._site(node, name, before, bias)
        upstream = _probe.relative(site.read, site.fed)
        try:
            alone = site.error(_layer_faults.call(site.module, site.fed))
        except RuntimeError:
            alone = float("inf")
        site.tried.append(Trial("the layer alone, on the source's input to it", alone))
        fault: Fault | None = None
        if alone <= self.tolerance:  # the layer is right, and what it reads is wrong
            first = self._reads_images(start)
            fault = _between_faults.images(site.read, site.fed, site.limit) if first else None
            fault = fault or self._between(start, site.read, self._limit(upstream), site.tried, shaped)
            said = f"{name} itself is right, but reads other numbers (relative error {upstream:.3g}): look behind {self._behind(start)}"
        else:
            fault = _layer_faults.explain(site)
            if fault is None and upstream > self.tolerance and not self._reads_images(start):
                fault = self._between(start, site.read, self._limit(upstream), site.tried, shaped)
            said = f"first divergence at {node.name}, our {name}"
        return _told(node.name, name, fault, before, said, site.tried)

    def _between(self, end: str, ours: np.ndarray, limit: float, tried: list[Trial], shaped: Any) -> Fault | None:
        nodes = execute.needed(self.graph, [end], self.agreed)
        read = {name for node in nodes for name in node.inputs} | {end}
        known = {name: value for name, value in self.agreed.items() if name in read}
        biases = {name: bias for name, bias in self.biases.items() if name in known}
        return _between_faults.explain(self.source, nodes, known, end, ours, self.images[0], limit, tried, shaped, biases)

    def _site(self, node: Node, name: str, before: float, bias: np.ndarray | None) -> tuple[Site, str, Any]:
        """Gather what is known about a layer: the input theirs has, as ours takes it, and what that is made of."""
        module, read = self.modules[name], self.passed.inputs[name]
        start, padding, order = self._start(node)
        wanted = {start, node.inputs[0]}
        known = {key: value for key, value in self.agreed.items() if key != node.name}
        needed = execute.needed(self.graph, wanted, known)
        values = execute.compute(self.source, needed, known, wanted, inputs=self.images[0])
        full, inner = values[node.inputs[0]], values[start]
        target = self.theirs[node.name]
        if bias is not None:
            target = target - bias.reshape(1, -1, *(1,) * (target.ndim - 2))

        def shaped(x: np.ndarray) -> np.ndarray:
            weight = getattr(module, "weight", None)
            if type(module).__name__ == "Linear" and x.ndim == 4 and weight is not None and weight.shape[1] == np.prod(x.shape[1:]):
                return x.reshape(len(x), -1)
            return _probe.aligned(x, read)

        if start != node.inputs[0] and full.shape == read.shape != shaped(inner).shape:
            start, inner, padding = node.inputs[0], full, (0, 0, 0, 0)  # ours pads in a layer of its own too
        ours = _probe.aligned(self.passed.outputs[name], target)
        grid = (inner.shape[1], inner.shape[2], inner.shape[3]) if inner.ndim == 4 else None
        pads = self._pads(node, padding, inner) if node.op in ("conv", "depthwise") else (0, 0, 0, 0)
        following = self.order[self.order.index(node) + 1 :]
        site = Site(self.source, node, name, module, target, ours, shaped(inner), read, before, self._limit(before), pads, grid, order)
        site.blocks = self._blocks(start)
        site.last = not following
        site.shifted = any(self._stride_differs(other) for other in following[:4])
        return site, start, shaped

    def _start(self, node: Node) -> tuple[str, Pads, str]:
        """Walk back through layers that only pad with zeros or flatten: to the map, what they pad, and the order they flatten in."""
        name, total, order = node.inputs[0], (0, 0, 0, 0), "chw"
        while name not in self.agreed:
            before = self.nodes[name]
            attrs = before.attrs
            if before.op == "pad" and not attrs.get("value", 0.0):
                top, left, bottom, right = (int(a) + b for a, b in zip(attrs["pads"], total, strict=True))
                total = top, left, bottom, right
            elif before.op == "flatten":
                order = attrs.get("order", "chw")
            elif before.op == "reshape" and len(attrs["shape"]) == 1:
                order = "hwc" if attrs.get("layout") == "nhwc" else "chw"
            elif before.op != "identity":
                break
            name = before.inputs[0]
        return name, total, order

    def _pads(self, node: Node, padding: Pads, x: np.ndarray) -> Pads:
        """Add up what theirs pads in front of and in a convolution, in our orientation."""
        from convert import _ops

        height, width = x.shape[2:]
        if turned := self.source.spatial == "wh":
            height, width = width, height
        stored = self.source.tensors[f"{node.name}.weight"]
        taps = _ops.kernel(node, np.broadcast_to(np.zeros(()), stored.stored_shape)).shape
        size = (height + padding[0] + padding[2], width + padding[1] + padding[3])
        stride, dilation = pair(node.attrs.get("stride")), pair(node.attrs.get("dilation"))
        own = resolve(node.attrs.get("pads"), size, (taps[2], taps[3]), stride, dilation)
        top, left, bottom, right = (a + b for a, b in zip(padding, own, strict=True))
        return (left, top, right, bottom) if turned else (top, left, bottom, right)

    def _blocks(self, name: str) -> tuple[int, ...]:
        """Tell the channels of the maps whose concatenation this value is, or is made of channel by channel."""
        while name not in self.agreed and len(self.nodes[name].inputs) == 1:
            name = self.nodes[name].inputs[0]
        if name in self.agreed or self.nodes[name].op != "concat":
            return ()
        inputs = self.nodes[name].inputs
        needed = execute.needed(self.graph, inputs, self.agreed)
        values = execute.compute(self.source, needed, self.agreed, inputs, inputs=self.images[0])
        return tuple(values[one].shape[1] for one in inputs)

    def _lost_bias(self, node: Node) -> np.ndarray | None:
        """Read the bias of a convolution of theirs where ours has none."""
        stored = self.source.tensors.get(f"{node.name}.bias")
        convolution = node.op in ("conv", "depthwise", "transposed")
        if stored is None or not convolution or getattr(self.modules[self.pairs[node.name]], "bias", None) is not None:
            return None
        bias = stored.load().astype(np.float64).reshape(-1)
        norm_reads = any(node.name in other.inputs and other.op == "norm" for other in self.graph.nodes)
        return bias if np.any(bias) and (self.pairs[node.name] in self.moved or norm_reads) else None

    def _reads_images(self, name: str) -> bool:
        """Tell whether this value is made of the images and of no layer with weights."""
        return all(node.name not in self.pairs for node in execute.needed(self.graph, [name], ())) and name not in self.agreed

    def _stride_differs(self, node: Node) -> bool:
        module = self.modules[self.pairs[node.name]]
        return hasattr(module, "stride") and pair(node.attrs.get("stride")) != tuple(module.stride)

    def _behind(self, name: str) -> str:
        nodes = execute.needed(self.graph, [name], self.agreed)
        fed = sorted({key for node in nodes for key in node.inputs if key in self.agreed} | ({name} & set(self.agreed)))
        return ", ".join(fed[:3]) or "the images"

    def _limit(self, before: float) -> float:
        return min(self.tolerance, before / 30)


def _told(theirs: str | None, ours: str | None, fault: Fault | None, before: float, unknown: str, tried: list[Trial]) -> Diagnosis:
    if fault is None:
        return Diagnosis(theirs, ours, UNKNOWN, unknown, before, tried=tried)
    meanings = [_fault.MEANING[cause] for cause in fault.causes]
    explanation = "; ".join(meaning for meaning, _ in meanings) + f" ({fault.said})"
    remedy = "; ".join(remedy for _, remedy in meanings)
    return Diagnosis(
        theirs, ours, " and ".join(fault.causes), explanation, before, fault.error, remedy[:1].upper() + remedy[1:] + ".", tried
    )
