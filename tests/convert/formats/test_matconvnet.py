"""SciPy's reader and writer, and h5py's, are the oracles of the container; PyTorch's layers and plain sums of the network."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import seeds_matconvnet
from scipy.io import loadmat, savemat
from test_npz import expected, network, same

from convert.formats import _mat5, matconvnet
from convert.formats._mat import Matrix
from weights import ConvertError, LimitExceeded, MalformedFile


def arrays(path: Path) -> dict[str, np.ndarray]:
    return {name: stored.array() for name, stored in matconvnet.read(path).tensors.items()}


def test_every_dialect_opens_and_the_versions_agree(tmp_path: Path) -> None:
    files = {file.name: file for file in seeds_matconvnet.seeds(tmp_path)}
    assert all(matconvnet.sniff(file, file.read_bytes()[:4096]) for file in files.values())
    for plain, packed, hdf in (("v5_0.mat", "v7_0.mat", "hdf_simple.mat"), ("v5_1.mat", "v7_1.mat", "hdf_dag.mat")):
        first = arrays(files[plain])
        assert same(arrays(files[packed]), first)
        assert same(arrays(files[hdf]), first)
    assert arrays(files["v5_2.mat"]).keys() == arrays(files["v7_2.mat"]).keys() == {
        "fire2.weight", "fire2.bias", "conv1.weight", "conv1.bias"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["v5_0.mat", "hdf_simple.mat"])
def test_kernels_and_moments_are_brought_to_pytorchs_form(name: str, tmp_path: Path) -> None:
    seeds_matconvnet.seeds(tmp_path)
    conv, norm, _, old, _ = (layer for layer in seeds_matconvnet.simplenn()["layers"][0])
    source = matconvnet.read(tmp_path / name)
    tensors = source.tensors
    assert np.array_equal(tensors["c1.weight"].array(), conv["weights"][0, 0].transpose(3, 2, 0, 1))
    assert np.array_equal(tensors["c2.weight"].array(), old["filters"].transpose(3, 2, 0, 1))
    moments = norm["weights"][0, 2].astype(np.float64)
    assert np.array_equal(tensors["b1.running_mean"].array(), moments[:, 0])
    assert np.allclose(tensors["b1.running_var"].array(), moments[:, 1] ** 2 - 1e-4, rtol=1e-6)
    assert source.conventions == {"correlation"}
    assert source.preprocessing["mean"] == pytest.approx((122.8 / 255, 116.7 / 255))


@pytest.mark.parametrize("name", ["v5_0.mat", "v7_0.mat", "hdf_simple.mat"])
def test_simplenns_chain_says_pads_strides_and_groups(name: str, tmp_path: Path) -> None:
    seeds_matconvnet.seeds(tmp_path)
    graph = matconvnet.read(tmp_path / name).graph
    assert graph is not None
    nodes = {node.name: node for node in graph.nodes}
    assert nodes["c1"].attrs["pads"] == (1, 3, 2, 4)
    assert nodes["c1"].attrs["stride"] == (2, 1)
    assert nodes["c1"].attrs["layout"] == ("OIWH" if name.startswith("hdf") else "HWIO")
    assert nodes["b1"].attrs == {"eps": 1e-4, "moment": "std"}
    assert nodes["r1"].op == "leaky_relu"
    assert nodes["p1"].attrs["pads"] == (0, 0, 1, 1)
    assert nodes["p1"].attrs["count_pad"] == "none"
    assert graph.outputs == ("p1",)
    assert graph.unknown == []


@pytest.mark.parametrize("name", ["v5_1.mat", "hdf_dag.mat"])
def test_dagnns_layers_are_put_into_an_order(name: str, tmp_path: Path) -> None:
    seeds_matconvnet.seeds(tmp_path)
    source = matconvnet.read(tmp_path / name)
    assert source.graph is not None
    order = [node.name for node in source.graph.nodes]
    assert order.index("sum") > max(order.index("left"), order.index("right"))
    nodes = {node.name: node for node in source.graph.nodes}
    assert nodes["sum"].inputs == ("left", "right")
    assert nodes["norm"].attrs["eps"] == 1e-3
    assert source.graph.outputs == ("norm",)
    assert "right.bias" not in source.tensors
    deviation = next(p["value"] for p in seeds_matconvnet.dagnn()["params"][0] if p["name"] == "m")[:, 1]
    assert np.allclose(source.tensors["norm.running_var"].array(), deviation.astype("f8") ** 2 - 1e-3, rtol=1e-5)


@pytest.mark.parametrize("convention", ["correlation", "convolution"])
def test_every_bit_comes_back_and_the_convention_is_remembered(convention: Any, tmp_path: Path) -> None:
    matconvnet.write(network(), tmp_path / "ours.mat", convention=convention, metadata={"source-sha": "12"})
    source = matconvnet.read(tmp_path / "ours.mat")
    assert source.conventions == {convention}
    assert source.facts["source_sha"] == "12"
    assert same({name: stored.as_correlation().array() for name, stored in source.tensors.items()}, expected(network()))


def test_scipy_reads_what_is_written(tmp_path: Path) -> None:
    matconvnet.write(network(), tmp_path / "ours.mat", metadata={})
    layers = loadmat(tmp_path / "ours.mat", squeeze_me=False)["layers"][0]
    kernel = layers[0]["weights"][0, 0][0, 0]
    assert kernel.dtype == np.float32
    assert np.array_equal(kernel, network()[0].leaves["weight"].array().transpose(2, 3, 1, 0))
    assert str(layers[0]["type"][0, 0][0]) == "conv"
    moments = layers[1]["weights"][0, 0][0, 2]
    assert moments.dtype == np.float32
    assert np.allclose(moments[:, 1], np.sqrt(network()[1].leaves["running_var"].array() + 1e-4))
    assert layers[4]["weights"][0, 0][0, 0].shape == (2, 3, 4, 7)  # dense: a convolution over the whole map


def test_the_same_network_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.mat", "b.mat"):
        matconvnet.write(network(), tmp_path / name, metadata={"x": "y"})
    assert (tmp_path / "a.mat").read_bytes() == (tmp_path / "b.mat").read_bytes()


def test_moments_that_were_trained_on_outweigh_the_variance_beside_them(tmp_path: Path) -> None:
    matconvnet.write(network(), tmp_path / "ours.mat", metadata={})
    loaded = loadmat(tmp_path / "ours.mat")
    moments = loaded["layers"][0, 1]["weights"][0, 0][0, 2]
    moments[:, 1] = 3
    savemat(tmp_path / "later.mat", {"layers": loaded["layers"], "meta": loaded["meta"]})
    assert np.allclose(arrays(tmp_path / "later.mat")["bn.running_var"], 9 - 1e-4)


def test_what_matlab_has_no_type_for_is_refused(tmp_path: Path) -> None:
    from convert.source import Part, in_memory

    with pytest.raises(ConvertError, match="float32"):
        matconvnet.write([Part("c", "conv", {"weight": in_memory("w", np.zeros((1, 1, 1, 1), "f2"))})], tmp_path / "x.mat", metadata={})


def test_round_numbers_in_small_types_are_given_their_own_type_back(tmp_path: Path) -> None:
    data = io.BytesIO()
    _mat5.write(data, {"w": Matrix("w", (2, 2), np.dtype("u1"), lambda: np.array([[1, 2], [3, 4]], "u1"))})
    stored = bytearray(data.getvalue())
    stored[128 + 8 + 8] = 7  # single, kept as uint8
    found = _mat5.variables(memoryview(bytes(stored)))["w"]
    assert isinstance(found, Matrix)
    assert found.load().dtype == np.float32
    assert found.load().tolist() == [[1, 2], [3, 4]]


def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    packed = zlib.compress((14).to_bytes(4, "little") + (2**28).to_bytes(4, "little") + bytes(2**28))
    head = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
    (tmp_path / "bomb.mat").write_bytes(head + (15).to_bytes(4, "little") + len(packed).to_bytes(4, "little") + packed)
    with pytest.raises(LimitExceeded, match="unpack"):
        matconvnet.read(tmp_path / "bomb.mat")


def test_cells_that_the_bytes_cannot_hold_are_refused(tmp_path: Path) -> None:
    savemat(tmp_path / "cell.mat", {"layers": seeds_matconvnet.cell({"type": "relu"})})
    data = bytearray((tmp_path / "cell.mat").read_bytes())
    at = data.index(np.array([5, 8, 1, 1], "<i4").tobytes())
    data[at + 8 : at + 16] = np.array([2**30, 2**30], "<i4").tobytes()
    (tmp_path / "cell.mat").write_bytes(data)
    with pytest.raises(MalformedFile, match="announced"):
        matconvnet.read(tmp_path / "cell.mat")


@pytest.mark.real
def test_the_real_file_is_what_scipy_reads(real: Path) -> None:
    path = real / "real" / "matconvnet" / "avoroshilov_sqz_notop.mat"
    theirs = loadmat(path)
    source = matconvnet.read(path)
    assert len(source.tensors) == 50
    assert source.conventions == {"correlation"}
    for name, stored in source.tensors.items():
        module, leaf = name.rsplit(".", 1)
        kernel, bias = theirs[module][0]
        assert np.array_equal(stored.array(), kernel.transpose(3, 2, 0, 1) if leaf == "weight" else bias.reshape(-1))
