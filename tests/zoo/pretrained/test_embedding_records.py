"""Checkpoints without classes, as DINOv2's and CLIP's: the network gives an embedding, says so, and takes a classifier later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from parity import randomised
from safetensors.torch import save_file

import weights
from weights.registry import user_folder
from zoo import CATALOGUE, features, predict, reset_head, trained
from zoo.commands.app import main
from zoo.networks.model import Model

ROW = """
[{model}.body]
default = true
sources = ["{source}"]
format = "safetensors"
names = "torchvision"
num_classes = {classes}
embedding = true
license = "CC-BY-NC-4.0"
preprocessing = {{ resize = 64, crop = 64, interpolation = "bilinear", mean = [0.5, 0.5, 0.5], std = [0.5, 0.5, 0.5] }}
provenance = "a test"
"""


def registered(name: str, folder: Path, classes: int = 0) -> type[Model]:
    """Register a file of a network, without its classifier or with a projection of so many numbers."""
    cls = CATALOGUE[name]
    with torch.device("meta"):
        network = cls(num_classes=classes or 10)
    state = randomised(network, seed=1)
    head = f"{cls.classifiers[0]}."
    save_file({key: tensor for key, tensor in state.items() if classes or not key.startswith(head)}, folder / "body.safetensors")
    user_folder().mkdir(parents=True, exist_ok=True)
    (user_folder() / "mine.toml").write_text(ROW.format(model=name, source=(folder / "body.safetensors").as_uri(), classes=classes))
    return cls


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_USER_REGISTRY", str(tmp_path / "registry"))


@pytest.mark.parametrize("name", ["ResNet20", "SqueezeNet1_1", "MobileNetV1_025", "MobileNetV3Small"])
def test_a_file_without_a_classifier_gives_the_embedding(name: str, tmp_path: Path) -> None:
    cls = registered(name, tmp_path)
    network = trained(cls, "body")
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        given = network(x)
        expected = features(trained(cls, "body", num_classes=3), "embedding")(x)
    assert network.num_classes == 0
    torch.testing.assert_close(given, expected if isinstance(expected, torch.Tensor) else next(iter(expected.values())))


def test_a_classifier_is_put_on_at_once_or_later_and_the_record_says_that_there_are_classes_then(tmp_path: Path) -> None:
    cls = registered("ResNet20", tmp_path)
    later = reset_head(trained(cls, "body"), 7)
    for network, count in ((later, 7), (trained(cls, "body", num_classes=5), 5)):
        assert network(torch.randn(1, 3, 32, 32)).shape == (1, count)
        assert network.checkpoint is not None
        assert (network.checkpoint.embedding, network.checkpoint.num_classes) == (False, count)
        assert len(predict(network, np.zeros((40, 40, 3), np.uint8))) == 5


@pytest.mark.parametrize("classes", [0, 16])
def test_predict_says_that_there_are_no_classes(classes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = trained(registered("ResNet20", tmp_path, classes), "body")
    assert network(torch.randn(1, 3, 32, 32)).shape == (1, classes or 64)
    with pytest.raises(ValueError, match=r"ResNet20:body has no classes: it gives an embedding"):
        predict(network, np.zeros((40, 40, 3), np.uint8))
    assert main(["info", "ResNet20:body"]) == 0
    assert "an embedding, no classes" in capsys.readouterr().out


def test_pull_says_what_the_licence_forbids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registered("ResNet20", tmp_path)
    assert main(["pull", "ResNet20:body", "-q"]) == 0
    assert "licence CC-BY-NC-4.0: not for commercial use" in capsys.readouterr().out
    assert main(["pull", "ResNet20:cifar10", "-q"]) == 0
    assert "commercial" not in capsys.readouterr().out


def test_the_row_is_found_as_any_other(tmp_path: Path) -> None:
    registered("ResNet20", tmp_path)
    assert weights.find("ResNet20").tag == "body"
