"""What no value of an input goes into: computed once, where the graph is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zoo.kernels.passes.aten import run_aten
from zoo.kernels.passes.graph import Node, const_value
from zoo.kernels.passes.trace import of_values

_FILLED = ("zeros", "ones", "full", "arange", "scalar_tensor", "eye", "linspace")
"""Operators, by the ends of their names, that fill new memory with what is known: window masks and grids are made of them."""
FILLED = 1 << 20
"""Numbers that a constant made of nothing may hold: it stays in memory, where the network makes it anew."""


def follows(node: Node) -> bool:
    """Tell whether a node is computed of constants alone, and is small or of the network's own."""
    if node.op != "aten" or not node.inputs or any(const_value(source) is None for source in node.inputs):
        return False
    return torch.Size(node.shape).numel() <= FILLED or any(source.attrs["name"] for source in node.inputs)


def from_nothing(node: Node, device: torch.device) -> Node | None:
    """Compute what reads no tensor's values; None of another node."""
    if node.op != "aten" or torch.Size(node.shape).numel() > FILLED:
        return None
    func = node.attrs["func"]
    name = func._overloadpacket.__name__.removesuffix("_like")
    if not name.endswith(_FILLED) or of_values(node):
        return None
    blanks = [torch.empty((), dtype=source.dtype, device=device).expand(source.shape) for source in node.inputs]
    return Node("const", [], {"tensor": run_aten(node, blanks, device), "name": ""}, node.shape, node.dtype)


def constant(node: Node, value: Tensor, origin: Node) -> Node:
    """Put a value in the place of a node, under the name of the constant that it was made of."""
    return Node("const", [], {"tensor": value, "name": origin.attrs["name"]}, node.shape, node.dtype)


def evaluate(node: Node) -> Any:
    """Compute a node whose inputs are constants."""
    tensors = [source.attrs["tensor"] for source in node.inputs]
    return run_aten(node, tensors, tensors[0].device)
