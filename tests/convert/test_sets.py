"""Training checkpoints: raw and averaged weights side by side are told apart and chosen, prefixes of training libraries go."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from convert.sets import averaged, chosen
from weights import WeightsMismatch
from zoo import ResNet20, trained
from zoo.commands.app import main

RAW, EMA = ResNet20().state_dict(), ResNet20().state_dict()


def after(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def averaged_model(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    network = ResNet20()
    network.load_state_dict(tensors)
    return AveragedModel(network).state_dict()


BOTH: dict[str, dict[str, Any]] = {
    "timm": {"epoch": 3, "state_dict": RAW, "state_dict_ema": EMA},
    "torchvision's references": {"model": after("module.", RAW), "model_ema": averaged_model(EMA), "optimizer": {"state": {}}},
    "nested": {"model": {"state_dict": RAW, "state_dict_ema": EMA}},
    "lightning": {
        "state_dict": {**after("model.", RAW), **after("ema_model.", averaged_model(EMA))},
    },
    "raw without a prefix": {**RAW, **after("ema.", EMA)},
    "compiled": {"model": after("_orig_mod.", RAW), "ema": after("module.", EMA)},
}


@pytest.mark.parametrize("kind", BOTH)
def test_raw_weights_are_taken_with_a_word_and_averaged_ones_when_asked_for(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "last.pth.tar"
    torch.save(BOTH[kind], path)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(trained(ResNet20, path).conv1.weight, RAW["conv1.weight"])
    assert 'weights_of="ema"' in caplog.text
    assert "several sets of weights" in caplog.text
    caplog.clear()
    assert torch.equal(trained(ResNet20, path, weights_of="ema").conv1.weight, EMA["conv1.weight"])
    assert torch.equal(trained(ResNet20, path, weights_of="raw").conv1.weight, RAW["conv1.weight"])
    assert "several sets" not in caplog.text


def test_a_set_is_chosen_by_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "last.pth"
    torch.save(BOTH["timm"], path)
    assert torch.equal(trained(ResNet20, path, weights_of="state_dict_ema").conv1.weight, EMA["conv1.weight"])
    with pytest.raises(ValueError, match="has no weights 'swa'; it has state_dict, state_dict_ema"):
        trained(ResNet20, path, weights_of="swa")


def test_a_file_with_one_set_has_no_other(tmp_path: Path) -> None:
    torch.save(RAW, tmp_path / "one.pth")
    assert trained(ResNet20, tmp_path / "one.pth", weights_of="raw") is not None
    with pytest.raises(ValueError, match="one set of weights alone"):
        trained(ResNet20, tmp_path / "one.pth", weights_of="ema")


def test_averaged_weights_alone_are_taken_as_they_are(tmp_path: Path) -> None:
    for number, content in enumerate(({"state_dict_ema": EMA}, {"ema": averaged_model(EMA)}, averaged_model(EMA))):
        path = tmp_path / f"{number}.pth"
        torch.save(content, path)
        assert torch.equal(trained(ResNet20, path).conv1.weight, EMA["conv1.weight"])


def test_safetensors_and_urls_are_chosen_from_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZOO_CACHE", str(tmp_path / "cache"))
    both = {**after("model.", RAW), **after("ema_model.", EMA)}
    save_file({name: tensor.clone() for name, tensor in both.items()}, tmp_path / "both.safetensors")
    torch.save(both, tmp_path / "both.pth")
    for source in (tmp_path / "both.safetensors", (tmp_path / "both.pth").as_uri()):
        assert torch.equal(trained(ResNet20, source, weights_of="ema").conv1.weight, EMA["conv1.weight"])
        assert torch.equal(trained(ResNet20, source).conv1.weight, RAW["conv1.weight"])


@pytest.mark.parametrize("prefix", ["model.", "net.", "backbone.", "module.", "_orig_mod.", "module._orig_mod.", "model.module.", "a.b.c."])
def test_a_prefix_before_every_name_goes(prefix: str, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": after(prefix, RAW), "epoch": 1}, path)
    found = trained(ResNet20, path).state_dict()
    assert all(torch.equal(found[name], RAW[name]) for name in RAW)


def test_a_classifier_beside_a_backbone_keeps_its_name(tmp_path: Path) -> None:
    head = {name: tensor for name, tensor in RAW.items() if name.startswith("fc.")}
    rest = {name: tensor for name, tensor in RAW.items() if name not in head}
    torch.save({**after("backbone.", rest), **head}, tmp_path / "split.pth")
    assert torch.equal(trained(ResNet20, tmp_path / "split.pth").fc.weight, RAW["fc.weight"])


def test_what_lies_outside_of_a_prefix_is_named(tmp_path: Path) -> None:
    torch.save({"state_dict": {**after("model.", RAW), "criterion.weight": torch.ones(10)}}, tmp_path / "last.ckpt")
    with pytest.raises(WeightsMismatch, match=r"1 unexpected:\n    criterion\.weight"):
        trained(ResNet20, tmp_path / "last.ckpt")


def test_a_prefix_of_another_network_is_named(tmp_path: Path) -> None:
    torch.save({"encoder.block.weight": torch.ones(3), "encoder.other.weight": torch.ones(3)}, tmp_path / "other.pth")
    with pytest.raises(WeightsMismatch, match=r"Every name in it begins with 'encoder\.'"):
        trained(ResNet20, tmp_path / "other.pth")


def test_twins_of_a_network_are_no_averages() -> None:
    twins = {"left.conv.weight": (1,), "right.conv.weight": (1,), "schema.conv.weight": (2,)}
    assert averaged(twins) == {}
    assert averaged({**twins, "ema.left.conv.weight": (1,)}) == {"ema.": ""}
    assert chosen(twins, None, "file") == twins


def test_the_command_converts_the_set_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "last.pth", tmp_path / "out.safetensors"
    torch.save(BOTH["timm"], path)
    assert main(["convert", str(path), str(out), "-m", "ResNet20", "--weights-of", "ema"]) == 0
    assert torch.equal(trained(ResNet20, out).conv1.weight, EMA["conv1.weight"])
    assert main(["convert", str(path), str(tmp_path / "no.safetensors"), "-m", "ResNet20", "--weights-of", "swa"]) in (1, 2)
    assert "it has state_dict, state_dict_ema" in " ".join(capsys.readouterr().err.split())
