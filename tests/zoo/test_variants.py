"""What commands know of networks without building them is what the catalogue says, and names are found however they are spelt."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from weights import UnknownWeights
from zoo import CATALOGUE, ResNet20
from zoo.catalogue import model_class
from zoo.networks.resnet import BasicBlock, Bottleneck, ResNet
from zoo.variants import SHAPES, TABLE, described, shapes, spelt, variants

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("making.networks")


def test_the_tables_are_not_stale(networks: ModuleType) -> None:
    """Counting all multiply-adds and building all networks takes ten seconds each: both are taken from the tables.

    `test_docs` counts some anew, and `test_catalogue` compares the shapes of every network that it builds.
    """
    known, told = variants(), shapes(list(CATALOGUE))
    assert networks.table(lambda cls: known[cls.__name__].multiply_adds) == TABLE.read_text(encoding="utf-8")
    assert networks.shapes(lambda cls: told[cls.__name__]) == SHAPES.read_bytes()
    assert all(known[name].multiply_adds for name in CATALOGUE)


def test_multiply_adds_are_those_of_the_network(networks: ModuleType) -> None:
    assert variants()["ResNet20"].multiply_adds == networks.multiply_adds(ResNet20) == 40_551_040


def test_shapes_are_those_of_the_state_dict() -> None:
    with torch.device("meta"):
        wanted = {name: tuple(tensor.shape) for name, tensor in ResNet20().state_dict().items()}
    assert shapes(["ResNet20", "nothing"]) == {"ResNet20": wanted}


def test_a_name_is_found_in_any_case_and_the_nearest_are_named() -> None:
    assert spelt("vgg19_bn") == "VGG19_BN"
    assert model_class("resnet20") is CATALOGUE["ResNet20"]
    for find in (spelt, model_class):
        with pytest.raises(UnknownWeights, match=r"no network 'ResNet51'; did you mean ResNet5"):
            find("ResNet51")


def test_a_network_of_the_running_program_is_known_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.networks.model.Model.catalogue", dict(CATALOGUE))

    class Mine(ResNet, block=BasicBlock, blocks=(1, 1, 1, 1), params=1): ...

    assert (variants()["Mine"].family, variants()["Mine"].multiply_adds) == ("ResNet", None)
    assert described(Mine).lineage[:2] != ()


def test_an_option_that_a_block_does_not_have_is_an_error() -> None:
    with pytest.raises(TypeError, match="squeeze_exite"):
        BasicBlock(8, 8, 1, None, squeeze_exite=True)  # pyright: ignore[reportCallIssue]

    class Grouped(ResNet, block=BasicBlock, blocks=(1, 1, 1, 1), groups=2): ...

    with pytest.raises(ValueError, match="Grouped has no bottlenecks, so there are no groups"):
        Grouped()
    assert Bottleneck(64, 16, 1, None, groups=2)
