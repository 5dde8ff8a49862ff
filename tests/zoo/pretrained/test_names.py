"""One spelling: NAME:TAG wherever a checkpoint is named, in any case; what is wrong is told before anything is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from weights import BadRecord, UnknownWeights
from zoo import ResNet20, ResNet50, network, predict, reset_head, trained
from zoo.finetuning import Settings
from zoo.pretrained.add_file import add_file
from zoo.pretrained.names import named, of_network
from zoo.variants import spelt


@pytest.mark.parametrize("name", ["ResNet20", "resnet20", "ResNet20:cifar10", "RESNET20:CIFAR10"])
def test_a_checkpoint_is_found_by_its_name_in_any_case(name: str) -> None:
    found = trained(name)
    assert type(found) is ResNet20
    assert found.checkpoint is not None
    assert found.checkpoint.tag == "cifar10"


@pytest.mark.parametrize("name", ["resnet-20", " ResNet 20 ", "resnet_20"])
def test_what_is_between_the_parts_of_a_name_does_not_matter(name: str) -> None:
    assert type(network(name)) is ResNet20


def test_every_name_of_torchvisions_is_one_of_ours() -> None:
    models = pytest.importorskip("torchvision.models")
    theirs = [
        name
        for name in models.list_models(module=models)
        if name.replace("_", "") in {one.lower().replace("_", "") for one in zoo.networks()}
    ]
    assert len(theirs) > 50
    assert spelt("regnet_x_1_6gf") != spelt("regnet_x_16gf")
    for name in theirs:
        assert spelt(name).lower().replace("_", "") == name.replace("_", "")


def test_torchvisions_word_for_weights_is_their_tag() -> None:
    assert of_network("ResNet50", "ResNet50_Weights.IMAGENET1K_V2") == "IMAGENET1K_V2"
    assert of_network("VGG16_BN", "VGG16_BN_Weights.IMAGENET1K_V1") == "IMAGENET1K_V1"


def test_a_file_in_the_networks_place_is_told_where_it_belongs(tmp_path: Path) -> None:
    file = tmp_path / "both.pth"
    torch.save(ResNet20().state_dict(), file)
    with pytest.raises(UnknownWeights, match="name that first"):
        trained(str(file))
    with pytest.raises(TypeError, match="takes the network first"):
        predict(str(file), "resnet20")


def test_a_network_of_ones_own_is_told_who_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynets.py").write_text("raise SystemExit('nobody imports it')")
    with pytest.raises(UnknownWeights, match=r"^mynets:Small is a network of your own, which only `zoo convert` takes as --model"):
        named("mynets:Small")
    (tmp_path / "resnet20.py").touch()
    assert named("resnet20:cifar10") == ("ResNet20", "cifar10")
    with pytest.raises(UnknownWeights, match="no network 'others'"):
        named("others:Small")


def test_predict_takes_a_name_as_trained_does() -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    assert predict("resnet20:cifar10", image) == predict(trained(ResNet20), image)


def test_a_class_takes_a_tag_and_the_whole_name() -> None:
    for weights in ("cifar10", "CIFAR10", "resnet20:Cifar10"):
        found = trained(ResNet20, weights).checkpoint
        assert found is not None
        assert found.tag == "cifar10"


@pytest.mark.parametrize(
    ("model", "weights", "told"),
    [
        ("ResNet51", None, "did you mean ResNet56 or ResNet50 or ResNet18"),
        ("ResNet50:imagenet1k_v3", None, "did you mean imagenet1k_v2"),
        (ResNet50, "ResNet50_Weights.IMAGENET9", "did you mean imagenet1k_v2"),
        ("ResNet20:", None, "names no checkpoint behind its colon: ResNet20:TAG"),
        ("ResNet20:cifar10", "cifar10", "names its weights already: leave out cifar10"),
        (ResNet20, "ResNet50:imagenet1k_v1", "is a checkpoint of ResNet50, not of ResNet20"),
        ("runs/none", None, "no run of zoo finetune lies there"),
    ],
    ids=str,
)
def test_a_wrong_name_is_told_the_right_one(model: Any, weights: str | None, told: str) -> None:
    with pytest.raises(UnknownWeights, match=told):
        trained(model, weights)


def test_addresses_and_files_keep_their_colons(tmp_path: Path) -> None:
    for weights in ("hf://acme/wheels", "https://a.example:8080/x.pth", "c:/x.pth", tmp_path):
        assert of_network("ResNet20", weights) == weights
    assert named("resnet20", "hf://acme/wheels") == ("ResNet20", "hf://acme/wheels")


def test_a_network_is_built_by_its_name() -> None:
    assert network("resnet20", num_classes=np.int64(3)).num_classes == 3
    with pytest.raises(UnknownWeights, match="did you mean ResNet20"):
        network("resnt20")
    with pytest.raises(UnknownWeights, match=r'network\(\) builds an untrained one: trained\("resnet20:cifar10"\)'):
        network("resnet20:cifar10")
    with pytest.raises(TypeError, match=r'network\("resnet50"\)'):
        network(ResNet50)  # pyright: ignore[reportArgumentType]


def test_networks_are_listed_by_a_pattern() -> None:
    assert zoo.networks("*NET50") == ["ResNet50", "SEResNet50"]
    assert zoo.networks("xcep") == ["Xception"]
    assert zoo.networks("no such") == []
    assert zoo.networks() == list(zoo.CATALOGUE)
    assert zoo.networks.model.Model is zoo.Model  # pyright: ignore[reportFunctionMemberAccess]  # and it is the package still


ASKED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: trained(ResNet50, pretrained=True), TypeError, r"trained\(ResNet50\) takes no 'pretrained'; trained\(\) always loads"),
    (lambda: trained(ResNet50, device="cuda"), TypeError, r'trained\(ResNet50\)\.to\("cuda"\) moves it'),
    (lambda: trained(ResNet50, num_clases=3), TypeError, r"takes no 'num_clases'; did you mean num_classes\?"),
    (lambda: trained(ResNet50, norm_eps="small"), TypeError, "ResNet50's norm_eps is a number"),
    (lambda: trained(ResNet50, stride_on="5x5"), ValueError, "5x5"),
    (lambda: trained(ResNet50, classes={"dog"}), TypeError, "classes are a list"),
    (lambda: trained(ResNet50, classes="dog"), TypeError, "classes are a list"),
    (lambda: trained(ResNet50, classes=5), TypeError, "classes are a list"),  # pyright: ignore[reportArgumentType]
    (lambda: trained(ResNet50, classes=[]), ValueError, "classes names none"),
    (lambda: trained(ResNet50, output_stride=7), ValueError, "output_stride is a power of two"),
    (lambda: trained(ResNet50, in_channels=0), ValueError, "in_channels is a whole number of at least 1"),
    (lambda: trained(ResNet50, weights_of=3), TypeError, "weights_of is"),  # pyright: ignore[reportArgumentType]
    (lambda: trained(ResNet50, True), TypeError, "weights are named by a tag, a URL or a path"),  # pyright: ignore[reportArgumentType]
    (lambda: trained(ResNet50(), "x"), TypeError, r"trained\(ResNet50\), not trained\(ResNet50\(\)\)"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    (lambda: ResNet50(pretrained=True), TypeError, r"ResNet50\(\) takes no 'pretrained'; ResNet50\(\) is untrained; trained\(ResNet50\)"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(weights="x"), TypeError, r"trained\(ResNet50, TAG\)"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(numclasses=3), TypeError, r"ResNet50\(\) takes no 'numclasses'; did you mean num_classes\?"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(0), ValueError, "num_classes is a whole number"),
    (lambda: predict(ResNet20(), "x.jpg", topk=3), TypeError, r"predict\(\) takes no 'topk'; did you mean top\?"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.features(ResNet20(), "layer3", output_strid=8), TypeError, "did you mean output_stride"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.fast(ResNet20(), devise="cpu"), TypeError, "did you mean device"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.finetune(ResNet20, "photos", epoch=3), TypeError, "did you mean epochs"),
    (lambda: zoo.finetune(ResNet20, "photos", pretrained=True), TypeError, "it trains from the default checkpoint"),
    (lambda: zoo.networks("*", pretrained=True), TypeError, r"^networks\(\) takes no 'pretrained'; it takes pattern"),  # pyright: ignore[reportCallIssue]
    (lambda: predict("cat.jpg", ResNet20()), TypeError, r"takes the network first: predict\(model, images\)"),
    (lambda: predict(ResNet20(), "x.jpg", top=2.0), ValueError, "top is a whole number"),  # pyright: ignore[reportCallIssue, reportArgumentType]
    (lambda: predict("resnt20", "x.jpg"), UnknownWeights, "did you mean ResNet20"),
    (lambda: trained("https://a.example/both.pth"), UnknownWeights, "names weights, and not the network that they are for"),
    (lambda: zoo.resnet50, AttributeError, r"did you mean ResNet50\? Or by its name: zoo.network\('resnet50'\)"),  # pyright: ignore[reportAttributeAccessIssue]
    (lambda: zoo.ResNet49, AttributeError, "did you mean ResNet"),  # pyright: ignore[reportAttributeAccessIssue]
    (lambda: zoo.list_models, AttributeError, r"zoo.networks\("),  # pyright: ignore[reportAttributeAccessIssue]
]


@pytest.mark.parametrize(("call", "kind", "told"), ASKED, ids=[told for _, _, told in ASKED])
def test_a_wrong_argument_is_told_before_anything_is_fetched(
    call: Callable[[], Any], kind: type[Exception], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr("zoo.pretrained.trained.find", fetched)
    with pytest.raises(kind, match=told) as refused:
        call()
    assert "ResNet.__init__" not in str(refused.value)
    assert "CIFARResNet" not in str(refused.value)


def test_torchvisions_own_name_of_weights_is_told_the_tag() -> None:
    models = pytest.importorskip("torchvision.models")
    with pytest.raises(TypeError, match='"imagenet1k_v2" is the tag of that'):
        trained(ResNet50, models.ResNet50_Weights.IMAGENET1K_V2)


def test_numpys_numbers_go_everywhere_a_number_is_taken() -> None:
    four = np.int64(4)
    assert ResNet20(num_classes=four).num_classes == 4
    assert type(ResNet20(four).num_classes) is int
    assert trained(ResNet20, num_classes=four).num_classes == 4
    assert trained(ResNet20, in_channels=np.int64(1)).in_channels == 1
    assert trained(ResNet20, output_stride=np.int64(2)) is not None
    assert type(reset_head(ResNet20(), four).num_classes) is int
    settings = Settings(epochs=np.int64(2), lr=np.float32(0.5), flip=np.bool_(False))  # pyright: ignore[reportArgumentType]
    assert (type(settings.epochs), type(settings.lr), settings.flip) == (int, float, False)
    assert len(predict(trained(ResNet20), np.zeros((32, 32, 3), np.uint8), top=np.int64(3))) == 3  # pyright: ignore[reportArgumentType]


def test_classes_come_from_anything_that_has_an_order() -> None:
    asked = ["cat", "dog"]
    for classes in (asked, tuple(asked), (name for name in asked), np.array(asked), dict.fromkeys(asked).keys() - set() and asked):
        assert trained(ResNet20, classes=classes).num_classes == 2


def test_a_constructor_of_the_users_own_class_is_told_by_its_name() -> None:
    class Mine(ResNet20):
        def __init__(self, width: int = 3) -> None:
            super().__init__(num_classes=width)

    assert Mine(np.int64(5)).num_classes == 5  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"Mine\(\) takes no 'widht'; did you mean width\?"):
        Mine(widht=3)  # pyright: ignore[reportCallIssue]


def test_options_are_checked_on_the_meta_device_and_cost_no_memory() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="5x5"):
        trained(ResNet50, stride_on="5x5")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("keys", [("model.{}", "model_ema.{}"), ("{}", "ema.{}")], ids=["both named", "raw without a prefix"])
def test_the_set_that_was_chosen_is_the_one_that_is_added(keys: tuple[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw, averaged = ResNet20(), ResNet20()
    file = tmp_path / "both.pth"
    torch.save(
        {key.format(name): value for key, one in zip(keys, (raw, averaged), strict=True) for name, value in one.state_dict().items()}, file
    )
    row = add_file(ResNet20, file, "averaged", weights_of="ema")
    file.unlink()
    found = trained(ResNet20, "averaged").state_dict()
    assert all(torch.equal(found[name], value) for name, value in averaged.state_dict().items())
    assert row.provenance.startswith("added by the user; weights 'ema' of both.pth, sha256 ")
    assert "labels='cifar10'" in caplog.text  # it has ten classes, which nobody named


def test_a_tag_that_is_none_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "damaged.pth").write_bytes(b"nothing")
    with pytest.raises(BadRecord, match="a tag is letters"):
        add_file(ResNet20, tmp_path / "damaged.pth", "a b")
    with pytest.raises(BadRecord, match=r"exists: choose another tag$"):
        add_file(ResNet20, tmp_path / "damaged.pth", "cifar10")
