"""Pass of half-precision plans: round the weights, and let biases make up for what that takes from each output's mean.

A rounded weight is off by the same amount for every image, and most of what it does to an output is to shift its mean: (w - round(w))
times the mean of what comes in. The mean is measured once, in float32, on made-up images; the shift goes into the bias (Nagel et al. 2019,
Data-Free Quantization, section 4.2). Folding BatchNorm gives weights another rounding than plain eager's, better or worse by chance;
with this a plan's error is about plain eager's or below; `test_balance.py` has two networks that missed the parity without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.candidates import ATEN, Bound, Candidate, Setting, Weights, bind
from zoo.kernels.graph import Graph, Node
from zoo.kernels.parity import products
from zoo.kernels.place import Place
from zoo.kernels.program import Program

Shifts = dict[tuple[Any, ...], Tensor]
"""By layer: what rounding takes from the mean of each output, float32 (C,)."""


def balance(graph: Graph, shifts: Shifts, setting: Setting) -> None:
    """Round the weights of all convolutions to the plan's dtype, and add the shifts to the biases of those that have one."""
    for node in graph.nodes:
        if node.op == "conv":
            weight, bias = node.attrs["weight"], node.attrs["bias"]
            node.attrs["weight"] = weight.to(setting.device, setting.dtype)
            if bias is not None:
                bias = bias.to(setting.device, torch.float32)
                node.attrs["bias"] = bias + shifts[key(node)] if key(node) in shifts else bias


def mean_shifts(graph: Graph, places: dict[Node, Place], batches: list[list[Tensor]], setting: Setting) -> Shifts:
    """Measure the shifts of all convolutions with a bias.

    Args:
        graph: fused and placed, with the weights as they were.
        places: of the graph.
        batches: what the network is given, of the graph's shapes, several times.
        setting: of the plan.
    """
    exact = Setting(setting.device, torch.float32)
    differences: dict[Node, Bound] = {}
    found: dict[tuple[Any, ...], list[Tensor]] = {}

    def probe(node: Node, inputs: list[Any], value: Any) -> None:
        if node.op == "conv" and node.attrs["bias"] is not None:
            if node not in differences:
                differences[node] = _difference(node, setting, exact)
            given = [x for role, x in zip(node.roles, inputs, strict=True) if role != "residual"]
            found.setdefault(key(node), []).append(differences[node](given, None).mean((0, 2, 3)))

    program = Program(graph, places, {}, exact, Weights())
    with torch.no_grad(), products(tf32=False):
        for tensors in batches:
            images = [t.float() if t.is_floating_point() else t for t in tensors]
            images = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in images]
            program.run([[image] * len(program.forms[node]) for node, image in zip(graph.inputs, images, strict=True)], probe)
    return {name: torch.stack(several).mean(0) for name, several in found.items()}


def _difference(node: Node, setting: Setting, exact: Setting) -> Bound:
    """Make the convolution whose weights are what rounding takes away, without bias, residual and activation."""
    weight: Tensor = node.attrs["weight"].to(setting.device, torch.float32)
    attrs = node.attrs | {"weight": weight - weight.to(setting.dtype).float(), "bias": None, "act": "none"}
    kept = [(role, source) for role, source in zip(node.roles, node.inputs, strict=True) if role != "residual"]
    alone = Node("conv", [source for _, source in kept], attrs, node.shape, node.dtype, [role for role, _ in kept], node.layers)
    return bind(alone, Candidate(ATEN), exact)


def key(node: Node) -> tuple[Any, ...]:
    """Name a convolution alike in the graphs of all shapes."""
    return (node.layers, node.attrs.get("source", ""))
