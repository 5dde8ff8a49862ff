"""Constructor options that change a network's tensors are found by the file, and named; words that are two things are read as either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from convert.formats import safetensors
from weights.errors import ConvertError, WeightsMismatch
from weights.reading import read_file
from zoo import VGG11, MobileNetV1_025, ResNet20, ResNet32, trained
from zoo.commands import app
from zoo.conversion.convert import convert, destination_words, source_words
from zoo.conversion.fitting import choices, said
from zoo.conversion.inspect import chosen, inspect
from zoo.networks.model import Model
from zoo.variants import optional


def saved(network: Model, path: Path) -> Path:
    safetensors.save(network.state_dict(), path)
    return path


def written(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.tensors(read_file(path)[1])


def test_options_that_change_tensors_are_listed_and_others_are_not() -> None:
    assert [options for options, _ in choices(ResNet20)] == [{"shortcut": "B"}]
    assert [options for options, _ in choices(VGG11)] == [{"bias": False}]
    assert choices(MobileNetV1_025) == ()
    assert said({"shortcut": "B", "bias": False}) == "shortcut='B', bias=False"
    assert "ResNet20 with shortcut='B'" in optional()


@pytest.mark.parametrize("match", [False, True])
def test_a_file_that_needs_an_option_gets_it_and_says_so(match: bool, tmp_path: Path) -> None:
    network = ResNet20(shortcut="B").eval()
    source = saved(network, tmp_path / "a.safetensors")
    if match:  # without a graph nothing tells the branches' layers apart
        source = convert(source, tmp_path / "a.onnx", ResNet20, prove=False).destination
    made = convert(source, tmp_path / "b.npz", ResNet20, match=match)
    assert made.options["shortcut"] == "B"
    assert match or "fits ResNet20 with shortcut='B', and not without" in made.notes  # an ONNX file of ours notes its options
    again = trained(ResNet20, tmp_path / "b.npz", kernel_convention="correlation")
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(again(x), network(x))


def test_an_option_that_is_given_is_not_searched(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"layer2\.0\.downsample"):
        convert(saved(ResNet20(shortcut="B"), tmp_path / "a.safetensors"), tmp_path / "b.npz", ResNet20, shortcut="A")


def test_another_networks_file_names_that_network(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"the shapes of ResNet20 with shortcut='B' \(100%\): name that network"):
        convert(saved(ResNet20(shortcut="B"), tmp_path / "a.safetensors"), tmp_path / "b.npz", ResNet32)
    with pytest.raises(WeightsMismatch, match=r"It fits ResNet20 with shortcut='B': trained\(ResNet20, …, shortcut='B'\)"):
        trained(ResNet20, tmp_path / "a.safetensors")


def test_inspect_ranks_with_options_and_says_nothing_where_nothing_is_likely(tmp_path: Path) -> None:
    found = inspect(saved(ResNet20(shortcut="B"), tmp_path / "a.safetensors"))
    assert [one.called for one in found.likely][:2] == ["ResNet20 with shortcut='B'", "ResNet20"]
    assert chosen(tmp_path / "a.safetensors", None) is ResNet20
    np.savez(tmp_path / "b.npz", **{"conv.weight": np.zeros((16, 3, 3, 3), "f4"), "fc.weight": np.zeros((10, 16), "f4")})
    assert inspect(tmp_path / "b.npz").likely == ()


@pytest.mark.parametrize("match", [False, True])
@pytest.mark.parametrize("lacks", [False, True])
def test_match_and_headless_go_together(lacks: bool, match: bool, tmp_path: Path) -> None:
    network = ResNet20().eval()
    state = {name: tensor for name, tensor in network.state_dict().items() if not lacks or not name.startswith("fc.")}
    safetensors.save(state, tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20, match=match, headless=True)
    assert ("the file has its classifier, which is kept" in made.notes) != lacks
    assert ("fc.weight" in written(tmp_path / "b.safetensors")) != lacks


PAIRS: list[dict[str, Any]] = [
    {"match": True, "headless": True},
    {"match": True, "fold_input": True},
    {"match": True, "to_convention": "convolution"},
    {"headless": True, "fold_input": True},
    {"headless": True, "preprocessing_inside": True},
    {"match": True, "preprocessing_inside": True},
    {"fold_input": True, "preprocessing_inside": True},
    {"size": 40, "fold_input": True},
    {"channel_order": "bgr", "preprocessing_inside": True},
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: " ".join(pair))
def test_options_work_in_pairs(pair: dict[str, Any], tmp_path: Path) -> None:
    """Each pair writes a file that reads back, or is refused in words; never anything else."""
    source = saved(ResNet20().eval(), tmp_path / "a.safetensors")
    ending = "onnx" if "preprocessing_inside" in pair else "npz"
    made = convert(source, tmp_path / f"b.{ending}", ResNet20, **pair)
    assert made.destination.stat().st_size > 0
    assert not any(one.contradicts for one in made.certificate.evidence)


def test_a_word_that_is_two_things_is_read_as_either(tmp_path: Path) -> None:
    network = MobileNetV1_025().eval()
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.h5", MobileNetV1_025, prove=False)
    assert source_words("keras", "auto", tmp_path / "a.h5") == ("keras", "auto")
    assert source_words("keras", "auto", tmp_path / "a.safetensors") == ("auto", "keras")
    assert source_words("keras", "kerashub", tmp_path / "a.h5") == ("keras", "kerashub")
    assert destination_words("keras", tmp_path / "b.npz") == ("auto", "keras")
    assert destination_words("keras", tmp_path / "b.h5") == ("keras", "auto")
    for wrong in ("nobody", "onnx"):
        with pytest.raises(ConvertError, match="is no naming"):
            source_words("auto", wrong, tmp_path / "a.h5")
    with pytest.raises(ConvertError, match="leave one out"):
        source_words("kerashub", "timm", tmp_path / "a.h5")


def test_arrays_with_kerass_names_are_read_by_them(tmp_path: Path) -> None:
    """What a user saves of `{w.name: w.numpy() for w in model.weights}`: depthwise kernels too, and separable ones beside each other."""
    h5py = pytest.importorskip("h5py")
    network = MobileNetV1_025().eval()
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / "a.h5", MobileNetV1_025, to="keras", prove=False)
    arrays: dict[str, np.ndarray] = {}

    def collect(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind == "f" and item.ndim:
            layer, _, leaf = name.rpartition("/")
            arrays[f"{layer.rpartition('/')[2]}/{leaf.partition(':')[0]}:0"] = item[()]

    with h5py.File(tmp_path / "a.h5") as file:
        file.visititems(collect)
    assert any(name.endswith("depthwise_kernel:0") for name in arrays)
    np.savez(tmp_path / "b.npz", **arrays)
    made = convert(tmp_path / "b.npz", tmp_path / "b.safetensors", MobileNetV1_025, padding="symmetric", norm_eps=1e-5, activation="relu")
    assert made.naming == "keras"
    found = written(tmp_path / "b.safetensors")
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert (
        app.main(["convert", str(tmp_path / "b.npz"), str(tmp_path / "c.safetensors"), "--model", "MobileNetV1_025", "--naming", "keras"])
        == 0
    )
