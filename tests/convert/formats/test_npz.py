from __future__ import annotations

import io
import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds_npz
from scipy.signal import convolve

from convert.formats import npz
from convert.source import Part, Source, in_memory
from convert.steps import Flip
from weights import LimitExceeded, MalformedFile, UnsafeFormat


def network(seed: int = 0) -> list[Part]:
    """A convolution, a depthwise one, a BatchNorm and a dense layer that reads a map of 4x2x3."""
    draw = np.random.default_rng(seed)

    def tensors(**shapes: tuple[int, ...]) -> dict[str, Any]:
        return {leaf: in_memory(leaf, draw.uniform(0.1, 2, shape).astype("f4")) for leaf, shape in shapes.items()}

    return [
        Part("conv", "conv", tensors(weight=(4, 3, 3, 5), bias=(4,))),
        Part("bn", "norm", tensors(weight=(4,), bias=(4,), running_mean=(4,), running_var=(4,)), eps=1e-4),
        Part("dw", "depthwise", tensors(weight=(4, 1, 3, 3)), groups=4),
        Part("up", "transposed", tensors(weight=(4, 2, 2, 3), bias=(2,))),
        Part("fc", "linear", tensors(weight=(7, 24), bias=(7,)), grid=(4, 2, 3)),
    ]


def expected(parts: list[Part]) -> dict[str, np.ndarray]:
    return {f"{part.name}.{leaf}": stored.array() for part in parts for leaf, stored in part.leaves.items()}


def by_position(source: Source, parts: list[Part], convention: str) -> dict[str, np.ndarray]:
    """Walk through a list as the converter does."""
    assert source.layout is not None
    left = iter(source.tensors.values())
    found: dict[str, np.ndarray] = {}
    for part in parts:
        for leaf in source.layout.leaves[part.kind]:
            if leaf in part.leaves:
                stored = next(left)
                array = stored.then(*source.layout.steps(part.kind, leaf, stored.stored_shape)).array()
                flipped = convention == "convolution" and leaf == "weight" and array.ndim == 4
                found[f"{part.name}.{leaf}"] = Flip().do(array) if flipped else array
    assert next(left, None) is None
    return found


def same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(
        np.array_equal(array, wanted[name]) and array.dtype == wanted[name].dtype for name, array in found.items()
    )


@pytest.mark.parametrize("compressed", [True, False])
def test_lists_are_in_the_order_of_their_numbers(compressed: bool, tmp_path: Path) -> None:
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "list.npz", *(np.full((2, 3), number, "f4") for number in range(12)))
    source = npz.read(tmp_path / "list.npz")
    assert source.positional
    assert [int(stored.load()[0, 0]) for stored in source.tensors.values()] == list(range(12))
    assert source.layout is not None
    assert source.layout.convention == "unknown"


def test_a_batchnorm_in_a_list_is_beta_gamma_mean_and_inverse_deviation(tmp_path: Path) -> None:
    np.savez(tmp_path / "list.npz", *(np.full(5, value, "f4") for value in (1, 2, 3, 4)))
    source = npz.read(tmp_path / "list.npz")
    part = Part("bn", "norm", {leaf: in_memory(leaf, np.zeros(5)) for leaf in ("weight", "bias", "running_mean", "running_var")})
    found = by_position(source, [part], "correlation")
    assert {name: array[0] for name, array in found.items()} == pytest.approx(
        {"bn.bias": 1, "bn.weight": 2, "bn.running_mean": 3, "bn.running_var": 1 / 16 - 1e-4}
    )


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
def test_lasagnes_list_gives_every_bit_back(convention: str, tmp_path: Path) -> None:
    npz.write(network(), tmp_path / "list.npz", convention=convention, metadata={"naming": "lasagne"})
    with np.load(tmp_path / "list.npz") as file:
        assert file.files == [f"arr_{number}" for number in range(11)]
        assert file["arr_9"].shape == (24, 7)
        assert file["arr_5"].dtype == np.float64
        assert np.array_equal(file["arr_0"][:, :, ::-1, ::-1], network()[0].leaves["weight"].array()) == (convention == "convolution")
    assert same(by_position(npz.read(tmp_path / "list.npz"), network(), convention), expected(network()))


def test_a_variance_too_small_for_lasagnes_form_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = network()[1]
    small = Part("bn", "norm", {**part.leaves, "running_var": in_memory("v", np.array([1, 1e-3, 1e-10, 1e-20], "f4"))})
    with caplog.at_level(logging.WARNING, "convert"):
        npz.write([small], tmp_path / "list.npz", metadata={"naming": "lasagne"})
    assert "1 variances" in caplog.text
    found = by_position(npz.read(tmp_path / "list.npz"), [small], "correlation")["bn.running_var"]
    assert np.array_equal(found[:3], small.leaves["running_var"].array()[:3])
    assert abs(found[3]) < 1e-18


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
def test_named_files_give_every_bit_back_and_remember_the_convention(convention: Any, tmp_path: Path) -> None:
    npz.write(network(), tmp_path / "ours.npz", convention=convention, metadata={"sha256": "abc"})
    source = npz.read(tmp_path / "ours.npz")
    assert source.conventions == {convention}
    assert source.facts["sha256"] == "abc"
    assert same({name: stored.as_correlation().array() for name, stored in source.tensors.items()}, expected(network()))


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        npz.write(network(), tmp_path / name, metadata={"x": "y"})
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_names_of_nobodys_leave_the_convention_open(tmp_path: Path) -> None:
    np.savez(tmp_path / "some.npz", **{"conv1.weight": np.zeros((4, 3, 5, 5), "f4"), "conv1.bias": np.zeros(4, "f4")})
    source = npz.read(tmp_path / "some.npz")
    assert source.tensors["conv1.weight"].shape == (4, 3, 5, 5)
    assert source.conventions == {"unknown"}


def test_tensorflows_words_mean_its_order_of_axes(tmp_path: Path) -> None:
    kernel, dense = np.random.default_rng(0).standard_normal((3, 5, 2, 4)), np.zeros((6, 10), "f4")
    np.savez(
        tmp_path / "tf.npz", **{"a/kernel:0": kernel, "bn/gamma:0": np.ones(4), "bn/moving_variance:0": np.ones(4), "d/kernel:0": dense}
    )
    source = npz.read(tmp_path / "tf.npz")
    assert np.array_equal(source.tensors["a.weight"].array(), kernel.transpose(3, 2, 0, 1))
    assert source.tensors["d.weight"].shape == (10, 6)
    assert source.flatten == "hwc"
    assert source.conventions == {"correlation"}
    assert {"bn.weight", "bn.running_var"} <= source.tensors.keys()


def test_a_dict_of_layers_in_an_npy_is_read_without_running_it(tmp_path: Path) -> None:
    layers: Any = {"conv1_1": [np.zeros((3, 3, 3, 8), "f4"), np.ones(8, "f4")], "fc6": [np.zeros((20, 7), "f4"), np.zeros(7, "f4")]}
    np.save(tmp_path / "vgg.npy", layers, allow_pickle=True)
    source = npz.read(tmp_path / "vgg.npy")
    assert {name: stored.shape for name, stored in source.tensors.items()} == {
        "conv1_1.weight": (8, 3, 3, 3), "conv1_1.bias": (8,), "fc6.weight": (7, 20), "fc6.bias": (7,)
    }  # fmt: skip


def test_objects_that_could_run_code_are_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    objects: Any = {"arr_0": np.array([Evil()], object)}
    np.savez(tmp_path / "evil.npz", **objects)
    with pytest.raises(UnsafeFormat, match="mkdir"):
        npz.read(tmp_path / "evil.npz")
    assert not (tmp_path / "ran").exists()


def test_every_dialect_opens(tmp_path: Path) -> None:
    for file in seeds_npz.seeds(tmp_path):
        assert npz.sniff(file, file.read_bytes()[:4096])
        assert all(stored.array().shape == stored.shape for stored in npz.read(file).tensors.values())


def member(shape: tuple[int, ...], data: bytes) -> bytes:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return head.getvalue() + data


def archive(path: Path, content: bytes, method: int) -> Path:
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("arr_0.npy", content)
    return path


def test_a_shape_that_the_bytes_cannot_fill_is_refused(tmp_path: Path) -> None:
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with pytest.raises(MalformedFile, match="does not fill"):
            npz.read(archive(tmp_path / "huge.npz", member((2**40, 2), b"\0" * 16), method))


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    zeros = bytes(2**28)
    path = archive(tmp_path / "bomb.npz", member((2**26,), zeros), zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 2**20
    with pytest.raises(LimitExceeded, match="would unpack to"):
        npz.read(path)


def test_a_cut_file_says_so(tmp_path: Path) -> None:
    path = seeds_npz.seeds(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(MalformedFile, match="cut short"):
        npz.read(path)


def test_a_network_of_true_convolution_needs_the_flip(tmp_path: Path) -> None:
    """Lasagne's MNIST example in small: Conv2DLayer, dense. scipy.signal.convolve computes what Theano does."""
    import torch
    from torch.nn import functional as F

    draw = np.random.default_rng(0)
    kernel, bias = draw.standard_normal((6, 2, 5, 3)).astype("f4"), draw.standard_normal(6).astype("f4")
    dense, offset = draw.standard_normal((6 * 6 * 8, 4)).astype("f4"), draw.standard_normal(4).astype("f4")
    np.savez(tmp_path / "mnist.npz", kernel, bias, dense, offset)
    image = draw.standard_normal((2, 10, 10)).astype("f4")
    maps = np.stack([sum(convolve(image[i], kernel[o, i], "valid") for i in range(2)) + bias[o] for o in range(6)])
    wanted = np.maximum(maps, 0).reshape(-1) @ dense + offset
    part = [
        Part("c", "conv", {"weight": in_memory("", kernel), "bias": in_memory("", bias)}),
        Part("d", "linear", {"weight": in_memory("", dense.T), "bias": in_memory("", offset)}),
    ]
    errors = {}
    for convention in ("convolution", "correlation"):
        t = {
            name: torch.from_numpy(array.copy()) for name, array in by_position(npz.read(tmp_path / "mnist.npz"), part, convention).items()
        }
        hidden = F.conv2d(torch.from_numpy(image)[None], t["c.weight"], t["c.bias"]).relu().flatten(1)
        errors[convention] = abs((hidden @ t["d.weight"].T + t["d.bias"]).numpy()[0] - wanted).max() / abs(wanted).max()
    assert errors["convolution"] < 1e-5
    assert errors["correlation"] > 0.1


@pytest.mark.real
def test_real_files_open(real: Path) -> None:
    source = npz.read(real / "real" / "lasagne" / "cifar_resnet_n5.npz")
    assert len(source.tensors) == 157
    assert source.tensors["0"].stored_shape == (16, 3, 3, 3)
    assert source.tensors["156"].stored_shape == (10,)
    for file in sorted((real / "real" / "fixtures").glob("*.np[yz]")):
        assert npz.read(file).tensors, file
