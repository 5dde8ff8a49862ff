"""Hypotheses about what lies between two layers with weights: one layer of the source's graph is changed, executed, and compared
with what our network computes there. The change that reproduces our numbers is the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from convert import _fault, _probe, execute
from convert._fault import Fault, Trial
from convert._layer_faults import orders_of
from convert.graph import Node
from convert.source import Source
from weights.errors import ConvertError

ACTIVATIONS: dict[str, dict[str, float | bool]] = {
    "identity": {},
    "relu": {},
    "relu6": {},
    "leaky_relu": {"slope": 0.1},
    "silu": {},
    "hardswish": {},
    "sigmoid": {},
    "hardsigmoid": {},
    "tanh": {},
    "gelu": {"approximate": False},
    "elu": {"alpha": 1.0},
}
SLOPES = (0.01, 0.1, 0.2, 0.3, 0.05, 0.25)
PADS = ("symmetric", (0, 0, 0, 0), "same_upper", "same_lower")


def explain(
    source: Source,
    nodes: list[Node],
    known: Mapping[str, np.ndarray],
    end: str,
    ours: np.ndarray,
    inputs: np.ndarray,
    limit: float,
    tried: list[Trial],
    shaped: Callable[[np.ndarray], np.ndarray],
    biases: Mapping[str, np.ndarray],
) -> Fault | None:
    """Find the one change to some layers of theirs with which they give what ours has.

    Args:
        source: theirs.
        nodes: the layers behind those that agree, in order.
        known: values of the layers that agree.
        end: whose value is compared.
        ours: what our network has there.
        inputs: the images, as theirs takes them.
        limit: the relative error that counts as agreement.
        tried: grows.
        shaped: gives a value of theirs the shape that our layer reads.
        biases: of those known layers whose bias our layer lacks.
    """
    for cause, said, changed, values in _changes(nodes, known, end, biases):
        try:
            made = shaped(execute.compute(source, changed, values, [end], inputs=inputs)[end])
        except ConvertError:  # a pool that no longer fits
            continue
        error = _probe.relative(made, ours)
        tried.append(Trial(said, error))
        if error <= limit:
            return Fault((cause,), said, error)
    return None


def _changes(
    nodes: list[Node], known: Mapping[str, np.ndarray], end: str, biases: Mapping[str, np.ndarray]
) -> Iterator[tuple[str, str, list[Node], Mapping[str, np.ndarray]]]:
    for number, node in enumerate(nodes):
        for cause, said, other in _others(node):
            yield cause, said, [*nodes[:number], other, *nodes[number + 1 :]], known
    for name, bias in biases.items():
        value = known[name]
        without = value - bias.reshape(1, -1, *(1,) * (value.ndim - 2))
        yield _fault.BIAS, f"the bias of {name} is lost", nodes, {**known, name: without}
    for op, attrs in [*ACTIVATIONS.items(), *(("leaky_relu", {"slope": slope}) for slope in SLOPES)]:
        if op != "identity":  # ours has one more than theirs, at the end or behind a layer that agrees
            yield _fault.ACTIVATION, f"ours has an additional {op} in front of this layer", *_appended(nodes, known, end, op, attrs)


def _appended(
    nodes: list[Node], known: Mapping[str, np.ndarray], end: str, op: str, attrs: Mapping[str, object]
) -> tuple[list[Node], Mapping[str, np.ndarray]]:
    inner = f"{end} itself"
    extra = Node(end, op, (inner,), attrs)
    if end in known:
        return [extra], {inner: known[end]}
    renamed = [replace(node, name=inner) if node.name == end else node for node in nodes]
    return [*renamed, extra], known


def _others(node: Node) -> Iterator[tuple[str, str, Node]]:
    """List what could stand in a layer's place in our network: the cause, what is said of it, and the layer."""
    attrs = node.attrs

    def with_(**changed: object) -> Node:
        return replace(node, attrs={**attrs, **changed})

    if node.op in ("maxpool", "avgpool"):
        yield from _pools(node, with_)
    if node.op in ("concat",):
        for order in orders_of(len(node.inputs)):
            permuted = tuple(node.inputs[i] for i in order)
            yield _fault.CONCAT, f"theirs concatenates {', '.join(node.inputs)}; ours {', '.join(permuted)}", replace(node, inputs=permuted)
    if node.op in ACTIVATIONS or node.op in ("clip", "softplus"):
        for op, usual in ACTIVATIONS.items():
            for slope in SLOPES if op == "leaky_relu" else (0.0,):
                given = {"slope": slope} if op == "leaky_relu" else usual
                if op != node.op or dict(attrs) != dict(given):
                    other = replace(node, op=op, attrs=given)
                    yield _fault.ACTIVATION, f"theirs has {_shown(node)} at {node.name}, ours {_shown(other)}", other
    elif len(node.inputs) == 1 and node.op not in ("input", "flatten", "reshape", "identity", "conv", "dense", "norm"):
        yield _fault.ABSENT, f"ours lacks {node.name} ({node.op})", replace(node, op="identity", attrs={})
    if node.op in ("global_avgpool", "global_maxpool"):
        other = {"global_avgpool": "global_maxpool", "global_maxpool": "global_avgpool"}[node.op]
        yield _fault.ABSENT, f"theirs has {node.op} at {node.name}, ours {other}", replace(node, op=other)
    if node.op == "upsample":
        mode = "bilinear" if attrs.get("mode", "nearest") == "nearest" else "nearest"
        yield _fault.ABSENT, f"ours enlarges {node.name} {mode}", with_(mode=mode)
    if node.op == "lrn":
        yield _fault.ABSENT, f"ours does not divide alpha of {node.name} by the size", with_(alpha=attrs["alpha"] * attrs["size"])
        yield _fault.ABSENT, f"ours divides alpha of {node.name} by the size twice", with_(alpha=attrs["alpha"] / attrs["size"])
    if node.op == "flatten":
        for order in ("chw", "hwc", "cwh", "whc", "wch", "hcw"):
            if order != attrs.get("order", "chw"):
                yield _fault.FLATTEN, f"theirs flattens {attrs.get('order', 'chw')}, ours {order}", with_(order=order)


def _pools(node: Node, with_: Callable[..., Node]) -> Iterator[tuple[str, str, Node]]:
    attrs = node.attrs
    rounding = attrs.get("rounding", "floor")
    others = ("ceil",) if rounding == "floor" else ("floor",)
    for other in others:
        yield _fault.CEIL, f"theirs rounds {node.name} to the {rounding}, ours to the {other}", with_(rounding=other)
    if node.op == "avgpool":
        counted = attrs.get("count_pad", "none")
        other = "all" if counted == "none" else "none"
        yield _fault.BORDER, f"theirs counts of {node.name}'s padding {counted}, ours {other}", with_(count_pad=other)
    kernel = attrs["kernel"]
    half = (kernel[0] // 2, kernel[1] // 2)
    for pads in PADS:
        value = (*half, *half) if pads == "symmetric" else pads
        if value == attrs.get("pads", (0, 0, 0, 0)):
            continue
        same = isinstance(value, str) or isinstance(attrs.get("pads"), str)
        for turned in (rounding, *others):
            said = f"theirs pads {node.name} {attrs.get('pads', (0, 0, 0, 0))}, ours {value}, rounded to the {turned}"
            yield (_fault.SAME if same else _fault.PADDING), said, with_(pads=value, rounding=turned)
    kinds = {"maxpool": "avgpool", "avgpool": "maxpool"}
    yield _fault.ABSENT, f"theirs has {node.op} at {node.name}, ours {kinds[node.op]}", replace(node, op=kinds[node.op])


def _shown(node: Node) -> str:
    given = ", ".join(f"{key} {value:g}" for key, value in node.attrs.items())
    return f"{node.op} ({given})" if given else node.op


def images(ours: np.ndarray, theirs: np.ndarray, limit: float) -> Fault | None:
    """Find how their images follow from ours: the order of the channels, a factor and an offset for each.

    Args:
        ours, theirs: (B, C, H, W), of one shape.
        limit: the relative error that counts as agreement.
    """
    if ours.shape != theirs.shape or ours.ndim != 4 or ours.shape[1] > 4:
        return None
    for reversed_ in (False, True) if ours.shape[1] == 3 else (False,):
        seen = ours[:, ::-1] if reversed_ else ours
        factors: list[float] = []
        offsets: list[float] = []
        for channel in range(seen.shape[1]):
            x, y = seen[:, channel].ravel(), theirs[:, channel].ravel()
            spread = float(((x - x.mean()) ** 2).sum())
            factors.append(float(((x - x.mean()) * (y - y.mean())).sum()) / spread if spread else 1.0)
            offsets.append(float(y.mean() - factors[-1] * x.mean()))
        a, b = (np.asarray(v).reshape(1, -1, 1, 1) for v in (factors, offsets))
        error = _probe.relative(seen * a + b, theirs)
        if error > limit:
            continue
        moved = bool(np.abs(b).max() > 1e-6 * max(np.abs(theirs).max(), 1e-300))
        scaled = bool(np.abs(a - 1).max() > 1e-6)
        uneven = bool(np.ptp(a) > 1e-6 * np.abs(a).max())
        size = float(np.abs(a).mean())
        causes = [_fault.BGR] if reversed_ else []
        causes += [_fault.RANGE] if scaled and (size > 30 or size < 1 / 30 or not (moved or uneven)) else []
        causes += [_fault.MEAN] if moved or uneven else []
        if causes:
            order = "ours in reverse order" if reversed_ else "ours"
            said = f"their channels are {order} times {_list(factors)} plus {_list(offsets)}"
            return Fault(tuple(causes), said, error)
    return None


def _list(values: list[float]) -> str:
    return "(" + ", ".join(f"{value:.4g}" for value in values) + ")"
