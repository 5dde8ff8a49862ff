"""A file of any framework as a network of the zoo: built as the file and its naming ask, or refused with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from roundtrips import built
from torch import Tensor

from convert import formats
from convert.conversion import Undecided
from convert.formats import safetensors
from convert.steps import flip
from weights.errors import ConvertError, MalformedFile, WeightsMismatch
from zoo import MobileNetV1_025, ResNet20, SqueezeNet1_1, trained
from zoo.conversion.convert import convert
from zoo.conversion.foreign import load
from zoo.conversion.namings import open_foreign
from zoo.conversion.notes import NOTES, file_sha256, notes
from zoo.networks.model import Model

IMAGES = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def network() -> Model:
    return built("ResNet20")


def logits(network: Model) -> Tensor:
    with torch.no_grad():
        return network(IMAGES)


def save(state: dict[str, Tensor], path: Path, **facts: str) -> Path:
    safetensors.save(state, path, facts)
    return path


def arrays(network: Model) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")}


def test_a_file_becomes_the_network(network: Model, tmp_path: Path) -> None:
    with (found := open_foreign(save(network.state_dict(), tmp_path / "a.safetensors"), ResNet20)).source:
        assert torch.equal(logits(load(found)), logits(network))
    assert found.adopted.naming == "torchvision"
    assert found.options == {}


def test_classes_channels_and_options_come_from_file_naming_and_user(tmp_path: Path) -> None:
    wanted = built("MobileNetV1_025", num_classes=3, in_channels=2, norm_eps=0.5)
    path = save(wanted.state_dict(), tmp_path / "a.safetensors")
    with (found := open_foreign(path, MobileNetV1_025, norm_eps=0.5)).source:
        assert (found.network.num_classes, found.network.in_channels) == (3, 2)
        assert found.options == {"norm_eps": 0.5}
        images = IMAGES[:, :2]
        with torch.no_grad():
            assert torch.equal(load(found)(images), wanted(images))


def test_what_the_user_says_of_the_classes_is_not_overruled(network: Model, tmp_path: Path) -> None:
    path = save(network.state_dict(), tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch, match=r"fc\.weight, 10x64, is not fc\.weight, 7x64"):
        open_foreign(path, ResNet20, num_classes=7)


@pytest.mark.parametrize("name", ["ResNet20", "SqueezeNet1_1"])
def test_a_fine_tuned_head_of_another_name_is_found(name: str, tmp_path: Path) -> None:
    wanted = built(name, num_classes=6)
    head = wanted.classifiers[0]
    state = {n.replace(f"{head}.", "my_head."): t for n, t in wanted.state_dict().items()}
    with (found := open_foreign(save(state, tmp_path / "a.safetensors"), type(wanted))).source:
        assert found.network.num_classes == 6
        assert torch.equal(logits(load(found)), logits(wanted))
    assert "the classifier is called my_head in the file" in found.adopted.notes


def test_a_dense_head_in_the_place_of_a_convolution_is_found(tmp_path: Path) -> None:
    wanted = built("SqueezeNet1_1", num_classes=6)
    state = dict(wanted.state_dict())
    state["fc.weight"], state["fc.bias"] = state.pop("classifier.1.weight").flatten(1), state.pop("classifier.1.bias")
    with (found := open_foreign(save(state, tmp_path / "a.safetensors"), SqueezeNet1_1)).source:
        assert torch.equal(logits(load(found)), logits(wanted))


def test_two_modules_that_could_be_the_head_are_no_head(network: Model, tmp_path: Path) -> None:
    state = {n: t for n, t in network.state_dict().items() if not n.startswith("fc.")}
    state |= {f"{name}.{leaf}": network.state_dict()[f"fc.{leaf}"] for name in ("a", "b") for leaf in ("weight", "bias")}
    with pytest.raises(WeightsMismatch, match=r"fc\.weight, 10x64(.|\n)*a\.bias, 10(.|\n)*b\.bias, 10"):
        open_foreign(save(state, tmp_path / "a.safetensors"), ResNet20)


def test_a_head_that_reads_another_width_is_no_head(network: Model, tmp_path: Path) -> None:
    state = {n: t for n, t in network.state_dict().items() if not n.startswith("fc.")} | {"new.weight": torch.zeros(5, 63)}
    with pytest.raises(WeightsMismatch, match=r"new\.weight, 5x63"):
        open_foreign(save(state, tmp_path / "a.safetensors"), ResNet20)


def test_a_file_without_its_head_is_hinted_at_and_taken_when_asked(network: Model, tmp_path: Path) -> None:
    state = {n: t for n, t in network.state_dict().items() if not n.startswith("fc.")}
    path = save(state, tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch, match=r"Only its classifier is missing: zoo convert --headless(.|\n)*num_classes") as caught:
        open_foreign(path, ResNet20)
    assert caught.value.missing == ["fc.weight", "fc.bias"]
    with (found := open_foreign(path, ResNet20, headless=True)).source:
        features = logits(load(found))
    assert features.shape == (2, 64)
    with torch.no_grad():
        assert torch.equal(network.fc(features), logits(network))


def test_a_new_head_is_put_on_a_foreign_body(network: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{n: a for n, a in arrays(network).items() if not n.startswith("fc.")})
    with pytest.raises(WeightsMismatch, match="--headless"):
        trained(ResNet20, tmp_path / "a.npz", kernel_convention="correlation")
    made = trained(ResNet20, tmp_path / "a.npz", kernel_convention="correlation", num_classes=5)
    assert made.num_classes == 5
    assert logits(made).shape == (2, 5)
    with torch.no_grad():
        assert torch.equal(made.forward_body(IMAGES), network.forward_body(IMAGES))


def test_a_mismatch_carries_all_names(network: Model, tmp_path: Path) -> None:
    state = dict(network.state_dict())
    state["extra"] = torch.zeros(2)
    state["bn1.bias"] = torch.zeros(17)
    del state["conv1.weight"]
    with pytest.raises(WeightsMismatch) as caught:
        open_foreign(save(state, tmp_path / "a.safetensors"), ResNet20)
    assert caught.value.missing == ["conv1.weight"]
    assert caught.value.unexpected == ["extra"]
    assert caught.value.misshaped == [("bn1.bias", (17,), (16,))]


def test_quantised_weights_are_refused(network: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{n: (100 * a).astype(np.int8) if n == "conv1.weight" else a for n, a in arrays(network).items()})
    with pytest.raises(WeightsMismatch, match=r"whole numbers(.|\n)*conv1\.weight"):
        open_foreign(tmp_path / "a.npz", ResNet20, convention="correlation")


# trained(): the convention and the order of space.


def test_trained_is_told_how_the_kernels_lie(network: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{n: flip(a) if a.ndim == 4 else a for n, a in arrays(network).items()})
    with pytest.raises(Undecided, match="--kernel-convention"):
        trained(ResNet20, tmp_path / "a.npz")
    assert torch.equal(logits(trained(ResNet20, tmp_path / "a.npz", kernel_convention="convolution")), logits(network))
    assert not torch.equal(logits(trained(ResNet20, tmp_path / "a.npz", kernel_convention="correlation")), logits(network))


@pytest.mark.parametrize("ending", ["npz", "h5"])
def test_one_file_with_other_options_is_another_network_each_time(network: Model, tmp_path: Path, ending: str) -> None:
    safetensors.save(network.state_dict(), tmp_path / "a.safetensors")
    convert(tmp_path / "a.safetensors", tmp_path / f"a.{ending}", ResNet20, prove=False)
    usual = logits(network)
    for eps in (None, 1e-1, 1e-2, None, 1e-1):
        options = {} if eps is None else {"norm_eps": eps}
        found = trained(ResNet20, tmp_path / f"a.{ending}", kernel_convention="correlation", **options)
        plain = ResNet20(**options)
        plain.load_state_dict(network.state_dict())
        assert {module.eps for module in found.modules() if isinstance(module, torch.nn.BatchNorm2d)} == {eps or 1e-5}
        assert torch.equal(logits(found), logits(plain.eval()))
        assert torch.equal(logits(found), usual) == (eps is None)
        assert found.checkpoint is not None
        assert found.checkpoint.options == options
    narrow = trained(ResNet20, tmp_path / f"a.{ending}", kernel_convention="correlation", num_classes=3)
    assert (narrow.num_classes, trained(ResNet20, tmp_path / f"a.{ending}", kernel_convention="correlation").num_classes) == (3, 10)


def test_trained_is_told_which_axis_is_the_width(network: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{n: a.swapaxes(2, 3) if a.ndim == 4 else a for n, a in arrays(network).items()})
    made = trained(ResNet20, tmp_path / "a.npz", kernel_convention="correlation", spatial="wh")
    assert torch.equal(logits(made), logits(network))


@pytest.mark.parametrize(("said", "words"), [({"kernel_convention": "flipped"}, "correlation, convolution"), ({"spatial": "x"}, "hw, wh")])
def test_a_word_that_is_none_lists_those_that_there_are(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trained(ResNet20, **said)


@pytest.mark.parametrize("content", [b"", b"garbage" * 50])
def test_a_file_that_is_none_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.h5").write_bytes(content)
    with pytest.raises(ConvertError, match=r"a\.h5"):
        trained(ResNet20, tmp_path / "a.h5")


# What `zoo convert` noted is believed.


def test_trained_takes_options_preprocessing_and_labels_from_the_notes(tmp_path: Path) -> None:
    network = built("MobileNetV1_025", padding="same", norm_eps=1e-3)
    source = save(network.state_dict(), tmp_path / "a.safetensors")
    made = convert(source, tmp_path / "b.safetensors", MobileNetV1_025, padding="same", norm_eps=1e-3)
    for path in (tmp_path / "b.safetensors", tmp_path / "c.npz"):
        if path.suffix == ".npz":
            convert(tmp_path / "b.safetensors", path, MobileNetV1_025)
        again = trained(MobileNetV1_025, path)
        assert torch.equal(logits(again), logits(network))
        assert again.checkpoint is not None
        assert {k: again.checkpoint.options[k] for k in ("padding", "norm_eps")} == {"padding": "same", "norm_eps": 1e-3}
        assert again.checkpoint.preprocessing == made.preprocessing
        assert again.checkpoint.labels == made.labels == "imagenet1k"
    plain = trained(MobileNetV1_025, source)
    assert not torch.equal(logits(plain), logits(network))


def test_the_users_options_win_over_the_notes(tmp_path: Path) -> None:
    network = built("MobileNetV1_025", norm_eps=1e-3)
    convert(save(network.state_dict(), tmp_path / "a.safetensors"), tmp_path / "b.safetensors", MobileNetV1_025, norm_eps=1e-3)
    made = trained(MobileNetV1_025, tmp_path / "b.safetensors", norm_eps=0.25)
    assert made.checkpoint is not None
    assert made.checkpoint.options["norm_eps"] == 0.25
    assert not torch.equal(logits(made), logits(network))


STEPS: dict[str, Any] = {
    "resize": None,
    "crop": 32,
    "interpolation": "bilinear",
    "mean": [0.5] * 3,
    "std": [0.5] * 3,
    "channel_order": "bgr",
}
GOOD: dict[str, Any] = {"model": "ResNet20", "preprocessing": STEPS, "options": {}, "source": {}}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "null", "{}", json.dumps({**GOOD, "options": 3}), json.dumps({**GOOD, "preprocessing": [1]}), "[" * 100_000],
    ids=range(9),
)
def test_damaged_notes_are_a_clear_error(network: Model, tmp_path: Path, text: str) -> None:
    with pytest.raises(MalformedFile, match="notes of `zoo convert`"):
        notes({NOTES: text}, ResNet20)
    path = save(network.state_dict(), tmp_path / "a.safetensors", **{NOTES: text})
    with pytest.raises(MalformedFile, match="notes of `zoo convert`"):
        trained(ResNet20, path)


def test_notes_of_another_network_and_files_without_are_not_believed() -> None:
    assert notes({}, ResNet20) == {}
    assert notes({NOTES: json.dumps(GOOD)}, SqueezeNet1_1) == {}
    assert notes({NOTES: json.dumps(GOOD)}, ResNet20)["preprocessing"] == {
        **STEPS, "mean": (0.5,) * 3, "std": (0.5,) * 3, "squash": False, "letterbox": False, "longest": None
    }  # fmt: skip


@pytest.mark.parametrize(
    "told",
    [
        {"options": {"no_such_keyword": 1}},
        {"options": {"activation": "no such"}},
        {"options": {"norm_eps": "x"}},
        {"preprocessing": {"mean": "abc", "std": "abc"}},
        {"preprocessing": {"mean": [0.5]}},
        {"preprocessing": {"std": [0, 0, 0]}},
        {"preprocessing": {"crop": -3}},
        {"labels": "no such list"},
        {"labels": 3},
        {"source": 3},
        {"preprocessing": {"resize": 1.5}},
        {"options": {"shortcut": None}},
    ],
    ids=str,
)
def test_notes_that_say_what_can_not_be_never_end_in_a_traceback_of_ours(network: Model, tmp_path: Path, told: dict[str, Any]) -> None:
    from weights import WeightsError

    path = save(
        network.state_dict(),
        tmp_path / "a.safetensors",
        **{NOTES: json.dumps({**GOOD, **told, "preprocessing": {**STEPS, **told.get("preprocessing", {})}})},
    )
    with pytest.raises((WeightsError, ValueError)):
        trained(ResNet20, path)


def test_a_folders_hash_is_of_names_and_contents(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "x").write_bytes(b"1")
    assert file_sha256(tmp_path / "a") == file_sha256(tmp_path / "b")
    (tmp_path / "b" / "deep" / "x").rename(tmp_path / "b" / "deep" / "y")
    assert file_sha256(tmp_path / "a") != file_sha256(tmp_path / "b")
    (tmp_path / "b" / "deep" / "y").rename(tmp_path / "b" / "deep" / "x")
    (tmp_path / "b" / "deep" / "x").write_bytes(b"2")
    assert file_sha256(tmp_path / "a") != file_sha256(tmp_path / "b")


def test_a_naming_brings_its_options_and_preprocessing(tmp_path: Path) -> None:
    theirs: dict[str, Any] = {"padding": "even", "norm_eps": 1e-3, "activation": "relu6"}
    network = built("MobileNetV1_025", **theirs)
    convert(save(network.state_dict(), tmp_path / "a.safetensors"), tmp_path / "b.h5", MobileNetV1_025, **theirs)
    with (noted := open_foreign(tmp_path / "b.h5", MobileNetV1_025)).source:
        assert noted.preprocessing["mean"] == (0.485, 0.456, 0.406)  # as it was converted, which its notes say
    with h5py.File(tmp_path / "b.h5", "r+") as file:
        del file[NOTES]
    with formats.read(tmp_path / "b.h5") as source:
        assert "conv1.weight" in source.tensors  # Keras's names
    with (found := open_foreign(tmp_path / "b.h5", MobileNetV1_025)).source:
        assert found.adopted.naming == "keras"
        assert found.options == theirs
        assert found.preprocessing["mean"] == (0.5, 0.5, 0.5)
        assert torch.equal(logits(load(found)), logits(network))


def test_a_file_of_other_names_that_fits_with_an_option_is_told_the_command(tmp_path: Path) -> None:
    state = built("ResNet20", shortcut="B").state_dict()
    path = save({f"net/{name}".replace(".", "_", 1): tensor for name, tensor in state.items()}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch, match="add --option shortcut=B --match"):
        open_foreign(path, ResNet20)
