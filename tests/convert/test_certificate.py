"""What the certificate calls proven, what it does not, and why."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_network import PAIRS, Ours, images, ours, theirs
from torch import nn

from convert import execute
from convert.certificate import Certificate, Evidence, against_graph, against_outputs, as_comparable, before_softmax, on_labelled, structure
from convert.core import Report
from convert.graph import Graph, Node

X = images()


def logits(network: Ours) -> np.ndarray:
    return execute.run(theirs(network), X, keep=["head"])["head"]


def test_a_right_conversion_is_proven_layer_by_layer() -> None:
    network = ours()
    evidence = against_graph(theirs(network), PAIRS, network, X, X)
    assert evidence.proven
    assert evidence.worst is not None
    assert evidence.worst < 1e-12
    assert [layer.ours for layer in evidence.layers] == [*PAIRS.values(), "(output)"]
    assert evidence.layers[0].shape == (2, 8, 9, 9)
    assert "10 layers and the output on 2 images, logits in front of probabilities" in evidence.detail


def test_a_flipped_kernel_is_contradicted_and_the_first_layer_named() -> None:
    network = ours()
    source = theirs(network)
    with torch.no_grad():
        network.right.weight.copy_(network.right.weight.flip(2, 3))
    evidence = against_graph(source, PAIRS, network, X, X)
    assert not evidence.proven
    assert evidence.contradicts
    assert "the first to differ is right (right)" in evidence.detail
    errors = {layer.ours: layer.relative for layer in evidence.layers}
    assert errors["left"] < 1e-12 < 1e-2 < errors["right"]


def test_the_error_is_the_largest_difference_over_the_largest_number() -> None:
    network = ours()
    given = logits(network)
    given[0, 0] += 0.01
    evidence = against_outputs(network, X, given)
    assert evidence.worst == pytest.approx(0.01 / np.abs(given).max())
    assert evidence.layers[0].max_abs == pytest.approx(0.01)


def test_what_rounding_moves_in_pytorch_too_neither_proves_nor_contradicts() -> None:
    network = ours()
    with torch.no_grad():  # the logits are what is left of sums a million times as large
        network.head.bias.copy_(1e6 * torch.ones(5))
        difference = nn.Linear(5, 5, bias=False)
        difference.weight.copy_(torch.eye(5) - torch.roll(torch.eye(5), 1, 0))
        network.head = nn.Sequential(network.head, difference)
    single = network.float().eval()
    with torch.no_grad():
        given = single(torch.from_numpy(X).float()).numpy()
    evidence = against_outputs(network, X, given, 1e-4)
    assert not evidence.proven
    assert not evidence.contradicts
    assert "rounding to float32 moves PyTorch's own outputs" in evidence.detail
    assert against_outputs(network, X, given[:, ::-1].copy(), 1e-4).contradicts


def test_a_convolution_whose_bias_was_moved_is_compared_behind_its_norm() -> None:
    network, other = ours(stem_bias=True), ours()
    other.load_state_dict({k: v for k, v in network.state_dict().items() if k != "conv1.bias"})
    assert network.conv1.bias is not None
    with torch.no_grad():
        other.bn1.running_mean -= network.conv1.bias
    assert not against_graph(theirs(network), PAIRS, other, X, X).proven
    evidence = against_graph(theirs(network), PAIRS, other, X, X, moved={"conv1"})
    assert evidence.proven
    assert "conv1" not in [layer.ours for layer in evidence.layers]


def test_another_number_of_outputs_is_no_proof() -> None:
    network = ours()
    source = theirs(network)
    network.head = nn.Linear(12, 7)
    evidence = against_graph(source, PAIRS, network, X, X)
    assert evidence.worst == float("inf")
    assert json.loads(json.dumps(Certificate([evidence]).to_json(), allow_nan=False))["evidence"][0]["worst"] is None


def test_numbers_that_are_not_finite_are_no_proof() -> None:
    network = ours()
    given = logits(network)
    given[0, 0] = np.nan
    assert against_outputs(network, X, given).worst == float("inf")


def test_a_file_without_a_graph_or_with_a_foreign_layer_proves_nothing_and_contradicts_nothing() -> None:
    network = ours()
    none = against_graph(replace(theirs(network), graph=None), PAIRS, network, X, X)
    odd = Graph((Node("x", "input"), Node("y", "unknown:Lambda", ("x",))), ("y",))
    foreign = against_graph(replace(theirs(network), graph=odd), PAIRS, network, X, X)
    assert (none.proven, none.contradicts, foreign.proven, foreign.contradicts) == (False, False, False, False)
    assert "Lambda" in foreign.detail
    assert Certificate([none]).verdict.startswith("UNPROVEN: structure only; float64 execution: ")


def test_logits_and_probabilities_are_compared_through_our_softmax() -> None:
    network = ours()
    probabilities = execute.run(theirs(network), X)["probabilities"]
    evidence = against_outputs(network, X, probabilities.astype(np.float32))
    assert evidence.proven
    assert "our softmax against their probabilities" in evidence.detail
    wrong = probabilities[:, ::-1]
    assert not against_outputs(network, X, wrong).proven
    assert against_outputs(network, X, logits(network)).detail.count("softmax") == 0


def test_small_probabilities_count_too() -> None:
    given = np.array([[30.0, 0.0, 1.0]])
    exact = np.exp(given) / np.exp(given).sum()
    off = exact.copy()
    off[0, 1] *= 2
    errors = [float(np.abs(a - b).max()) for a, b, _ in as_comparable(given, off)]
    assert errors[0] < 1e-12
    assert errors[1] == pytest.approx(np.log(2))


def test_a_network_that_ends_in_a_softmax_is_compared_behind_it() -> None:
    class Soft(Ours):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).softmax(1)

    network = ours()
    source = theirs(network)
    network.__class__ = Soft
    assert against_graph(source, PAIRS, network, X, X).layers[-1].theirs == "probabilities"
    assert against_outputs(network, X, execute.run(source, X)["probabilities"]).proven


def test_the_walk_back_to_the_logits_stops_where_there_is_no_softmax() -> None:
    nodes = (Node("x", "input"), Node("i", "identity", ("x",)), Node("s", "softmax", ("i",)), Node("j", "identity", ("s",)))
    graph = Graph(nodes, ("j",))
    assert before_softmax(graph, "j") == "i"
    assert before_softmax(graph, "i") == "i"


def test_accuracy_proves_only_beside_the_sources_own() -> None:
    class Answer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) + self.zero

    labels = np.arange(100) % 4
    answers = labels.copy()
    answers[:20] = (answers[:20] + 1) % 4  # 80 of 100 right
    batches = [np.eye(4)[answers[start : start + 30]] for start in range(0, 100, 30)]
    network = Answer().train()
    alone = on_labelled(network, batches, labels)
    assert (alone.proven, alone.contradicts) == (False, False)
    assert "80.00 % of 100 images" in alone.detail
    assert on_labelled(network, [], labels).detail == "there were no images"
    assert network.training


def test_structure_alone_is_unproven() -> None:
    assert Certificate([structure(Report())]).verdict == "UNPROVEN: structure only"
    assert Certificate([]).verdict == "UNPROVEN: structure only"
    assert "1 tensors or rows" in structure(Report(unmatched=["a"])).detail


def test_the_strongest_evidence_is_named_first_and_one_contradiction_undoes_all() -> None:
    weak = Evidence("labelled images", True, 0.0, "80 % of 100")
    strong = Evidence("source outputs", True, 1e-7, "relative error 1e-07")
    back = Evidence("read back", True, 0.0, "bit for bit")
    assert Certificate([weak, structure(Report()), strong]).verdict == "PROVEN by source outputs: relative error 1e-07"
    assert Certificate([structure(Report())]).verdict == "UNPROVEN: structure only"
    assert Certificate([back, structure(Report())]).verdict.startswith("UNPROVEN: read back bit for bit")
    against = Certificate([strong, Evidence("float64 execution", False, 0.5, "relative error 0.5")])
    assert against.verdict == "UNPROVEN: contradicted by float64 execution, relative error 0.5"
    assert not against.proven
    assert str(against).splitlines()[1].startswith("  source outputs: proven")


def test_comparing_leaves_the_network_alone() -> None:
    network = ours().train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    against_outputs(network, X, np.zeros((2, 5)))
    assert network.training
    assert all(torch.equal(before[name], tensor) and tensor.dtype == before[name].dtype for name, tensor in network.state_dict().items())


def test_a_map_of_a_network_without_its_head_is_averaged_as_our_pooling_does() -> None:
    maps = np.random.default_rng(0).normal(size=(2, 5, 3, 4))
    for given in (maps, maps.reshape(2, -1)):
        ((ours, wanted, said),) = as_comparable(maps.mean((2, 3)), given)
        assert np.allclose(ours, wanted)
        assert "averaged over its pixels" in said
    ((ours, wanted, said),) = as_comparable(maps.max((2, 3)), maps)
    assert not np.allclose(ours, wanted)
    assert as_comparable(np.ones((2, 5)), np.ones((2, 7)))[0][2] == ""


def test_outputs_of_another_shape_contradict_in_json_too() -> None:
    told = Certificate([Evidence("source outputs", False, float("inf"), "another shape", [])]).to_json()
    assert told["evidence"][0]["worst"] is None
    assert told["evidence"][0]["contradicts"]
