"""Modules are matched without a table when one answer fits, and refused with names and shapes when two do or none."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zoo
from convert.core import Row
from convert.graph import Graph, Node
from convert.match import NoUniqueMatch, match
from convert.network import Layer, layers
from convert.source import Source, Stored, in_memory
from convert.steps import Shape
from convert.topology import pair, prune

NETWORKS = (
    "ResNet50",
    "DenseNet121",
    "GoogLeNet",
    "InceptionV3",
    "Xception",
    "MobileNetV3Small",
    "EfficientNetB0",
    "SqueezeNet1_1",
    "SEResNet18",
    "RegNetY_400MF",
)


def of(network: nn.Module, side: int, channels: int = 3) -> tuple[list[Layer], dict[str, Shape]]:
    return layers(network, (channels, side, side)), {name: tuple(t.shape) for name, t in network.state_dict().items()}


def tensors(shapes: Mapping[str, Shape], names: Mapping[str, str]) -> dict[str, Stored]:
    found = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf != "num_batches_tracked":
            found[f"{names.get(module, module)}.{leaf}"] = in_memory(name, np.broadcast_to(np.float32(0), shape))
    return found


def graph_of(ls: Sequence[Layer], names: Mapping[str, str], join: str = "concat") -> Graph:
    nodes = [Node("input", "input")]
    for layer in ls:
        feeds = tuple(names.get(fed, "input") for fed in layer.inputs)
        if len(feeds) > 1:
            nodes.append(Node(f"join{len(nodes)}", join, feeds))
            feeds = (nodes[-1].name,)
        nodes.append(Node(names[layer.name], {"linear": "dense"}.get(layer.kind, layer.kind), feeds))
    return Graph(tuple(nodes), (nodes[-1].name,))


def source(found: dict[str, Stored], graph: Graph | None = None, **more: object) -> Source:
    return replace(Source(Path("theirs.bin"), "test", "test", found, graph=graph), **more)  # pyright: ignore[reportArgumentType]


def pairs(rows: Sequence[Row]) -> dict[str, str]:
    return {row.theirs: row.ours for row in rows}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_graph_alone_tells_every_module_of_a_network_whose_names_say_nothing(name: str) -> None:
    cls = zoo.CATALOGUE[name]
    with torch.device("meta"):
        network = cls()
    ls, shapes = of(network, max(cls.min_size, 96))
    numbers = list(range(len(ls)))
    random.Random(0).shuffle(numbers)
    names = {layer.name: f"m{number}" for layer, number in zip(ls, numbers, strict=True)}
    found = list(tensors(shapes, names).items())
    random.Random(1).shuffle(found)
    rows = match(source(dict(found), graph_of(ls, names)), ls, shapes)
    assert pairs(rows) == {theirs: ours for ours, theirs in names.items()}
    assert [row.ours for row in rows] == [layer.name for layer in ls]


def test_the_files_order_tells_equal_layers_of_a_chain_apart() -> None:
    with torch.device("meta"):
        network = zoo.VGG19_BN()
    ls, shapes = of(network, 224)
    names = {layer.name: f"m{number * 7919 % 1009}" for number, layer in enumerate(ls)}
    rows = match(source(tensors(shapes, names)), ls, shapes)
    assert pairs(rows) == {theirs: ours for ours, theirs in names.items()}
    assert {row.kind for row in rows} == {"conv", "norm", "linear"}


def test_an_order_that_contradicts_what_the_shapes_say_is_not_trusted() -> None:
    with torch.device("meta"):
        network = zoo.ResNet20()
    ls, shapes = of(network, 32)
    names = {layer.name: f"m{number * 7919 % 1009}" for number, layer in enumerate(ls)}
    for seed in range(10):
        found: dict[str, list[tuple[str, Stored]]] = {}
        for name, stored in tensors(shapes, names).items():
            found.setdefault(name.rpartition(".")[0], []).append((name, stored))
        shuffled = list(found)
        random.Random(seed).shuffle(shuffled)
        with pytest.raises(NoUniqueMatch, match="more than one way"):
            match(source({name: stored for module in shuffled for name, stored in found[module]}), ls, shapes)


def test_alphabetical_files_are_ordered_by_their_numbers() -> None:
    network = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    ls, shapes = layers_of_dense(network)
    names = {str(i): f"dense_{i}" for i in range(12)}
    alphabetical = dict(sorted(tensors(shapes, names).items()))
    assert list(alphabetical)[:4] == ["dense_0.bias", "dense_0.weight", "dense_1.bias", "dense_1.weight"]
    assert list(alphabetical)[4].startswith("dense_10")
    assert pairs(match(source(alphabetical), ls, shapes)) == {f"dense_{i}": str(i) for i in range(12)}


def layers_of_dense(network: nn.Sequential) -> tuple[list[Layer], dict[str, Shape]]:
    feeds = ["", *(str(i) for i in range(len(network) - 1))]
    ls = [Layer(str(i), "linear", (fed,)) for i, fed in enumerate(feeds)]
    return ls, {name: tuple(t.shape) for name, t in network.state_dict().items()}


class Branches(nn.Module):
    """Two branches of the same shapes, added or put side by side."""

    def __init__(self, joined: str) -> None:
        super().__init__()
        self.joined = joined
        self.stem = nn.Conv2d(3, 4, 3)
        self.left = nn.Conv2d(4, 4, 3)
        self.right = nn.Conv2d(4, 4, 3)
        self.last = nn.Conv2d(4 if joined == "add" else 8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        left, right = self.left(x), self.right(x)
        return self.last(left + right if self.joined == "add" else torch.cat([left, right], 1))


NAMES = {"stem": "a", "left": "b", "right": "c", "last": "d"}


def test_two_branches_of_the_same_shapes_without_a_graph_are_refused_with_names_and_shapes() -> None:
    ls, shapes = of(Branches("concat"), 9)
    with pytest.raises(NoUniqueMatch) as caught:
        match(source(tensors(shapes, NAMES)), ls, shapes)
    assert caught.value.ambiguous == [(["left", "right"], ["b", "c"])]
    assert "left (weight 4x4x3x3, bias 4)" in str(caught.value)
    assert "b (weight 4x4x3x3, bias 4)" in str(caught.value)
    assert "--from" in str(caught.value)


def test_two_branches_that_are_added_are_refused_even_with_a_graph() -> None:
    ls, shapes = of(Branches("add"), 9)
    with pytest.raises(NoUniqueMatch) as caught:
        match(source(tensors(shapes, NAMES), graph_of(ls, NAMES, "add")), ls, shapes)
    assert caught.value.ambiguous == [(["left", "right"], ["b", "c"])]


@pytest.mark.parametrize("swapped", [False, True])
def test_the_order_of_a_concatenation_tells_its_branches_apart(swapped: bool) -> None:
    ls, shapes = of(Branches("concat"), 9)
    names = NAMES | ({"left": "c", "right": "b"} if swapped else {})
    rows = match(source(tensors(shapes, NAMES), graph_of(ls, names)), ls, shapes)
    assert pairs(rows) == {theirs: ours for ours, theirs in names.items()}


def test_near_names_decide_last() -> None:
    ls, shapes = of(Branches("add"), 9)
    near = {"stem": "a", "left": "model_left", "right": "model_right", "last": "d"}
    assert pairs(match(source(tensors(shapes, near)), ls, shapes)) == {theirs: ours for ours, theirs in near.items()}


def test_another_topology_of_the_same_shapes_is_refused() -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(self.one(x) + self.two(x))

    ls, shapes = of(Parallel(), 5, channels=4)
    chain = Graph((Node("input", "input"), Node("a", "conv", ("input",)), Node("b", "conv", ("a",)), Node("c", "conv", ("b",))), ("c",))
    with pytest.raises(NoUniqueMatch, match="not by who feeds whom"):
        match(source(tensors(shapes, {"one": "a", "two": "b", "three": "c"}), chain), ls, shapes)


def test_everything_left_over_is_listed_on_both_sides() -> None:
    ls, shapes = of(Branches("concat"), 9)
    found = tensors(shapes, NAMES)
    found["d.weight"] = in_memory("d", np.zeros((1000, 8, 1, 1), np.float32))
    found["extra.weight"] = in_memory("extra", np.zeros((7, 7), np.float32))
    with pytest.raises(NoUniqueMatch) as caught:
        match(source(found), ls, shapes)
    assert caught.value.missing == ["last"]
    assert caught.value.unmatched == ["d", "extra"]
    for words in ("last (weight 2x8x1x1, bias 2)", "d (weight 1000x8x1x1, bias 2)", "extra (weight 7x7)"):
        assert words in str(caught.value)


def test_a_bias_before_a_norm_a_norm_without_scale_and_reshaped_layers_are_said_in_the_rows() -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 9, 6), nn.Unflatten(1, (6, 1, 1)), nn.Conv2d(6, 5, 1)
    )
    ls, shapes = of(network, 5)
    found = tensors(shapes, {"0": "conv", "1": "bn", "3": "fc6", "5": "fc7"})
    del found["bn.weight"]
    found["conv.bias"] = in_memory("b", np.zeros(4, np.float32))
    found["fc6.weight"] = in_memory("w", np.zeros((6, 4, 3, 3), np.float32))
    found["fc7.weight"] = in_memory("w", np.zeros((5, 6), np.float32))
    assert match(source(found), ls, shapes) == [
        Row("conv", "0", "conv", adds=("bias",)),
        Row("bn", "1", "norm", lacks=("weight",)),
        Row("fc6", "3", "linear_from_conv"),
        Row("fc7", "5", "conv_from_linear"),
    ]


def test_a_convolution_over_another_grid_of_the_same_size_is_no_dense_layer() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 9, 6))
    ls, shapes = of(network, 5)
    found = tensors(shapes, {"0": "conv", "2": "fc"})
    found["fc.weight"] = in_memory("w", np.zeros((6, 9, 2, 2), np.float32))
    with pytest.raises(NoUniqueMatch) as caught:
        match(source(found), ls, shapes)
    assert caught.value.missing == ["2"]


def test_folded_batchnorms_are_left_out_of_the_rows() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, bias=False), nn.BatchNorm2d(4))
    ls, shapes = of(network, 9)
    found = {
        "a.weight": in_memory("a", np.zeros((4, 3, 3, 3), np.float32)),
        "a.bias": in_memory("a", np.zeros(4, np.float32)),
        "b.weight": in_memory("b", np.zeros((4, 4, 3, 3), np.float32)),
        "b.bias": in_memory("b", np.zeros(4, np.float32)),
    }
    assert match(source(found), ls, shapes) == [Row("a", "0", "conv", adds=("bias",)), Row("b", "3", "conv", adds=("bias",))]


def test_oblong_kernels_tell_which_axis_is_the_height() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, (1, 5)), nn.Conv2d(4, 4, 3))
    ls, shapes = of(network, 9)
    found = tensors(shapes, {"0": "a", "1": "b"})
    found["a.weight"] = in_memory("a", np.zeros((4, 3, 5, 1), np.float32))
    with pytest.raises(NoUniqueMatch):
        match(source(found), ls, shapes)
    assert pairs(match(source(found, spatial="unknown"), ls, shapes)) == {"a": "0", "b": "1"}


def test_pairing_changes_over_where_it_must_and_prunes_what_no_pairing_has() -> None:
    domains = {"a": {"1", "2"}, "b": {"1"}, "c": {"2", "3"}}
    assert pair(domains) == {"a": "2", "b": "1", "c": "3"}
    assert prune(domains)
    assert domains == {"a": {"2"}, "b": {"1"}, "c": {"3"}}
    circle = {"a": {"1", "2"}, "b": {"1", "2"}, "c": {"2", "3"}}
    assert prune(circle)
    assert circle == {"a": {"1", "2"}, "b": {"1", "2"}, "c": {"3"}}
    assert not prune({"a": {"1"}, "b": {"1"}})
