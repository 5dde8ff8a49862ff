"""A fault of each kind, planted in a network that was right, is found at its layer and named; what nothing explains is unknown."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small_network import PAIRS, Ours, images, ours, theirs
from torch import Tensor, nn

from convert import _fault, _probe, execute
from convert.diagnose import Diagnosis, diagnose, diagnose_outputs
from convert.graph import Graph, Node
from convert.source import Source, in_memory
from convert.steps import FlattenOrder
from weights.errors import ConvertError

X = images()


def copied(network: Ours, **options: Any) -> Ours:
    """Build another network with the same tensors."""
    other = ours(**options)
    other.load_state_dict(network.state_dict(), strict=False)
    return other


def change(tensor: Tensor, value: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.as_tensor(np.ascontiguousarray(value)))


def walked(source: Source, network: nn.Module, theirs_see: np.ndarray = X, ours_see: np.ndarray = X, **options: Any) -> Diagnosis:
    found = diagnose(source, PAIRS, network, theirs_see, ours_see, **options)
    assert str(found)
    assert json.dumps(found.to_json(), allow_nan=False)
    return found


def named(found: Diagnosis, cause: str, ours_: str | None) -> None:
    """Check the cause and the layer, and that the cause explains all of the difference."""
    assert (found.cause, found.ours) == (cause, ours_), str(found)
    assert found.before > 1e-4
    assert found.after is not None
    assert found.after < 1e-9
    assert found.remedy
    assert cause in str(found)


def test_a_right_conversion_has_no_fault() -> None:
    network = ours()
    found = walked(theirs(network), network)
    assert (found.cause, found.theirs, found.found) == ("no fault", None, False)
    assert found.before < 1e-12


# kernels


def test_flipped_kernels_are_found_at_the_first_of_them() -> None:
    network = ours()
    source = theirs(network)
    for name in ("conv1", "right", "block.conv2"):
        weight = network.get_submodule(name).weight
        change(weight, weight.detach().flip(2, 3))
    named(walked(source, network), "kernels flipped", "conv1")
    change(network.conv1.weight, network.conv1.weight.detach().flip(2, 3))
    named(walked(source, network), "kernels flipped", "right")


@pytest.mark.parametrize(("turn", "cause"), [(lambda w: w.transpose(2, 3), "transposed"), (lambda w: w.flip(2), "flipped")])
def test_transposed_and_half_flipped_kernels_are_told_from_flipped_ones(turn: Callable[[Tensor], Tensor], cause: str) -> None:
    network = ours()
    source = theirs(network)
    change(network.right.weight, turn(network.right.weight.detach()))
    named(walked(source, network), f"kernels {cause}", "right")


def test_a_depthwise_multiplier_in_the_wrong_order_is_named() -> None:
    network = nn.Sequential(nn.Conv2d(3, 6, 3, groups=3, bias=False))
    weight = network[0].weight.detach().numpy()
    nodes = (Node("x", "input"), Node("dw", "depthwise", ("x",), {"layout": "OIHW", "convention": "correlation"}))
    source = replace(theirs(ours()), graph=Graph(nodes, ("dw",)), tensors={"dw.weight": in_memory("dw", weight.copy())})
    change(network[0].weight, weight.reshape(3, 2, 1, 3, 3).swapaxes(0, 1).reshape(6, 1, 3, 3))
    found = diagnose(source, {"dw": "0"}, network, X, X)
    named(found, "channel order", "0")


def test_a_layer_with_anothers_weights_is_named_and_so_is_the_other() -> None:
    network = ours()
    source = theirs(network)
    source.tensors["wide2.weight"] = replace(source.tensors["wide.weight"], load=lambda: source.tensors["wide.weight"].load() + 1)
    change(network.block.conv2.weight, source.tensors["wide2.weight"].as_correlation().array())
    found = walked(source, network)
    named(found, "other weights", "block.conv2")
    assert "holds those of wide2" in found.explanation


# dense layers and heads


@pytest.mark.parametrize("order", ["hwc", "cwh"])
def test_a_flatten_order_is_found_at_the_dense_layer(order: str) -> None:
    network = ours()
    source = theirs(network)
    change(network.fc.weight, FlattenOrder(6, 3, 3, order).undo(network.fc.weight.detach().numpy()))
    named(walked(source, network), "flatten order", "fc")


def test_a_head_with_a_background_class_is_an_old_head() -> None:
    network = ours()
    source = theirs(network)
    other = copied(ours(classes=4), classes=4)
    state = {k: v for k, v in network.state_dict().items() if not k.startswith("head")}
    other.load_state_dict(state, strict=False)
    change(other.head.weight, network.head.weight.detach()[1:])
    change(other.head.bias, network.head.bias.detach()[1:])
    found = walked(source, other)
    named(found, "old head", "head")
    assert "theirs 5; theirs has 1 in front of ours" in found.explanation


def test_a_head_with_its_classes_in_another_order_is_an_old_head() -> None:
    network = ours()
    source = theirs(network)
    order = [3, 0, 4, 1, 2]
    for leaf in (network.head.weight, network.head.bias):
        change(leaf, leaf.detach()[order])
    found = walked(source, network)
    named(found, "old head", "head")
    assert "3, 0, 4, 1, 2" in found.explanation


@pytest.mark.parametrize("classes", [5, 9])
def test_a_head_of_other_classes_is_an_old_head(classes: int) -> None:
    network = ours()
    source = theirs(network)
    network.head = nn.Linear(12, classes)
    named(walked(source, network), "old head", "head")


# norms


def test_an_epsilon_is_found() -> None:
    network = ours(eps=1e-3)
    found = walked(theirs(network), copied(network, eps=1e-5))
    named(found, "BN epsilon", "bn1")
    assert "epsilon 0.001 where ours has 1e-05" in found.explanation


def test_swapped_gamma_and_beta_are_found() -> None:
    network = ours()
    source = theirs(network)
    bn = network.block.bn1
    gamma, beta = bn.weight.detach().clone(), bn.bias.detach().clone()
    change(bn.weight, beta)
    change(bn.bias, gamma)
    named(walked(source, network), "BN gamma/beta swapped", "block.bn1")


def test_swapped_mean_and_variance_are_found() -> None:
    network = ours()
    change(network.bn1.running_mean, network.bn1.running_mean.abs() + 0.1)
    source = theirs(network)
    mean, variance = network.bn1.running_mean.clone(), network.bn1.running_var.clone()
    change(network.bn1.running_mean, variance)
    change(network.bn1.running_var, mean)
    named(walked(source, network), "BN mean/var swapped", "bn1")


@pytest.mark.parametrize("moment", ["std", "std+eps", "inv_std"])
def test_a_standard_deviation_taken_for_a_variance_is_found(moment: str) -> None:
    network = ours()
    source = theirs(network)
    assert source.graph is not None
    source.graph = edited(source.graph, "stem_bn", moment=moment)
    named(walked(source, network), "BN std as variance", "bn1")


def test_sums_that_were_not_divided_by_caffes_factor_are_found() -> None:
    network = ours()
    source = theirs(network)
    assert source.graph is not None
    source.graph = edited(source.graph, "stem_bn", factor=999.98)
    named(walked(source, network), "BN factor", "bn1")


# images


def test_images_in_the_other_channel_order_are_found() -> None:
    network = ours()
    named(walked(theirs(network), network, X, X[:, ::-1]), "BGR", "conv1")


def test_a_stem_whose_input_channels_are_reversed_is_found() -> None:
    network = ours()
    source = theirs(network)
    change(network.conv1.weight, network.conv1.weight.detach().flip(1))
    named(walked(source, network), "BGR", "conv1")


def test_images_on_another_scale_are_found() -> None:
    network = ours()
    found = walked(theirs(network), network, X, X / 255)
    named(found, "0..255", "conv1")
    assert "times (255, 255, 255)" in found.explanation


def test_a_missing_mean_and_std_are_found() -> None:
    network = ours()
    mean, std = (np.reshape(v, (1, 3, 1, 1)) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    named(walked(theirs(network), network, (X / 255 - mean) / std, X / 255), "mean/std", "conv1")
    found = walked(theirs(network), network, X[:, ::-1] - 104, X / 255)
    named(found, "BGR and 0..255 and mean/std", "conv1")


def test_a_reversed_stem_fed_reversed_images_is_right() -> None:
    network = ours()
    source = theirs(network)
    change(network.conv1.weight, network.conv1.weight.detach().flip(1))
    assert walked(source, network, X, X[:, ::-1]).cause == "no fault"
    change(network.conv1.weight, network.conv1.weight.detach().flip(2, 3))
    named(walked(source, network, X, X[:, ::-1]), "kernels flipped", "conv1")


# windows and what lies between


def test_same_padding_is_told_from_symmetric_padding() -> None:
    network = ours(padding="same")
    named(walked(theirs(network), copied(network)), "SAME padding", "conv1")
    network = ours()
    named(walked(theirs(network), copied(network, padding="same")), "SAME padding", "conv1")


@pytest.mark.parametrize(("right", "wrong", "where"), [("3x3", "1x1", "block.conv1"), ("1x1", "3x3", "block.conv1")])
def test_a_stride_on_the_wrong_convolution_is_found(right: str, wrong: str, where: str) -> None:
    network = ours(stride_on=right)
    found = walked(theirs(network), copied(network, stride_on=wrong))
    named(found, "stride v1/v1.5", where)
    assert found.before == float("inf")


def test_another_stride_alone_is_no_matter_of_versions() -> None:
    network = ours()
    source = theirs(network)
    network.block.conv2.stride = (1, 1)
    named(walked(source, network), "stride", "block.conv2")


def test_a_pools_rounding_is_found() -> None:
    network = ours()
    other = copied(network, ceil_mode=True)
    other.pool.ceil_mode = False
    named(walked(theirs(network), other), "ceil mode", "left")


def test_a_pools_padding_is_found() -> None:
    network = ours()
    source = theirs(network)
    network.pool = nn.MaxPool2d(2, 2, padding=1)
    named(walked(source, network), "padding", "left")


def test_a_concatenation_in_another_order_is_found() -> None:
    network = ours()
    named(walked(theirs(network), copied(network, swapped=True)), "concat order", "block.conv1")


def test_weights_for_a_concatenation_in_another_order_are_found() -> None:
    network = ours()
    source = theirs(network)
    weight = network.block.conv1.weight.detach()
    change(network.block.conv1.weight, torch.cat((weight[:, 4:], weight[:, :4]), 1))
    named(walked(source, network), "concat order", "block.conv1")


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.1), nn.ReLU6(), nn.SiLU(), nn.Identity()])
def test_another_activation_is_found(activation: nn.Module) -> None:
    network = ours()
    found = walked(theirs(network), copied(network, activation=activation))
    named(found, "wrong activation", "left")
    assert "theirs has relu at stem_act" in found.explanation


def test_a_layer_that_ours_lacks_is_found() -> None:
    network = ours()
    source = theirs(network)
    network.pool = nn.Identity()
    found = walked(source, network)
    named(found, "layer missing", "left")
    assert "pool (maxpool)" in found.explanation


@pytest.mark.parametrize("moved", [(), ("conv1",)])
def test_a_bias_that_arrived_nowhere_is_found(moved: tuple[str, ...]) -> None:
    network = ours(stem_bias=True)
    found = walked(theirs(network), copied(network), moved=moved)
    named(found, "conv bias missing", "bn1")


def test_a_bias_that_went_into_the_mean_behind_is_no_fault() -> None:
    network = ours(stem_bias=True)
    other = copied(network)
    assert network.conv1.bias is not None
    change(other.bn1.running_mean, network.bn1.running_mean - network.conv1.bias.detach())
    assert walked(theirs(network), other, tolerance=1e-5).cause == "no fault"
    other.bn1.eps = 1e-5
    found = walked(theirs(network), other)
    assert (found.cause, found.ours) == ("BN epsilon", "bn1")


def test_two_faults_of_one_layer_are_both_named() -> None:
    network = ours(padding="same")
    other = copied(network)
    change(other.conv1.weight, other.conv1.weight.detach().flip(2, 3))
    named(walked(theirs(network), other), "kernels flipped and SAME padding", "conv1")


# what nothing explains


class Odd(Ours):
    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.bn1(self.conv1(x))))
        x = torch.cat((self.left(x), self.right(x)), 1)
        return self.head(self.fc(self.block(x.relu() + 0.1 * x.sin()).flatten(1)).relu())


def test_what_nothing_explains_is_unknown_and_the_place_is_named() -> None:
    network = ours()
    source = theirs(network)
    network.__class__ = Odd
    found = walked(source, network)
    assert (found.cause, found.ours, found.after, found.found) == ("unknown", "block.conv1", None, False)
    assert "block.conv1 itself is right, but reads other numbers" in found.explanation
    assert "left, right" in found.explanation
    assert min(trial.error for trial in found.tried if "alone" not in trial.hypothesis) > 1e-5


def test_a_layer_that_computes_something_else_is_unknown() -> None:
    class Rounded(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).round()

    network = ours()
    source = theirs(network)
    network.bn1.__class__ = Rounded
    found = walked(source, network)
    assert (found.cause, found.ours) == ("unknown", "bn1")
    assert "nearest of what was tried" in str(found)


def test_a_layer_that_ours_never_calls_is_named() -> None:
    class Cut(Ours):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv1(x)

    network = ours()
    source = theirs(network)
    network.__class__ = Cut
    assert "never calls bn1" in walked(source, network).explanation


def test_a_difference_behind_the_last_layer_is_the_outputs() -> None:
    class Doubled(Ours):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    network = ours()
    source = theirs(network)
    network.__class__ = Doubled
    found = walked(source, network)
    named(found, "wrong activation", "(output)")


def test_without_a_graph_that_can_be_executed_there_is_no_walk() -> None:
    network = ours()
    with pytest.raises(ConvertError, match="carries no graph; `diagnose_outputs`"):
        diagnose(replace(theirs(network), graph=None), PAIRS, network, X, X)
    graph = Graph((Node("x", "input"), Node("y", "unknown:Lambda", ("x",))), ("y",))
    with pytest.raises(ConvertError, match="has Lambda"):
        diagnose(replace(theirs(network), graph=graph), PAIRS, network, X, X)


def test_our_network_is_left_as_it_was() -> None:
    network = ours().train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    source = theirs(network)
    walked(source, network, X, X[:, ::-1])
    diagnose_outputs(network, X, reference(source, X[:, ::-1]))
    assert network.training
    assert all(torch.equal(before[name], tensor) and tensor.dtype == before[name].dtype for name, tensor in network.state_dict().items())


def edited(graph: Graph, name: str, **attrs: Any) -> Graph:
    nodes = tuple(replace(node, attrs={**node.attrs, **attrs}) if node.name == name else node for node in graph.nodes)
    return Graph(nodes, graph.outputs)


# references without a graph


def reference(source: Source, x: np.ndarray = X) -> np.ndarray:
    """Compute what their framework would say, in float32."""
    assert source.graph is not None
    return execute.run(source, x, keep=["head"])["head"].astype(np.float32)


def guessed(network: nn.Module, outputs: np.ndarray, cause: str, x: np.ndarray = X) -> None:
    found = diagnose_outputs(network, x, outputs)
    assert (found.cause, found.ours) == (cause, None), str(found)
    assert found.after is not None
    assert found.after < 1e-5
    assert found.before > 1e-4


def test_outputs_that_agree_have_no_fault() -> None:
    network = ours()
    assert diagnose_outputs(network, X, reference(theirs(network))).cause == "no fault"
    assert diagnose_outputs(network, X, execute.run(theirs(network), X)["probabilities"]).cause == "no fault"


def test_all_kernels_flipped_is_told_from_outputs() -> None:
    network = ours()
    outputs = reference(theirs(network))
    for name in ("conv1", "right", "block.conv2"):
        weight = network.get_submodule(name).weight
        change(weight, weight.detach().flip(2, 3))
    guessed(network, outputs, "kernels flipped")


def test_a_flatten_order_is_told_from_outputs() -> None:
    network = ours()
    outputs = reference(theirs(network))
    change(network.fc.weight, FlattenOrder(6, 3, 3, "hwc").undo(network.fc.weight.detach().numpy()))
    guessed(network, outputs, "flatten order")


def test_images_are_told_from_outputs() -> None:
    network = ours()
    guessed(network, reference(theirs(network), X[:, ::-1]), "BGR")
    guessed(network, reference(theirs(network)), "0..255", X / 255)
    mean, std = (np.reshape(v, (1, 3, 1, 1)) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    guessed(network, reference(theirs(network), (X / 255 - mean) / std), "mean/std", X / 255)
    caffe = X[:, ::-1] - np.reshape((103.939, 116.779, 123.68), (1, 3, 1, 1))
    guessed(network, reference(theirs(network), caffe), "BGR and 0..255", X / 255)


def test_norms_are_told_from_outputs() -> None:
    network = ours(eps=1e-3)
    guessed(copied(network, eps=1e-5), reference(theirs(network)), "BN epsilon")
    outputs = reference(theirs(network))
    for bn in (network.bn1, network.block.bn1, network.block.bn2):
        gamma, beta = bn.weight.detach().clone(), bn.bias.detach().clone()
        change(bn.weight, beta)
        change(bn.bias, gamma)
    guessed(network, outputs, "BN gamma/beta swapped")


def test_padding_rounding_and_stride_are_told_from_outputs() -> None:
    for right, wrong, cause in (
        ({"padding": "same"}, {}, "SAME padding"),
        ({}, {"padding": "same"}, "SAME padding"),
        ({"stride_on": "1x1"}, {"stride_on": "3x3"}, "stride v1/v1.5"),
    ):
        network = ours(**right)
        guessed(copied(network, **wrong), reference(theirs(network)), cause)


def test_a_pools_rounding_is_told_from_outputs() -> None:
    torch.manual_seed(1)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(3, 2), nn.Conv2d(4, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    network = nn.Sequential(*layers)
    outputs = _probe.forward(_probe.twin(network), X).results[0]
    network[1].ceil_mode = True
    guessed(network, outputs, "ceil mode")


def test_concatenation_activation_and_head_are_told_from_outputs() -> None:
    network = ours()
    head = copied(network)
    for leaf in (head.head.weight, head.head.bias):
        change(leaf, leaf.detach()[[3, 0, 4, 1, 2]])
    guessed(head, reference(theirs(network)), "old head")
    guessed(copied(network, swapped=True), reference(theirs(network)), "concat order")


def test_one_activation_for_another_everywhere_is_told_from_outputs() -> None:
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.LeakyReLU(0.1), nn.Conv2d(4, 4, 3), nn.LeakyReLU(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    outputs = _probe.forward(_probe.twin(network), X).results[0]
    network[1], network[3] = nn.ReLU(), nn.ReLU(inplace=True)
    guessed(network, outputs, "wrong activation")


def test_two_faults_are_told_from_outputs() -> None:
    network = ours(padding="same", eps=1e-3)
    guessed(copied(network, eps=1e-5), reference(theirs(network)), "BN epsilon and SAME padding")


def test_outputs_that_nothing_explains_are_unknown() -> None:
    network = ours()
    outputs = reference(theirs(network)) + np.linspace(0, 1, 10).reshape(2, 5)
    found = diagnose_outputs(network, X, outputs)
    assert (found.cause, found.after) == ("unknown", None)
    assert found.tried


def test_two_causes_that_fit_equally_well_are_not_told_apart() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    half = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    kernels = half + half.flip(2, 3).transpose(2, 3)  # flipped they are what they are transposed
    change(network[0].weight, kernels)
    outputs = _probe.forward(_probe.twin(network), X).results[0]
    change(network[0].weight, kernels.flip(2, 3))
    found = diagnose_outputs(network, X, outputs)
    assert found.cause == "unknown"
    assert "can't tell apart what would explain the outputs: kernels" in found.explanation


def test_a_search_ends_when_its_time_is_over() -> None:
    network = ours()
    found = diagnose_outputs(network, X, reference(theirs(network)) + 1, seconds=0)
    assert (found.cause, len(found.tried)) == ("unknown", 1)


def test_a_mean_that_was_folded_into_a_stem_is_no_fault_where_it_was_said() -> None:
    network = ours(stem_bias=True)
    source = theirs(network)
    with torch.no_grad():
        assert network.conv1.bias is not None
        network.conv1.bias -= 3.0
        network.bn1.running_mean -= 3.0
    assert walked(source, network, moved={"conv1"}).cause == "no fault"
    assert walked(source, network).ours == "conv1"


def test_every_cause_has_a_meaning_and_a_remedy() -> None:
    causes = {value for name, value in vars(_fault).items() if name.isupper() and isinstance(value, str)}
    assert causes == set(_fault.MEANING)
    assert all(meaning and remedy for meaning, remedy in _fault.MEANING.values())
