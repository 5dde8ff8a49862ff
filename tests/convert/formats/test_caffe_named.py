"""Arrays by Caffe's names in files of NumPy's, against Caffe's own reader and a BatchNorm computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeds_caffe import Layer, v2

from convert import formats
from weights.errors import MalformedFile

Arrays = dict[str, np.ndarray]
FACTOR = np.array([999.982], "f4")


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).uniform(0.5, 2, shape).astype("f4")


def layers() -> list[Layer]:
    """A convolution without bias, its BatchNorm and Scale under MSRA's names, another pair under shicai's, a dense layer."""
    norm = [draw(6), draw(6, seed=1), FACTOR]
    return [
        Layer("conv1", "Convolution", ["data"], ["conv1"], [draw(6, 3, 5, 3)]),
        Layer("bn_conv1", "BatchNorm", ["conv1"], ["conv1"], norm),
        Layer("scale_conv1", "Scale", ["conv1"], ["conv1"], [draw(6, seed=2), draw(6, seed=3)], {"scale_param": {"bias_term": 1}}),
        Layer("conv2/dw", "Convolution", ["conv1"], ["conv2"], [draw(6, 1, 3, 3), draw(6, seed=4)], {"convolution_param": {"group": 6}}),
        Layer("conv2/dw/bn", "BatchNorm", ["conv2"], ["conv2"], [draw(6, seed=5), draw(6, seed=6), np.zeros(1, "f4")]),
        Layer("conv2/dw/scale", "Scale", ["conv2"], ["conv2"], [draw(6, seed=7), draw(6, seed=8)], {"scale_param": {"bias_term": 1}}),
        Layer("fc7", "InnerProduct", ["conv2"], ["fc7"], [draw(7, 6), draw(7)]),
    ]


def numbered(join: str) -> Arrays:
    return {f"{layer.name}{join}{place}": blob for layer in layers() for place, blob in enumerate(layer.blobs)}


def listed(blobs: list[np.ndarray]) -> np.ndarray:
    made = np.empty(len(blobs), object)
    made[:] = blobs
    return made


def worded() -> Arrays:
    def words(layer: Layer) -> tuple[str, ...]:
        return ("mean", "var", "factor") if layer.type == "BatchNorm" else ("w", "b")

    return {f"{layer.name}_{word}": blob for layer in layers() for word, blob in zip(words(layer), layer.blobs, strict=False)}


def saved(path: Path, arrays: Mapping[str, Any]) -> Path:
    np.savez(path, **arrays)
    return path


def expected(folder: Path) -> Arrays:
    """What Caffe's own reader makes of these layers."""
    (folder / "net.caffemodel").write_bytes(v2(layers()))
    return {name: stored.array() for name, stored in formats.read(folder / "net.caffemodel").tensors.items()}


WAYS: dict[str, Callable[[], Mapping[str, Any]]] = {
    "slashes": lambda: numbered("/"),
    "underscores": lambda: numbered("_"),
    "by the alphabet": lambda: dict(sorted(numbered("/").items())),
    "lists": lambda: {layer.name: listed(list(layer.blobs)) for layer in layers()},
    "words": worded,
}


@pytest.mark.parametrize("way", WAYS)
def test_blobs_are_those_that_caffes_own_reader_gives(way: str, tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "net.npz", WAYS[way]()))
    wanted = expected(tmp_path)
    assert source.tensors.keys() == wanted.keys()
    for name, stored in source.tensors.items():
        np.testing.assert_allclose(stored.array(), wanted[name], rtol=1e-6, err_msg=name)
    assert source.conventions == {"correlation"}


def test_a_dict_of_lists_in_tensorflows_order_of_axes(tmp_path: Path) -> None:
    turned = {4: (2, 3, 1, 0), 2: (1, 0)}
    tree = {layer.name: [blob.transpose(turned.get(blob.ndim, (0,))) for blob in layer.blobs] for layer in layers()}
    np.save(tmp_path / "net.npy", tree, allow_pickle=True)  # pyright: ignore[reportArgumentType]
    source = formats.read(tmp_path / "net.npy")
    for name, wanted in expected(tmp_path).items():
        np.testing.assert_allclose(source.tensors[name].array(), wanted, rtol=1e-6, err_msg=name)
    assert source.flatten == "hwc"


def test_a_batchnorm_is_the_sums_by_their_factor(tmp_path: Path) -> None:
    found = formats.read(saved(tmp_path / "net.npz", numbered("/"))).tensors
    np.testing.assert_allclose(found["bn_conv1.running_mean"].array(), draw(6) / FACTOR, rtol=1e-6)
    assert not found["conv2/dw/bn.running_var"].array().any()  # nothing was gathered, and Caffe multiplies with 0
    np.testing.assert_array_equal(found["bn_conv1.bias"].array(), draw(6, seed=3))


@pytest.mark.parametrize(
    ("blobs", "leaves"),
    [
        ([draw(4), draw(4), draw(4), draw(4)], ["weight", "bias", "running_mean", "running_var"]),
        ([draw(4), draw(4), np.ones(1, "f4"), draw(4), draw(4)], ["running_mean", "running_var", "weight", "bias"]),
        ([draw(4), draw(4), draw(4), draw(4), np.ones(1, "f4")], ["weight", "bias", "running_mean", "running_var"]),
        ([draw(4)], ["weight"]),
        ([draw(1, 1, 7, 4), draw(1, 1, 1, 7)], ["weight", "bias"]),
    ],
)
def test_forks_and_old_shapes(blobs: list[np.ndarray], leaves: list[str], tmp_path: Path) -> None:
    arrays = {f"x/{place}": blob for place, blob in enumerate(blobs)} | {"conv/0": draw(4, 3, 3, 3)}
    found = formats.read(saved(tmp_path / "net.npz", arrays)).tensors
    assert [name.removeprefix("x.") for name in found if name.startswith("x.")] == leaves
    assert len(found["x.bias"].shape if "bias" in leaves else (1,)) == 1


@pytest.mark.parametrize(
    "arrays",
    [
        {"conv1_1": draw(4, 3, 3, 3), "conv1_2": draw(4, 4, 3, 3)},
        {"block_0": draw(4, 3, 3, 3), "block_1": draw(4, 4, 3, 3)},
        {"a/0": draw(4), "a/1": draw(5)},
        {"a/0": draw(4, 3, 3, 3), "a/1": draw(4), "mean": draw(3), "rest": draw(3)},
        {"a_w": draw(4, 3, 3, 3), "a_weight": draw(4, 3, 3, 3)},
    ],
)
def test_names_that_only_look_like_blobs_stay_as_they_are(arrays: Arrays, tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "net.npz", arrays))
    assert source.tensors.keys() == arrays.keys() or "mean" in arrays
    assert source.framework == "NumPy"


def test_words_alone_leave_the_convention_open(tmp_path: Path) -> None:
    source = formats.read(saved(tmp_path / "net.npz", {"conv1_W": draw(4, 3, 3, 3), "conv1_b": draw(4)}))
    assert source.tensors.keys() == {"conv1.weight", "conv1.bias"}
    assert source.conventions == {"unknown"}


def test_a_factor_that_is_cut_off_is_an_error_of_ours(tmp_path: Path) -> None:
    path = saved(tmp_path / "net.npz", numbered("/"))
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(MalformedFile):
        formats.read(path)
