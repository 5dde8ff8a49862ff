"""Last pass on a GPU: what no kernel takes is gathered, so that PyTorch's compiler makes few kernels of it and not one an operator.

An island is a set of operators between our kernels: whatever joins two of its operators lies in it too, so that it can be computed at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from zoo.kernels.passes.aten import is_view
from zoo.kernels.passes.graph import OUTSIDE, Graph, Node, joined

JOINING = ("aten", "view", "item")
"""Kinds of steps that islands are made of; and sums have a kernel, which the compiler's makes needless beside others."""
OPAQUE = ("unbind", "split", "split_with_sizes", "chunk", "attention")
"""Operators that only cut, and one that the compiler leaves as it is: by themselves they are no reason for an island."""


def gather(graph: Graph) -> None:
    """Replace each set of two or more such steps, one of which computes something, by one "island" step.

    Its `attrs` hold the steps as `body`, in order, those of them that are read elsewhere as `results`, and what they call its inputs as
    `given`. It has the value of its one
    result, or a tuple of several, which "item" steps take apart.
    """
    graph.prune()
    users = graph.users()
    for body in _islands(graph):
        inside = set(body)
        results = [node for node in body if any(reader not in inside for reader in users[node])]
        sources = list(dict.fromkeys(source for node in body for source in node.inputs if source not in inside))
        single = len(results) == 1
        shape, dtype = (results[0].shape, results[0].dtype) if single else ((), body[0].dtype)
        island = Node("island", sources, {"body": body, "results": results}, shape, dtype, ["x"] * len(sources), joined(*body))
        graph.nodes.append(island)
        for number, result in enumerate(results):
            new = island
            if not single:
                new = Node("item", [island], {"index": number}, result.shape, result.dtype, ["x"], result.layers)
                graph.nodes.append(new)
            for node in graph.nodes:
                if node not in inside:
                    node.inputs = [new if source is result else source for source in node.inputs]
            graph.outputs = [new if leaf is result else leaf for leaf in graph.outputs]
            users[new] = [reader for reader in users[result] if reader is OUTSIDE or reader not in inside]
    for node in graph.nodes:
        if node.op == "island":
            node.attrs["given"] = list(node.inputs)  # as its steps name them: what is merged later takes another name outside only
    graph.prune()


def _islands(graph: Graph) -> Iterator[list[Node]]:
    """Yield the sets, each in the order of the graph.

    A step's depth is the greatest number of kernels on a way to it. Steps of one depth that read each other are an island: a way that
    leaves it through a kernel comes to greater depths only.
    """
    depth: dict[Node, int] = {}
    root: dict[Node, Node] = {}
    users = graph.users()
    kernel = {node: _is_kernel(node, users[node]) for node in graph.nodes}

    def find(node: Node) -> Node:
        while root[node] is not node:
            node = root[node]
        return node

    for node in graph.nodes:
        if node.op in ("input", "const"):
            depth[node] = 0
            continue
        depth[node] = max((depth[source] + kernel[source] for source in node.inputs), default=0)
        if kernel[node]:
            continue
        root[node] = node
        for source in node.inputs:
            if source in root and depth[source] == depth[node]:
                root[find(source)] = find(node)
    found: dict[Node, list[Node]] = {}
    for node in root:
        found.setdefault(find(node), []).append(node)
    yield from (body for body in found.values() if len(body) > 1 and any(map(_computes, body)))


def _is_kernel(node: Node, readers: list[Node]) -> bool:
    if node.op == "pointwise":  # with numbers of its own it would be alike to no other island
        return any(isinstance(value, Tensor) for value in node.attrs.values())
    if node.op == "cat":  # which costs nothing where kernels write its parts side by side, but for what shuffles channels
        return any(reader.op not in JOINING for reader in readers)
    return node.op not in (*JOINING, "input", "const")


def _computes(node: Node) -> bool:
    if node.op == "cat":
        return True
    if node.op != "aten":
        return False
    func = node.attrs["func"]
    return not is_view(func) and func._overloadpacket.__name__ not in OPAQUE
