"""Flax, Orbax's files and PyTorch's own layers are the oracles."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import seeds_flax
import torch
from test_npz import expected, network, same
from torch.nn import functional as F

from convert.formats import _msgpack, flax, npz
from convert.source import Part, in_memory
from convert.steps import FlattenOrder
from weights import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat


def read_back(path: Path, convention: Any = None) -> dict[str, np.ndarray]:
    return {name: stored.as_correlation(convention).array() for name, stored in flax.read(path).tensors.items()}


def test_every_bit_comes_back(tmp_path: Path) -> None:
    parts = [part for part in network() if part.kind != "transposed"]
    flax.write(parts, tmp_path / "net.msgpack", convention="correlation", metadata={})
    found = read_back(tmp_path / "net.msgpack")
    for part in parts:
        if part.kind == "linear" and part.grid is not None:  # adoption knows the map, a reader does not
            found[f"{part.name}.weight"] = FlattenOrder(*part.grid, "hwc").do(found[f"{part.name}.weight"])
    assert same(found, expected(parts))


def test_flipped_kernels_are_not_written_for_a_layer_that_correlates(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="Flax's Conv computes cross-correlation"):
        flax.write(network(), tmp_path / "net.msgpack", convention="convolution", metadata={})


def test_a_conv_transpose_is_always_of_true_convolution(tmp_path: Path) -> None:
    from dataclasses import replace

    part = replace(network()[3], name="ConvTranspose_0")
    flax.write([part], tmp_path / "net.msgpack", metadata={})
    source = flax.read(tmp_path / "net.msgpack")
    assert source.conventions == {"convolution"}
    assert same(read_back(tmp_path / "net.msgpack"), expected([part]))


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.msgpack", "b.msgpack"):
        flax.write(network(), tmp_path / name, metadata={"seen": name})
    assert (tmp_path / "a.msgpack").read_bytes() == (tmp_path / "b.msgpack").read_bytes()


@pytest.mark.reference
def test_what_is_written_is_what_flax_writes(tmp_path: Path) -> None:
    from flax import serialization

    tree = serialization.msgpack_restore(serialization.to_bytes(seeds_flax.tree()))
    (tmp_path / "theirs.msgpack").write_bytes(serialization.to_bytes(seeds_flax.tree()))
    (mine, *_) = seeds_flax.seeds(tmp_path)
    restored = serialization.msgpack_restore(mine.read_bytes())
    assert restored["params"]["ConvTranspose_0"]["kernel"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(restored["params"]["Conv_0"]["kernel"], tree["params"]["Conv_0"]["kernel"])
    theirs, ours = (flax.read(path).tensors for path in (tmp_path / "theirs.msgpack", mine))
    assert theirs.keys() == ours.keys()
    assert all(np.array_equal(stored.array(), ours[name].array()) for name, stored in theirs.items())


@pytest.mark.reference
def test_large_arrays_are_in_chunks_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flax import serialization

    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 40)
    monkeypatch.setattr(flax, "CHUNK_BYTES", 40)
    tree = {"params": {"Dense_0": {"kernel": np.arange(60, dtype="f4").reshape(12, 5)}}}
    (tmp_path / "theirs.msgpack").write_bytes(serialization.to_bytes(tree))
    assert b"__msgpack_chunked_array__" in (tmp_path / "theirs.msgpack").read_bytes()
    found = flax.read(tmp_path / "theirs.msgpack").tensors["Dense_0.weight"]
    assert np.array_equal(found.array(), tree["params"]["Dense_0"]["kernel"].T)
    from convert.source import Part

    flax.write([Part("Dense_0", "linear", {"weight": found})], tmp_path / "ours.msgpack", metadata={})
    assert (tmp_path / "ours.msgpack").read_bytes() == (tmp_path / "theirs.msgpack").read_bytes()


@pytest.mark.reference
@pytest.mark.parametrize("bound", [True, False])
def test_a_train_states_optimiser_is_left_out(bound: bool, tmp_path: Path) -> None:
    from flax import serialization

    tree = seeds_flax.tree()
    state = {"step": np.int32(3), "opt_state": {"0": {"mu": tree["params"], "count": np.int32(3)}}, **tree}
    path = tmp_path / "checkpoint_3"
    path.write_bytes(serialization.to_bytes({"target": state} if bound else state))
    source = flax.read(path)
    assert source.tensors.keys() == flax.read(seeds_flax.seeds(tmp_path)[0]).tensors.keys()
    assert source.tensors["BatchNorm_0.running_var"].shape == (4,)
    assert source.notes


def test_nnxs_values_and_collections_within_collections_are_seen_through(tmp_path: Path) -> None:
    kernel = np.random.default_rng(0).standard_normal((3, 3, 2, 4)).astype("f4")
    for name, key in (("a", "params/params/conv/kernel"), ("b", "params/conv/kernel/value"), ("c", "state/params/conv/kernel")):
        np.savez(tmp_path / f"{name}.npz", **{key: kernel, key.replace("kernel", "bias"): np.zeros(4, "f4")})
        tensors = npz.read(tmp_path / f"{name}.npz").tensors
        assert tensors.keys() == {"conv.weight", "conv.bias"}
        assert np.array_equal(tensors["conv.weight"].array(), kernel.transpose(3, 2, 0, 1))


def test_what_is_no_convolution_keeps_its_own_form_and_attention_loses_the_axis_of_its_heads() -> None:
    attention = "Transformer/MultiHeadDotProductAttention_0"
    shapes = {f"{attention}/query/kernel": (8, 2, 3), f"{attention}/query/bias": (2, 3), f"{attention}/out/kernel": (2, 3, 8)}
    shapes |= {"head/kernel": (8, 5), "pos_embedding": (1, 4, 8), "SelfAttention/kernel": (8, 2, 3)}
    from convert.source import Source

    source = Source(Path("x"), "npz", "NumPy", {name: in_memory(name, np.zeros(shape, "f4")) for name, shape in shapes.items()})
    assert flax.looks_like_flax(shapes)
    found = flax.canonical(source).tensors
    kept = attention.replace("/", ".")
    assert [found[f"{kept}.{name}"].shape for name in ("query.weight", "query.bias", "out.weight")] == [(6, 8), (6,), (8, 6)]
    assert found["SelfAttention.kernel"].shape == (8, 2, 3)
    assert found["head.weight"].shape == (5, 8)
    assert found["pos_embedding"].shape == (1, 4, 8)


@pytest.mark.parametrize(
    "names", [["conv.weight", "conv.bias"], ["a/kernel:0", "a/gamma"], ["a/kernel", "bn/moving_mean"], ["scale", "bias"]]
)
def test_others_names_are_not_taken_for_flaxs(names: list[str]) -> None:
    assert not flax.looks_like_flax(dict.fromkeys(names, (3, 3, 2, 4)))


def test_an_array_in_orbax_that_a_link_leads_to_is_refused(tmp_path: Path) -> None:
    folder = seeds_flax.orbax(tmp_path / "folders", one_store=False)
    (tmp_path / "secret").write_bytes(b"x" * 64)
    shutil.rmtree(folder / "params.Dense_0.kernel")
    (folder / "params.Dense_0.kernel").symlink_to(tmp_path)
    with pytest.raises(UnsafeFormat, match="link"):
        flax.read(folder)


def test_orbax_in_one_store_and_in_folders_is_the_same_tree(tmp_path: Path) -> None:
    *files, store, folders = seeds_flax.seeds(tmp_path)
    plain = flax.read(files[0]).tensors
    for folder in (store, folders):
        assert flax.sniff(folder, b"")
        tensors = flax.read(folder).tensors
        assert tensors.keys() == plain.keys()
        assert all(np.array_equal(stored.array(), plain[name].array()) for name, stored in tensors.items())


def test_an_array_without_its_bytes_cannot_ask_for_memory(tmp_path: Path) -> None:
    folder = seeds_flax.orbax(tmp_path / "folders", one_store=False)
    file = folder / "params.Dense_0.kernel" / ".zarray"
    file.write_text(file.read_text().replace("16", "160000000"))
    with pytest.raises(LimitExceeded):
        flax.read(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\xa6params" + b"\xdd\x7f\xff\xff\xff" * 40,  # arrays of two thousand million values in one another
        b"\x81\xa6params" + b"\x91" * 10_000 + b"\x00",
        b"\x81\xa6params\x81\xa6kernel\xc9\xff\xff\xff\xff\x01",
        b"\x81\xa6params\x81\xa6kernel" + _msgpack.header("ext", 17, 1) + _msgpack.pack([[2**40, 2**20], "float32", b""]),
        b"\x81\xa6params\x81\xa6kernel" + _msgpack.header("ext", 17, 1) + _msgpack.pack([[], "V8", b"12345678"]) + b"\0\0",
        b"\x81\xa1a\xa1b",
    ],
)
def test_hostile_msgpack_is_refused_in_no_time(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.msgpack").write_bytes(data)
    start = time.process_time()
    with pytest.raises(MalformedFile):
        flax.read(tmp_path / "bad.msgpack")
    assert time.process_time() - start < 20


def test_two_tensors_of_one_name_are_refused_when_written(tmp_path: Path) -> None:
    part = network()[0]
    with pytest.raises(ConvertError, match="two tensors"):
        flax.write([part, part], tmp_path / "x.msgpack", metadata={})


@pytest.mark.real
def test_the_fixtures_tell_a_transposed_kernels_flip(real: Path) -> None:
    with np.load(real / "real" / "fixtures" / "flaxct.npz") as file:
        x, y, y2, kernel = (file[name] for name in ("x", "y", "y2", "k"))
    found = flax._flaxtree.canonical({("ConvTranspose_0", "kernel"): in_memory("k", kernel)})["ConvTranspose_0.weight"]
    image = torch.from_numpy(x.transpose(0, 3, 1, 2).copy())

    def upscaled(weight: np.ndarray) -> np.ndarray:
        return F.conv_transpose2d(image, torch.from_numpy(weight.copy()), stride=2).numpy().transpose(0, 2, 3, 1)

    assert abs(upscaled(found.as_correlation().array()) - y).max() < 1e-5
    assert abs(upscaled(found.array()) - y).max() > 1
    assert y.shape == y2.shape


@pytest.mark.real
def test_the_fixtures_depthwise_kernel_computes_what_flax_does(real: Path) -> None:
    with np.load(real / "real" / "fixtures" / "flaxdw.npz") as file:
        x, y, kernel = (file[name] for name in ("x", "y", "k"))
    weight = flax._flaxtree.canonical({("Conv_0", "kernel"): in_memory("k", kernel)})["Conv_0.weight"].array()
    found = F.conv2d(torch.from_numpy(x.transpose(0, 3, 1, 2).copy()), torch.from_numpy(weight.copy()), groups=3)
    assert abs(found.numpy().transpose(0, 2, 3, 1) - y).max() < 1e-5


@pytest.mark.real
def test_the_fixtures_are_one_tree_in_three_containers(real: Path) -> None:
    sources = [flax.read(real / "real" / "fixtures" / name) for name in ("t.msgpack", "orbax_t", "orbax_zarr_t")]
    first = sources[0].tensors
    assert first["dw.weight"].shape == (4, 1, 3, 3)
    assert first["fc.weight"].shape == (5, 162)
    for source in sources[1:]:
        assert source.tensors.keys() == first.keys()
        assert all(np.array_equal(stored.array(), first[name].array()) for name, stored in source.tensors.items())


def test_a_dense_layer_behind_a_map_reads_it_height_first(tmp_path: Path) -> None:
    """The one in place (c, y, x) of PyTorch's order is in place (y, x, c) of Flax's."""
    weight = np.zeros((1, 24), np.float32)
    weight.reshape(1, 2, 3, 4)[0, 1, 2, 3] = 1
    weight.reshape(1, 2, 3, 4)[0, 1, 0, 1] = 2
    part = Part("dense", "linear", {"weight": in_memory("w", weight)}, grid=(2, 3, 4))
    flax.write([part], tmp_path / "net.msgpack", metadata={})
    stored = flax.read(tmp_path / "net.msgpack").tensors["dense.weight"]
    kernel = stored.load().reshape(3, 4, 2)
    assert (kernel[2, 3, 1], kernel[0, 1, 1], kernel.sum()) == (1, 2, 3)
