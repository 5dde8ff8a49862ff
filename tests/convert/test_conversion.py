"""A file's tensors become a network's: oriented, named, folded, filled, and taken back; what does not fit is listed."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from convert.adopted import Adopted
from convert.conversion import Undecided, adopt, explain
from convert.core import COUNTER, Row
from convert.graph import Graph, Node
from convert.network import Layer, layers
from convert.source import Positional, Source, Stored, in_memory
from convert.steps import flip, from_layout, undo
from convert.writing import fold_scales, parts
from weights.errors import ConvertError

KINDS = {"conv": "conv", "norm": "norm", "wide": "conv", "fc": "linear"}


class Small(nn.Module):
    """A convolution with BatchNorm, one with a bias, and a dense layer on their flattened map of 5 x 3 x 2."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Conv2d(4, 5, (1, 2))
        self.fc = nn.Linear(30, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.wide(self.norm(self.conv(x)).relu()).relu().flatten(1))


SHAPE = (2, 5, 5)


@pytest.fixture
def network() -> nn.Module:
    random = torch.Generator().manual_seed(0)
    made = Small().eval()
    for name, tensor in made.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=random).abs() + 0.5 if "running_var" in name else torch.randn_like(tensor))
    return made


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(1))


def rows() -> list[Row]:
    return [Row(f"their_{name}", name, kind) for name, kind in KINDS.items()]


def arrays(network: nn.Module) -> dict[str, np.ndarray]:
    return {f"their_{name}": tensor.numpy().copy() for name, tensor in network.state_dict().items() if not name.endswith(COUNTER)}


def a_file(tensors: Mapping[str, np.ndarray], convention: Any = "correlation", **facts: Any) -> Source:
    held = {n: in_memory(n, a, convention=convention if a.ndim > 2 else None) for n, a in tensors.items()}
    return Source(Path("a.file"), "pytorch", "nobody's", held, **facts)


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}


def adopted(network: nn.Module, source: Source, mapping: Sequence[Row] | None = None, **said: Any) -> Adopted:
    return adopt(source, layers(network, SHAPE), shapes_of(network), family="Small", rows=rows() if mapping is None else mapping, **said)


def loaded(network: nn.Module, found: Adopted) -> nn.Module:
    made = copy.deepcopy(network)
    state = {name: torch.from_numpy(np.array(stored.array())) for name, stored in found.tensors.items()}
    assert all(tuple(state[name].shape) == found.tensors[name].shape for name in state)
    missing, unexpected = made.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(name.endswith(COUNTER) for name in missing)
    return made


def same(network: nn.Module, found: Adopted) -> bool:
    state = network.state_dict()
    return all(np.array_equal(stored.array(), state[name].numpy()) for name, stored in found.tensors.items())


def close(a: nn.Module, b: nn.Module, images: Tensor) -> bool:
    with torch.no_grad():
        wanted = b(images)
        return bool((a(images) - wanted).abs().max() < 1e-5 * wanted.abs().max())


def test_tensors_of_other_names_arrive_and_pairs_say_which_module_is_which(network: nn.Module) -> None:
    found = adopted(network, a_file(arrays(network)))
    assert found.report.ok
    assert same(network, found)
    assert found.pairs == {f"their_{name}": name for name in KINDS}
    assert explain(found, shapes_of(network)) == ""


def test_a_bias_before_a_batchnorm_goes_into_its_mean(network: nn.Module, images: Tensor) -> None:
    bias = np.array([0.5, -1, 2, 0.25], np.float32)
    tensors = arrays(network) | {"their_conv.bias": bias}
    theirs = copy.deepcopy(network)
    theirs.conv = nn.Conv2d(2, 4, 3)
    theirs.conv.load_state_dict({"weight": network.conv.weight, "bias": torch.from_numpy(bias)})
    found = adopted(network, a_file(tensors))
    assert found.report.ok
    assert found.moved == {"conv"}
    assert any("1 convolution" in note for note in found.notes)
    assert close(loaded(network, found), theirs.eval(), images)
    assert not close(network, theirs, images)
    assert str(found.tensors["norm.running_mean"].steps[-1]) == "minus their_conv.bias"


def test_a_batchnorm_without_scale_and_shift_is_filled_with_ones_and_zeros(network: nn.Module) -> None:
    tensors = arrays(network)
    del tensors["their_norm.weight"], tensors["their_norm.bias"]
    found = adopted(network, a_file(tensors))
    assert found.report.ok
    assert found.tensors["norm.weight"].array().tolist() == [1] * 4
    assert found.tensors["norm.bias"].array().tolist() == [0] * 4
    assert sorted(note.partition(":")[0] for note in found.notes) == ["norm.bias", "norm.weight"]


def test_a_batchnorm_folded_in_the_file_becomes_one_that_only_adds_the_bias(network: nn.Module, images: Tensor) -> None:
    norm: Any = network.norm
    with torch.no_grad():
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        tensors = {name: array for name, array in arrays(network).items() if "their_norm" not in name}
        tensors["their_conv.weight"] = (network.conv.weight * scale.view(-1, 1, 1, 1)).numpy()
        tensors["their_conv.bias"] = (norm.bias - scale * norm.running_mean).numpy()
    found = adopted(network, a_file(tensors))
    assert found.report.ok
    assert close(loaded(network, found), network, images)
    assert any("1 BatchNorm of the file" in note for note in found.notes)


def test_a_bias_that_a_graph_does_not_have_is_zeros_and_without_a_graph_it_is_missing(network: nn.Module) -> None:
    tensors = {name: array for name, array in arrays(network).items() if name != "their_wide.bias"}
    lacking = a_file(tensors)
    assert [ours for ours, _ in adopted(network, lacking).report.missing] == ["wide.bias"]
    lacking.graph = Graph((Node("x", "input", (), {}), Node("their_wide", "conv", ("x",), {})), ("their_wide",))
    found = adopted(network, lacking)
    assert found.tensors["wide.bias"].array().tolist() == [0] * 5
    assert any("computes without one" in note for note in found.notes)


@pytest.mark.parametrize("behind", ["unknown:Add", "affine", "add", "sub"])
def test_a_bias_is_not_taken_for_zeros_where_the_graph_adds_something_behind(behind: str, network: nn.Module) -> None:
    lacking = a_file({name: array for name, array in arrays(network).items() if name != "their_wide.bias"})
    nodes = (Node("x", "input", (), {}), Node("their_wide", "conv", ("x",), {}), Node("more", behind, ("their_wide",), {}))
    lacking.graph = Graph(nodes, ("more",))
    assert [ours for ours, _ in adopted(network, lacking).report.missing] == ["wide.bias"]


def test_a_bias_with_neither_place_nor_batchnorm_is_an_error(network: nn.Module) -> None:
    plain = nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.Conv2d(4, 4, 1, bias=False))
    tensors = {f"{i}.{leaf}": np.ones(s, np.float32) for i, s in ((0, (4, 2, 3, 3)), (1, (4, 4, 1, 1))) for leaf in ("weight",)}
    mapping = [Row("0", "0", "conv"), Row("1", "1", "conv")]
    assert adopted(plain, a_file(tensors), mapping).report.ok
    found = adopted(plain, a_file(tensors | {"0.bias": np.ones(4, np.float32)}), mapping)
    assert found.report.unmatched == ["0.bias"]
    assert "0.bias, 4" in explain(found, shapes_of(plain))


def test_a_bias_whose_map_goes_elsewhere_too_is_not_folded() -> None:
    class Forked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.side = nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            return self.norm(y) + self.side(y)

    forked = Forked()
    tensors = {name: tensor.numpy() for name, tensor in forked.state_dict().items() if not name.endswith(COUNTER)}
    mapping = [Row("conv", "conv", "conv"), Row("norm", "norm", "norm"), Row("side", "side", "conv")]
    found = adopted(forked, a_file(tensors | {"conv.bias": np.ones(4, np.float32)}), mapping)
    assert found.report.unmatched == ["conv.bias"]


@pytest.mark.parametrize("said", ["convolution", None])
def test_kernels_of_true_convolution_are_flipped_and_the_step_is_taken_back(network: nn.Module, said: Any) -> None:
    flipped = {name: np.ascontiguousarray(flip(a)) if a.ndim == 4 else a for name, a in arrays(network).items()}
    found = adopted(network, a_file(flipped, "unknown" if said else "convolution"), convention=said)
    assert same(network, found)
    for name, stored in found.tensors.items():
        assert np.array_equal(undo(stored.steps, stored.array()), flipped[f"their_{name}"])
    assert not same(network, adopted(network, a_file(flipped, "correlation")))


def test_the_convention_given_wins_over_the_files(network: nn.Module) -> None:
    assert same(network, adopted(network, a_file(arrays(network), "convolution"), convention="correlation"))


def test_an_unknown_convention_is_undecided_and_says_what_to_do(network: nn.Module) -> None:
    with pytest.raises(Undecided, match=r"their_conv\.weight(.|\n)*--kernel-convention(.|\n)*--reference(.|\n)*--images"):
        adopted(network, a_file(arrays(network), "unknown"))


def test_an_unknown_order_of_space_is_undecided_and_says_what_to_do(network: nn.Module) -> None:
    with pytest.raises(Undecided, match=r"--spatial hw or wh to zoo convert or zoo add(.|\n)*--reference"):
        adopted(network, a_file(arrays(network), spatial="unknown"))


def test_a_network_of_1x1_kernels_needs_no_decision() -> None:
    plain = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False))
    source = a_file({"0.weight": np.ones((4, 2, 1, 1), np.float32)}, "unknown", spatial="unknown")
    assert adopted(plain, source, [Row("0", "0", "conv")]).report.ok


def test_width_before_height_is_turned_in_kernels_and_in_the_flatten_order(network: nn.Module, images: Tensor) -> None:
    tensors = arrays(network)
    theirs = {name: np.ascontiguousarray(a.swapaxes(2, 3)) if a.ndim == 4 else a for name, a in tensors.items()}
    dense = tensors["their_fc.weight"]
    height, width = 3, 2
    theirs["their_fc.weight"] = np.ascontiguousarray(dense.reshape(3, 5, height, width).swapaxes(2, 3)).reshape(3, 30)
    for source, said in ((a_file(theirs, spatial="wh"), None), (a_file(theirs, spatial="unknown"), "wh")):
        assert same(network, adopted(network, source, spatial=said))


@pytest.mark.parametrize("order", ["hwc", "whc", "cwh"])
def test_a_dense_layer_that_reads_a_flattened_map_is_brought_to_pytorchs_order(network: nn.Module, order: str) -> None:
    tensors = arrays(network)
    axes = ["chw".index(letter) + 1 for letter in order]
    dense = tensors["their_fc.weight"].reshape(3, 5, 3, 2).transpose(0, *axes).reshape(3, 30)
    found = adopted(network, a_file(tensors | {"their_fc.weight": dense}, flatten=order))
    assert same(network, found)
    stored = found.tensors["fc.weight"]
    assert str(stored.steps[-1]) == f"flatten {order} to chw(5x3x2)"
    assert np.array_equal(undo(stored.steps, stored.array()), dense)


def test_all_that_does_not_fit_is_listed_with_names_and_shapes(network: nn.Module) -> None:
    tensors = arrays(network)
    del tensors["their_norm.running_var"]
    tensors |= {"extra.weight": np.ones((7, 6), np.float32), "their_wide.bias": np.ones(9, np.float32)}
    mapping = [*rows(), Row("their_conv", "wide", "conv"), Row("ghost", "nowhere", "conv")]
    found = adopted(network, a_file(tensors), mapping)
    assert not found.report.complete
    told = explain(found, shapes_of(network))
    assert "norm.running_var, 4: their_norm.running_var was looked for" in told
    assert "extra.weight, 7x6" in told
    assert "their_wide.bias, 9, is not wide.bias, 5" in told
    for contested in ("wide.weight", "wide.bias", "their_conv.weight"):
        assert contested in found.report.contested
        assert re.search(rf"are named by two rows:(.|\n)*^    {re.escape(contested)}$", told, re.MULTILINE)


def test_an_unused_row_is_an_error_of_its_own(network: nn.Module) -> None:
    found = adopted(network, a_file(arrays(network)), [*rows(), Row("ghost", "nowhere", "conv")])
    assert not found.report.complete
    assert "ghost → nowhere (conv)" in explain(found, shapes_of(network))


def test_a_long_list_is_cut_and_counts_the_rest(network: nn.Module) -> None:
    more = {f"extra{i:02}.weight": np.ones((1, 1), np.float32) for i in range(12)}
    told = explain(adopted(network, a_file(arrays(network) | more)), shapes_of(network))
    assert "12 of their tensors have no place" in told
    assert "… and 2 more" in told
    assert "extra10" not in told


def test_an_unknown_naming_lists_those_that_there_are(network: nn.Module) -> None:
    with pytest.raises(LookupError, match=r"'esperanto'(.|\n)*torchvision"):
        adopt(a_file(arrays(network)), [], shapes_of(network), family="Small", naming="esperanto")


# Files that keep only an order: Lasagne's naming takes our modules as they come, and ResNets have a bias in conv1

LEAVES = {"conv": ("weight", "bias"), "linear": ("weight", "bias"), "norm": ("bias", "weight", "running_mean", "running_var")}


def positional(arrays: Sequence[np.ndarray], convention: Any = "correlation") -> Source:
    def steps(kind: str, leaf: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
        return from_layout("linear", "IO", shape) if kind == "linear" and leaf == "weight" else ()

    held = {str(i): in_memory(f"arr_{i}", array) for i, array in enumerate(arrays)}
    layout = Positional(LEAVES, steps, convention)
    return Source(Path("a.npz"), "npz", "Lasagne", held, positional=True, layout=layout)


def listed(network: nn.Module) -> list[np.ndarray]:
    state = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    order = ["conv.weight", "norm.bias", "norm.weight", "norm.running_mean", "norm.running_var", "wide.weight", "wide.bias"]
    return [*(state[name] for name in order), state["fc.weight"].T, state["fc.bias"]]


def counted(network: nn.Module, source: Source, family: str = "Small", **said: Any) -> Adopted:
    return adopt(source, layers(network, SHAPE), shapes_of(network), family=family, naming="lasagne", **said)


def test_a_list_without_names_is_walked_in_its_order(network: nn.Module) -> None:
    found = counted(network, positional(listed(network)))
    assert found.report.ok
    assert same(network, found)
    assert found.tensors["fc.weight"].origin == "arr_7"


def test_the_kernels_of_a_list_are_flipped_when_they_are_said_to_be_of_true_convolution(network: nn.Module) -> None:
    flipped = [np.ascontiguousarray(flip(array)) if array.ndim == 4 else array for array in listed(network)]
    with pytest.raises(Undecided, match="arr_0"):
        counted(network, positional(flipped, "unknown"))
    assert same(network, counted(network, positional(flipped, "unknown"), convention="convolution"))
    assert not same(network, counted(network, positional(flipped, "unknown"), convention="correlation"))


def test_a_list_that_is_too_short_or_too_long_names_what_is_left(network: nn.Module) -> None:
    short = counted(network, positional(listed(network)[:-1]))
    assert ("fc.bias", "the file has ended") in short.report.missing
    long = counted(network, positional([*listed(network), np.ones(3, np.float32)]))
    assert long.report.unmatched == ["9"]
    assert "9, 3" in explain(long, shapes_of(network))


def test_a_list_in_another_order_is_found_by_its_shapes(network: nn.Module) -> None:
    wrong = listed(network)
    wrong[0], wrong[5] = wrong[5], wrong[0]
    found = counted(network, positional(wrong))
    assert ("0", "conv.weight", (5, 4, 1, 2), (4, 2, 3, 3)) in found.report.misshaped
    assert "0, 5x4x1x2, is not conv.weight, 4x2x3x3" in explain(found, shapes_of(network))


def test_a_bias_that_a_list_has_before_a_batchnorm_is_folded_where_the_naming_knows_it() -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn1(self.conv1(x))

    stem = Stem().eval()
    bias = np.array([1, 2, 3, 4], np.float32)
    state = {name: tensor.numpy() for name, tensor in stem.state_dict().items()}
    norm = [state[f"bn1.{leaf}"] for leaf in LEAVES["norm"]]
    plain = counted(stem, positional([state["conv1.weight"], *norm]), "ResNet")
    assert plain.report.ok
    assert plain.tensors["bn1.running_mean"].array().tolist() == [0] * 4
    biased = counted(stem, positional([state["conv1.weight"], bias, *norm]), "ResNet")
    assert biased.report.ok
    assert biased.tensors["bn1.running_mean"].array().tolist() == [-1, -2, -3, -4]
    assert biased.moved == {"conv1"}


def test_a_list_is_taken_in_the_order_that_is_given_and_by_no_naming_without_one(network: nn.Module) -> None:
    source, structure = replace(positional(listed(network)), format="pytorch"), layers(network, SHAPE)
    with pytest.raises(LookupError, match="the naming torchvision knows no order"):
        adopt(source, structure, shapes_of(network), family="Small", naming="torchvision")
    found = adopt(source, structure, shapes_of(network), family="Small", order=[layer.name for layer in structure])
    assert (found.naming, found.report.ok) == ("position", True)
    assert all(np.array_equal(found.tensors[n].array(), t.numpy()) for n, t in network.state_dict().items() if not n.endswith(COUNTER))


def stored(network: nn.Module) -> dict[str, Stored]:
    return {n: in_memory(n, t.numpy()) for n, t in network.state_dict().items() if not n.endswith(COUNTER)}


def test_parts_are_the_inverse_of_adoption(network: nn.Module) -> None:
    made = parts(rows(), layers(network, SHAPE), stored(network))
    assert [part.name for part in made] == [f"their_{name}" for name in KINDS]
    assert [part.ours for part in made] == list(KINDS)
    assert [part.kind for part in made] == list(KINDS.values())
    assert made[1].eps == network.norm.eps
    assert made[3].grid == (5, 3, 2)
    again = {f"{part.name}.{leaf}": held.array() for part in made for leaf, held in part.leaves.items()}
    assert same(network, adopted(network, a_file(again)))
    assert len(again) == len(stored(network))


def test_parts_refuse_a_tensor_that_no_row_leads_to(network: nn.Module) -> None:
    with pytest.raises(ConvertError, match=r"no row leads to 2 tensors(.|\n)*fc\.weight"):
        parts(rows()[:3], layers(network, SHAPE), stored(network))


def test_a_bias_that_theirs_has_and_ours_has_not_is_written_as_zeros(network: nn.Module) -> None:
    mapping = [replace(row, adds=("bias",)) if row.ours == "conv" else row for row in rows()]
    made = parts(mapping, layers(network, SHAPE), stored(network))
    assert made[0].leaves["bias"].array().tolist() == [0] * 4
    again = {f"{part.name}.{leaf}": held.array() for part in made for leaf, held in part.leaves.items()}
    assert same(network, adopted(network, a_file(again)))


def test_a_dense_layer_becomes_their_convolution_over_its_map_and_comes_back(network: nn.Module) -> None:
    mapping = [replace(row, kind="linear_from_conv") if row.ours == "fc" else row for row in rows()]
    made = parts(mapping, layers(network, SHAPE), stored(network))
    assert made[3].kind == "conv"
    assert made[3].leaves["weight"].shape == (3, 5, 3, 2)
    again = {f"{part.name}.{leaf}": held.array() for part in made for leaf, held in part.leaves.items()}
    assert same(network, adopted(network, a_file(again), mapping))


def test_a_scale_that_has_no_place_there_goes_into_the_convolution_before_it(network: nn.Module, images: Tensor) -> None:
    mapping = [replace(row, lacks=("weight",)) if row.kind == "norm" else row for row in rows()]
    structure: list[Layer] = layers(network, SHAPE)
    folded = fold_scales(mapping, structure, stored(network))
    assert folded["norm.weight"].array().tolist() == [1] * 4
    twin = copy.deepcopy(network)
    twin.load_state_dict({n: torch.from_numpy(s.array().copy()) for n, s in folded.items()}, strict=False)
    assert close(twin, network, images)
    made = parts(mapping, structure, stored(network))
    assert set(made[1].leaves) == {"bias", "running_mean", "running_var"}
    again = {f"{part.name}.{leaf}": held.array() for part in made for leaf, held in part.leaves.items()}
    assert close(loaded(network, adopted(network, a_file(again), mapping)), network, images)


def test_a_scale_of_ones_is_left_alone(network: nn.Module) -> None:
    network.norm.weight.data.fill_(1)
    mapping = [replace(row, lacks=("weight",)) if row.kind == "norm" else row for row in rows()]
    assert fold_scales(mapping, layers(network, SHAPE), stored(network))["conv.weight"].steps == ()


def test_a_scale_that_can_not_be_folded_is_refused(network: nn.Module) -> None:
    mapping = [replace(row, lacks=("weight",)) if row.kind == "norm" else row for row in rows()]
    structure = [replace(layer, inputs=("conv", "norm")) if layer.name == "wide" else layer for layer in layers(network, SHAPE)]
    with pytest.raises(ConvertError, match=r"their_norm has no weight there, and norm\.weight is not all 1"):
        parts(mapping, structure, stored(network))
