"""`trained`: the record's network with the record's numbers, or an error that lists what is wrong."""

from __future__ import annotations

import copy
import hashlib
import logging
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity import randomised
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import weights
import zoo
from convert import sandbox
from convert.source import Source
from weights import BadRecord, MalformedFile, NonFinite, NoPretrainedWeights, UnknownWeights, WeightsMismatch
from zoo import (
    CATALOGUE,
    VGG11,
    CIFARResNet,
    DenseNet121,
    DenseNet264,
    MobileNetV1_025,
    Model,
    ResNet18,
    ResNet20,
    ResNet32,
    SqueezeNet1_1,
    trained,
)
from zoo.pretrained.add_file import add_file
from zoo.pretrained.records import to_safetensors
from zoo.pretrained.resolve import all_finite


def small_variants() -> list[type[Model]]:
    """The smallest variant of each family."""
    smallest: dict[type[Model], type[Model]] = {}
    for cls in CATALOGUE.values():
        best = smallest.get(cls.family())
        if best is None or cls.params < best.params:
            smallest[cls.family()] = cls
    return list(smallest.values())


def random_state(cls: type[Model], **options: object) -> dict[str, Tensor]:
    with torch.device("meta"):  # drawing what an initialisation would draw takes longer than all that is tested with it
        network = cls(**options)
    return randomised(network, seed=1)


def saved(state: dict[str, Tensor], path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def images(cls: type[Model], channels: int = 3) -> Tensor:
    side = cls.input_size if cls.fixed_size else max(cls.min_size, min(cls.input_size, 64))
    return torch.randn(2, channels, side, side, generator=torch.Generator().manual_seed(0))


def test_the_embedded_checkpoint_needs_no_network_and_no_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")
    model = trained(ResNet20)
    assert not model.training
    assert model.checkpoint is not None
    assert model.checkpoint.metrics["top1"] >= 88.0
    assert not own_cache.exists()
    assert all(not p.is_meta and p.requires_grad for p in model.parameters())


def test_a_constructor_gives_an_untrained_network_in_train_mode() -> None:
    model = ResNet20()
    assert model.training
    assert model.checkpoint is None


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_path_gives_exactly_the_files_numbers(tmp_path: Path, suffix: str) -> None:
    state = random_state(ResNet18)
    model = trained(ResNet18, saved(state, tmp_path / f"w{suffix}"))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not model.training


@pytest.mark.parametrize("cls", small_variants(), ids=lambda c: c.__name__)
def test_every_family_takes_a_new_head_and_other_channels(cls: type[Model], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = random_state(cls)
    file = saved(state, tmp_path / "w.safetensors")
    with caplog.at_level(logging.WARNING, "zoo"):
        model = trained(cls, file, num_classes=7, in_channels=1)
    assert "new and untrained" in caplog.text
    assert "reads 1 channels" in caplog.text
    assert model(images(cls, 1)).shape == (2, 7)
    assert (model.num_classes, model.in_channels) == (7, 1)
    body = [n for n in state if not n.startswith((*cls.classifiers, cls.first_layer + "."))]
    made = model.state_dict()
    assert all(torch.equal(made[n], state[n]) for n in body)
    assert model.checkpoint is not None
    assert model.checkpoint.labels is None
    assert len(model.checkpoint.preprocessing.mean) == 1
    assert trained(cls, file, in_channels=5)(images(cls, 5)).shape[0] == 2


@pytest.mark.parametrize("channels", [1, 3, 4, 6])
def test_adapted_stem_answers_to_a_grey_image_as_before(tmp_path: Path, channels: int) -> None:
    file = saved(ResNet18().state_dict(), tmp_path / "w.safetensors")
    grey = torch.randn(2, 1, 64, 64)
    expected = trained(ResNet18, file)(grey.expand(-1, 3, -1, -1))
    if channels in (1, 3, 6):
        got = trained(ResNet18, file, in_channels=channels)(grey.expand(-1, channels, -1, -1))
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
    else:
        stem = trained(ResNet18, file, in_channels=channels).conv1.weight
        old = trained(ResNet18, file).conv1.weight
        assert torch.allclose(stem, old[:, [0, 1, 2, 0]] * 3 / 4)


def test_a_file_with_other_classes_keeps_its_own_head(tmp_path: Path) -> None:
    state = random_state(ResNet18, num_classes=5)
    model = trained(ResNet18, saved(state, tmp_path / "w.pth"))
    assert model.num_classes == 5
    assert torch.equal(model.fc.weight, state["fc.weight"])
    assert torch.equal(trained(ResNet18, tmp_path / "w.pth", num_classes=5).fc.weight, state["fc.weight"])


def test_a_wrong_file_lists_missing_unexpected_and_misshaped(tmp_path: Path) -> None:
    state = random_state(ResNet18)
    del state["layer1.0.conv1.weight"]
    state["stray.weight"] = torch.zeros(3)
    state["layer2.0.bn1.weight"] = torch.zeros(7)
    with pytest.raises(WeightsMismatch) as caught:
        trained(ResNet18, saved(state, tmp_path / "w.safetensors"))
    text = str(caught.value)
    assert "1 missing" in text
    assert "layer1.0.conv1.weight" in text
    assert "stray.weight" in text
    assert "(7,)" in text
    assert "(128,)" in text


def test_another_networks_file_shows_ten_lines_and_the_count(tmp_path: Path) -> None:
    file = saved(random_state(ResNet32), tmp_path / "w.safetensors")
    with pytest.raises(WeightsMismatch, match=r"… and \d+ more"):
        trained(ResNet20, file)


def test_densenet264_says_what_is_nearest_and_what_to_do() -> None:
    with pytest.raises(NoPretrainedWeights) as caught:
        trained(DenseNet264)
    text = str(caught.value)
    assert "DenseNet201" in text
    assert "top-1" in text
    assert "zoo add FILE DenseNet264:mine" in text


def test_an_unknown_tag_names_the_known_ones() -> None:
    with pytest.raises(UnknownWeights, match="imagenet1k_v1"):
        trained(ResNet18, "imagenet1k_v9")


def test_a_missing_file_says_what_a_source_can_be(tmp_path: Path) -> None:
    with pytest.raises(UnknownWeights, match="tag"):
        trained(ResNet18, tmp_path / "none.safetensors")


def test_an_instance_instead_of_a_class_is_explained() -> None:
    with pytest.raises(TypeError, match=r"trained\(ResNet20\), not trained\(ResNet20\(\)\)"):
        trained(ResNet20())  # pyright: ignore[reportArgumentType]


def old_densenet_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    import re

    return {re.sub(r"(denselayer\d+\.(?:norm|conv))(\d)", r"\1.\2", name): value for name, value in state.items()}


def test_old_densenet_names_are_mended(tmp_path: Path) -> None:
    state = random_state(DenseNet121)
    old = old_densenet_names(state)
    assert old.keys() != state.keys()
    model = trained(DenseNet121, saved(old, tmp_path / "w.pth"))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("nest", ["state_dict", "model"])
def test_nested_dicts_module_prefixes_and_missing_counters_are_mended(tmp_path: Path, nest: str) -> None:
    state = random_state(ResNet18)
    kept = {f"module.{n}": v for n, v in state.items() if not n.endswith("num_batches_tracked")}
    torch.save({nest: kept, "epoch": 3, "best_acc1": torch.tensor(46.6)}, tmp_path / "w.pth")
    model = trained(ResNet18, tmp_path / "w.pth")
    assert all(torch.equal(v, state[n]) for n, v in model.state_dict().items() if not n.endswith("num_batches_tracked"))
    assert int(model.bn1.num_batches_tracked) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_storage_becomes_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    state = {n: v.to(dtype) if v.is_floating_point() else v for n, v in random_state(ResNet18).items()}
    model = trained(ResNet18, saved(state, tmp_path / "w.safetensors"))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert torch.equal(model.fc.weight, state["fc.weight"].float())


@pytest.mark.parametrize("name", ["GoogLeNet", "InceptionV3"])
def test_auxiliary_heads_are_dropped_or_kept_as_the_network_has_them(tmp_path: Path, name: str) -> None:
    cls = CATALOGUE[name]
    state = random_state(cls, aux_logits=True)
    file = saved(state, tmp_path / "w.safetensors")
    plain, full = trained(cls, file), trained(cls, file, aux_logits=True, num_classes=4)
    assert set(plain.state_dict()) < set(state)
    assert set(full.state_dict()) == set(state)
    assert sum(p.numel() for p in plain.parameters()) == cls.params
    assert all(full.get_submodule(layer).weight.shape[0] == 4 for layer in cls.classifiers)


def test_tensors_share_the_verified_buffer(tmp_path: Path) -> None:
    model = trained(ResNet18, saved(random_state(ResNet18), tmp_path / "w.safetensors"))
    places = sorted(p.data_ptr() for p in model.parameters())
    assert places[-1] - places[0] < 2 * 4 * ResNet18.params  # one buffer, not an allocation each


def test_training_changes_neither_the_file_nor_the_next_load(tmp_path: Path) -> None:
    file = saved(random_state(ResNet18), tmp_path / "w.safetensors")
    before = file.read_bytes()
    for verify in ("load", "stamp"):
        model = trained(ResNet18, file.as_uri(), verify=verify)
        with torch.no_grad():
            model.fc.weight.fill_(3.0)
        assert not torch.equal(trained(ResNet18, file.as_uri(), verify=verify).fc.weight, model.fc.weight)
    assert file.read_bytes() == before


def test_a_trained_network_is_pickled_and_copied_with_its_record() -> None:
    model = trained(ResNet20)
    x = images(ResNet20)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.checkpoint == model.checkpoint
        assert torch.equal(twin(x), model(x))


def test_a_users_own_subclass_finds_its_parents_weights() -> None:
    class Mine(ResNet20):
        pass

    assert isinstance(trained(Mine), Mine)


def test_bytes_that_the_registry_knows_bring_their_record(tmp_path: Path) -> None:
    record = weights.find("ResNet20")
    copied = tmp_path / "renamed.safetensors"
    copied.write_bytes(weights.get(record).path.read_bytes())
    model = trained(ResNet20, copied)
    assert model.checkpoint == record


def cifar_accuracy(model: Model, packed: Path, every: int = 1) -> float:
    """Return the accuracy in percent on each `every`-th image; they lie sorted by class."""
    import io

    from PIL import Image

    arrays = np.load(packed)
    raw, offset, label = arrays["jpeg"].tobytes(), arrays["offset"], torch.from_numpy(arrays["label"][::every].astype(np.int64))
    files = [raw[offset[i] : offset[i + 1]] for i in range(0, len(offset) - 1, every)]
    right = 0
    model.to(memory_format=torch.channels_last)  # with batches that stay in the processor's cache less than half of the time
    with torch.inference_mode():
        for start in range(0, len(label), 100):
            pictures = [Image.open(io.BytesIO(file)) for file in files[start : start + 100]]
            batch = model.preprocess(pictures).contiguous(memory_format=torch.channels_last)
            right += int((model(batch).argmax(1) == label[start : start + 100]).sum())
    return 100 * right / len(label)


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "file", "every", "top1"),
    [
        pytest.param("ResNet20", "cifar_resnet20-12fca82f.th", 1, 81.03, marks=pytest.mark.long),
        pytest.param("ResNet32", "cifar_resnet32-d509ac18.th", 1, 82.56, marks=pytest.mark.long),
        ("ResNet20", "cifar_resnet20-12fca82f.th", 5, 80.45),
        ("ResNet32", "cifar_resnet32-d509ac18.th", 5, 81.9),
    ],
)
def test_third_party_cifar_checkpoints_reach_their_own_accuracy(real: Path, name: str, file: str, every: int, top1: float) -> None:
    model = trained(CATALOGUE[name], real / "real" / "pytorch" / file)
    assert cifar_accuracy(model, real / "data" / "cifar10_test.npz", every) == pytest.approx(top1, abs=0.0201 * every)


@pytest.mark.real
def test_the_embedded_checkpoint_knows_every_fifth_image_as_well_as_ever(real: Path) -> None:
    assert cifar_accuracy(trained(ResNet20), real / "data" / "cifar10_test.npz", 5) == pytest.approx(89.15, abs=0.101)


@pytest.mark.real
@pytest.mark.long
def test_the_embedded_checkpoint_reaches_the_accuracy_in_its_record(real: Path) -> None:
    model = trained(ResNet20)
    assert model.checkpoint is not None
    assert cifar_accuracy(model, real / "data" / "cifar10_test.npz") == pytest.approx(model.checkpoint.metrics["top1"], abs=0.03)


@pytest.mark.real
def test_the_records_activation_decides_on_real_photographs(real: Path) -> None:
    file = real / "real" / "pytorch" / "mobilenetV1X0.25_pretrain.tar"
    photographs = sorted((real / "real" / "images" / "imagenet").glob("*.JPEG"))
    assert len(photographs) == 100
    wnids = [p.name.split("_")[0] for p in photographs]

    def right(**options: str) -> tuple[int, int]:
        rows = zoo.predict(trained(MobileNetV1_025, file, **options), photographs)
        top1 = sum(row[0].wnid == wnid for row, wnid in zip(rows, wnids, strict=True))
        return top1, sum(wnid in {x.wnid for x in row} for row, wnid in zip(rows, wnids, strict=True))

    assert right() == (pytest.approx(58, abs=1), pytest.approx(82, abs=1))
    assert right(activation="relu") == (pytest.approx(2, abs=1), pytest.approx(4, abs=1))


def test_squeezenets_convolutional_head_is_replaced(tmp_path: Path) -> None:
    file = saved(random_state(SqueezeNet1_1), tmp_path / "w.safetensors")
    assert trained(SqueezeNet1_1, file, num_classes=3).classifier[1].out_channels == 3


ROW = """
[MobileNetV1_025.leaky]
sources = ["{source}"]
format = "pytorch"
names = "torchvision"
sha256 = "{sha256}"
num_classes = {classes}
license = "MIT"
{more}
preprocessing = {{ resize = 40, crop = 32, interpolation = "bilinear", mean = [0.1, 0.2, 0.3], std = [1.0, 1.0, 1.0] }}
provenance = "a test"
"""


@pytest.fixture
def leaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Register a MobileNetV1 whose activation is not the default; returns its file."""

    def register(classes: int = 4, more: str = 'options = { activation = "leaky_relu_0.1" }') -> Path:
        file = saved(random_state(MobileNetV1_025, num_classes=4), tmp_path / "leaky.pth")
        folder = tmp_path / "tables"
        folder.mkdir(exist_ok=True)
        sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
        (folder / "mine.toml").write_text(ROW.format(source=file.as_uri(), sha256=sha256, classes=classes, more=more))
        monkeypatch.setenv("ZOO_REGISTRY", str(folder))
        return file

    return register


def slopes(model: Model) -> set[float]:
    return {m.negative_slope for m in model.modules() if isinstance(m, nn.LeakyReLU)}


def test_the_record_brings_its_options_by_tag_by_path_and_by_url(leaky: Callable[..., Path], tmp_path: Path) -> None:
    file = leaky()
    moved = tmp_path / "moved.pth"
    moved.write_bytes(file.read_bytes())
    for source in ("leaky", file, moved, file.as_uri(), moved.as_uri()):
        model = trained(MobileNetV1_025, source)
        assert slopes(model) == {0.1}, source
        assert model.checkpoint is not None
        assert model.checkpoint.tag == "leaky"
        assert model.checkpoint.preprocessing.crop == 32


def test_a_users_option_wins_over_the_records_and_is_recorded(leaky: Callable[..., Path]) -> None:
    model = trained(MobileNetV1_025, leaky(more='options = { activation = "leaky_relu_0.1" }'), activation="relu")
    assert slopes(model) == set()
    assert model.checkpoint is not None
    assert model.checkpoint.options == {"activation": "relu"}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"more": 'options = { activation = "sinus" }'}, "sinus"),
        ({"more": "options = { colour = 3 }"}, "colour"),
        ({"more": 'labels = "nonsense"'}, "nonsense"),
        ({"more": 'labels = "cifar10"'}, "10 labels"),
        ({"classes": 9}, "says 9 classes, the file has 4"),
    ],
)
def test_a_record_that_contradicts_file_or_network_is_refused(leaky: Callable[..., Path], how: dict[str, Any], words: str) -> None:
    leaky(**how)
    with pytest.raises(BadRecord, match=words):
        trained(MobileNetV1_025, "leaky")


def test_a_known_tag_is_a_tag_whatever_files_lie_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cifar10").mkdir()
    assert trained(ResNet20, "cifar10").checkpoint == trained(ResNet20).checkpoint
    with pytest.raises(UnknownWeights, match="is a folder"):
        trained(ResNet20, "./cifar10")


def test_an_added_file_keeps_what_its_bytes_are_known_for(leaky: Callable[..., Path]) -> None:
    add_file(MobileNetV1_025, leaky(), "mine")
    assert slopes(trained(MobileNetV1_025, "mine")) == {0.1}


def test_an_added_file_is_built_with_the_options_it_was_added_with(tmp_path: Path) -> None:
    file = saved(random_state(ResNet20, shortcut="B"), tmp_path / "b.pth")
    with pytest.raises(WeightsMismatch):
        add_file(ResNet20, file, "mine")
    row = add_file(ResNet20, file, "mine", shortcut="B", license="MIT", preprocessing={"resize": 64, "mean": (0.5, 0.5, 0.5)})
    assert (row.license, row.preprocessing.resize, row.preprocessing.mean) == ("MIT", 64, (0.5, 0.5, 0.5))
    assert row.preprocessing.std == trained(ResNet20).checkpoint.preprocessing.std  # pyright: ignore[reportOptionalMemberAccess]
    assert "layer2.0.downsample.0.weight" in trained(ResNet20, "mine").state_dict()


@pytest.mark.parametrize(
    ("facts", "words"), [({"labels": "imagenet1k"}, "1000 labels"), ({"preprocessing": {"mean": (0.5,), "std": (0.5,)}}, "3 channels")]
)
def test_adding_what_the_network_can_not_use_is_refused(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    file = saved(random_state(ResNet20), tmp_path / "w.pth")
    with pytest.raises(BadRecord, match=words):
        add_file(ResNet20, file, "mine", **facts)
    with pytest.raises(UnknownWeights):
        weights.find("ResNet20", "mine")


def test_a_grey_networks_file_classifies_photographs(tmp_path: Path) -> None:
    file = saved(random_state(ResNet20, in_channels=1), tmp_path / "w.pth")
    picture = torch.randint(256, (40, 50, 3), dtype=torch.uint8).numpy()
    assert len(zoo.predict(trained(ResNet20, file), picture)) == 5


def test_a_new_head_follows_the_familys_rule_and_evaluates(tmp_path: Path) -> None:
    file = saved(random_state(VGG11), tmp_path / "w.safetensors")
    head = trained(VGG11, file, num_classes=50).classifier[6]
    assert float(head.weight.detach().std()) == pytest.approx(0.01, rel=0.05)  # torch's own rule would give 0.009
    assert float(head.bias.detach().abs().max()) == 0
    assert not head.training


@pytest.mark.parametrize(
    "arguments",
    [{"num_classes": 0}, {"num_classes": "10"}, {"num_classes": True}, {"in_channels": 0}, {"in_channels": -1}, {"verify": "never"}],
    ids=str,
)
def test_an_impossible_argument_is_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        trained(ResNet20, **arguments)


def test_whole_numbers_are_no_weights(tmp_path: Path) -> None:
    state = random_state(ResNet20)
    state["fc.weight"] = state["fc.weight"].to(torch.int8)
    with pytest.raises(WeightsMismatch, match="whole numbers"):
        trained(ResNet20, saved(state, tmp_path / "w.pth"))


def test_a_mismatch_carries_all_names_and_says_whose_the_file_is(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    file.write_bytes(weights.get(weights.find("ResNet20")).path.read_bytes())
    with pytest.raises(WeightsMismatch, match="that of ResNet20:cifar10") as caught:
        trained(ResNet32, file)
    assert len(caught.value.missing) > 10
    assert "layer1.3.conv1.weight" in caught.value.missing


def test_changing_a_models_record_changes_no_other_model() -> None:
    first = trained(ResNet20).checkpoint
    assert first is not None
    first.metrics["top1"] = 100.0  # pyright: ignore[reportIndexIssue]
    assert trained(ResNet20).checkpoint.metrics["top1"] == 89.14  # pyright: ignore[reportOptionalMemberAccess]


def test_a_family_has_no_weights_and_a_users_network_may_have_a_file(tmp_path: Path) -> None:
    with pytest.raises(NoPretrainedWeights):
        trained(CIFARResNet)

    class Tiny(CIFARResNet, n=1): ...

    assert isinstance(trained(Tiny, saved(random_state(Tiny), tmp_path / "w.pth")), Tiny)


def test_a_published_name_is_not_overwritten() -> None:
    with pytest.raises(TypeError, match="published already"):
        type("ResNet18", (ResNet18,), {}, params=5)


def test_the_embedded_file_stays_small() -> None:
    assert weights.get(weights.find("ResNet20")).size_bytes <= 1_200_000


def test_a_url_is_judged_by_its_bytes_and_not_by_its_name(tmp_path: Path) -> None:
    state = random_state(ResNet20)
    file = saved(state, tmp_path / "w.safetensors").rename(tmp_path / "w.bin")
    assert torch.equal(trained(ResNet20, file.as_uri()).fc.weight, state["fc.weight"])
    (tmp_path / "text.pth").write_bytes(b"hello, world")
    with pytest.raises(MalformedFile, match=r"text\.pth is no PyTorch file") as caught:
        trained(ResNet20, (tmp_path / "text.pth").as_uri())
    assert ".part" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_refused_by_the_tensors_name(tmp_path: Path, suffix: str, wrong: float) -> None:
    state = random_state(ResNet20)
    name = next(name for name in state if name.endswith("running_var"))
    state[name][3] = wrong
    path = saved(state, tmp_path / f"w{suffix}")
    for source in (path, path.as_uri()):
        with pytest.raises(NonFinite, match=f"the tensor '{name}' holds NaN or an infinity"):
            trained(ResNet20, source, progress=False)


def test_the_bytes_that_were_proven_are_the_ones_that_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = random_state(ResNet20)
    path, other = saved(state, tmp_path / "w.pth"), saved(dict.fromkeys(state, torch.zeros(1)), tmp_path / "other.pth")
    sha256, read = hashlib.sha256(path.read_bytes()).hexdigest(), sandbox.read

    def late(source: Path, *args: Any, **options: Any) -> Source:
        source.write_bytes(other.read_bytes())  # another process, that has the same cache, while the reader starts
        return read(source, *args, **options)

    monkeypatch.setattr(sandbox, "read", late)
    assert to_safetensors(path, tmp_path / "made") == sha256
    assert load_file(tmp_path / "made").keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in load_file(tmp_path / "made").items())


def test_an_error_of_a_files_content_says_whose_it_is(tmp_path: Path) -> None:
    text = b'{"x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    (tmp_path / "bad.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(MalformedFile, match=rf"{re.escape(str(tmp_path))}/bad\.safetensors: tensor 'x': F32 of shape \[3\]"):
        trained(ResNet20, tmp_path / "bad.safetensors")


def test_a_complex_number_that_is_none_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(NonFinite, match="'x' holds NaN or an infinity"):
        all_finite({"x": torch.full((2,), complex(0, float("nan")))}, tmp_path / "a.safetensors")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_file_with_names_of_its_own_is_matched_wherever_it_comes_from(tmp_path: Path, own_cache: Path, scheme: str) -> None:
    state = random_state(ResNet20)
    file = tmp_path / "x.pt"
    torch.save({name.replace("layer", "stage").replace("bn", "norm"): tensor for name, tensor in state.items()}, file)
    found = trained(ResNet20, f"{scheme}{file}", match=True)
    assert all(torch.equal(tensor, state[name]) for name, tensor in found.state_dict().items())
    assert found.checkpoint is not None
    assert found.checkpoint.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("told", [{"match": True}, {"kernel_convention": "convolution"}, {"spatial": "wh"}])
def test_nobody_tells_a_record_how_its_file_is_to_be_read(told: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=rf"ResNet20:cifar10 says itself how it is to be read, so leave {next(iter(told))} out"):
        trained(ResNet20, "cifar10", **told)


def test_nothing_that_is_said_of_weights_is_dropped_where_they_are_a_runs(tmp_path: Path) -> None:
    from weights import find
    from zoo.pretrained.run_folder import write_result

    state, preprocessing = random_state(ResNet20), find("ResNet20").preprocessing
    told: dict[str, Any] = {"options": {}, "base": None, "metrics": {}, "metrics_data": None}
    write_result(tmp_path, state, model="ResNet20", classes=[str(n) for n in range(10)], preprocessing=preprocessing, **told)
    assert torch.equal(trained(ResNet20, tmp_path).state_dict()["conv1.weight"], state["conv1.weight"])
    with pytest.raises(ValueError, match="holds one set of weights alone, so there is no 'ema' in it"):
        trained(ResNet20, tmp_path, weights_of="ema")
    with pytest.raises(TypeError, match="says itself how it is to be read, so leave match out"):
        trained(ResNet20, tmp_path, match=True)
