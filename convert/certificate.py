"""The parity certificate: what was compared with what, how far apart it was, and the strongest thing that follows.

A relative error is max |ours - theirs| / max |theirs| over a whole tensor: one number that doesn't swell where theirs is near zero.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from convert import _probe, execute
from convert.core import Report
from convert.graph import Graph
from convert.kinds import is_array, is_dict, is_row
from convert.source import Source
from weights.wording import counted

if TYPE_CHECKING:
    from torch import nn

Kind = Literal["source outputs", "float64 execution", "destination outputs", "labelled images", "read back", "structure only"]

STRENGTH: tuple[Kind, ...] = (
    "source outputs", "float64 execution", "destination outputs", "labelled images", "read back", "structure only",
)  # fmt: skip
"""The kinds of evidence, the strongest first."""

PROVING: tuple[Kind, ...] = ("source outputs", "float64 execution", "destination outputs", "labelled images")
"""Those that can prove that the network computes what it did at home, where home may be ours and the destination another framework's;
reading back proves only that the file is what was written."""

NOT_COMPARED = "; what they compute was not compared"
"""Said of a mapping that fits, where nothing else was compared."""
OUTPUT = "(output)"
ROUNDED = 30.0
"""By how much another order of float32's sums may move outputs further than PyTorch's own moves them."""
LEAST_SPREAD = 0.05
"""Largest difference between the networks, by what differs between their outputs for several images, at which agreement means anything."""
SMALLEST = 1e-30
"""Probabilities below it are not compared by their logarithm: float32 rounds them to nothing."""


@dataclass(frozen=True, slots=True)
class LayerError:
    """How far one layer of ours is from theirs.

    Attributes:
        theirs, ours: its names; "(output)" for what the network returns.
        shape: of their value.
        max_abs: the largest difference.
        relative: the same, divided by the largest of their numbers.
    """

    theirs: str
    ours: str
    shape: tuple[int, ...]
    max_abs: float
    relative: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """One comparison.

    Attributes:
        kind: what ours was compared with.
        proven: whether it shows that our network computes what theirs does.
        worst: the largest relative error; None where nothing was measured. Evidence with an error that is not proven speaks against
            the conversion, evidence without one for nothing.
        detail: a sentence for people.
        layers: what was compared, in order.
    """

    kind: Kind
    proven: bool
    worst: float | None
    detail: str
    layers: list[LayerError] = field(default_factory=list[LayerError])

    @property
    def contradicts(self) -> bool:
        """Whether it shows that our network computes something else."""
        return not self.proven and self.worst is not None


@dataclass(slots=True)
class Certificate:
    """All evidence about one conversion, the strongest first."""

    evidence: list[Evidence]
    before: str = ""
    """The verdict that the source's own notes carry, or what is published of its bytes; it is no evidence of this conversion."""

    def __post_init__(self) -> None:
        self.evidence = sorted(self.evidence, key=lambda one: STRENGTH.index(one.kind))
        if self.chained or any(one.worst is not None and one.kind in PROVING for one in self.evidence):
            self.evidence = [replace(one, detail=one.detail.removesuffix(NOT_COMPARED)) for one in self.evidence]

    @property
    def proven(self) -> bool:
        """Whether some evidence proves the conversion and none contradicts it."""
        return self._best is not None and not any(one.contradicts for one in self.evidence)

    @property
    def _best(self) -> Evidence | None:
        return next((one for one in self.evidence if one.proven and one.kind in PROVING), None)

    @property
    def chained(self) -> bool:
        """Whether what was written is bit for bit the network of a source that was proven before, as its own notes say."""
        back = any(one.kind == "read back" and one.proven and one.worst == 0 for one in self.evidence)
        return bool(self.before) and back and not any(one.contradicts for one in self.evidence)

    @property
    def verdict(self) -> str:
        """Say in a line what follows: "PROVEN by …", "the same network …" as one that was proven before, or "UNPROVEN: …"."""
        against = next((one for one in self.evidence if one.contradicts), None)
        if against is not None:
            return f"UNPROVEN: contradicted by {against.kind}, {against.detail}"
        if self._best is not None:
            return f"PROVEN by {self._best.kind}: {self._best.detail}"
        if self.chained:
            return f"the same network, read back bit for bit; {self.before}"
        tried = next((one for one in self.evidence if one.kind in PROVING), None)
        back = next((one for one in self.evidence if one.kind == "read back" and one.proven), None)
        if tried is None and back is not None:
            how = "read back bit for bit" if back.worst == 0 else f"read back, {back.detail}"
            return f"UNPROVEN: {how}; what the source computed was not compared"
        return "UNPROVEN: structure only" + (f"; {tried.kind}: {tried.detail}" if tried is not None else "")

    def to_json(self) -> dict[str, Any]:
        """Describe it in what JSON has; an infinite error is None there, so each evidence says whether it contradicts."""
        chain = {"chained": self.before} if self.chained and not self.proven else {}
        evidence = [finite(asdict(one)) | {"contradicts": one.contradicts} for one in self.evidence]
        return {"verdict": self.verdict, "proven": self.proven, **chain, "evidence": evidence}

    def __str__(self) -> str:
        lines = [self.verdict]
        for one in self.evidence:
            lines.append(f"  {one.kind}: {'proven' if one.proven else 'not proven'}; {one.detail}")
            if one.contradicts and one.layers:
                shown = sorted(one.layers, key=lambda layer: -layer.relative)[:3]
                lines.extend(f"    {layer.theirs} -> {layer.ours}: relative error {layer.relative:.3g}" for layer in shown)
        return "\n".join(lines)


def against_outputs(
    network: nn.Module, inputs: np.ndarray, outputs: np.ndarray | Sequence[np.ndarray], tolerance: float = 1e-4
) -> Evidence:
    """Compare our network's outputs, in float64, with those that the source's framework computed for the same images.

    Args:
        network: ours.
        inputs: (B, C, H, W) as our network takes them.
        outputs: theirs, one array for each that the network returns. Probabilities are compared with our softmax where ours returns
            logits, by themselves and by their logarithm, and the detail says so.
        tolerance: the largest relative error that proves.
    """
    theirs = [outputs] if is_array(outputs) else list(outputs)
    ours = _probe.forward(_probe.twin(network), inputs).results
    layers: list[LayerError] = []
    said = ""
    for number, wanted in enumerate(theirs):
        name = OUTPUT if len(theirs) == 1 else f"{OUTPUT} {number}"
        given = ours[number] if number < len(ours) else np.zeros(0)
        pairs = as_comparable(given, np.asarray(wanted, np.float64))
        said = said or pairs[0][2]
        layers.append(max((_error(name, name, a, b) for a, b, _ in pairs), key=lambda layer: layer.relative))
    found = _judged("source outputs", layers, tolerance, counted(len(inputs), "image") + (f", {said}" if said else ""))
    if found.proven and len(inputs) > 1 and all(_blind(ours[i], np.asarray(each, np.float64)) for i, each in enumerate(theirs)):
        return Evidence("source outputs", False, None, "the outputs hardly depend on the images, so they prove nothing; give other images")
    if found.contradicts and (noise := _rounding(network, inputs, ours)) > tolerance / 10 and (found.worst or 0.0) < ROUNDED * noise:
        said = f"rounding to float32 moves PyTorch's own outputs by {noise:.2g} and theirs by {found.worst:.2g} of the largest"
        return Evidence("source outputs", False, None, f"{said}, so outputs in float32 show nothing")
    return found


def _rounding(network: nn.Module, inputs: np.ndarray, exact: Sequence[np.ndarray]) -> float:
    """Tell by how much float32 moves a network's own outputs, as a part of the largest."""
    import torch

    with torch.no_grad():
        network = _probe.twin(network).float()
        result = network(_probe.tensor(inputs).float())
        found = [each.double().numpy() for each in _probe.tensors_of(result)]
    return max((_probe.errors(a, b)[1] for a, b in zip(found, exact, strict=False)), default=0.0)


def _blind(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether what differs between images is no larger than what differs between the networks: then their agreement means nothing."""
    pairs = as_comparable(ours, theirs)
    return all(np.abs(a - b).max(initial=0) > LEAST_SPREAD * np.abs(b - b.mean(0, keepdims=True)).max(initial=0) for a, b, _ in pairs[:1])


def averaged(ours: np.ndarray, theirs: np.ndarray) -> tuple[np.ndarray, str]:
    """Average a map of theirs, of a network without its head, where ours returns the vector that its pooling makes of it; and say so."""
    larger = ours.ndim == 2 and theirs.ndim > 1 and len(ours) == len(theirs) and ours.size > 0 and theirs.size > ours.size
    if not larger or theirs.size % ours.size or (theirs.ndim == 4 and theirs.shape[1] != ours.shape[1]):
        return theirs, ""
    return theirs.reshape(*ours.shape, -1).mean(2), "their map averaged over its pixels, as our pooling does"


def as_comparable(ours: np.ndarray, theirs: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, str]]:
    """Bring logits and probabilities together: a list of (ours, theirs, what was done), all of which have to agree."""
    theirs, pooled = averaged(ours, theirs)
    ours = _probe.aligned(ours, theirs)
    if pooled:
        return [(ours, theirs, pooled)]
    if ours.shape != theirs.shape or _probe.probabilities(ours) == _probe.probabilities(theirs):
        return [(ours, theirs, "")]
    if _probe.probabilities(ours):  # theirs are logits, which our probabilities don't determine
        raised = np.exp(theirs - theirs.max(1, keepdims=True))
        return [(ours, raised / raised.sum(1, keepdims=True), "their softmax against our probabilities")]
    shifted = ours - ours.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    seen = theirs > SMALLEST
    said = "our softmax against their probabilities"
    return [(np.exp(logs), theirs, said), (logs[seen], np.log(theirs[seen]), said)]


def against_graph(
    source: Source,
    pairs: Mapping[str, str],
    network: nn.Module,
    inputs_theirs: np.ndarray,
    inputs_ours: np.ndarray,
    tolerance: float = 1e-5,
    *,
    moved: Collection[str] = (),
) -> Evidence:
    """Compare every layer of our network with the float64 execution of what the file says its network computes.

    Args:
        source: with a graph.
        pairs: their module to ours.
        network: ours.
        inputs_theirs, inputs_ours: the same images as each network wants them, (B, C, H, W).
        tolerance: the largest relative error of a layer that proves.
        moved: our convolutions whose bias was moved into the norm behind them; only that norm is compared.

    Returns:
        Evidence, with an error for each pair and for the output. Where the file carries no graph, or one with operations that nothing
        here executes, it proves nothing and says why.
    """
    if source.graph is None:
        return Evidence("float64 execution", False, None, f"{source.format} files don't say what their network computes")
    if source.graph.unknown:
        return Evidence("float64 execution", False, None, f"nothing here executes {', '.join(source.graph.unknown)}")
    names = {node.name for node in source.graph.nodes}
    compared = {theirs: ours for theirs, ours in pairs.items() if theirs in names and ours not in moved}
    ends = [before_softmax(source.graph, name) for name in source.graph.outputs]
    theirs = execute.run(source, inputs_theirs, keep={*compared, *ends, *source.graph.outputs})
    passed = _probe.forward(_probe.twin(network), inputs_ours, list(compared.values()))
    ordered = [node.name for node in source.graph.nodes if node.name in compared]
    if not ordered:
        return Evidence("float64 execution", False, None, "no layer of the graph is known to be one of ours, so nothing was compared")
    nothing = np.zeros(0)
    layers = [_error(name, compared[name], passed.outputs.get(compared[name], nothing), theirs[name]) for name in ordered]
    inside = [ours for theirs, ours in pairs.items() if theirs in names and ours in moved]
    said = ""
    for number, (end, last) in enumerate(zip(ends, source.graph.outputs, strict=True)):
        ours = passed.results[number] if number < len(passed.results) else nothing
        chosen = last if end != last and _probe.probabilities(ours) else end
        said = f", logits in front of {last}" if chosen != last else said
        wanted, pooled = averaged(ours, theirs[chosen])
        said = f", {pooled}" if pooled else said
        layers.append(_error(chosen, OUTPUT, ours, wanted))
    return _judged(
        "float64 execution",
        layers,
        tolerance,
        f"{counted(len(ordered), 'layer')} and the output on {counted(len(inputs_ours), 'image')}{said}{_only_in_output(len(inside))}",
    )


def _only_in_output(count: int) -> str:
    """Say why so few layers were compared, where convolutions have another bias than in the file."""
    if not count:
        return ""
    return f"; {counted(count, 'convolution')} whose bias is the BatchNorm's behind it in ours only by what follows them"


def before_softmax(graph: Graph, name: str) -> str:
    """Walk from an output back through softmaxes and layers that do nothing, to the logits; the same name where there is no softmax."""
    nodes = {node.name: node for node in graph.nodes}
    end, found = name, name
    while nodes[end].op in ("softmax", "identity") and len(nodes[end].inputs) == 1:
        softmax = nodes[end].op == "softmax"
        end = nodes[end].inputs[0]
        if softmax:
            found = end
    return found


def on_labelled(network: nn.Module, batches: Iterable[np.ndarray], labels: Sequence[int] | np.ndarray) -> Evidence:
    """Measure our network's accuracy on labelled images, in its own precision.

    An accuracy alone proves nothing: flipped kernels cost some tens of points and no more.

    Args:
        network: ours.
        batches: (B, C, H, W) as our network takes them.
        labels: the class of each image.
    """
    import torch

    right = seen = 0
    first = next(network.parameters())
    training = network.training
    network.eval()
    with torch.no_grad():
        for batch in batches:
            images = torch.from_numpy(np.ascontiguousarray(batch))  # pyright: ignore[reportUnknownMemberType]  # its argument is untyped
            result = network(images.to(first.device, first.dtype))
            result = next(iter(_probe.tensors_of(result)))
            found = result.flatten(1).argmax(1).cpu().numpy()
            right += int((found == np.asarray(labels[seen : seen + len(found)])).sum())
            seen += len(found)
    network.train(training)
    if not seen:
        return Evidence("labelled images", False, None, "there were no images")
    detail = f"{100 * right / seen:.2f} % of {seen} images right; nothing says how many the source's network gets right"
    return Evidence("labelled images", False, None, detail)


def structure(report: Report) -> Evidence:
    """Say what a complete mapping shows: that everything has a place, and nothing about what it computes."""
    lost = len(report.missing) + len(report.unmatched) + len(report.misshaped) + len(report.contested) + len(report.unused)
    detail = f"{lost} tensors or rows don't fit" if lost else f"every tensor has one place and fits in it{NOT_COMPARED}"
    return Evidence("structure only", False, None, detail)


def _error(theirs: str, ours: str, mine: np.ndarray, wanted: np.ndarray) -> LayerError:
    most, relative = _probe.errors(mine, wanted)
    return LayerError(theirs, ours, tuple(wanted.shape), most, relative)


def _judged(kind: Kind, layers: list[LayerError], tolerance: float, what: str) -> Evidence:
    worst = max(layers, key=lambda layer: layer.relative)
    proven = worst.relative <= tolerance
    first = next((layer for layer in layers if not layer.relative <= tolerance), worst)
    where = f"largest at {worst.ours}" if proven else f"the first to differ is {first.theirs} ({first.ours})"
    detail = f"relative error {worst.relative:.2g}, allowed {tolerance:g}, {what}; {where}"
    return Evidence(kind, proven, worst.relative, detail, layers)


def finite(value: Any) -> Any:
    """Turn what JSON has no words for, infinite numbers, into None, also within lists and dicts."""
    if is_dict(value):
        return {key: finite(one) for key, one in value.items()}
    if is_row(value):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
