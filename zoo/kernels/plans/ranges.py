"""What int8 and fp8 could compute of a graph, and the ranges of its values, measured on calibration images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.comparing.precision import products
from zoo.kernels.errors import Untraceable
from zoo.kernels.ops import conv
from zoo.kernels.ops._activation import ACTIVATIONS
from zoo.kernels.ops._narrow import MOST, narrowed
from zoo.kernels.passes.aten import is_view
from zoo.kernels.passes.graph import OUTSIDE, Graph, Node
from zoo.kernels.passes.place import Place
from zoo.kernels.plans.balance import taps
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = ("view", "rows")
"""Steps that show the same numbers in another shape."""
FINITE = ("conv", "pool", "mean", "pointwise", "layer_norm", "cat", "squeeze_excite", "pad", "item", "input", "const", *SHAPES)
"""Steps that make no infinity or NaN of finite numbers, for int8 has none: behind other steps all layers stay wide in it."""
FINITE_OPERATORS = ("add", "relu", "clone", "cat", "constant_pad_nd", "upsample_nearest2d", "upsample_bilinear2d", "hardtanh", "sigmoid")
"""The same of PyTorch's operators, with all that only show numbers otherwise."""
RATIOS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Parts of a value's largest number that int8's range may end at."""


@dataclass(slots=True)
class Scales:
    """What was measured of a network on calibration images, by the number of a step in its graph.

    Attributes:
        steps: what the steps are, so that another graph's are not taken for them.
        largest: of each value that a layer reads, its largest magnitude.
        clipped: the range whose int8 has the least squared error.
        means: of each layer, the mean of what its weights are multiplied by, (C, KH, KW).
        lost: of each layer, the relative error of its output where only its own input and weights are narrow.
    """

    steps: list[tuple[str, tuple[str, ...]]]
    largest: dict[int, float] = field(default_factory=dict)
    clipped: dict[int, float] = field(default_factory=dict)
    means: dict[int, Tensor] = field(default_factory=dict)
    lost: dict[int, float] = field(default_factory=dict)


def steps_of(graph: Graph) -> list[tuple[str, tuple[str, ...]]]:
    """Name the steps of a graph, alike for all batch sizes."""
    return [(node.op, node.layers) for node in graph.steps()]


def root(value: Node) -> Node:
    """Return the step whose numbers a value shows."""
    while value.op in SHAPES:
        value = value.inputs[0]
    return value


def finite_values(graph: Graph) -> set[Node]:
    """Return the values that are finite where the images are."""
    found: set[Node] = set()
    for node in graph.nodes:
        func: Any = node.attrs.get("func")
        plain = node.op in FINITE or (node.op == "aten" and (is_view(func) or func._overloadpacket.__name__ in FINITE_OPERATORS))
        if plain and all(source in found for source in node.inputs):
            found.add(node)
    return found


def able(node: Node, kind: str, users: dict[Node, list[Node]], finite: set[Node]) -> bool:
    """Tell whether a step is a layer that 8 bits can compute: dense, of 16 channels at least, not the first nor the last."""
    a = node.attrs
    if node.op != "conv" or a["groups"] != 1 or a.get("scale") is not None or a["pre_act"] != "none" or "gate" in node.roles:
        return False
    k, c = a["weight"].shape[:2]
    source = node.inputs[0]
    if c % 16 or k % 16 or a["act"] not in ACTIVATIONS or len(source.shape) != 4 or root(source).op in ("input", "const"):
        return False
    if kind == "int8" and source not in finite:
        return False
    return not _is_last(node, users)


def _is_last(node: Node, users: dict[Node, list[Node]]) -> bool:
    """Tell whether a value is the network's output, perhaps in another shape."""
    return any(reader is OUTSIDE or (reader.op in SHAPES and _is_last(reader, users)) for reader in users[node])


def measure(graph: Graph, places: dict[Node, Place], batches: Sequence[list[Tensor]], kind: str, device: torch.device) -> Scales:
    """Run a graph in float32 on calibration images and measure its values.

    Args:
        graph: fused and placed, with weights as they were.
        places: where parts of concatenations lie.
        batches: what the network is given, of the graph's shapes.
        kind: "int8" or "fp8".
        device: where to compute.

    Raises:
        Untraceable: there is no layer that can be narrow, or a value is not finite.
    """
    users, number = graph.users(), {node: index for index, node in enumerate(graph.steps())}
    finite = finite_values(graph)
    layers = [node for node in graph.steps() if able(node, kind, users, finite)]
    if not layers:
        raise Untraceable(f"it has no dense layer of 16 channels and more between its first and its last that {kind} could compute")
    found = Scales(steps_of(graph))
    program = Program(graph, places, {}, Setting(device, torch.float32), Weights(), compiled=False)
    known = set(layers)

    def run(probe: Callable[[Node, list[Any], Any], None]) -> None:
        for tensors in batches:
            images = [t.float() if t.is_floating_point() else t for t in tensors]
            images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in images]
            program.run([[image] * len(program.forms[node]) for node, image in zip(graph.inputs, images, strict=True)], probe)

    def first(node: Node, inputs: list[Any], value: Any) -> None:
        del value
        if node not in known:
            return
        for source, given in zip(node.inputs, inputs, strict=True):
            index = number.get(root(source))
            if index is not None:
                found.largest[index] = max(found.largest.get(index, 0.0), float(given.abs().amax()))
        mean = taps(node, inputs).cpu() / len(batches)
        found.means[number[node]] = found.means.get(number[node], torch.zeros_like(mean)) + mean

    off: dict[int, Tensor] = {}
    wrong: dict[int, Tensor] = {}

    def second(node: Node, inputs: list[Any], value: Any) -> None:
        if node not in known:
            return
        index = number[root(node.inputs[0])]
        x: Tensor = inputs[0]
        tried = torch.stack([(_rounded(x, ratio * found.largest[index], kind) - x).square().sum() for ratio in RATIOS]).cpu()
        off[index] = off.get(index, torch.zeros_like(tried)) + tried
        best = RATIOS[int(tried.argmin())] if kind == "int8" else 1.0
        weight = node.attrs["weight"].to(device, torch.float32)
        stored, scale = narrow_weight(weight, kind)
        a = node.attrs
        window = (a["stride"], a["padding"], a["dilation"])
        right = conv.convolved(x, weight, None, *window)
        near = conv.convolved(_rounded(x, best * found.largest[index], kind), stored.float() * scale[:, None, None, None], None, *window)
        some = torch.stack([(near - right).square().sum(), right.square().sum()]).cpu()
        wrong[number[node]] = wrong.get(number[node], torch.zeros_like(some)) + some
        del value

    with torch.no_grad(), products(tf32=False):
        run(first)
        if not all(0 <= most < float("inf") for most in found.largest.values()):
            raise Untraceable("a value is infinite or NaN on the calibration images")
        run(second)
    for index, sums in off.items():
        found.clipped[index] = RATIOS[int(sums.argmin())] * found.largest[index]
    found.lost = {index: float((some[0] / some[1].clamp_min(1e-30)).sqrt()) for index, some in wrong.items()}
    return found


def _rounded(x: Tensor, most: float, kind: str) -> Tensor:
    """Return the values that a map has when it is stored narrow, its range ending at `most`."""
    scale = max(most, 1e-12) / MOST[KINDS[kind]]
    return narrowed(x / scale, KINDS[kind]).float() * scale


def narrow_weight(weight: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return weights (K, ...) in a narrow type, and the scale (K,) of each output channel."""
    scale = weight.flatten(1).abs().amax(1).clamp_min(1e-12) / MOST[KINDS[kind]]
    held = narrowed(weight / scale[:, None, None, None], KINDS[kind])
    return held.contiguous(memory_format=torch.channels_last), scale
