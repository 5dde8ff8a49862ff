"""Any module takes anybody's weights: by names, by topology, by order; and what can't be is refused in words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import own_network_files as made
import pytest
import torch
from torch import Tensor, nn

from convert.formats import safetensors
from convert.match import NoUniqueMatch
from weights import UnknownWeights
from weights.errors import ConvertError, NonFinite, WeightsMismatch
from weights.reading import read_file
from zoo import ResNet20, trained
from zoo.conversion.convert import convert
from zoo.conversion.own import OwnNetwork, arguments_of, imported, is_own, own_network, shape_of


class Fussy(nn.Module):
    """Has a parameter of its own, names that Model uses, a buffer that is not saved, and a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Conv2d(2, 4, 3)
        self.template = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.rand(1, 4, 1, 1))
        self.register_buffer("shift", torch.rand(1, 4, 1, 1), persistent=False)
        self.fixed = torch.rand(1, 4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.template(self.classes(x)) * self.scale + self.shift + self.fixed


def saved(network: nn.Module, path: Path) -> Path:
    safetensors.save(network.state_dict(), path)
    return path


def test_a_module_with_odd_names_and_hidden_tensors_is_filled_in_place(tmp_path: Path) -> None:
    theirs, ours = Fussy().eval(), Fussy()
    ours.shift.copy_(theirs.shift)
    ours.fixed.copy_(theirs.fixed)
    weight = ours.classes.weight
    x = torch.rand(1, 2, 9, 7)
    found = trained(ours, saved(theirs, tmp_path / "a.safetensors"), example=(2, 9, 7))
    assert found is ours
    assert found.classes.weight is weight
    assert not found.training
    assert torch.equal(found(x), theirs(x))


@pytest.mark.parametrize("lost", ["classes.bias", "template.bias", "template.weight", "scale", "classes.weight"])
def test_a_file_with_the_modules_names_and_without_one_tensor_is_refused_by_that_name(lost: str, tmp_path: Path) -> None:
    held = Fussy().state_dict()
    del held[lost]
    safetensors.save(held, tmp_path / "a.safetensors")
    ours = Fussy()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(WeightsMismatch, match="1 of our tensors nothing becomes") as refused:
        trained(ours, tmp_path / "a.safetensors", example=(2, 9, 7))
    assert refused.value.missing == [lost]
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


def test_a_tensor_too_many_is_named_and_not_a_number_is_refused(tmp_path: Path) -> None:
    held = {**Fussy().state_dict(), "more.weight": torch.ones(3)}
    safetensors.save(held, tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch, match=r"more\.weight"):
        trained(Fussy(), tmp_path / "a.safetensors", example=(2, 9, 7))
    held = Fussy().state_dict()
    held["classes.bias"] = held["classes.bias"].clone().fill_(float("nan"))
    safetensors.save(held, tmp_path / "b.safetensors")
    with pytest.raises(NonFinite, match=r"'classes\.bias' holds NaN"):
        trained(Fussy(), tmp_path / "b.safetensors", example=(2, 9, 7))


def test_a_converted_file_is_the_modules_state_dict_and_nothing_is_changed_in_the_module(tmp_path: Path) -> None:
    theirs, ours = Fussy().eval(), Fussy()
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    written = convert(saved(theirs, tmp_path / "a.safetensors"), tmp_path / "b.safetensors", ours, example=(2, 9, 7))
    assert written.model.__name__ == "Fussy"
    found = safetensors.tensors(read_file(tmp_path / "b.safetensors")[1])
    assert all(torch.equal(found[name], tensor) for name, tensor in theirs.state_dict().items())
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())
    assert ours.training


@pytest.mark.parametrize("ending", ["npz", "pth", "mat", "h5", "bson", "msgpack", "jld2"])
def test_an_own_network_is_written_in_every_format_and_read_back(ending: str, tmp_path: Path) -> None:
    digits = made.drawn(made.code(tmp_path)["Digits"]())
    source = saved(digits, tmp_path / "a.safetensors")
    written = convert(
        source, tmp_path / f"b.{ending}", digits, example=(1, 28, 28), to_convention="correlation" if ending == "npz" else "auto"
    )
    assert any(one.kind == "read back" and one.proven for one in written.certificate.evidence)
    again = made.code(tmp_path)["Digits"]()
    trained(again, tmp_path / f"b.{ending}", example=(1, 28, 28), **({"spatial": "hw"} if ending in ("bson", "jld2") else {}))
    assert all(torch.equal(tensor, digits.state_dict()[name]) for name, tensor in again.state_dict().items())


def test_a_vector_network_and_a_usual_shape() -> None:
    dense = own_network(nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 2)))
    assert (dense.image_shape, dense.outputs, dense.assumed_shape) == ((5,), 2, True)
    picky = own_network(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 4)))
    assert picky.image_shape == (1, 28, 28)
    assert [is_own(one) for one in (nn.ReLU, nn.ReLU(), OwnNetwork, ResNet20, ResNet20(), "ResNet20")] == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("network", "example", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2, 4)), None, "Give the shape of one input: example="),
        (nn.Conv2d(3, 2, 3), (4, 8, 8), r"does not compute with one input of 4x8x8: RuntimeError"),
        (nn.ReLU(), None, "no convolution and no dense layer that tells its input"),
        (nn.Conv2d(3, 2, 3), (8, 8), "the shape of one input"),
        (lambda: 3, None, "made 3, which is no torch.nn.Module"),
    ],
)
def test_what_does_not_compute_is_said(network: Any, example: Any, message: str) -> None:
    with pytest.raises(ConvertError, match=message):
        own_network(network, example)


def test_another_depth_is_refused_with_both_sides(tmp_path: Path) -> None:
    known = made.code(tmp_path)
    made.matconvnet(made.drawn(known["DnCNN"](5, 8, 1e-4)), tmp_path / "a.mat")
    with pytest.raises(NoUniqueMatch, match=r"do not fit each other by kind and shape"):
        convert(tmp_path / "a.mat", tmp_path / "b.safetensors", known["DnCNN"](6, 8, 1e-4))
    assert not (tmp_path / "b.safetensors").exists()


def test_a_list_goes_in_by_order_and_a_norm_without_statistics_is_refused(tmp_path: Path) -> None:
    networks = made.write(tmp_path)
    digits = made.code(tmp_path)["Digits"]()
    trained(digits, tmp_path / "digits.bson", kernel_convention="convolution", spatial="wh")
    assert all(torch.equal(tensor, networks["digits"].state_dict()[name]) for name, tensor in digits.state_dict().items())
    normed = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
    made.flux_list(networks["digits"], tmp_path / "digits.bson")
    with pytest.raises(WeightsMismatch, match=r"running_mean"):
        trained(normed, tmp_path / "digits.bson", kernel_convention="convolution", spatial="wh")


def test_words_of_the_command_are_read_and_refused() -> None:
    assert arguments_of(["depth=17", "widths=[16, 32]", "name=relu", "bias=false", "eps=1e-3"]) == {
        "depth": 17,
        "widths": [16, 32],
        "name": "relu",
        "bias": False,
        "eps": 1e-3,
    }
    assert shape_of("1x64x64") == shape_of("1,64,64") == (1, 64, 64)
    for wrong, read in (("1x", shape_of), ("0x3", shape_of), (["depth"], arguments_of)):
        with pytest.raises(ValueError, match="looks like"):
            read(wrong)  # pyright: ignore[reportArgumentType]


def test_an_import_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made.code(tmp_path)
    path = list(sys.path)
    assert imported("mynets:DnCNN", {"depth": 4, "width": 2}, (1, 8, 8)).__name__ == "DnCNN"
    assert sys.path == path
    for place, message in (
        ("mynets:Nothing", "has no attribute 'Nothing'"),
        ("no_such_module:DnCNN", "No module named"),
        ("zoo:ResNet20", "--model ResNet20"),
        ("mynets:__name__", "which is no network"),
    ):
        with pytest.raises(ConvertError, match=message):
            imported(place)
    with pytest.raises(ConvertError, match=r"DnCNN\(colour=3\) raised TypeError"):
        imported("mynets:DnCNN", {"colour": 3})
    sys.modules.pop("mynets")


def test_what_belongs_to_the_zoos_networks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="your own network is built by your own code"):
        trained(nn.Conv2d(1, 1, 1), tmp_path / "a.pth", num_classes=3)
    with pytest.raises(UnknownWeights, match=r"trained\(Conv2d, PATH\)"):
        trained(nn.Conv2d(1, 1, 1))
    with pytest.raises(TypeError, match="of their class or name: ResNet20, not"):
        convert(tmp_path / "a.pth", tmp_path / "b.safetensors", ResNet20())
    with pytest.raises(TypeError, match="the zoo's networks know theirs"):
        trained(ResNet20, example=(3, 32, 32))
    source = saved(nn.Conv2d(1, 1, 1), tmp_path / "a.safetensors")
    with pytest.raises(ConvertError, match="nothing here knows which of its layers is a classifier"):
        convert(source, tmp_path / "b.safetensors", nn.Conv2d(1, 1, 1), headless=True)


@pytest.mark.real
def test_real_files_go_into_networks_that_nobody_here_knows(real: Path, tmp_path: Path) -> None:
    """SampLeNet by its authors' own class, from ONNX and Caffe; a Flux list that stores an accuracy of 99.28 %."""
    samples = real / "real" / "samplenet"
    known: dict[str, Any] = {"__name__": "samplenet"}
    exec((samples / "samplenet.py").read_text(), known)
    for name in ("samplenet.onnx", "SampLeNet.caffemodel"):
        found = convert(samples / name, tmp_path / f"{name}.safetensors", known["SampLeNet"], example=(3, 32, 32))
        assert found.certificate.proven
        assert max(one.worst or 0 for one in found.certificate.evidence) < 1e-6


def test_nobody_states_the_pixels_of_an_own_network_by_having_converted_it(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    first = convert(saved(network, tmp_path / "a.safetensors"), tmp_path / "b.safetensors", network, example=(3, 8, 8))
    again = convert(tmp_path / "b.safetensors", tmp_path / "c.npz", network, example=(3, 8, 8))
    assert (first.pixels, again.pixels) == (None, None)
    assert any("how its images are prepared is not known" in note for note in again.notes)


class Named(nn.Module):
    """Answers a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"map": self.layer(x)}


@pytest.mark.parametrize("ending", [".onnx", ".xml"])
def test_a_network_that_answers_a_dict_is_not_exported_and_told_why(ending: str, tmp_path: Path) -> None:
    file = saved(Named(), tmp_path / "a.safetensors")
    with pytest.raises(ConvertError, match="the network answers a dict, and one tensor can be written and compared"):
        convert(file, tmp_path / f"b{ending}", Named(), example=(3, 16, 16))
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


class OfTokens(nn.Module):
    """Takes whole numbers, and no image."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(50, 16), nn.BatchNorm1d(16)
        self.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1))
        self.recurrent, self.head = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens).transpose(1, 2)).transpose(1, 2)
        return self.head(self.recurrent(x)[0][:, -1])


@pytest.mark.parametrize("ending", [".pth", ".safetensors"])
def test_a_network_of_tokens_is_filled_by_its_own_names_without_being_run(ending: str, tmp_path: Path) -> None:
    theirs, ours = OfTokens().eval(), OfTokens().half()
    state = {name: tensor for name, tensor in theirs.state_dict().items() if not name.endswith("num_batches_tracked")}
    torch.save(state, place) if (place := tmp_path / f"a{ending}").suffix == ".pth" else safetensors.save(state, place)
    assert trained(ours, place) is ours
    assert not ours.training
    assert all(torch.equal(tensor, theirs.state_dict()[name].to(tensor.dtype)) for name, tensor in ours.state_dict().items())
    built = trained(OfTokens, place)
    tokens = torch.randint(0, 50, (2, 9))
    assert torch.equal(built(tokens), theirs(tokens))
    state["norm.weight"] = state["norm.weight"].clone().fill_(float("inf"))
    torch.save(state, tmp_path / "b.pth")
    with pytest.raises(NonFinite, match=r"'norm\.weight' holds NaN"):
        trained(ours, tmp_path / "b.pth")
    assert torch.equal(ours.head.bias, theirs.head.bias.half())


class OfPhases(nn.Module):
    """Has numbers of a kind that no file of safetensors has."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = nn.Parameter(torch.ones(2, dtype=torch.complex128))


def test_complex_numbers_are_filled_and_looked_at(tmp_path: Path) -> None:
    torch.save({"phases": torch.tensor([1 + 2j, 3], dtype=torch.complex128)}, tmp_path / "a.pth")
    assert trained(OfPhases, tmp_path / "a.pth").phases.tolist() == [1 + 2j, 3]
    torch.save({"phases": torch.tensor([complex(0, float("nan")), 3], dtype=torch.complex128)}, tmp_path / "b.pth")
    with pytest.raises(NonFinite, match="'phases' holds NaN"):
        trained(OfPhases, tmp_path / "b.pth")
