"""JLD2's files: states and lists in compounds with references, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest
import seeds_jld2 as made
import torch
from test_bson import mnist, tensors
from torch import Tensor
from torch.nn import functional as F

from convert.formats import jld2, read, sniff
from convert.formats._jld2write import checksum
from convert.source import Convention, Part, in_memory
from weights.errors import ConvertError, UnsupportedFormat


def lenet(t: Sequence[Tensor], x: Tensor) -> Tensor:
    for at in (0, 2):
        x = F.max_pool2d(F.relu(F.conv2d(x, t[at], t[at + 1])), 2)
    x = x.flatten(1)
    for at in (4, 6):
        x = F.relu(F.linear(x, t[at], t[at + 1]))
    return F.linear(x, t[8], t[9])


@pytest.mark.real
@pytest.mark.parametrize(("name", "right", "unflipped", "rows_first"), [("lenet2state", 97.81, 58.3, 14.5), ("lenet", 97.89, 43.7, 13.3)])
def test_lenets_accuracy_comes_out_flipped_and_with_columns_first(
    real: Path, name: str, right: float, unflipped: float, rows_first: float
) -> None:
    path = real / "real" / "jld2" / f"unkdeve_{name}.jld2"
    source = read(path)
    assert sniff(path) == "jld2"
    assert source.conventions == {"convolution"}
    assert source.spatial == "unknown"
    images, labels = mnist(real)

    def accuracy(convention: str, x: Tensor) -> float:
        with torch.no_grad():
            found = lenet(tensors(list(source.tensors.values()), convention), x).argmax(1).numpy()
        return 100 * float((found == labels[: len(x)]).mean())

    assert accuracy("convolution", images) == pytest.approx(right, abs=0.005)
    few = images[:5000]  # the first half is a little harder than the second
    assert accuracy("correlation", few) == pytest.approx(unflipped, abs=5)
    assert accuracy("convolution", few.transpose(2, 3)) == pytest.approx(rows_first, abs=5)


@pytest.mark.real
def test_every_real_file_gives_what_libhdf5_reads(real: Path) -> None:
    for path in sorted((real / "real" / "jld2").glob("*.jld2")):
        source = read(path)
        with h5py.File(path) as file:
            state = file[source.facts["entry"]]
            assert isinstance(state, h5py.Dataset)
            for name, stored in source.tensors.items():
                cell = state[()]
                for step in name.split("."):
                    cell = cell[step]
                assert np.array_equal(np.asarray(file[cell]), stored.load()), name
        assert len(source.tensors) in (4, 10)


def test_elided_layers_leave_gaps_and_cross_cor_is_told_by_its_missing_groups(tmp_path: Path) -> None:
    source = read(made.save({"model_state": made.state(), "acc": 0.5}, tmp_path / "a.jld2"))
    assert source.facts["acc"] == "0.5"
    assert list(source.tensors) == [
        *("layers.1.weight", "layers.1.bias", "layers.3.weight"),
        *("layers.4.weight", "layers.4.bias", "layers.4.running_mean", "layers.4.running_var"),
        *("layers.6.weight", "layers.6.bias"),
    ]
    assert source.tensors["layers.1.weight"].convention == "convolution"
    assert source.tensors["layers.3.weight"].convention == "correlation"
    assert source.tensors["layers.6.weight"].shape == (5, 16)


def test_without_any_groups_conv_of_old_and_cross_cor_look_alike(tmp_path: Path) -> None:
    layers = {"1": made.conv(made.floats(4, 3, 3, 3), groups=None)}
    source = read(made.save({"model": {"layers": layers}}, tmp_path / "a.jld2"))
    assert source.conventions == {"unknown"}
    assert any("Flux before 0.13" in note for note in source.notes)


def test_a_list_of_references_is_a_list_of_parameters(tmp_path: Path) -> None:
    arrays = [made.floats(4, 3, 3, 3), made.floats(4), made.floats(16, 5)]
    source = read(made.save({"params": arrays}, tmp_path / "a.jld2"))
    assert source.positional
    assert source.layout is not None
    assert source.layout.convention == "unknown"
    assert all(np.array_equal(source.tensors[str(i)].load(), array) for i, array in enumerate(arrays))


def test_deflated_arrays_are_unpacked(tmp_path: Path) -> None:
    wanted = np.arange(4096, dtype="f4").reshape(64, 64)
    with h5py.File(tmp_path / "a.jld2", "w", userblock_size=512, libver=("earliest", "v110")) as file:
        file.create_dataset("model/dense/weight", data=wanted, chunks=wanted.shape, compression="gzip")
    with (tmp_path / "a.jld2").open("r+b") as raw:
        raw.write(made.HEADER)
    source = read(tmp_path / "a.jld2")
    assert np.array_equal(source.tensors["dense.weight"].array(), wanted.T)


def test_links_to_other_files_are_not_followed(tmp_path: Path) -> None:
    made.save({"model": made.state()}, tmp_path / "b.jld2")
    with h5py.File(tmp_path / "a.jld2", "w", userblock_size=512, libver=("earliest", "v110")) as file:
        file["model"] = h5py.ExternalLink("b.jld2", "model")
    with (tmp_path / "a.jld2").open("r+b") as raw:
        raw.write(made.HEADER)
    source = read(tmp_path / "a.jld2")
    assert source.tensors == {}
    assert any("not followed" in note for note in source.notes)


@pytest.mark.parametrize("convention", ["convolution", "correlation"])
def test_written_files_come_back_bit_for_bit(tmp_path: Path, convention: Convention) -> None:
    parts = made.parts()
    jld2.write(parts, tmp_path / "a.jld2", convention=convention, metadata={"who": "a test"})
    source = read(tmp_path / "a.jld2")
    assert source.conventions == {convention}
    assert source.facts["who"] == "a test"
    assert source.spatial == "hw"
    wanted = {f"{part.name}.{leaf}": item for part in parts for leaf, item in part.leaves.items() if leaf != "num_batches_tracked"}
    assert set(source.tensors) == set(wanted)
    for name, item in wanted.items():
        got = source.tensors[name].as_correlation().array()
        assert got.dtype == item.dtype
        assert np.array_equal(got, item.array()), name


@pytest.mark.reference
def test_libhdf5_reads_what_is_written_checksums_and_all(tmp_path: Path) -> None:
    parts = made.parts()
    jld2.write(parts, tmp_path / "a.jld2", metadata={"who": "a test"})
    assert (tmp_path / "a.jld2").read_bytes().startswith(b"HDF5-based Julia Data Format, version 0.1.1\0")
    with h5py.File(tmp_path / "a.jld2") as file:
        group = file["model_state/layers/1/layers"]
        assert isinstance(group, h5py.Group)
        assert np.array_equal(np.asarray(group["1/weight"]), parts[0].leaves["weight"].array()[:, :, ::-1, ::-1])
        assert np.array_equal(np.asarray(group["2/μ"]), parts[1].leaves["running_mean"].array())
        assert np.asarray(group["3/groups"]) == 2
        assert np.array_equal(np.asarray(file["model_state/layers/2/layers/3/weight"]), parts[5].leaves["weight"].array().T)
        assert np.asarray(file["kernelzoo/who"]) == b"a test"


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "u1", "i2", "i4", "i8", "?"])
def test_every_dtype_comes_back_here_and_in_libhdf5(tmp_path: Path, dtype: str) -> None:
    wanted = np.arange(6).reshape(2, 3).astype(dtype)
    jld2.write([Part("layers.1", "other", {"values": in_memory("v", wanted)})], tmp_path / "a.jld2")
    got = read(tmp_path / "a.jld2").tensors["layers.1.values"].array()
    assert np.array_equal(got, wanted)
    with h5py.File(tmp_path / "a.jld2") as file:
        stored = file["model_state/layers/1/values"]
        assert isinstance(stored, h5py.Dataset)
        assert dtype == "?" or np.array_equal(stored[()], wanted)  # Julia's Bool is a bit field, which h5py does not convert


def test_the_same_modules_give_the_same_bytes(tmp_path: Path) -> None:
    parts = made.parts()
    for name in ("a.jld2", "b.jld2"):
        jld2.write(parts, tmp_path / name, metadata={"b": "2", "a": "1"})
    assert (tmp_path / "a.jld2").read_bytes() == (tmp_path / "b.jld2").read_bytes()


def test_a_dtype_that_julia_has_not_is_refused(tmp_path: Path) -> None:
    part = Part("layers.1", "linear", {"weight": in_memory("w", np.zeros((2, 2), "c8"))})
    with pytest.raises(UnsupportedFormat, match="cast it to float32"):
        jld2.write([part], tmp_path / "a.jld2")


def test_a_text_that_hdf5_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="longer than HDF5 can hold"):
        jld2.write([Part("l" * 70_000, "linear", {})], tmp_path / "a.jld2")


def test_the_checksum_is_lookup3s() -> None:
    # Bob Jenkins's own driver: hashlittle("Four score and seven years ago", 30, 0)
    assert checksum(b"Four score and seven years ago") == 0x17770551
    assert checksum(b"") == 0xDEADBEEF


@pytest.mark.parametrize("cut", [0, 100, 600, 2000, -40])
def test_a_cut_file_says_so(tmp_path: Path, cut: int) -> None:
    jld2.write(made.parts(), tmp_path / "a.jld2")
    (tmp_path / "a.jld2").write_bytes((tmp_path / "a.jld2").read_bytes()[:cut])
    with pytest.raises(ConvertError, match=r"a\.jld2"):
        read(tmp_path / "a.jld2", "jld2")
