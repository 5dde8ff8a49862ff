"""What `why` shows of a plan's steps: their kernels and times, and how near those are to what the device can do."""

from __future__ import annotations

from collections import Counter

import torch

from zoo.kernels import ops
from zoo.kernels.measuring.roofline import floor_us, limits
from zoo.kernels.passes.aten import is_view
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.reports.report import Row
from zoo.kernels.tuning.choose import Decision
from zoo.kernels.tuning.steps import ATEN, COMPUTED, Candidate, Setting, arguments, reference_op


def rows(graph: Graph, decision: Decision, setting: Setting, notes: dict[Node, str]) -> list[Row]:
    """Return a row for each step that has a kernel, in order."""
    found = []
    ceilings = limits(setting.device)
    for node in graph.steps():
        if node.op not in COMPUTED:
            continue
        choice, candidate = decision.found.get(node), decision.chosen.get(node, Candidate(ATEN))
        row = Row(", ".join(node.layers), str(candidate), node.shape, note=notes.get(node, ""))
        if choice is not None:
            row.us, row.replaced_us = choice.us, choice.aten_us
            flop, size = cost(node, setting)
            flop = flop // 2 if node.op == "narrow_conv" else flop  # 8 bits are multiplied twice as fast
            row.roofline = floor_us(flop, size, setting.dtype, ceilings) / choice.us if choice.us and size else None
        found.append(row)
    return found


def untimed(graph: Graph) -> list[str]:
    """Say which operators PyTorch computes beside those steps, if any: their time is in no row, and not in the sum."""
    islands = sum(node.op == "island" for node in graph.steps())
    functions = [node.attrs["func"] for node in graph.steps() if node.op == "aten"]
    count = Counter(str(func._overloadpacket.__name__) for func in functions if not is_view(func))
    named = ", ".join(name if number == 1 else f"{name} ({number})" for name, number in count.most_common())
    pieces = f"PyTorch's compiler runs {islands} group{'s' * (islands != 1)} of other operators" if islands else ""
    alone = f"PyTorch computes {named}" if named else ""
    return [f"beside these, and not in the sum, {' and '.join(filter(None, (pieces, alone)))}"] if pieces or alone else []


def cost(node: Node, setting: Setting) -> tuple[int, int]:
    """Return the floating-point operations and the bytes of a step: each input and output once."""
    if node.op in ("squeeze_excite", "depthwise_squeeze"):
        return 0, sum(_bytes(n, setting) for n in (*node.inputs, node)) if node.op == "depthwise_squeeze" else _bytes(
            node.inputs[0], setting
        )
    name = reference_op(node)
    meta = Setting(torch.device("meta"), setting.dtype, setting.tf32)
    maps = {source: torch.empty(source.shape, dtype=source.stored(setting.dtype), device="meta") for source in node.inputs}
    inputs = {role: maps[source] for role, source in zip(node.roles, node.inputs, strict=True)}  # one that is read twice is one
    return ops.load(name).cost(**inputs, **arguments(node, name, meta))


def _bytes(node: Node, setting: Setting) -> int:
    return torch.Size(node.shape).numel() * setting.dtype.itemsize
