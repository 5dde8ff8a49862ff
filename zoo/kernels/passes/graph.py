"""What the passes hand to each other: nodes in the order of their execution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Node:
    """One value of the network and how it is computed.

    `op` is "input", "const", "view", "aten" (an ATen operator that no pass knows) or the kind of a step: "conv", "act", "affine",
    "add", "gate", "cat", "pool", "mean", "pointwise", "join" … The tensors that it reads are `inputs`; `roles` names them in the
    same order as the arguments of the kernels in `ops/`, and `attrs` holds all other arguments.
    """

    op: str
    inputs: list[Node]
    attrs: dict[str, Any]
    shape: tuple[int, ...]
    dtype: torch.dtype
    roles: list[str] = field(default_factory=list)
    layers: tuple[str, ...] = ()
    """Names of the modules whose work this is."""

    def argument(self, role: str) -> Node | None:
        """Return the input that has this role, or None."""
        return self.inputs[self.roles.index(role)] if role in self.roles else None

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type in which its value lies in memory, a plan's own where nothing else was said."""
        return self.attrs.get("stored", dtype)

    def said(self) -> tuple[str, ...]:
        """Write down which operator this is, with all arguments but tensors, and what comes out; of a node as `trace` leaves it."""
        return (self.op, *(str(self.attrs.get(name)) for name in ("func", "args", "kwargs", "index")), str(self.shape), str(self.dtype))

    def add_input(self, role: str, node: Node) -> None:
        """Append an input."""
        self.roles.append(role)
        self.inputs.append(node)

    def __repr__(self) -> str:
        return f"{self.op}{list(self.shape)} {'/'.join(self.layers)}"


@dataclass(eq=False)
class Graph:
    """A network at one input shape: its nodes in order, its inputs, and its outputs in the structure that `spec` describes."""

    nodes: list[Node]
    inputs: list[Node]
    outputs: list[Any]
    """Flat leaves of what the network returns: nodes, or constants as they are."""
    spec: Any

    def users(self) -> dict[Node, list[Node]]:
        """Map each node to those that read it; the network's outputs count as a reader that is no node of the list."""
        found: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in node.inputs:
                found[source].append(node)
        for leaf in self.outputs:
            if isinstance(leaf, Node):
                found[leaf].append(OUTSIDE)
        return found

    def replace(self, old: Node, new: Node) -> None:
        """Let every reader of `old` read `new`."""
        for node in self.nodes:
            if node is not new:
                node.inputs = [new if source is old else source for source in node.inputs]
        self.outputs = [new if leaf is old else leaf for leaf in self.outputs]

    def prune(self) -> None:
        """Drop what no output needs, and put the rest into an order in which everything is computed before it is read."""
        ordered: dict[Node, None] = dict.fromkeys(self.inputs)
        for leaf in self.outputs:
            if isinstance(leaf, Node):
                _visit(leaf, ordered)
        self.nodes = list(ordered)

    def steps(self) -> Iterator[Node]:
        """Yield the nodes that compute something."""
        return (node for node in self.nodes if node.op not in ("input", "const"))


OUTSIDE = Node("outside", [], {}, (), torch.float32)
"""The reader of the network's outputs."""


def _visit(leaf: Node, ordered: dict[Node, None]) -> None:
    stack = [(leaf, iter(leaf.inputs))]
    while stack:
        node, rest = stack[-1]
        if node in ordered:
            stack.pop()
            continue
        nearest = next((source for source in rest if source not in ordered), None)
        if nearest is not None:
            stack.append((nearest, iter(nearest.inputs)))
            continue
        ordered[node] = None
        stack.pop()


def const_value(node: Node) -> Tensor | None:
    """Return the tensor of a constant, or None."""
    return node.attrs["tensor"] if node.op == "const" else None


def joined(*nodes: Node) -> tuple[str, ...]:
    """Return the layers of several nodes, each once, in order."""
    return tuple(dict.fromkeys(name for node in nodes for name in node.layers))
