"""`zoo convert`: a file of one framework becomes one of another, proven or refused, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from roundtrips import built
from torch import Tensor

from convert import formats, names
from convert.conversion import Undecided
from convert.formats import safetensors
from convert.source import Convention
from convert.steps import flip
from weights import header
from weights.errors import ConvertError, MalformedFile, NonFinite, WeightsMismatch
from zoo import DenseNet_BC_100_12, InceptionV3, MobileNetV1_025, ResNet20, SqueezeNet1_1, trained
from zoo.conversion.convert import check_finite, convert
from zoo.conversion.notes import NOTES
from zoo.conversion.result import NotProven
from zoo.networks.model import Model

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(7))


@pytest.fixture(scope="module")
def network() -> Model:
    return built("ResNet20")


@pytest.fixture
def ours(network: Model, tmp_path: Path) -> Path:
    return save(network, tmp_path / "ours.safetensors")


def save(network: Model, path: Path) -> Path:
    safetensors.save(network.state_dict(), path)
    return path


def tensors(path: Path) -> dict[str, Tensor]:
    return safetensors.tensors(path.read_bytes())


def noted(path: Path) -> dict[str, Any]:
    return json.loads(header.metadata(path.read_bytes())[NOTES])


def same(path: Path, network: Model) -> bool:
    found = tensors(path)
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    return all(torch.equal(found[name], tensor) for name, tensor in state.items()) and state.keys() <= found.keys()


def logits(network: Model, images: Tensor = IMAGES) -> Tensor:
    with torch.no_grad():
        return network(images)


def nameless(network: Model, path: Path, turned: bool = False) -> Path:
    """Write an .npz by our names, without a word on whether its kernels are of true convolution."""
    state = {name: tensor.numpy() for name, tensor in network.state_dict().items() if not name.endswith("num_batches_tracked")}
    np.savez(path, **{name: flip(array) if turned and array.ndim == 4 else array for name, array in state.items()})
    return path


def reference(network: Model, path: Path, images: Tensor = IMAGES) -> Path:
    np.savez(path, inputs=images.numpy(), outputs=logits(network, images).numpy())
    return path


def only(folder: Path, *names: str) -> bool:
    """Whether nothing else is there: no temporary folder either."""
    return sorted(path.name for path in folder.iterdir()) == sorted(names)


# What a converted file says of itself.


def test_the_result_says_where_every_tensor_came_from(network: Model, tmp_path: Path) -> None:
    source = nameless(network, tmp_path / "a.npz", turned=True)
    made = convert(
        source, tmp_path / "b.safetensors", ResNet20, kernel_convention="convolution", reference=reference(network, tmp_path / "r.npz")
    )
    told = noted(tmp_path / "b.safetensors")
    assert told["model"] == "ResNet20"
    assert told["source"]["sha256"] == made.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert (told["source"]["file"], told["source"]["format"], told["source"]["naming"]) == ("a.npz", "npz", "torchvision")
    kernel = told["transforms"]["layer1.0.conv1.weight"]
    assert kernel == {
        "from": "layer1.0.conv1.weight",
        "shape": [16, 16, 3, 3],
        "becomes": [16, 16, 3, 3],
        "dtype": "float32",
        "steps": ["flip(2,3)"],
        "exact": True,
        "trained_as": kernel["trained_as"],
    }
    assert "steps" not in told["transforms"]["bn1.weight"]
    assert set(told["transforms"]) == {name for name in network.state_dict() if not name.endswith("num_batches_tracked")}
    assert {"kernelzoo", "numpy", "torch", "python"} <= set(told["versions"])
    assert told["parity"]["proven"] is True
    assert told["parity"]["verdict"].startswith("PROVEN by source outputs")
    assert made.certificate.proven
    assert same(tmp_path / "b.safetensors", network)
    assert only(tmp_path, "a.npz", "b.safetensors", "r.npz")


def test_what_trained_a_kernel_is_recorded_even_where_the_user_said_it(network: Model, tmp_path: Path) -> None:
    convert(nameless(network, tmp_path / "a.npz", turned=True), tmp_path / "b.safetensors", ResNet20, kernel_convention="convolution")
    assert noted(tmp_path / "b.safetensors")["transforms"]["conv1.weight"]["trained_as"] == "convolution"


def test_the_same_input_gives_the_same_bytes(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "a.safetensors", ResNet20)
    convert(ours, tmp_path / "b.safetensors", ResNet20)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# The kernel convention.


def test_a_convention_that_nobody_knows_is_undecided_and_nothing_is_written(network: Model, tmp_path: Path) -> None:
    source = nameless(network, tmp_path / "a.npz")
    with pytest.raises(Undecided, match=r"--kernel-convention(.|\n)*--reference"):
        convert(source, tmp_path / "b.safetensors", ResNet20)
    assert only(tmp_path, "a.npz")


@pytest.mark.parametrize("turned", [False, True])
def test_a_reference_decides_and_the_decision_is_recorded(network: Model, tmp_path: Path, turned: bool) -> None:
    source = nameless(network, tmp_path / "a.npz", turned)
    made = convert(source, tmp_path / "b.safetensors", ResNet20, reference=reference(network, tmp_path / "r.npz"))
    wanted = "convolution" if turned else "correlation"
    assert made.decision is not None
    assert made.decision.winner == wanted
    assert same(tmp_path / "b.safetensors", network)
    told = noted(tmp_path / "b.safetensors")
    assert told["decision"]["winner"] == wanted
    assert told["decision"]["margin"] == pytest.approx(made.decision.margin)
    assert told["transforms"]["conv1.weight"]["trained_as"] == wanted


def test_a_reference_of_another_network_decides_nothing(network: Model, tmp_path: Path) -> None:
    source = nameless(network, tmp_path / "a.npz")
    np.savez(tmp_path / "r.npz", inputs=IMAGES.numpy(), outputs=np.random.default_rng(0).normal(size=(4, 10)))
    with pytest.raises(ConvertError):
        convert(source, tmp_path / "b.safetensors", ResNet20, reference=tmp_path / "r.npz")
    assert only(tmp_path, "a.npz", "r.npz")


def test_a_reference_with_channels_last_is_understood(network: Model, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", x=IMAGES.permute(0, 2, 3, 1).numpy(), logits=logits(network).numpy())
    made = convert(nameless(network, tmp_path / "a.npz"), tmp_path / "b.safetensors", ResNet20, reference=tmp_path / "r.npz")
    assert made.certificate.proven


def test_a_wrong_convention_is_found_by_the_reference_and_named(network: Model, tmp_path: Path) -> None:
    source, outputs = nameless(network, tmp_path / "a.npz"), reference(network, tmp_path / "r.npz")
    with pytest.raises(NotProven, match="kernels flipped") as caught:
        convert(source, tmp_path / "b.safetensors", ResNet20, kernel_convention="convolution", reference=outputs)
    assert "--kernel-convention" in str(caught.value)
    made = caught.value.conversion
    assert made is not None
    assert not made.certificate.proven
    assert made.diagnosis is not None
    assert made.diagnosis.cause == "kernels flipped"
    assert only(tmp_path, "a.npz", "r.npz")


def test_unproven_writes_what_was_contradicted_and_says_so(network: Model, tmp_path: Path) -> None:
    source, outputs = nameless(network, tmp_path / "a.npz"), reference(network, tmp_path / "r.npz")
    made = convert(source, tmp_path / "b.safetensors", ResNet20, kernel_convention="convolution", reference=outputs, unproven=True)
    assert made.certificate.verdict.startswith("UNPROVEN: contradicted by source outputs")
    assert noted(tmp_path / "b.safetensors")["parity"]["verdict"] == made.certificate.verdict
    assert not same(tmp_path / "b.safetensors", network)


def test_unproven_writes_another_frameworks_file_too(network: Model, tmp_path: Path) -> None:
    source, outputs = nameless(network, tmp_path / "a.npz"), reference(network, tmp_path / "r.npz")
    made = convert(source, tmp_path / "b.h5", ResNet20, kernel_convention="convolution", reference=outputs, unproven=True)
    assert made.certificate.verdict.startswith("UNPROVEN: contradicted by source outputs")
    assert (tmp_path / "b.h5").is_file()


BATCH = np.zeros((2, 3, 32, 32), np.float32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no zip",
        {"inputs": BATCH},
        {"inputs": BATCH[0], "outputs": np.zeros((3, 10))},
        {"inputs": BATCH, "outputs": np.float32(1)},
        {"inputs": BATCH, "outputs": np.zeros((3, 10))},
        {"inputs": BATCH[:0], "outputs": np.zeros((0, 10))},
        {"inputs": BATCH.astype(str), "outputs": np.zeros((2, 10))},
    ],
    ids=range(8),
)
def test_a_reference_that_is_none_is_a_clear_error(ours: Path, tmp_path: Path, content: Any) -> None:
    if isinstance(content, dict):
        np.savez(tmp_path / "r.npz", **content)
    else:
        (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(ConvertError, match=r"r\.npz"):
        convert(ours, tmp_path / "b.safetensors", ResNet20, reference=tmp_path / "r.npz")
    assert only(tmp_path, ours.name, "r.npz")


def test_a_reference_of_pickled_objects_is_not_unpickled(ours: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", inputs=np.array([{}], dtype=object), outputs=np.zeros(1))
    with pytest.raises(ConvertError, match=r"r\.npz"):
        convert(ours, tmp_path / "b.safetensors", ResNet20, reference=tmp_path / "r.npz")


# Every format and back.


@pytest.mark.parametrize("convention", ["auto", "convolution"])
@pytest.mark.parametrize("ending", ["h5", "weights.h5", "bson", "jld2", "npz", "pkl", "mat", "weights", "pth", "onnx", "msgpack"])
def test_ours_to_every_format_and_back_is_the_same_bits(network: Model, ours: Path, tmp_path: Path, ending: str, convention: Any) -> None:
    there, back = tmp_path / f"there.{ending}", tmp_path / "back.safetensors"
    if convention == "convolution" and ending in ("weights.h5", "pth", "onnx", "msgpack"):
        with pytest.raises(ConvertError, match=r"convolution|correlation"):
            convert(ours, there, ResNet20, to_convention=convention)
        assert only(tmp_path, ours.name)
        return
    made = convert(ours, there, ResNet20, to_convention=convention)
    assert "read back" in [each.kind for each in made.certificate.evidence]
    assert not any(each.contradicts for each in made.certificate.evidence)
    silent = ending == "pkl"  # no list of Lasagne's says it
    said = ("correlation" if convention == "auto" else convention) if silent else "auto"
    convert(there, back, ResNet20, kernel_convention=said)
    assert same(back, network)
    beside = ["there.cfg"] if ending == "weights" else []
    assert only(tmp_path, ours.name, there.name, back.name, *beside)


@pytest.mark.parametrize("ending", ["npz", "bson", "h5"])
def test_the_kernels_that_are_written_differ_by_the_flip(ours: Path, tmp_path: Path, ending: str) -> None:
    raw = []
    conventions: tuple[Convention, ...] = ("correlation", "convolution")
    for convention in conventions:
        folder = tmp_path / convention
        folder.mkdir()
        convert(ours, folder / f"a.{ending}", ResNet20, to_convention=convention)
        with formats.read(folder / f"a.{ending}") as source:
            raw.append(next(stored.load() for name, stored in source.tensors.items() if name.endswith("conv1.weight")))
    axes = [axis for axis, size in enumerate(raw[0].shape) if size == 3 and (raw[0].shape.count(3) == 2 or axis in spatial(raw[0].shape))]
    assert not np.array_equal(*raw)
    assert np.array_equal(raw[0], np.flip(raw[1], axes))


def spatial(shape: tuple[int, ...]) -> tuple[int, int]:
    return (2, 3) if shape[0] == 16 else (0, 1)


def test_fluxs_usual_convention_is_true_convolution(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "a.bson", ResNet20)
    with formats.read(tmp_path / "a.bson") as source:
        assert source.conventions == {"convolution"}


def test_safetensors_hold_no_kernels_of_true_convolution(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="cross-correlation"):
        convert(ours, tmp_path / "b.safetensors", ResNet20, to_convention="convolution")
    assert only(tmp_path, ours.name)


def test_flaxs_names_are_used_where_flax_has_the_network(tmp_path: Path) -> None:
    network = built("MobileNetV1_025", num_classes=7)
    made = convert(save(network, tmp_path / "a.safetensors"), tmp_path / "b.npz", MobileNetV1_025, to="npz")
    assert made.naming == "torchvision"
    convert(tmp_path / "b.npz", tmp_path / "c.safetensors", MobileNetV1_025)
    assert same(tmp_path / "c.safetensors", network)


def test_a_converted_file_converted_on_keeps_options_and_preprocessing(tmp_path: Path) -> None:
    network = built("MobileNetV1_025", num_classes=5, padding="same", norm_eps=1e-3, activation="relu")
    source = save(network, tmp_path / "a.safetensors")
    options: dict[str, Any] = {"padding": "same", "norm_eps": 1e-3, "activation": "relu"}
    first = convert(source, tmp_path / "b.safetensors", MobileNetV1_025, **options)
    assert {k: first.options[k] for k in options} == options
    second = convert(tmp_path / "b.safetensors", tmp_path / "c.npz", MobileNetV1_025)
    third = convert(tmp_path / "c.npz", tmp_path / "d.safetensors", MobileNetV1_025)
    assert first.options == second.options == third.options
    assert first.preprocessing == second.preprocessing == third.preprocessing
    again = trained(MobileNetV1_025, tmp_path / "d.safetensors")
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits(again, images), logits(network, images))
    assert again.checkpoint is not None
    assert again.checkpoint.preprocessing == first.preprocessing


def test_a_file_for_networks_that_compute_otherwise_says_so(tmp_path: Path) -> None:
    source = save(built("MobileNetV1_025", num_classes=5), tmp_path / "a.safetensors")
    made = convert(source, tmp_path / "b.h5", MobileNetV1_025)
    told = [note for note in made.notes if "these weights compute something else" in note]
    assert len(told) == 1
    assert "padding 'even' and not" in told[0]
    assert "norm_eps 0.001 and not 1e-05" in told[0]
    alike: dict[str, Any] = {"padding": "even", "norm_eps": 1e-3, "activation": "relu6"}
    made = convert(source, tmp_path / "c.h5", MobileNetV1_025, **alike)
    assert not [note for note in made.notes if "these weights compute something else" in note]


def test_noted_options_win_over_the_namings_even_where_there_are_none(tmp_path: Path) -> None:
    source = save(built("MobileNetV1_025", num_classes=5), tmp_path / "a.safetensors")
    convert(source, tmp_path / "b.bson", MobileNetV1_025)
    assert convert(tmp_path / "b.bson", tmp_path / "c.safetensors", MobileNetV1_025).options == {}


def test_a_scale_that_keras_has_no_place_for_is_folded_and_reads_back_as_the_same_network(tmp_path: Path) -> None:
    """Keras's InceptionV3 has no gamma; its padding is another than ours, and reading back must not take it for ours."""
    network = built("InceptionV3", num_classes=3)
    for name, tensor in network.state_dict().items():
        if name.endswith("bn.weight"):
            tensor.uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
    made = convert(save(network, tmp_path / "a.safetensors"), tmp_path / "b.h5", InceptionV3, prove=False)
    back = next(each for each in made.certificate.evidence if each.kind == "read back")
    assert back.proven
    assert back.worst is not None
    assert 0 < back.worst < 1e-5
    assert "bit for bit" not in made.certificate.verdict


# Names and formats.


def test_an_ending_that_no_format_has_lists_those_that_there_are(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"b\.dat(.|\n)*\.safetensors(.|\n)*to=FORMAT"):
        convert(ours, tmp_path / "b.dat", ResNet20)


def test_to_takes_a_format_whatever_the_ending(ours: Path, network: Model, tmp_path: Path) -> None:
    convert(ours, tmp_path / "b.dat", ResNet20, to="npz")
    convert(tmp_path / "b.dat", tmp_path / "c.safetensors", ResNet20, framework="npz")
    assert same(tmp_path / "c.safetensors", network)


def test_to_takes_a_naming(tmp_path: Path) -> None:
    network = built("MobileNetV1_025", num_classes=7)
    source = save(network, tmp_path / "a.safetensors")
    convert(source, tmp_path / "b.safetensors", MobileNetV1_025, to="timm")
    names = set(tensors(tmp_path / "b.safetensors"))
    assert "conv_stem.weight" in names
    assert not names & {name for name in network.state_dict() if name.startswith("features")}
    made = convert(tmp_path / "b.safetensors", tmp_path / "c.safetensors", MobileNetV1_025, framework="timm")
    assert made.naming == "timm"
    assert same(tmp_path / "c.safetensors", network)


@pytest.mark.parametrize("said", [{"framework": "esperanto"}, {"to": "esperanto"}])
def test_a_word_that_is_neither_format_nor_naming_lists_both(ours: Path, tmp_path: Path, said: dict[str, Any]) -> None:
    with pytest.raises(ConvertError, match=r"'esperanto'(.|\n)*keras(.|\n)*torchvision"):
        convert(ours, tmp_path / "b.npz", ResNet20, **said)
    assert only(tmp_path, ours.name)


def test_a_naming_that_does_not_know_the_network_is_an_error(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="metalhead has no ResNet20"):
        convert(ours, tmp_path / "b.bson", ResNet20, to="metalhead")
    assert only(tmp_path, ours.name)


def test_a_file_of_another_network_lists_what_does_not_fit(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=r"features(.|\n)*bn1\.bias, 16(.|\n)*the shapes of ResNet20 \(100%\)"):
        convert(ours, tmp_path / "b.safetensors", SqueezeNet1_1)
    assert only(tmp_path, ours.name)


def test_match_derives_a_mapping_from_shapes(network: Model, tmp_path: Path) -> None:
    modules = {ours: f"m{i:03}" for i, ours in enumerate(dict.fromkeys(n.rpartition(".")[0] for n in network.state_dict()))}
    state = {f"{modules[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": t for n, t in network.state_dict().items() if "num_" not in n}
    safetensors.save(state, tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20)
    made = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20, match=True)
    assert made.naming == "match"
    assert same(tmp_path / "b.safetensors", network)


# Whole or not at all.


def test_a_file_that_is_there_stays_unless_forced(ours: Path, network: Model, tmp_path: Path) -> None:
    (tmp_path / "b.safetensors").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="replace=True puts the new one"):
        convert(ours, tmp_path / "b.safetensors", ResNet20)
    assert (tmp_path / "b.safetensors").read_bytes() == b"precious"
    convert(ours, tmp_path / "b.safetensors", ResNet20, replace=True)
    assert same(tmp_path / "b.safetensors", network)


def test_a_sidecar_that_is_there_stays_unless_forced(ours: Path, tmp_path: Path) -> None:
    (tmp_path / "b.cfg").write_bytes(b"precious")
    with pytest.raises(FileExistsError, match=r"b\.cfg"):
        convert(ours, tmp_path / "b.weights", ResNet20)
    assert (tmp_path / "b.cfg").read_bytes() == b"precious"
    convert(ours, tmp_path / "b.weights", ResNet20, replace=True)
    assert b"[convolutional]" in (tmp_path / "b.cfg").read_bytes()


def test_what_another_program_does_meanwhile_is_neither_overwritten_nor_certified(ours: Path, network: Model, tmp_path: Path) -> None:
    destination = tmp_path / "b.npz"

    def appear(step: str) -> None:
        if step.startswith("proving"):
            destination.write_text("another program's")

    with pytest.raises(FileExistsError, match="is there already"):
        convert(ours, destination, type(network), progress=appear)
    assert destination.read_text() == "another program's"
    destination.unlink()

    def change(step: str) -> None:
        if step.startswith("writing"):
            ours.write_bytes(ours.read_bytes())

    with pytest.raises(ConvertError, match=r"was changed while it was read, by another program\. Nothing was kept"):
        convert(ours, destination, type(network), progress=change)
    assert [path.name for path in tmp_path.iterdir()] == [ours.name]


def test_a_file_can_be_replaced_by_its_own_conversion(ours: Path, network: Model, tmp_path: Path) -> None:
    convert(ours, ours, ResNet20, replace=True)
    assert same(ours, network)
    assert noted(ours)["source"]["file"] == ours.name
    assert only(tmp_path, ours.name)


@pytest.mark.parametrize(
    ("error", "ending"), [(KeyboardInterrupt, "safetensors"), (OSError("no space left"), "npz"), (KeyboardInterrupt, "weights")]
)
def test_an_interrupted_or_failing_write_leaves_nothing(
    ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, ending: str
) -> None:
    from convert.formats import darknet, npz

    def fail(*args: Any, **keywords: Any) -> None:
        path = next(value for value in args if isinstance(value, Path))
        path.write_bytes(b"half")
        path.with_suffix(".cfg").write_bytes(b"half")
        raise error

    module, name = {"safetensors": (safetensors, "amend"), "npz": (npz, "write"), "weights": (darknet, "write")}[ending]
    monkeypatch.setattr(module, name, fail)
    before = threading.active_count()
    with pytest.raises(error if isinstance(error, type) else type(error)):
        convert(ours, tmp_path / f"b.{ending}", ResNet20)
    assert only(tmp_path, ours.name)
    assert threading.active_count() == before


def test_a_folder_that_is_not_there_is_named(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert(ours, tmp_path / "nowhere" / "b.safetensors", ResNet20)


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b""), lambda p: p.write_bytes(b"garbage" * 99), lambda p: p.mkdir()])
def test_a_source_that_is_no_weight_file_is_a_clear_error(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    make(tmp_path / "a")
    with pytest.raises(ConvertError, match="a is no weight file"):
        convert(tmp_path / "a", tmp_path / "b.safetensors", ResNet20)
    assert only(tmp_path, "a")


def test_a_source_cut_short_leaves_nothing(ours: Path, tmp_path: Path) -> None:
    ours.write_bytes(ours.read_bytes()[:-100])
    with pytest.raises(MalformedFile):
        convert(ours, tmp_path / "b.safetensors", ResNet20)
    assert only(tmp_path, ours.name)


# Heads, channels, pictures.


def test_another_number_of_classes_and_channels_is_read_from_the_file(tmp_path: Path) -> None:
    network = built("ResNet20", num_classes=7, in_channels=1)
    convert(save(network, tmp_path / "a.safetensors"), tmp_path / "b.h5", ResNet20)
    made = convert(tmp_path / "b.h5", tmp_path / "c.safetensors", ResNet20)
    assert len(made.preprocessing.mean) == 1
    again = trained(ResNet20, tmp_path / "c.safetensors")
    assert (again.num_classes, again.in_channels) == (7, 1)
    assert torch.equal(logits(again, IMAGES[:, :1]), logits(network, IMAGES[:, :1]))


def test_a_file_without_its_classifier_is_converted_when_asked_and_stays_without(network: Model, tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith("fc.")}
    safetensors.save(state, tmp_path / "a.safetensors")
    with pytest.raises(WeightsMismatch, match=r"fc\.weight(.|\n)*--headless"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20)
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20, headless=True)
    assert tensors(tmp_path / "b.safetensors").keys() == state.keys()
    convert(tmp_path / "b.safetensors", tmp_path / "c.h5", ResNet20, headless=True)
    convert(tmp_path / "c.h5", tmp_path / "d.safetensors", ResNet20, headless=True)
    back = tensors(tmp_path / "d.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items() if "num_batches" not in name)
    again = trained(ResNet20, tmp_path / "d.safetensors", num_classes=5)
    assert again.num_classes == 5
    assert torch.equal(again.forward_body(IMAGES), network.forward_body(IMAGES))


def test_a_densenet_arrives_too(tmp_path: Path) -> None:
    network = built("DenseNet_BC_100_12")
    convert(save(network, tmp_path / "a.safetensors"), tmp_path / "b.weights", DenseNet_BC_100_12)
    convert(tmp_path / "b.weights", tmp_path / "c.safetensors", DenseNet_BC_100_12)
    assert same(tmp_path / "c.safetensors", network)


def test_an_onnx_file_proves_itself_by_its_runtime_and_by_float64(ours: Path, network: Model, tmp_path: Path) -> None:
    convert(ours, tmp_path / "a.onnx", ResNet20)
    made = convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20)
    kinds = {each.kind: each for each in made.certificate.evidence}
    assert kinds["source outputs"].proven
    assert kinds["float64 execution"].proven
    assert len(kinds["float64 execution"].layers) > 20
    assert made.certificate.verdict.startswith("PROVEN by source outputs: onnxruntime")
    assert same(tmp_path / "b.safetensors", network)


def test_a_fault_in_the_options_is_found_by_the_files_own_graph(ours: Path, tmp_path: Path) -> None:
    convert(ours, tmp_path / "a.onnx", ResNet20)
    with pytest.raises(NotProven, match="epsilon"):
        convert(tmp_path / "a.onnx", tmp_path / "b.safetensors", ResNet20, norm_eps=0.1)
    assert only(tmp_path, ours.name, "a.onnx")


def test_progress_tells_what_is_done(ours: Path, tmp_path: Path) -> None:
    said: list[str] = []
    convert(ours, tmp_path / "b.safetensors", ResNet20, progress=said.append)
    assert list(dict.fromkeys(line.split()[0] for line in said)) == ["opening", "writing", "proving"]


def test_a_folded_input_is_proven_and_recorded(ours: Path, network: Model, tmp_path: Path) -> None:
    made = convert(ours, tmp_path / "b.safetensors", ResNet20, fold_input=True, reference=reference(network, tmp_path / "r.npz"))
    assert made.certificate.proven
    assert made.preprocessing.std == (1, 1, 1)
    folded = trained(ResNet20, tmp_path / "b.safetensors")
    assert folded.checkpoint is not None
    assert folded.checkpoint.preprocessing == made.preprocessing
    assert noted(tmp_path / "b.safetensors")["transforms"]["conv1.weight"]["steps"] != []


def test_caffes_blobs_in_an_npz_find_their_network(tmp_path: Path) -> None:
    network = built("MobileNetV1_025")
    state, blobs = {name: tensor.numpy() for name, tensor in network.state_dict().items()}, {}
    shapes = {name: tensor.shape for name, tensor in state.items()}
    for row in names.rows("caffe", MobileNetV1_025, shapes):
        held = {
            leaf: state[f"{row.ours}.{leaf}"] for leaf in ("running_mean", "running_var", "weight", "bias") if f"{row.ours}.{leaf}" in state
        }
        if row.kind == "norm":
            blobs |= {
                f"{row.theirs}/0": 2 * held["running_mean"],
                f"{row.theirs}/1": 2 * held["running_var"],
                f"{row.theirs}/2": np.array([2.0]),
            }
        blobs |= {
            f"{row.theirs.replace('/bn', '/scale')}/{place}": held[leaf] for place, leaf in enumerate(("weight", "bias")) if leaf in held
        }
    np.savez(tmp_path / "a.npz", **blobs)
    made = convert(tmp_path / "a.npz", tmp_path / "b.safetensors", MobileNetV1_025)
    assert same(tmp_path / "b.safetensors", network)
    assert (made.naming, made.source.framework, made.preprocessing.channel_order) == ("caffe", "Caffe's blobs", "bgr")


@pytest.mark.reference
@pytest.mark.parametrize("ending", [".onnx", ".xml", ".tflite", ".bson", ".jld2", ".npz", ".mat", ".h5", ".weights.h5"])
def test_the_notes_of_a_written_file_say_what_the_screen_said(ending: str, tmp_path: Path) -> None:
    """The proof comes after the file is written, and must be in it all the same."""
    safetensors.save(built("ResNet20").state_dict(), tmp_path / "a.safetensors")
    made = convert(tmp_path / "a.safetensors", tmp_path / f"a{ending}", "ResNet20")
    with formats.read(tmp_path / f"a{ending}") as source:
        noted = json.loads(source.facts["kernelzoo"])
    assert noted["parity"]["verdict"] == made.certificate.verdict
    assert noted["parity"]["evidence"] == made.certificate.to_json()["evidence"]
    back = convert(tmp_path / f"a{ending}", tmp_path / "b.safetensors", "ResNet20")
    assert any(made.certificate.verdict in note for note in back.notes)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_weights_that_are_no_numbers_are_refused_and_nothing_is_written(value: str, network: Model, tmp_path: Path) -> None:
    held = dict(network.state_dict())
    held["fc.bias"] = held["fc.bias"].clone()
    held["fc.bias"][3] = float(value)
    safetensors.save(held, tmp_path / "a.safetensors")
    with pytest.raises(NonFinite, match=r"'fc\.bias' holds NaN or an infinity") as refused:
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", ResNet20)
    assert refused.value.tensor == "fc.bias"
    assert [one.name for one in tmp_path.iterdir()] == ["a.safetensors"]


def test_large_weights_whose_sum_is_too_large_are_numbers() -> None:
    check_finite({"w": torch.full((4,), 3e38), "h": torch.full((9,), 6e4, dtype=torch.float16)}, Path("a.pth"))


@pytest.mark.parametrize("ending", [".tflite", ".npz", ".safetensors"])
def test_a_format_that_can_not_hold_the_preprocessing_says_so_at_once(ending: str, ours: Path, tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ConvertError, match=rf"^b{ending} can't hold the preprocessing; only ONNX and OpenVINO's IR take it inside"):
        convert(ours, tmp_path / f"b{ending}", "ResNet20", preprocessing_inside=True, progress=told.append)
    assert not told
