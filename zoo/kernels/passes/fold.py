"""Third pass: put into weights what is linear and constant: BatchNorm behind a convolution, padding in front of it, branches beside it."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.kernels.passes.graph import Graph, Node, joined


def fold(graph: Graph, dtype: torch.dtype | None = None) -> None:
    """Fold padding into the convolutions and pools that read it, affine layers into the convolutions in front of them, branches into one.

    A fold needs a single reader; weights are scaled in float64 and kept in the precision that they had.

    Args:
        dtype: what will be computed in; None may be any.
    """
    _views(graph)
    _padding(graph)
    narrow = dtype in (None, torch.float16)
    _affine(graph, narrow)
    _branches(graph)
    _affine(graph, narrow)  # a factor may stand behind a sum of branches


def _views(graph: Graph) -> None:
    """Let a view of a view look at the first map; a view back to the map's own shape is the map."""
    for node in graph.nodes:
        if node.op != "view":
            continue
        while node.inputs[0].op == "view":
            node.inputs[0] = node.inputs[0].inputs[0]
        if node.inputs[0].shape == node.shape:
            graph.replace(node, node.inputs[0])
    graph.prune()


def _padding(graph: Graph) -> None:
    users = graph.users()
    for node in graph.nodes:
        if node.op != "pad" or len(users[node]) != 1:
            continue
        reader = users[node][0]
        fits = (reader.op == "conv" and node.attrs["value"] == 0) or (
            reader.op == "pool" and reader.attrs["kind"] == "max" and node.attrs["value"] == float("-inf") and not reader.attrs["ceil_mode"]
        )
        if fits and reader.inputs[0] is node:
            reader.attrs["padding"] = tuple(a + b for a, b in zip(reader.attrs["padding"], node.attrs["padding"], strict=True))
            reader.inputs[0] = node.inputs[0]
            reader.layers = node.layers + reader.layers
    graph.prune()


def _affine(graph: Graph, narrow: bool) -> None:
    users = graph.users()
    for node in list(graph.nodes):
        if node.op != "affine":
            continue
        scale, shift = node.attrs["scale"], node.attrs["shift"]
        conv = first = node.inputs[0]
        if first.op == "affine" and len(users[first]) == 1:
            node.attrs |= {"scale": first.attrs["scale"] * scale, "shift": first.attrs["shift"] * scale + shift}
            node.inputs, node.layers = list(first.inputs), joined(first, node)
            users[first.inputs[0]] = [node if reader is first else reader for reader in users[first.inputs[0]]]
            continue
        if conv.op != "conv" or conv.attrs["act"] != "none" or len(users[conv]) != 1 or conv.argument("residual") is not None:
            continue
        weight: Tensor = conv.attrs["weight"]
        bias = conv.attrs["bias"]
        scaled = weight.double() * scale.view(-1, 1, 1, 1)
        if narrow and not shift.any() and _vanishes(scaled) > _vanishes(weight) + 0.01:
            continue  # a factor as small as those that ConvNeXt begins with
        conv.attrs["weight"] = scaled.to(weight.dtype)
        conv.attrs["bias"] = (shift if bias is None else bias.double() * scale + shift).to(torch.float32)
        conv.layers = joined(conv, node)
        graph.replace(node, conv)
        users[conv] = users[node]
    graph.prune()


def _vanishes(weight: Tensor) -> float:
    """Return which part of weights float16, in which a plan may compute, would round to few bits."""
    small = weight.abs() < torch.finfo(torch.float16).smallest_normal
    return int(small.count_nonzero()) / max(1, small.numel())


def _branches(graph: Graph) -> None:
    """Add up the weights of convolutions of one map whose results are added; RepVGG and MobileOne learn in such branches.

    A branch may be a BatchNorm alone, which is a window's middle.
    """
    users = graph.users()
    for node in list(graph.nodes):
        if node.op != "add" or node.inputs[0] is node.inputs[1]:
            continue
        wide, other = sorted(node.inputs, key=_taps, reverse=True)
        if not _is_branch(wide, users) or other.inputs[:1] != wide.inputs or (weight := _with_branch(wide, other, users)) is None:
            continue
        bias, more = wide.attrs["bias"], other.attrs["shift"] if other.op == "affine" else other.attrs["bias"]
        wide.attrs["weight"] = weight
        if more is not None:
            wide.attrs["bias"] = (more.double() if bias is None else bias.double() + more.double()).float()
        wide.attrs["source"] = f"{wide.attrs.get('source', '')}+{other.attrs.get('source', '')}"
        wide.layers = joined(wide, other, node)
        graph.replace(node, wide)
        users[wide] = users[node]
    graph.prune()


def _taps(node: Node) -> int:
    return node.attrs["weight"].shape[2:].numel() if node.op == "conv" else 0


def _is_branch(node: Node, users: dict[Node, list[Node]]) -> bool:
    alone = node.op == "conv" and len(node.inputs) == 1 and len(users[node]) == 1
    return alone and node.attrs["act"] == "none" and node.attrs["pre_act"] == "none" and node.attrs.get("scale") is None


def _with_branch(wide: Node, other: Node, users: dict[Node, list[Node]]) -> Tensor | None:
    """Return the weight of two branches, or None where the second looks at what the first doesn't."""
    a, own = wide.attrs, wide.attrs["weight"]
    if other.shape != wide.shape:
        return None
    if other.op == "affine":
        if a["stride"] != (1, 1):
            return None
        groups, many = a["groups"], own.shape[1]
        taps = torch.eye(many, dtype=torch.float64, device=own.device).repeat(groups, 1) * other.attrs["scale"].double()[:, None]
        taps, before = taps[:, :, None, None], (0, 0)
    elif _is_branch(other, users):
        b = other.attrs
        if (a["stride"], a["groups"]) != (b["stride"], b["groups"]) or (_taps(other) > 1 and a["dilation"] != b["dilation"]):
            return None
        taps, before = b["weight"].double(), (b["padding"][0], b["padding"][2])
    else:
        return None
    apart = [a["padding"][0] - before[0], a["padding"][2] - before[1]]
    (top, left), (high, broad) = (gap // step for gap, step in zip(apart, a["dilation"], strict=True)), taps.shape[2:]
    if any(gap < 0 or gap % step for gap, step in zip(apart, a["dilation"], strict=True)):
        return None
    if top + high > own.shape[2] or left + broad > own.shape[3]:
        return None
    summed = own.double().clone()
    summed[:, :, top : top + high, left : left + broad] += taps
    return summed.to(own.dtype)
