"""Styles by name, and style networks from files of others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds_tensorflow
import torch

from weights import UnknownWeights, WeightsMismatch
from zoo.stylizing import Engstrom, Johnson, MobileStyle, style_files, style_network, styles
from zoo.stylizing.named import UNSTATED
from zoo.stylizing.networks import InstanceNorm


def test_every_style_has_a_network_a_hash_and_a_licence() -> None:
    for name, row in styles().items():
        network = style_files.NETWORKS[row.model](**row.options)
        assert sum(one.numel() for one in network.parameters()) == row.params, name
        assert row.sha256 or row.sha256_prefix, name
        assert row.license in ("MIT", "unstated"), name


def test_styles_that_ship_are_ours_and_load_without_a_network() -> None:
    shipped = [name for name, row in styles().items() if row.sources[0].startswith("package:")]
    assert shipped == ["embers", "leadlight", "woodcut"]
    for name in shipped:
        network = style_network(name)
        assert network.checkpoint is styles()[name]
        assert not network.training
        assert styles()[name].license == "MIT"


def test_styles_of_others_never_ship() -> None:
    assert all(row.sources[0].startswith("https://") for row in styles().values() if row.license == "unstated")


def test_a_download_of_a_style_without_a_licence_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def bytes_of(*_: object, **__: object) -> memoryview:
        from safetensors.torch import save

        return memoryview(bytearray(save(Johnson(8).state_dict())))

    monkeypatch.setattr("weights.open_weights", bytes_of)
    with caplog.at_level(logging.WARNING, "zoo"):
        assert style_network("candy_8").checkpoint is styles()["candy_8"]
    assert f"style candy_8: {UNSTATED}" in caplog.text


def test_old_files_with_running_statistics_load(tmp_path: Path) -> None:
    network = Johnson(8)
    old = dict(network.state_dict())
    for name, layer in network.named_modules():
        if isinstance(layer, InstanceNorm):
            old[f"{name}.running_mean"], old[f"{name}.running_var"] = torch.zeros(3), torch.ones(3)
    torch.save(old, tmp_path / "old.pth")
    assert all(one.equal(other) for one, other in zip(style_network(tmp_path / "old.pth").parameters(), network.parameters(), strict=True))


def test_a_mobile_network_is_known_by_its_names(tmp_path: Path) -> None:
    torch.save(MobileStyle().state_dict(), tmp_path / "mobile.pth")
    assert isinstance(style_network(tmp_path / "mobile.pth"), MobileStyle)


def test_engstroms_checkpoints_load_by_the_order_of_their_variables(tmp_path: Path) -> None:
    network, variables = Engstrom(), {}
    layers: list[Any] = [network.conv1, network.conv2, network.conv3]
    norms: list[Any] = [network.norm1, network.norm2, network.norm3]
    for block in network.blocks:
        layers += [block.conv1, block.conv2]
        norms += [block.norm1, block.norm2]
    layers += [network.up1, network.up2, network.conv4]
    norms += [network.norm4, network.norm5, network.norm6]
    for number, (layer, norm) in enumerate(zip(layers, norms, strict=True)):
        norm.weight.data.normal_()
        norm.bias.data.normal_()
        for at, value in enumerate((layer.weight.permute(2, 3, 1, 0), norm.bias, norm.weight)):
            name = f"Variable_{3 * number + at}" if number + at else "Variable"
            variables[name] = value.detach().contiguous().numpy()
            variables[f"{name}/Adam"] = np.zeros(1, np.float32)
    path = seeds_tensorflow.first(tmp_path / "wave.ckpt", variables)
    found = style_network(path)
    assert isinstance(found, Engstrom)
    assert all(one.equal(other) for one, other in zip(found.state_dict().values(), network.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("in1.bias"), "it has no in1.bias"),
        (lambda t: t.update({"more": torch.zeros(1)}), "it has more, which the network has not"),
        (lambda t: t.update({"res1.in1.weight": torch.zeros(3)}), r"res1.in1.weight is \(3,\), not \(16,\)"),
        (lambda t: t.clear() or t.update({"fc.weight": torch.zeros(1)}), "holds no style network that is known: its tensors are fc.weight"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, change: object, message: str) -> None:
    tensors = dict(Johnson(4).state_dict())
    change(tensors)  # pyright: ignore
    torch.save(tensors, tmp_path / "file.pth")
    with pytest.raises(WeightsMismatch, match=message):
        style_network(tmp_path / "file.pth")


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    tensors = dict(Johnson(4).state_dict())
    tensors["in1.bias"] = torch.full((4,), float("nan"))
    torch.save(tensors, tmp_path / "file.pth")
    with pytest.raises(ValueError, match=r"in1\.bias"):
        style_network(tmp_path / "file.pth")


def test_a_misspelt_style_is_told_the_right_one() -> None:
    with pytest.raises(UnknownWeights, match="there is no style 'mosaik', and no such file; did you mean mosaic"):
        style_network("mosaik")
