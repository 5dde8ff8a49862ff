"""Chainer's checkpoints are read in both containers: OIHW, of cross-correlation, a snapshot's model alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from seeds_chainer import draw, hdf5, small, snapshot
from torch import nn

from convert import formats, sandbox
from convert.source import Source
from weights.errors import MalformedFile, UnsupportedFormat
from zoo.conversion.convert import convert

NAMES = {
    "conv/W": "conv.weight", "conv/b": "conv.bias", "block/0/bn/gamma": "block.0.bn.weight", "block/0/bn/beta": "block.0.bn.bias",
    "block/0/bn/avg_mean": "block.0.bn.running_mean", "block/0/bn/avg_var": "block.0.bn.running_var", "dw/W": "dw.weight",
    "dw/b": "dw.bias", "fc/W": "fc.weight", "fc/b": "fc.bias",
}  # fmt: skip


def written(folder: Path, container: str, arrays: dict[str, np.ndarray]) -> Path:
    if container == "h5":
        return hdf5(folder / "a.h5", arrays)
    np.savez_compressed(folder / "a.npz", **arrays)
    return folder / "a.npz"


def check(source: Source) -> None:
    assert source.framework == "Chainer"
    assert source.conventions == {"correlation"}
    assert source.flatten == "chw"
    held = small()
    assert set(source.tensors) == set(NAMES.values())
    for theirs, ours in NAMES.items():
        wanted = held[theirs] if theirs != "dw/W" else held[theirs].transpose(1, 0, 2, 3).reshape(8, 1, 3, 3)
        assert np.array_equal(source.tensors[ours].array(), wanted), ours


@pytest.mark.parametrize("container", ["h5", "npz"])
def test_each_container_gives_the_links_arrays(container: str, tmp_path: Path) -> None:
    path = written(tmp_path, container, small())
    check(formats.read(path))
    check(formats.read(path, "chainer"))
    with sandbox.read(path) as source:
        check(source)


@pytest.mark.parametrize("container", ["h5", "npz"])
def test_of_a_snapshot_the_model_is_read_and_the_rest_is_named(container: str, tmp_path: Path) -> None:
    source = formats.read(written(tmp_path, container, snapshot()))
    check(source)
    assert source.notes == ["left out 3 arrays of the training's state"]


def test_dense_layers_alone_are_chainers_where_outputs_come_first(tmp_path: Path) -> None:
    arrays = {"l1/W": draw(6, 10), "l1/b": draw(6)}
    assert formats.read(written(tmp_path, "npz", arrays)).framework == "Chainer"
    other = formats.read(written(tmp_path, "npz", {"l1/W": draw(10, 6), "l1/b": draw(6)}))
    assert (other.framework, other.tensors["l1.weight"].shape) == ("NumPy", (6, 10))


def test_tensorpacks_names_are_not_chainers(tmp_path: Path) -> None:
    source = formats.read(written(tmp_path, "npz", {"conv0/W": draw(3, 3, 4, 6), "conv0/b": draw(6)}))
    assert source.framework != "Chainer"
    assert source.tensors["conv0.weight"].shape == (6, 4, 3, 3)


def test_another_hdf5_file_is_refused_as_before(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="none of Keras's"):
        formats.read(hdf5(tmp_path / "a.h5", {"x": draw(3)}))
    with pytest.raises(UnsupportedFormat, match="none of Chainer's"):
        formats.read(tmp_path / "a.h5", "chainer")


def test_a_network_of_ones_own_takes_its_weights(tmp_path: Path) -> None:
    twin = nn.Sequential(nn.Conv2d(3, 4, (3, 5)), nn.BatchNorm2d(4, eps=2e-5), nn.Conv2d(4, 8, 3, groups=4), nn.Flatten(), nn.Linear(48, 5))
    made = convert(written(tmp_path, "npz", small()), tmp_path / "a.safetensors", twin, example=(3, 6, 9), match=True)
    assert made.certificate.evidence
    assert torch.is_tensor(made.network.state_dict()["0.weight"])
    assert np.array_equal(made.network.state_dict()["0.weight"].numpy(), small()["conv/W"])


@pytest.mark.parametrize(
    ("first", "second"),
    [("l/W", "l.weight"), ("l.weight", "l/W"), ("l/gamma", "l/W"), ("updater/model:main/l/W", "updater/model:other/l/W")],
)
def test_two_arrays_of_one_name_are_refused(first: str, second: str, tmp_path: Path) -> None:
    path = written(tmp_path, "npz", {"bn/avg_mean": draw(4), first: draw(4, 4), second: draw(4, 4)})
    with pytest.raises(MalformedFile, match=f"arrays '{first}' and '{second}' are both"):
        formats.read(path, "chainer")
