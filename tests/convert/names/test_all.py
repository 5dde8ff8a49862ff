from __future__ import annotations

import logging
from functools import cache
from pathlib import Path

import pytest
import torch
from deeper import every_size
from written import written

import zoo
from convert import core, names
from convert.formats import pytorch
from zoo.networks.model import Model


@cache
def meta(cls: type[Model], **options: object) -> dict[str, torch.Tensor]:
    """Made once for all namings, and changed by no test."""
    with torch.device("meta"):
        return cls(**options).state_dict()


def shapes(state: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


@every_size
def test_our_own_names_are_recognised_and_unchanged(cls: type[Model]) -> None:
    state = meta(cls)
    assert names.recognise(state, cls, state) == "torchvision"
    carried = names.to_ours(state, state, naming="auto", family=cls)
    assert carried.keys() == state.keys()
    assert all(carried[name] is state[name] for name in state)


@every_size
def test_every_naming_leads_there_and_back(cls: type[Model]) -> None:
    for naming in names.NAMINGS:
        there_and_back(cls, naming)


def there_and_back(cls: type[Model], naming: str) -> None:
    """Their tensors are ours as a writer gets them; that no name collides and no tensor gets lost shows in the report."""
    state = meta(cls)
    rows = names.rows(naming, cls, shapes(state))
    if not rows:  # a naming of some families only; those of every family are these
        assert naming not in ("torchvision", "timm", "akamaster")
        return
    assert len({row.theirs for row in rows}) == len({row.ours for row in rows}) == len(rows)
    theirs = written(rows, state)
    carried, report = core.apply(rows, theirs, shapes(state))
    assert not report.misshaped + report.contested, report
    assert all(set(row.lacks) == {*core.KINDS[row.kind].leaves} - {core.COUNTER} for row in report.unused)
    assert {ours for ours, _ in report.missing} == {
        f"{row.ours}.{leaf}" for row in rows for leaf in row.lacks if f"{row.ours}.{leaf}" in state
    }
    assert set(report.unmatched) == {f"{row.theirs}.{leaf}" for row in rows for leaf in row.adds}
    assert all(name in stored.origin.split(", ") for name, stored in carried.items())  # of several of ours, where theirs is one
    assert len(carried) + len(report.missing) == sum(not name.endswith(core.COUNTER) for name in state)


def test_densenets_old_dots_are_mended() -> None:
    cls = zoo.DenseNet121
    state = meta(cls)
    old = {name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): tensor for name, tensor in state.items()}
    old = {name: tensor for name, tensor in old.items() if "num_batches" not in name}  # as the files of 2017 are
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    carried = names.to_ours(old, state, naming="torchvision", family=cls)
    assert carried.keys() == {name for name in state if "num_batches" not in name}


@pytest.mark.parametrize("cls", [zoo.GoogLeNet, zoo.InceptionV3])
def test_auxiliary_heads_are_left_out_or_kept_as_the_network_has_them(cls: type[Model]) -> None:
    with_heads, without = meta(cls, aux_logits=True), meta(cls)
    assert len(with_heads) > len(without)
    assert names.to_ours(with_heads, without, naming="torchvision", family=cls).keys() == without.keys()
    assert names.to_ours(with_heads, with_heads, naming="torchvision", family=cls).keys() == with_heads.keys()


def test_data_parallels_prefix_is_taken_away() -> None:
    state = meta(zoo.ResNet18)
    wrapped = {f"module.{name}": tensor for name, tensor in state.items()}
    assert names.to_ours(wrapped, state, naming="auto", family=zoo.ResNet18).keys() == state.keys()


def test_a_record_with_the_wrong_naming_is_corrected_and_said_so(caplog: pytest.LogCaptureFixture) -> None:
    state = meta(zoo.ResNet20, shortcut="B")
    rows = names.rows("akamaster", zoo.ResNet20, shapes(state))
    theirs = written(rows, state)
    assert "linear.weight" in theirs
    with caplog.at_level(logging.WARNING, "convert"):
        carried = names.to_ours(theirs, state, naming="timm", family=zoo.ResNet20)
    assert carried.keys() == {name for name in state if not name.endswith(core.COUNTER)}
    assert "akamaster" in caplog.text


def test_tensors_of_another_network_come_back_under_their_own_names() -> None:
    state = meta(zoo.ResNet18)
    theirs = {**state, "extra.weight": torch.zeros(1), "layer1.0.conv1.weight": torch.zeros(1)}
    del theirs["fc.bias"]
    carried = names.to_ours(theirs, state, naming="auto", family=zoo.ResNet18)
    assert set(carried) - set(state) == {"extra.weight"}
    assert set(state) - set(carried) == {"fc.bias"}
    assert carried["layer1.0.conv1.weight"].shape == (1,)


def test_another_number_of_classes_is_recognised() -> None:
    state = meta(zoo.VGG11)
    assert names.recognise(meta(zoo.VGG11, num_classes=7), zoo.VGG11, state) == "torchvision"


def test_an_unknown_naming_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LookupError, match="torchvision, timm"):
        names.to_ours({}, {}, naming="tim", family="VGG")


def test_a_users_subclass_has_its_familys_names() -> None:
    class Mine(zoo.MobileNetV2):
        pass

    state = shapes(meta(zoo.MobileNetV2))
    assert names.rows("timm", Mine, state) == names.rows("timm", zoo.MobileNetV2, state) == names.rows("timm", "MobileNetV2", state)


@pytest.mark.real
@pytest.mark.parametrize(
    ("cls", "file", "naming"),
    [
        (zoo.ResNet20, "cifar_resnet20-12fca82f.th", "akamaster"),
        (zoo.ResNet32, "cifar_resnet32-d509ac18.th", "akamaster"),
        (zoo.MobileNetV1_025, "mobilenetV1X0.25_pretrain.tar", "biubug6"),
    ],
)
def test_real_files_are_recognised_and_complete(real: Path, cls: type[Model], file: str, naming: str) -> None:
    tensors = pytorch.read(real / "real" / "pytorch" / file).tensors
    state = meta(cls)
    assert names.recognise(tensors, cls, state) == naming
    carried = names.to_ours(tensors, state, naming="auto", family=cls)
    assert {n: tuple(t.shape) for n, t in carried.items()} == {n: s for n, s in shapes(state).items() if n in carried}
    assert all("num_batches" in name for name in state.keys() - carried.keys())
