"""MXNet's symbols executed in float64 give what PyTorch computes of the same arrays, for MXNet itself is not to be had any more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from seeds_mxnet import Making, draw, params, small_network, statistics
from torch import Tensor

from convert import execute, formats
from convert.source import Source
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat


def executed(source: Source, images: np.ndarray) -> np.ndarray:
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    return value


def weight(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(draw(*shape, seed=seed)).double()


def normed(x: Tensor, width: int, eps: float, gamma: bool) -> Tensor:
    held = {name: torch.from_numpy(array).double() for name, array in statistics(width).items()}
    return F.batch_norm(x, held["moving_mean"], held["moving_var"], held["gamma"] if gamma else None, held["beta"], eps=eps)


@pytest.mark.parametrize(("key", "generation"), [("attrs", 2), ("attr", 1), ("param", 0)])
def test_a_network_of_every_generation(key: str, generation: int, tmp_path: Path) -> None:
    source = formats.read(small_network(key).written(tmp_path, "softmax", generation=generation))
    images = draw(2, 3, 8, 8, seed=7)
    x = torch.from_numpy(images).double()
    x = normed(F.conv2d(x, weight(4, 3, 3, 3), stride=2, padding=1), 4, 2e-5, gamma=True).relu()
    x = x + normed(F.conv2d(x, weight(4, 1, 3, 3), weight(4), padding=1, groups=4), 4, 1e-3, gamma=False)
    x = F.avg_pool2d(F.leaky_relu(x, 0.1), 2)
    expected = F.linear(x.flatten(1), weight(5, 16), weight(5)).softmax(1).numpy()
    assert np.abs(executed(source, images) - expected).max() < 1e-8
    assert (source.tensors["bn1.weight"].array() == 1).all()  # fix_gamma is MXNet's default
    assert "fixed: ones" in source.tensors["bn1.weight"].origin
    assert [name for name in source.tensors if name.startswith("bn0")] == [
        f"bn0.{leaf}" for leaf in ("weight", "bias", "running_mean", "running_var")
    ]
    assert source.facts == {"symbol": "net-symbol.json"}


def test_the_other_layers(tmp_path: Path) -> None:
    m = Making()
    a = m.node("_mul_scalar", "scaled", ("data",), scalar=0.5)
    a = m.layer("Deconvolution", "up", a, {"weight": draw(3, 4, 3, 3)}, kernel=(3, 3), stride=(2, 2), pad=(1, 1), adj=(1, 1), num_filter=4)
    b = m.node("Pooling", "pool", (a,), kernel=(3, 3), stride=(2, 2), pool_type="max", pooling_convention="full")
    c = m.node("Pooling", "mean", (a,), kernel=(3, 3), stride=(2, 2), pool_type="avg", pooling_convention="full")
    a = m.node("Concat", "both", (b, c), dim=1)
    a = m.node("SliceChannel", "halves", (m.node("clip", "clip", (a,), a_min=-1, a_max=1),), num_outputs=2, axis=1)
    a = m.node(
        "broadcast_mul",
        "gated",
        (
            m.node("UpSampling", "large", ("halves:1",), scale=2, sample_type="nearest"),
            m.node("Pooling", "all", (a,), global_pool=True, pool_type="avg", kernel=(1, 1)),
        ),
    )
    a = m.node("slice_axis", "cut", (m.node("LRN", "lrn", (a,), nsize=3),), axis=1, begin=1, end="None")
    a = m.layer("LeakyReLU", "prelu", a, {"gamma": draw(3)}, act_type="prelu")
    m.node("Flatten", "flat", (m.node("Dropout", "drop", (a,), p=0.5),))
    images = draw(2, 3, 8, 8, seed=7)
    x = F.conv_transpose2d(torch.from_numpy(images).double() / 2, weight(3, 4, 3, 3), stride=2, padding=1, output_padding=1)
    both = torch.cat([F.max_pool2d(x, 3, 2, ceil_mode=True), F.avg_pool2d(x, 3, 2, ceil_mode=True)], 1).clamp(-1, 1)
    first, second = both.chunk(2, 1)
    x = F.interpolate(second, scale_factor=2.0) * first.mean((2, 3), keepdim=True)
    x = F.local_response_norm(x, 3, 1e-4, 0.75, 2.0)[:, 1:]
    expected = F.prelu(x, weight(3)).flatten(1).numpy()
    assert np.abs(executed(formats.read(m.written(tmp_path, "flat")), images) - expected).max() < 1e-10


def test_arrays_without_a_symbol_have_the_names_of_their_layers_and_a_note(tmp_path: Path) -> None:
    arrays = {
        "features.0.weight": draw(4, 3, 3, 3),
        "arg:stage1_bn_gamma": draw(4),
        "aux:stage1_bn_running_var": draw(4),
        "odd": draw(2).astype(np.float16),
    }
    (tmp_path / "x.params").write_bytes(params(arrays))
    source = formats.read(tmp_path / "x.params")
    assert list(source.tensors) == ["features.0.weight", "stage1_bn.weight", "stage1_bn.running_var", "odd"]
    assert [held.convention for held in source.tensors.values()] == ["correlation", None, None, None]
    assert "fix_gamma" in source.notes[0]
    assert all(held.array().tobytes() == arrays[held.origin].tobytes() for held in source.tensors.values())


def test_what_cannot_be_said_keeps_its_place(tmp_path: Path) -> None:
    m = Making()
    m.node("L2Normalization", "unit", (m.layer("Convolution", "c", "data", {"weight": draw(4, 3, 1, 1)}, kernel=(1, 1), no_bias=True),))
    graph = formats.read(m.written(tmp_path, "unit")).graph
    assert graph is not None
    assert graph.unknown == ["L2Normalization"]


@pytest.mark.parametrize(
    ("place", "value", "kind", "words"),
    [
        (16, 2**40, LimitExceeded, "arrays; at most"),
        (28, 1, UnsupportedFormat, "is sparse"),
        (32, 99, LimitExceeded, "99 axes"),
        (36, 2**31, MalformedFile, "leads out of the file"),
        (76, 77, UnsupportedFormat, "kind 77"),
    ],
)
def test_damaged_lists_are_refused(place: int, value: int, kind: type[Exception], words: str, tmp_path: Path) -> None:
    data = bytearray(params({"a": draw(4, 3, 3, 3), "b": draw(2)}))
    width = 8 if value >= 2**32 or place == 36 else 4
    data[place : place + width] = value.to_bytes(width, "little")
    (tmp_path / "x.params").write_bytes(data)
    with pytest.raises(kind, match=words):
        formats.read(tmp_path / "x.params")


@pytest.mark.real
def test_the_real_lenet_is_that_of_onnx(real: Path) -> None:
    folder, images = real / "real" / "samplenet", np.random.default_rng(0).uniform(0, 1, (2, 3, 32, 32)).astype(np.float32)
    with formats.read(folder / "samplenet.onnx") as other, formats.read(folder / "samplenet-0000.params") as source:
        assert (executed(source, images) == executed(other, images)).all()
        assert [held.array().tobytes() for held in source.tensors.values()] == [held.array().tobytes() for held in other.tensors.values()]
