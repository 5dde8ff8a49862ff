"""Torch7's files give what they hold, and OpenCV, which reads them by itself, computes what we say that they compute."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seeds_torch7 import Function, Longs, Nn, conv, draw, linear, norm, pool, saved, seeds, sequential, small_network
from torch import nn

from convert import execute, formats
from convert.source import Source
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsupportedFormat
from zoo.conversion.convert import convert


def computed(source: Source, images: np.ndarray) -> np.ndarray:
    assert source.graph is not None
    assert source.graph.unknown == []
    (value,) = execute.run(source, images).values()
    return value


def at_home(path: Path, images: np.ndarray) -> np.ndarray:
    cv2 = pytest.importorskip("cv2")
    net = cv2.dnn.readNetFromTorch(str(path), True, True)
    net.setInput(images)
    return net.forward()


def test_a_networks_tensors_are_named_as_pytorch_counts_its_modules(tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "a.t7", small_network()))
    assert (source.format, source.flatten) == ("torch7", "chw")
    shapes = {name: stored.shape for name, stored in source.tensors.items()}
    assert shapes["0.weight"] == (4, 3, 3, 5)
    assert shapes["4.weight"] == (5, 4, 3, 2)
    assert [name for name in shapes if name.startswith("1.")] == ["1.weight", "1.bias", "1.running_mean", "1.running_var"]
    assert "7.gradWeight" not in shapes
    assert source.tensors["0.weight"].convention == "correlation"
    assert np.array_equal(source.tensors["4.weight"].array(), draw(5, 24, seed=4).reshape(5, 4, 3, 2))


def test_a_network_computes_what_pytorchs_modules_do(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.t7", small_network())
    twin = nn.Sequential(
        nn.Conv2d(3, 4, (3, 5), padding=(1, 2)), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, (3, 2)),
        nn.Tanh(), nn.Flatten(), nn.Linear(30, 7),
    ).eval()  # fmt: skip
    source = formats.read(path)
    state = {name: torch.from_numpy(np.array(stored.array())) for name, stored in source.tensors.items()}
    assert twin.load_state_dict(state, strict=False).unexpected_keys == []
    images = draw(2, 3, 8, 8, seed=9)
    with torch.no_grad():
        expected = twin(torch.from_numpy(images)).numpy()
    assert np.abs(computed(source, images) - expected).max() < 1e-5


@pytest.mark.reference
@pytest.mark.parametrize(
    "modules",
    [
        (
            conv(3, 4, 3, 5, padH=1, padW=2), Nn("nn.ReLU"), conv(4, 5, 3, 2, flat=True), Nn("nn.Tanh"),
            Nn("nn.Reshape", {"size": Longs([245])}), linear(245, 7),
        ),
        (conv(3, 4, 3, 3, dH=2, dW=1), norm(4), Nn("nn.Sigmoid"), pool("Average", count_include_pad=True)),
        (conv(3, 4, 3, 3), pool(kH=3, kW=3, ceil_mode=True), Nn("nn.SpatialZeroPadding", {"pad_l": 1, "pad_r": 2, "pad_t": 0, "pad_b": 1})),
    ],
)  # fmt: skip
def test_opencv_computes_the_same(modules: tuple[Nn, ...], tmp_path: Path) -> None:
    path, images = saved(tmp_path / "a.t7", sequential(*modules)), draw(1, 3, 9, 8, seed=9)
    ours, theirs = computed(formats.read(path), images), at_home(path, images)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max() < 1e-4


def test_an_inverse_deviation_is_no_variance(tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "a.t7", sequential(conv(3, 4, 1, 1), norm(4, "running_std"))))
    held = np.abs(draw(4, seed=3)) + 0.5
    assert np.allclose(source.tensors["1.running_var"].array(), 1 / held.astype(np.float64) ** 2 - 1e-3, rtol=1e-5)


def test_branches_are_joined(tmp_path: Path) -> None:
    *_, path = seeds(tmp_path)
    source = formats.read(path)
    assert source.graph is not None
    assert [node.op for node in source.graph.nodes] == ["input", "conv", "conv", "add", "norm"]


def test_tables_keep_their_keys_and_views_their_numbers(tmp_path: Path) -> None:
    source = formats.read(seeds(tmp_path)[1])
    assert list(source.tensors) == ["state.conv.weight", "state.turned", "state.part"]
    assert np.array_equal(source.tensors["state.turned"].array(), draw(6, 4).T)
    assert np.array_equal(source.tensors["state.part"].array(), draw(6, 4)[2:])


def test_a_network_of_ones_own_takes_its_weights_and_is_proven(tmp_path: Path) -> None:
    twin = nn.Sequential(
        nn.Conv2d(3, 4, (3, 5), padding=(1, 2)), nn.BatchNorm2d(4, eps=1e-3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, (3, 2)),
        nn.Tanh(), nn.Flatten(), nn.Linear(30, 7),
    )  # fmt: skip
    made = convert(saved(tmp_path / "a.t7", small_network()), tmp_path / "a.safetensors", twin, example=(3, 8, 8))
    assert made.certificate.proven


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"\4\0\0\0\1\0\0\0\3\0\0\0V 1", MalformedFile),
        (struct.pack("<iiiiiqqq", 4, 1, 3, 0, 0, 1, 1, 1), ConvertError),
        (struct.pack("<iii", 3, 1, 2**30) + b"\1\0\0\0" * 9, ConvertError),
        (b"".join(struct.pack("<iii", 3, number, 1) for number in range(1, 400)), LimitExceeded),
    ],
)
def test_damage_is_an_error_of_ours(content: bytes, error: type[Exception], tmp_path: Path) -> None:
    (tmp_path / "a.t7").write_bytes(content)
    with pytest.raises(error):
        formats.read(tmp_path / "a.t7", "torch7")


def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.t7", {"w": draw(4, 4), "f": Function()})
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<qqqqq", 4, 4, 4, 1, 1))
    data[at : at + 8] = struct.pack("<q", 5)
    path.write_bytes(data)
    source: Any = formats.read(path)
    with pytest.raises(MalformedFile, match="needs 20 numbers of 16"):
        source.tensors["w"].array()


def replicas(*networks: Nn) -> Nn:
    return Nn("nn.DataParallelTable", {"modules": list(networks), "dimension": 1})


def test_of_equal_replicas_the_first_is_read(tmp_path: Path) -> None:
    images = draw(2, 3, 8, 8, seed=9)
    alone = formats.read(saved(tmp_path / "a.t7", sequential(replicas(small_network()), Nn("nn.Identity"))))
    twice = formats.read(saved(tmp_path / "b.t7", sequential(replicas(small_network(), small_network()), Nn("nn.Identity"))))
    assert twice.notes == ["of the 2 equal replicas of the DataParallelTable 0 the first was taken"]
    assert list(twice.tensors) == list(alone.tensors)
    wanted = computed(formats.read(saved(tmp_path / "c.t7", small_network())), images)
    assert np.array_equal(computed(alone, images), wanted)
    assert np.array_equal(computed(twice, images), wanted)


@pytest.mark.parametrize(
    ("other", "where"),
    [
        (sequential(conv(3, 4, 3, 3), norm(4, "running_std")), r"1\.running_std"),
        (sequential(conv(3, 4, 3, 3)), "the number of modules at the top"),
        (sequential(conv(3, 4, 3, 3), Nn("nn.ReLU")), "the module 1"),
        (sequential(conv(3, 4, 3, 3, dW=2), norm(4)), r"0\.dW"),
        (sequential(conv(3, 4, 3, 3, groups=2), norm(4)), r"0\.groups"),
    ],
)
def test_replicas_that_differ_are_refused_by_name(other: Nn, where: str, tmp_path: Path) -> None:
    first = sequential(conv(3, 4, 3, 3), norm(4))
    with pytest.raises(UnsupportedFormat, match=f"replicas 0 and 1 of the DataParallelTable at the top differ, in {where}"):
        formats.read(saved(tmp_path / "a.t7", replicas(first, other)))


@pytest.mark.parametrize(
    ("module", "factor"),
    [
        (Nn("nn.Dropout", {"p": 0.25, "v2": True}), 1.0),
        (Nn("nn.Dropout", {"p": 0.25, "v2": False}), 0.75),
        (Nn("nn.Dropout", {"p": 0.25}), 0.75),  # from before there was a second version
        (Nn("nn.SpatialDropout", {"p": 0.25}), 0.75),
    ],
)
def test_a_dropout_of_the_first_version_scales_in_evaluation(module: Nn, factor: float, tmp_path: Path) -> None:
    images = draw(2, 3, 5, 5, seed=9)
    plain = computed(formats.read(saved(tmp_path / "a.t7", sequential(conv(3, 4, 3, 3)))), images)
    dropped = computed(formats.read(saved(tmp_path / "b.t7", sequential(conv(3, 4, 3, 3), module))), images)
    assert np.array_equal(dropped, np.float32(factor) * plain)


@pytest.mark.parametrize("how", [{"v2": False}, {"p": 1.5}, {"p": 0.5, "v2": True, "stochasticInference": True}])
def test_a_dropout_that_cant_be_said_leaves_the_tensors_alone(how: dict[str, Any], tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "a.t7", sequential(conv(3, 4, 3, 3), Nn("nn.Dropout", how))))
    assert source.graph is None
    assert list(source.tensors) == ["0.weight", "0.bias"]
    assert any("what the network computes is not understood: the Dropout 1" in note for note in source.notes)
