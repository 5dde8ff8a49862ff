"""One spelling: NAME:TAG wherever a checkpoint is named, in any case; what is wrong is told before anything is fetched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from weights import UnknownWeights
from zoo import ResNet20, ResNet50, network, predict, reset_head, trained
from zoo.finetuning import Settings
from zoo.pretrained.names import named, of_network


@pytest.mark.parametrize("name", ["ResNet20", "resnet20", "ResNet20:cifar10", "RESNET20:CIFAR10"])
def test_a_checkpoint_is_found_by_its_name_in_any_case(name: str) -> None:
    found = trained(name)
    assert type(found) is ResNet20
    assert found.checkpoint is not None
    assert found.checkpoint.tag == "cifar10"


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
    (lambda: trained(ResNet50(), "x"), TypeError, "an instance of ResNet50"),  # pyright: ignore[reportArgumentType, reportCallIssue]
    (lambda: ResNet50(pretrained=True), TypeError, r"ResNet50\(\) takes no 'pretrained'; ResNet50\(\) is untrained; trained\(ResNet50\)"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(weights="x"), TypeError, r"trained\(ResNet50, TAG\)"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(numclasses=3), TypeError, r"ResNet50\(\) takes no 'numclasses'; did you mean num_classes\?"),  # pyright: ignore[reportCallIssue]
    (lambda: ResNet50(0), ValueError, "num_classes is a whole number"),
    (lambda: predict(ResNet20(), "x.jpg", topk=3), TypeError, r"predict\(\) takes no 'topk'; did you mean top\?"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.features(ResNet20(), "layer3", output_strid=8), TypeError, "did you mean output_stride"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.fast(ResNet20(), devise="cpu"), TypeError, "did you mean device"),  # pyright: ignore[reportCallIssue]
    (lambda: zoo.finetune(ResNet20, "photos", epoch=3), TypeError, "did you mean epochs"),
    (lambda: zoo.finetune(ResNet20, "photos", pretrained=True), TypeError, "it trains from the default checkpoint"),
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
