"""Third pass: attention inside windows becomes one step that reads and writes the map in place.

A network cuts a map into windows, maybe shifted, computes queries, keys and values of each pixel, lets the pixels of a window attend to
each other, and puts the windows together again. Almost all of it moves pixels. Here each value is followed through such moves as what it
is: the pixels of a map, in another order. What is computed of each pixel alone is computed on the map instead, and attention becomes the
step "window_attention", whose arguments say where the pixels of a window lie. Where the order comes out as the map's own, nothing has
moved, and the map takes the value's place.

Attention of all tokens to which a constant is added, as BEiT's positions are, is such a step too, of one window.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.graph import Graph, Node, const_value
from zoo.kernels.passes.kinds import is_pointwise
from zoo.kernels.passes.orders import (
    Factor,
    Known,
    Logits,
    Order,
    Several,
    own_dims,
    part_of,
    permuted,
    rolled,
    seen,
    selected,
    sizes_of,
    sliced,
)

aten = torch.ops.aten

KEYS = 4
"""Added to the axis of a key's pixel; a query's has none."""
MOST_TOKENS, MOST_CHANNELS = 256, 128
"""Tokens, and channels of a head, up to which attention with a constant is one window: the kernel holds them all."""
APART = -100.0
"""What Swin adds to the logits of pixels that only its shift made neighbours."""

Found = dict[Node, Known]


@dataclass(frozen=True, slots=True)
class Norm:
    """The norms of a value's vectors, on the way to where it is divided by them."""

    of: Node


@dataclass(slots=True)
class _Walk:
    """What is known of each node, and of nodes that hold norms."""

    found: Found = field(default_factory=dict)
    norms: dict[Node, Norm] = field(default_factory=dict)
    made: dict[tuple[Node, ...], Node] = field(default_factory=dict)
    attended: bool = False


def windows(graph: Graph) -> None:
    """Replace attention inside windows; where there is none, or it is something else, the graph stays as it is."""
    walk = _Walk()
    for node in graph.nodes:
        if (known := _follow(node, walk)) is not None:
            walk.found[node] = known
    if not walk.attended:
        return
    before = [(node, list(node.inputs)) for node in graph.nodes]
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    graph.nodes += walk.made.values()
    for node, known in walk.found.items():
        if isinstance(known, Order) and known.is_map() and known.root is not node:
            graph.replace(node, known.root)
    graph.prune()
    if _work(graph.nodes) > _work(nodes):  # the old order is needed too, so that layers would be computed twice
        for node, inputs in before:
            node.inputs = inputs
        graph.nodes, graph.outputs = nodes, outputs


def _work(nodes: Iterable[Node]) -> int:
    return sum(node.op == "conv" for node in nodes)


def _follow(node: Node, walk: _Walk) -> Known | None:
    """Return what a node is, as far as it can be followed."""
    found = walk.found
    first = found.get(node.inputs[0]) if node.inputs else None
    if node.op == "aten":
        return _operator(node, first, walk)
    if first is not None:
        if node.op == "view":
            return seen(first, node.shape)
        if node.op == "item" and isinstance(first, Several):
            return part_of(first, node)
        if node.op == "affine" and isinstance(first, Logits):
            return _scaled(node, first)
        if isinstance(first, Order) and first.has_channels() and not first.is_map() and (made := _pixelwise(node, walk)) is not None:
            return made
    if len(node.shape) == 4 and node.op not in ("view", "item", "const"):
        return Order(node, own_dims(node.shape))
    return None


def _pixelwise(node: Node, walk: _Walk) -> Order | None:
    """Compute on the map what a step computes of each pixel alone."""
    orders = [walk.found.get(source) for source in node.inputs]
    first = orders[0]
    assert isinstance(first, Order)
    alone = (node.op == "conv" and is_pointwise(node)) or node.op in ("layer_norm", "act", "affine", "add")
    if not alone or (node.op != "add" and len(node.inputs) > 1):
        return None
    roots = []
    for order in orders:
        if not isinstance(order, Order) or not order.has_channels() or (order.dims, order.roll) != (first.dims, first.roll):
            return None
        if order.root.shape != first.root.shape:
            return None
        roots.append(order.root)
    n, _, h, w = first.root.shape
    shape = (n, node.shape[1], h, w)
    new = Node(node.op, roots, dict(node.attrs), shape, node.dtype, list(node.roles), node.layers)
    walk.made[node, *roots] = new
    return Order(new, (first.dims[0], own_dims(shape)[1], *first.dims[2:]), first.roll)


def _operator(node: Node, first: Known | None, walk: _Walk) -> Known | None:
    """Follow one of PyTorch's operators."""
    func, args = node.attrs["func"], bound(node)
    if (norm := _norm(node, func, args, walk)) is not None:
        walk.norms[node] = norm
        return None
    if first is None:
        return None
    if func in (aten.clone.default, aten.alias.default, aten.contiguous.default) or (func is aten.expand.default and _same(node)):
        return first
    if func is aten._unsafe_view.default:
        return seen(first, node.shape)
    if func is aten.permute.default:
        return permuted(first, args[1])
    if func is aten.transpose.int:
        axes = list(range(len(node.shape)))
        axes[args[1]], axes[args[2]] = axes[args[2]], axes[args[1]]
        return permuted(first, axes)
    if func is torch.ops.kernelzoo.attention.default:
        return _with_constant(node, args, walk)
    if func is aten.bmm.default:
        return _product(node, first, walk.found.get(node.inputs[1]), walk)
    if isinstance(first, Logits):
        return _onto_logits(node, func, args, first)
    if not isinstance(first, Order):
        return None
    if func is aten.roll.default:
        return rolled(first, args[1], args[2], node.shape)
    if func is aten.unbind.int:
        return Several(first, args[1] % len(first.dims))
    if func is aten.split.Tensor:
        return Several(first, args[2] % len(first.dims), args[1])
    if func is aten.select.int:
        return selected(first, args[1] % len(first.dims), args[2])
    if func is aten.slice.Tensor:
        return sliced(first, node.inputs[0].shape, node.shape, args)
    if func is aten.mul.Tensor and isinstance(args[1], int | float) and not first.unit:
        return replace(first, factor=first.factor * args[1])
    if func is aten.div.Tensor and len(node.inputs) == 2 and (norm := walk.norms.get(node.inputs[1])) is not None:
        plain = norm.of is node.inputs[0] and first.factor == 1.0 and not first.unit
        return replace(first, unit=first.dims[-1]) if plain else None
    return None


def _same(node: Node) -> bool:
    return node.shape == node.inputs[0].shape


def _norm(node: Node, func: Any, args: Sequence[Any], walk: _Walk) -> Norm | None:
    """Recognise the norm of a value's last axis, at least 1e-12, as `torch.nn.functional.normalize` has it."""
    if func is aten.linalg_vector_norm.default and args[1] == 2 and args[2] in ([-1], [len(node.shape) - 1]) and args[3]:
        return Norm(node.inputs[0])
    if (func is aten.clamp_min.default and args[1] <= 1e-6) or func is aten.expand.default:
        return walk.norms.get(node.inputs[0])
    return None


def _onto_logits(node: Node, func: Any, args: Sequence[Any], logits: Logits) -> Logits | None:
    if func is aten._softmax.default and args[1] % len(logits.dims) == len(logits.dims) - 1 and not logits.weighs:
        return replace(logits, weighs=True)
    if func is aten.add.Tensor and len(node.inputs) == 2 and _same(node) and args[2] == 1 and not logits.weighs:
        value = const_value(node.inputs[1])
        return None if value is None else _added(value, logits)
    if func is aten.mul.Tensor and isinstance(args[1], int | float) and _is_bare(logits):
        return replace(logits, query=replace(logits.query, factor=logits.query.factor * args[1]))
    return None


def _is_bare(logits: Logits) -> bool:
    """Tell whether nothing was done to the products of queries and keys that a factor would change too."""
    return logits.scale is None and logits.bias is None and logits.region is None and not logits.weighs


def _scaled(node: Node, logits: Logits) -> Logits | None:
    """Take a factor of each head's logits; Swin V2's temperature."""
    scale, shift = node.attrs["scale"], node.attrs["shift"]
    heads = _heads(logits.query)
    if not _is_bare(logits) or len(logits.dims) != 4 or logits.dims[1] != heads or scale.numel() != prod(size for _, size, _ in heads):
        return None
    if bool((shift != 0).any()):
        return None
    return replace(logits, scale=scale.detach().float().flatten())


def _added(value: Tensor, logits: Logits) -> Logits | None:
    """Take what is added to logits: a number for each head and two pixels, or for each window and two pixels."""
    tokens = prod(size for _, size, _ in logits.dims[-1])
    value = value.detach().float()
    value = value.reshape(*(1,) * (len(logits.dims) - value.dim()), *value.shape)
    if value.shape[-2:] != (tokens, tokens):
        return None
    named = [axis for axis, size in enumerate(value.shape[:-2]) if size > 1]
    if len(named) > 1:
        return None
    about = logits.dims[named[0]] if named else _heads(logits.query)
    flat = value.reshape(-1, tokens, tokens)
    if about == _heads(logits.query):
        heads = prod(size for _, size, _ in about)
        bias = flat.expand(heads, tokens, tokens)
        return replace(logits, bias=bias.contiguous() if logits.bias is None else logits.bias + bias)
    if {axis for axis, _, _ in about} <= {2, 3} and about == _windows(logits.query) and logits.region is None:
        region = (flat != 0).int().argmin(2).float()  # the first pixel that each may look at
        rebuilt = (region[:, :, None] != region[:, None, :]) * APART
        return replace(logits, region=region) if torch.equal(rebuilt, flat) else None
    return None


def _product(node: Node, left: Known | None, right: Known | None, walk: _Walk) -> Known | None:
    """Multiply queries by keys, or what each pixel looks at by values."""
    if isinstance(left, Order) and isinstance(right, Order):
        if left.root is not right.root or left.roll != right.roll or left.unit != right.unit or len(left.dims) != 3:
            return None
        batch, asking, inner = left.dims
        alike = right.dims == (batch, inner, asking) and sizes_of(inner) > 1
        return Logits(left, right, (batch, asking, _looked_at(asking))) if alike else None
    if isinstance(left, Logits) and left.weighs and isinstance(right, Order) and len(left.dims) == 3:
        return _attention(node, left, right, walk)
    return None


def _with_constant(node: Node, args: Sequence[Any], walk: _Walk) -> Order | None:
    """Take attention that is one operator, where a constant is added to its logits; PyTorch's fast kernels know none."""
    *tensors, mask, causal, scale, grouped = args
    held = const_value(mask) if isinstance(mask, Node) else None
    if held is None or not held.is_floating_point() or causal or grouped:
        return None
    orders = [walk.found.get(tensor) for tensor in tensors]
    q, k, v = (order if isinstance(order, Order) and len(order.dims) == 4 else None for order in orders)
    if q is None or k is None or v is None or k.root is not q.root or (k.dims, k.roll, k.unit) != (q.dims, q.roll, q.unit):
        return None
    tokens, width = node.shape[2:]
    if tokens > MOST_TOKENS or width > MOST_CHANNELS:
        return None
    batch, heads, asking, _ = q.dims
    q, k, v = (replace(order, dims=(order.dims[0] + order.dims[1], *order.dims[2:])) for order in (q, k, v))
    q = replace(q, factor=q.factor * (width**-0.5 if scale is None else scale))
    logits = _added(held, Logits(q, k, (batch, heads, asking, _looked_at(asking))))
    if logits is None:
        return None
    made = _attention(node, replace(logits, dims=(batch + heads, asking, _looked_at(asking)), weighs=True), v, walk)
    return None if made is None else replace(made, dims=(batch, made.dims[0][len(batch) :], asking, made.dims[2]))


def _attention(node: Node, logits: Logits, value: Order, walk: _Walk) -> Order | None:
    """Make the step, where queries, keys and values are of the same pixels and the windows are regular."""
    query, key = logits.query, logits.key
    batch, asking, inner = query.dims
    if value.root is not query.root or not _plain_but_start(value) or value.roll != query.roll or value.dims != (batch, asking, inner):
        return None
    if logits.dims != (batch, asking, _looked_at(asking)):
        return None
    shape = query.root.shape
    placed = _window(query, shape)
    heads = sizes_of(_heads(query))
    if placed is None or len(inner) != 1 or inner[0][0] != 1 or inner[0][2] != 1:
        return None
    width, firsts = inner[0][1], (query.start[1], key.start[1], value.start[1])
    pitch = _heads(query)[0][2] if len(_heads(query)) == 1 else width
    if _heads(query) not in ((), ((1, heads, pitch),)) or (query.unit and query.unit != inner):
        return None
    edges = sorted((*firsts, shape[1] if pitch == width else min(firsts) + pitch))
    if min(after - before for before, after in pairwise(edges)) // (heads if pitch == width else 1) != width:
        return None
    if any((o.start[0], o.start[2], o.start[3]) != (0, 0, 0) for o in (query, key, value)):
        return None
    window, step, stride = placed
    attrs: dict[str, Any] = {
        "heads": heads, "window": window, "step": step, "stride": stride, "roll": (query.roll[2], query.roll[3]),
        "first": firsts, "pitch": 0 if pitch == width else pitch, "factor": query.factor * key.factor, "cosine": bool(query.unit),
        "bias": logits.bias, "scale": logits.scale, "region": logits.region,
    }  # fmt: skip
    if query.roll[0] or query.roll[1]:
        return None
    new = Node("window_attention", [query.root], attrs, (shape[0], heads * width, *shape[2:]), node.dtype, ["x"], node.layers)
    walk.made[(node,)] = new
    walk.attended = True
    together = tuple((1, heads, width) if factor[0] == 1 else factor for factor in batch)
    return Order(new, (together, asking, inner), query.roll)


def _looked_at(factors: Iterable[Factor]) -> tuple[Factor, ...]:
    return tuple((axis + KEYS, size, step) for axis, size, step in factors)


def _plain_but_start(order: Order) -> bool:
    return order.factor == 1.0 and not order.unit


def _window(query: Order, shape: tuple[int, ...]) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """Return pixels of a window, steps inside of it, and strides from one to the next, down and along."""
    batch, asking = query.dims[0], query.dims[1]
    if [axis for axis, _, _ in asking] not in ([2, 3], [2], [3]) or (_heads(query) and batch[-1][0] != 1):
        return None
    outer = [factor for factor in batch if factor[0] != 1]
    if [axis for axis, _, _ in outer] != sorted(axis for axis, _, _ in outer) or len({axis for axis, _, _ in outer}) != len(outer):
        return None
    if sizes_of([factor for factor in outer if factor[0] == 0]) != shape[0]:
        return None
    window, step, stride = [], [], []
    for axis in (2, 3):
        inside = next((f for f in asking if f[0] == axis), (axis, 1, 1))
        beyond = next((f for f in outer if f[0] == axis), (axis, 1, inside[1]))
        if inside[1] * beyond[1] != shape[axis]:
            return None
        window.append(inside[1])
        step.append(inside[2])
        stride.append(beyond[2])
    return (window[0], window[1]), (step[0], step[1]), (stride[0], stride[1])


def _heads(order: Order) -> tuple[Factor, ...]:
    """Return the parts of channels that the first axis of queries runs over."""
    return tuple(factor for factor in order.dims[0] if factor[0] == 1)


def _windows(order: Order) -> tuple[Factor, ...]:
    return tuple(factor for factor in order.dims[0] if factor[0] in (2, 3))
