"""Between lowering and folding: global response normalisation becomes a gate, which the 1x1 convolution behind it multiplies by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import bound
from zoo.kernels.passes.graph import Graph, Node, const_value
from zoo.kernels.passes.kinds import is_pointwise

aten = torch.ops.aten
LAST, FIRST = ((1, 2), 3, (0, 2, 3, 1), (0, 3, 1, 2)), ((2, 3), 1, None, None)
"""Axes of pixels, axis of channels, and how a map is put into that order and back: channels last, as the authors have them, or first."""


def gate_responses(graph: Graph) -> None:
    """Replace ``x + (x * n * weight + bias)`` (Woo et al. 2023, equation 5), n being each channel's norm by the mean of all norms."""
    users = graph.users()
    for node in list(graph.nodes):
        if node.op != "add":
            continue
        for x, other in (node.inputs, node.inputs[::-1]):
            found = next((parts for order in (LAST, FIRST) if (parts := _normalised(x, other, order)) is not None), None)
            if found is None:
                continue
            weight, bias, eps = found
            attrs = {"scale": weight, "eps": eps}
            gate = Node("response_gate", [x], attrs, (*x.shape[:2], 1, 1), x.dtype, ["x"], other.layers)
            product = Node("gate", [x, gate], {}, node.shape, node.dtype, ["x", "gate"], node.layers)
            graph.nodes += [gate, product]
            result = product
            if all(map(is_pointwise, users[node])):
                for conv in users[node]:
                    _add_bias(conv, bias)
            else:
                attrs = {"scale": torch.ones_like(bias), "shift": bias}
                result = Node("affine", [product], attrs, node.shape, node.dtype, ["x"], node.layers)
                graph.nodes.append(result)
            graph.replace(node, result)
            break
    graph.prune()


def _add_bias(conv: Node, bias: Tensor) -> None:
    """Let a 1x1 convolution's own bias stand for one of each of its inputs."""
    weight, own = conv.attrs["weight"], conv.attrs["bias"]
    more = weight.flatten(1).double() @ bias.double().to(weight.device)
    conv.attrs["bias"] = (more if own is None else own.double() + more).to(torch.float32)


def _normalised(x: Node, other: Node, order: Any) -> tuple[Tensor, Tensor, float] | None:
    """Return weight, bias and eps where `other` is ``x * n * weight + bias``; None where it is something else."""
    pixels, channels, there, back = order
    if back is not None:
        if not _is(other, aten.permute.default) or tuple(bound(other)[1]) != back:
            return None
        other = other.inputs[0]
    if not _is(other, aten.addcmul.default) or bound(other)[3] != 1 or len(other.inputs) != 3:
        return None
    bias, weight = (None if (value := const_value(source)) is None else value.detach().flatten() for source in other.inputs[:2])
    product = other.inputs[2]
    if bias is None or weight is None or not (product.op == "gate" or _is(product, aten.mul.Tensor)) or len(product.inputs) != 2:
        return None
    seen, ratio = product.inputs
    if not _is(ratio, aten.div.Tensor) or len(ratio.inputs) != 2 or not bias.numel() == weight.numel() == x.shape[1]:
        return None
    norm, mean = ratio.inputs
    if not _is(norm, aten.linalg_vector_norm.default) or norm.inputs[0] is not seen or not _is(mean, aten.add.Tensor):
        return None
    eps, average = bound(mean)[1], mean.inputs[0]
    if not isinstance(eps, float) or not _is(average, aten.mean.dim) or average.inputs[0] is not norm:
        return None
    power, axes, kept = bound(norm)[1:4]
    over, keeps = bound(average)[1:3]
    if not axes or not over:
        return None
    if power != 2 or tuple(axis % 4 for axis in axes) != pixels or not kept or [axis % 4 for axis in over] != [channels] or not keeps:
        return None
    if there is not None:
        if not _is(seen, aten.permute.default) or tuple(bound(seen)[1]) != there:
            return None
        seen = seen.inputs[0]
    return (weight, bias, eps) if seen is x else None


def _is(node: Node, func: Any) -> bool:
    return node.op == "aten" and node.attrs["func"] is func
