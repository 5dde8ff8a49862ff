"""The rows of Darknet's files: what the recipe writes, of networks that have as many numbers; and a row's file loads like any other's."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import weights
from convert.formats import _darknet_cfg as cfg
from recipes import registry_darknet
from weights import ConvertError, HashMismatch
from zoo import YoloFastest, trained
from zoo.catalogue import any_class
from zoo.detection import darknet
from zoo.detection.darknet_networks import Darknet
from zoo.labels import labels

ROWS = tomllib.loads(registry_darknet.written())
HEADER = np.array([0, 2, 5, 0, 0], "<i4").tobytes()
"""Of AlexeyAB's Darknet."""
SMALL = """[net]
width=8
height=8
channels=3
[convolutional]
filters=6
batch_normalize=1
[yolo]
mask=0
anchors=2,2
classes=1
num=1
"""


def test_the_file_is_what_the_recipe_writes() -> None:
    assert registry_darknet.FILE.read_text(encoding="utf-8") == registry_darknet.written()


@pytest.mark.parametrize("model", ROWS)
def test_a_rows_network_has_its_numbers_and_its_classes(model: str) -> None:
    cls, (table,) = any_class(model), ROWS[model].values()
    assert issubclass(cls, Darknet)
    sections = cfg.parse(cls.cfg)
    runs = [run for one in sections[1:] for run in cfg.takes(one, transposed=False, alexey=True, bias_in_norm=True)]
    header = 16 if model == "YOLOv2" else 20
    assert 4 * sum(int(np.prod(run.shape)) for run in runs) + header == table["size_bytes"]
    assert len(labels(table["labels"])) == table["num_classes"] == cls.usual_classes()
    assert weights.find(model).format == "darknet"


def numbers(count: int) -> bytes:
    """Write small numbers that no variance minds."""
    return HEADER + np.random.default_rng(0).uniform(0.01, 0.1, count).astype("<f4").tobytes()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.weights"
    path.write_bytes(numbers(346_062))
    return path


def register(folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give YoloFastest a row of this file in a registry of its own."""
    row = registry_darknet.row(next(one for one in registry_darknet.KNOWN if one.network is YoloFastest))
    row.table |= {"sources": [file.as_uri()], "sha256": hashlib.sha256(file.read_bytes()).hexdigest(), "size_bytes": file.stat().st_size}
    row.table |= {"metrics": {"map50": 1}}
    folder.mkdir(exist_ok=True)
    (folder / "mine.toml").write_text(registry_darknet.text(replace(row, tag="mine")))
    monkeypatch.setenv("ZOO_REGISTRY", str(folder))


def test_a_rows_file_is_hashed_kept_and_read_as_a_local_one(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = trained(YoloFastest, file)
    register(tmp_path / "registry", file, monkeypatch)
    model = trained("yolofastest:mine")
    assert model.checkpoint is not None
    assert (model.checkpoint.tag, model.checkpoint.format, model.checkpoint.labels) == ("mine", "darknet", "coco")
    assert model.checkpoint.options == {"batch_norm": "alexeyab"}  # as the file's header says
    assert model.checkpoint.preprocessing.letterbox
    assert all(torch.equal(tensor, local.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert trained(YoloFastest, file).checkpoint == model.checkpoint  # known bytes bring their record along
    file.unlink()
    assert trained(YoloFastest, "mine", num_classes=2).num_classes == 2  # of the cache


def test_other_bytes_and_a_file_that_is_cut_are_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path / "registry", file, monkeypatch)
    file.write_bytes(numbers(346_062)[:-4] + bytes(4))
    with pytest.raises(HashMismatch, match=r"mine\.weights"):
        trained(YoloFastest, "mine")
    file.write_bytes(numbers(346_000))
    register(tmp_path / "registry", file, monkeypatch)
    with pytest.raises(ConvertError, match=r"mine\.weights.*YoloFastest describes 346062"):
        trained(YoloFastest, "mine")


def test_a_file_is_read_by_its_address_of_a_network_of_ones_own_too(file: Path, tmp_path: Path) -> None:
    model = trained(YoloFastest, file.as_uri())
    assert model.checkpoint is not None
    assert (model.checkpoint.sources, model.checkpoint.labels) == ((file.as_uri(),), "coco")
    assert torch.equal(*(one.state_dict()["layers.0.conv.weight"] for one in (model, trained(YoloFastest, file))))
    (tmp_path / "small.cfg").write_text(SMALL)
    (tmp_path / "small.weights").write_bytes(numbers(4 * 6 + 6 * 3))
    own = darknet(tmp_path / "small.cfg")
    there, here = (trained(own, each) for each in ((tmp_path / "small.weights").as_uri(), tmp_path / "small.weights"))
    assert all(torch.equal(tensor, here.state_dict()[name]) for name, tensor in there.state_dict().items())
