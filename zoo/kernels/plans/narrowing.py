"""Behind the passes, for int8 and fp8: convolutions and linear layers whose maps and weights have 8 bits, with no wide map between them.

A value is stored narrow where whatever reads it takes it so, and what computes it can write it so. Else a step of its own rounds it for the
layers that do. Scales are one for each value and one for each output channel of the weights (e4m3 of Micikevicius et al., "FP8 Formats for
Deep Learning", 2022). What rounding the weights does to an output's mean goes into its bias (Nagel et al. 2019, section 4.2).
"""

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
from zoo.kernels.passes.kinds import is_stem
from zoo.kernels.passes.place import Place
from zoo.kernels.passes.trace import Ref
from zoo.kernels.plans.balance import _taps
from zoo.kernels.plans.program import Program
from zoo.kernels.tuning.binding import Weights
from zoo.kernels.tuning.steps import Setting

KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
SHAPES = ("view", "rows")
"""Steps that show the same numbers in another shape."""
FINITE = ("conv", "pool", "mean", "pointwise", "layer_norm", "cat", "squeeze_excite", "pad", "item", "input", "const", *SHAPES)
"""Steps that make no infinity or NaN of finite numbers, for int8 has none: behind other steps all layers stay wide in it."""
FINITE_OPERATORS = (
    "add",
    "relu",
    "clone",
    "cat",
    "constant_pad_nd",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "hardtanh",
    "sigmoid",
    "gelu",
)
"""The same of PyTorch's operators, with all that only show numbers otherwise."""
HOMOGENEOUS = ("none", "relu", "leaky_relu_0.1", "leaky_relu_0.01")
"""Activations that a factor may be taken through."""
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
        mean = _taps(node, inputs).cpu() / len(batches)
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


def narrow(graph: Graph, places: dict[Node, Place], scales: Scales, kind: str, keep: frozenset[int], *, clip: bool) -> int:
    """Let layers of a graph compute in 8 bits.

    Args:
        graph: fused and placed, with weights as they were; changed.
        places: where parts of concatenations lie; what lies there stays wide.
        scales: what was measured of the same network.
        kind: "int8" or "fp8".
        keep: numbers of layers that stay as they are.
        clip: let int8's ranges end where the squared error is least, not at the largest number.

    Returns:
        How many layers do.

    Raises:
        Untraceable: the graph is not that of which the scales are.
    """
    if steps_of(graph) != scales.steps:
        raise Untraceable(f"the ranges for {kind} were measured on another graph of this network")
    users, number = graph.users(), {node: index for index, node in enumerate(graph.steps())}
    finite = finite_values(graph)
    possible = [node for node in graph.steps() if able(node, kind, users, finite)]
    layers = [node for node in possible if number[node] not in keep and number[node] in scales.means]
    chosen, dtype = set(layers), KINDS[kind]
    ranges = scales.clipped if clip and kind == "int8" else scales.largest
    scale = {node: max(ranges.get(index, scales.largest.get(index, 0.0)), 1e-12) / MOST[dtype] for node, index in number.items()}
    measured = {node for node, index in number.items() if index in scales.largest}
    for alike in _families(graph):  # a maximum has its input's scale, and what it is the maximum of has it
        known = [node for node in alike if node in measured]
        if known:
            scale.update(dict.fromkeys(alike, max(scale[node] for node in known)))
            measured.update(alike)
    stored: dict[Node, bool] = {}

    def takes(reader: Node, value: Node) -> bool:
        if reader.op in SHAPES:
            return all(takes(further, reader) for further in users[reader])
        if reader in chosen:
            return all(role in ("x", "residual") for role, source in zip(reader.roles, reader.inputs, strict=True) if source is value)
        return _is_max_pool(reader) and is_stored(reader)

    def is_stored(value: Node) -> bool:
        if value not in stored:
            stored[value] = False  # of a circle, which there is none
            writes = value in chosen or value.op == "layer_norm" or _is_max_pool(value) or _stem_writes(value, users, chosen)
            known = value in measured and value not in places and bool(users[value])
            stored[value] = writes and known and OUTSIDE not in users[value] and all(takes(reader, value) for reader in users[value])
        return stored[value]

    for node in list(graph.steps()):
        is_stored(node)
    # A pool is stored only where what it reads is, and what reads it takes it so.
    for node in graph.steps():
        if _is_max_pool(node) and stored.get(node) and not stored.get(root(node.inputs[0])):
            stored[node] = False
    wide: dict[Node, Node] = {}

    def rounded(value: Node) -> Node:
        if value not in wide:
            made = Node(
                "quantize",
                [value],
                {"out_factor": _one(1 / scale[root(value)]), "act": "none", "stored": dtype},
                value.shape,
                value.dtype,
                ["x"],
            )
            made.layers = root(value).layers
            graph.nodes.insert(graph.nodes.index(value) + 1, made)
            wide[value] = made
        return wide[value]

    for node in graph.steps():
        if not stored.get(node) or node in chosen:
            continue
        node.attrs["stored"] = dtype
        if node.op == "layer_norm":
            node.attrs |= {name: None if node.attrs[name] is None else node.attrs[name] / scale[node] for name in ("scale", "shift")}
            if node.attrs["scale"] is None:
                node.attrs["scale"] = torch.full((node.shape[1],), 1 / scale[node])
        elif node.op == "conv":
            node.attrs["weight"] = node.attrs["weight"] / scale[node]
            node.attrs["bias"] = None if node.attrs["bias"] is None else node.attrs["bias"] / scale[node]
    for node in layers:
        a, source = node.attrs, node.inputs[0]
        own = scale[root(source)]
        weight = a["weight"].float()
        held, each = narrow_weight(weight, kind)
        shift = (
            (held.float() * each.view(-1, 1, 1, 1) - weight).flatten(1) @ scales.means[number[node]].to(weight.device).flatten()
        ).float()
        bias = -shift if a["bias"] is None else a["bias"].float() - shift
        made: dict[str, Any] = {name: a[name] for name in ("stride", "padding", "dilation", "act", "source") if name in a}
        made |= {"kind": kind, "weight": held, "factor": each * own, "bias": bias, "residual_factor": None, "out_factor": None}
        if not stored.get(root(source)):
            node.inputs[0] = rounded(source)
        other = node.argument("residual")
        if other is not None and stored.get(root(other)):
            made["residual_factor"] = _one(scale[root(other)])
        if stored.get(node):
            made |= {"out_factor": _one(1 / scale[node]), "stored": dtype}
        node.op, node.attrs = "narrow_conv", made
    if kind == "int8":
        _mark_unfinite(graph)
    for node in graph.steps():
        if node.op in SHAPES and (root(node).attrs.get("stored") is not None):
            node.attrs["stored"] = dtype
    return len(layers)


def _stem_writes(node: Node, users: dict[Node, list[Node]], chosen: set[Node]) -> bool:
    """Tell whether a first convolution can write 8 bits and should; where a pool reads it one kernel computes both."""
    a = node.attrs
    able = is_stem(node) and a["act"] in HOMOGENEOUS and a["pre_act"] == "none" and a["weight"].shape[0] % 16 == 0
    return able and all(reader in chosen for reader in users[node])


def _families(graph: Graph) -> list[list[Node]]:
    """Return the values that have a scale in common: those that maxima are made of, with the maxima."""
    found: dict[Node, list[Node]] = {}
    for node in graph.steps():
        value = node
        while _is_max_pool(value):
            value = root(value.inputs[0])
        found.setdefault(value, []).append(node)
    return [
        [value, *(node for node in alike if node is not value)] for value, alike in found.items() if len(alike) > 1 and value.op != "input"
    ]


def _mark_unfinite(graph: Graph) -> None:
    """Let an image with NaN or infinity in it have NaN for an answer: int8 would make plausible numbers of them.

    Each image's largest magnitude times 0, which is 0 or NaN, is added to what the last layer reads, or to an output without such a layer.
    To what is not one row of numbers for each image that of all images is added.
    """
    aten = torch.ops.aten
    marks: dict[tuple[Node, int, int], Node] = {}
    renamed: dict[Node, Node] = {}

    def step(func: Any, source: list[Node], shape: tuple[int, ...], *args: Any) -> Node:
        made = Node("aten", source, {"func": func, "args": args, "kwargs": {}}, shape, source[0].dtype, ["x"] * len(source))
        graph.nodes.append(made)
        return made

    def mark(image: Node, marked: Node) -> Node:
        each = len(marked.shape) > 0 and marked.shape[0] == image.shape[0]
        count, dims = image.shape[0] if each else 1, max(1, len(marked.shape))
        if (image, count, dims) not in marks:
            axes = list(range(int(each), len(image.shape)))
            most = step(aten.linalg_vector_norm.default, [image], (count,) if each else (), Ref(0), float("inf"), axes)
            none = step(aten.mul.Tensor, [most], most.shape, Ref(0), 0.0)
            shape = (count, *[1] * (dims - 1))
            marks[image, count, dims] = step(aten.view.default, [none], shape, Ref(0), list(shape))
        return marks[image, count, dims]

    images = [node for node in graph.inputs if node.dtype.is_floating_point and len(node.shape) == 4]
    outputs = [leaf for leaf in graph.outputs if isinstance(leaf, Node) and leaf.dtype.is_floating_point and leaf.shape]
    for leaf in dict.fromkeys(outputs):
        last = root(leaf)
        for image in images:
            if last.op == "conv" and last.inputs[0].shape[0] == image.shape[0] == leaf.shape[0]:
                x = last.inputs[0]
                last.inputs[0] = step(aten.add.Tensor, [x, mark(image, x)], x.shape, Ref(0), Ref(1))
            else:
                now = renamed.get(leaf, leaf)
                renamed[leaf] = step(aten.add.Tensor, [now, mark(image, leaf)], leaf.shape, Ref(0), Ref(1))
    graph.outputs = [renamed.get(leaf, leaf) if isinstance(leaf, Node) else leaf for leaf in graph.outputs]
    graph.prune()


def _is_max_pool(node: Node) -> bool:
    a = node.attrs
    return node.op == "pool" and a["kind"] == "max" and a.get("scale") is None and a.get("shift") is None and a["pre_act"] == "none"


def _one(value: float) -> Tensor:
    return torch.full((1,), value)
