"""TensorFlow.js's models give what PyTorch computes of the same weights, and quantised shards what their scales say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from seeds_tfjs import draw, graph, layers, written
from torch import Tensor

from convert import execute, formats
from convert.source import Source
from weights.errors import MalformedFile, UnsafeFormat


def executed(source: Source, images: np.ndarray) -> np.ndarray:
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    return value


def kernel(held: np.ndarray) -> Tensor:
    return torch.from_numpy(held.transpose(3, 2, 0, 1).copy()).double()


def halved(x: np.ndarray) -> Tensor:
    """Pad eight pixels as SAME does for a stride of two."""
    return F.pad(torch.from_numpy(x).double(), (0, 1, 0, 1))


def test_a_graph_model(tmp_path: Path) -> None:
    topology, weights = graph()
    source, images = formats.read(written(tmp_path / "model.json", weights, topology, shards=3)), draw(2, 3, 8, 8, seed=7)
    x = F.conv2d(halved(images), kernel(weights["a/kernel"]), torch.from_numpy(weights["a/bias"]).double(), stride=2).relu()
    taps = torch.from_numpy(weights["dw/depthwise_kernel"].transpose(2, 3, 0, 1).copy()).double()
    x = F.conv2d(x, taps, padding=1, groups=4).mean((2, 3)) @ torch.from_numpy(weights["fc/kernel"]).double()
    assert np.abs(executed(source, images) - (x.numpy() + weights["fc/bias"])).max() < 1e-10
    assert list(source.tensors) == ["a.weight", "a.bias", "dw.weight", "fc.weight", "fc.bias"]
    assert (source.format, source.facts) == ("tfjs", {"kind": "graph model"})


@pytest.mark.parametrize("bits", [32, 16])
def test_a_layers_model(bits: int, tmp_path: Path) -> None:
    topology, weights = layers()
    source, images = formats.read(written(tmp_path / "model.json", weights, topology, bits=bits)), draw(2, 3, 8, 8, seed=7)
    if bits == 16:
        weights = {name: held.astype(np.float16).astype(np.float32) for name, held in weights.items()}
    held = {name: torch.from_numpy(array).double() for name, array in weights.items()}
    x = F.conv2d(halved(images), kernel(weights["stem/kernel"]), held["stem/bias"], stride=2).relu()
    x = F.batch_norm(x, held["bn/moving_mean"], held["bn/moving_variance"], held["bn/gamma"], held["bn/beta"], eps=1e-3)
    expected = (x.permute(0, 2, 3, 1).flatten(1) @ held["head/kernel"] + held["head/bias"]).softmax(1).numpy()
    assert np.abs(executed(source, images) - expected).max() < 1e-10
    norm = [f"bn.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")]
    assert list(source.tensors) == ["stem.weight", "stem.bias", *norm, "head.weight", "head.bias"]
    assert (source.flatten, source.framework) == ("hwc", "TensorFlow.js, Keras 2.4.0")


def test_weights_alone_and_in_eight_bits(tmp_path: Path) -> None:
    weights = {
        "conv1/depthwise_filter": draw(3, 3, 4, 2),
        "conv1/pointwise_filter": draw(1, 1, 8, 5),
        "conv1/bias": draw(5),
        "fc/weights": draw(5, 3),
    }
    source = formats.read(written(tmp_path / "manifest.json", weights, bits=8))
    assert {name: held.shape for name, held in source.tensors.items()} == {
        "conv1.depthwise.weight": (8, 1, 3, 3), "conv1.pointwise.weight": (5, 8, 1, 1), "conv1.pointwise.bias": (5,), "fc.weight": (3, 5),
    }  # fmt: skip
    for held, array in zip(source.tensors.values(), weights.values(), strict=True):
        assert np.abs(held.load() - array).max() <= np.ptp(array) / 255 * 0.501
        assert "dequantised from uint8" in held.origin
    assert np.abs(source.tensors["fc.weight"].array() - weights["fc/weights"].T).max() < 0.02


@pytest.mark.parametrize(
    ("place", "kind", "words"),
    [
        ("../a.bin", UnsafeFormat, "only files inside"),
        ("/a.bin", UnsafeFormat, "only files inside"),
        ("b.bin", MalformedFile, "is not there"),
        ("link.bin", UnsafeFormat, "a link"),
    ],
)
def test_shards_elsewhere_are_not_read(place: str, kind: type[Exception], words: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m.json", {"a/kernel": draw(4, 4)}, shards=1)
    (tmp_path / "link.bin").symlink_to(tmp_path / "m-shard1of1.bin")
    told = json.loads(path.read_text())
    told[0]["paths"] = [place]
    path.write_text(json.dumps(told))
    with pytest.raises(kind, match=words):
        formats.read(path)


def test_a_shard_that_is_cut_short_is_told(tmp_path: Path) -> None:
    path = written(tmp_path / "m.json", {"a/kernel": draw(4, 4)})
    (tmp_path / "m-shard2of2.bin").write_bytes(b"")
    with pytest.raises(MalformedFile, match="leads out of its shards, which have 32 bytes"):
        formats.read(path)


@pytest.mark.real
def test_the_weights_of_a_real_detector(real: Path) -> None:
    path = real / "real" / "tfjs" / "tiny_face_detector_model-weights_manifest.json"
    source = formats.read(path)
    told = {one["name"]: one for group in json.loads(path.read_text()) for one in group["weights"]}
    content = (path.parent / "tiny_face_detector_model-shard1").read_bytes()
    first = told["conv0/filters"]["quantization"]
    expected = np.frombuffer(content[:432], np.uint8).reshape(3, 3, 3, 16) * first["scale"] + first["min"]
    assert (source.tensors["conv0.weight"].array() == expected.astype(np.float32).transpose(3, 2, 0, 1)).all()
    assert sum(held.stored_shape != () for held in source.tensors.values()) == len(told)
