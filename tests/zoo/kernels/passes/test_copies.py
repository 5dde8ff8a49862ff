"""A graph's copy has nodes of its own and the same tensors, so that what is done to it is not seen in the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import zoo
from zoo.kernels.passes.graph import Graph, Node
from zoo.kernels.passes.merge import apply, merges
from zoo.kernels.passes.pipeline import understand
from zoo.kernels.passes.place import Place, copied


def told(graph: Graph, places: dict[Node, Place]) -> list[str]:
    """Write down what a graph computes, from what, and where values lie."""
    number = {node: index for index, node in enumerate(graph.nodes)}
    buffers = {place.buffer: index for index, place in enumerate(places.values())}
    lines = [
        f"{number[node]} {node!r} {[number[source] for source in node.inputs]} {node.roles} {sorted(node.attrs)}"
        + (f" {buffers[places[node].buffer]} {places[node].offset}" if node in places else "")
        for node in graph.nodes
    ]
    return [*lines, str([number[leaf] if isinstance(leaf, Node) else leaf for leaf in (*graph.inputs, *graph.outputs)])]


def tensors(graph: Graph) -> list[int]:
    return [id(leaf) for node in graph.nodes for leaf in pytree.tree_leaves(node.attrs) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("name", ["ResNet18", "DenseNet121", "MobileNetV3Small", "Swin_T", "ConvNeXt_Atto", "MaxViT_T"])
def test_a_copy_is_the_same_graph_apart(name: str) -> None:
    network = zoo.network(name).eval()
    side = int(network.input_size)
    with torch.no_grad():
        graph, places = understand(network, (torch.zeros(1, 3, side, side),), {}, torch.device("cpu"), islands=True, dtype=torch.bfloat16)
    before, held = told(graph, places), tensors(graph)
    twin, spots = copied(graph, places)
    assert told(twin, spots) == before
    assert tensors(twin) == held
    assert not set(map(id, twin.nodes)) & set(map(id, graph.nodes))
    apply(twin, merges(twin, spots)[:1], spots)
    for node in twin.nodes:
        node.attrs.clear()
        node.inputs = []
    assert told(graph, places) == before
