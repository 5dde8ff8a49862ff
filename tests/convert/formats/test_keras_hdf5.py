"""The HDF5 reader against HDF5's own library, and against what it must not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from convert.formats._hdf5 import Dataset, Group, Hdf5
from weights.errors import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat, UnsupportedFormat


def fill(file: h5py.File, draw: np.random.Generator) -> None:
    """Put everything into a file that weight files have, in every storage."""
    file["plain"] = draw.normal(size=(20, 7)).astype("f4")
    file["big_endian"] = np.arange(5, dtype=">f8")
    file["scalar"] = np.float64(3)
    file["empty"] = np.empty((0, 4), "f4")
    file["half"] = np.arange(4, dtype="f2")
    file["complex"] = np.array([1 + 2j])
    file["bools"] = np.array([True, False])
    file["strings"] = ["a", "", "bcd", "é"]
    file["fixed"] = np.array([b"ab", b"cde"])
    numbers = draw.integers(0, 9, (130, 77))
    file.create_dataset("packed", data=numbers, chunks=(32, 20), compression="gzip", shuffle=True, fletcher32=True)
    file.create_dataset("one_chunk", data=numbers, chunks=numbers.shape, compression="gzip")
    file.create_dataset("chunks", data=numbers, chunks=(32, 20))
    file.create_dataset("many_chunks", data=numbers.reshape(-1)[:3000], chunks=(2,))
    file.create_dataset("many_packed", data=numbers.reshape(-1)[:3000], chunks=(2,), compression="gzip")
    file.create_dataset("unwritten", shape=(4, 5), dtype="f4", fillvalue=7.5)
    file.create_dataset("partly", shape=(40, 5), dtype="f4", fillvalue=7.5, chunks=(4, 5))
    file["partly"][3:6] = 1
    for number in range(300):
        file.create_group(f"crowd/a_rather_long_name_{number:04}")
        file.require_group("many").attrs[f"attribute{number}"] = np.arange(number % 7 + 1)
    file["many"].attrs["text"] = "x" * 100_000
    file["many"].attrs["names"] = np.array([b"layer_%d" % number for number in range(300)])
    file["many"].attrs["nothing"] = h5py.Empty("f4")
    file["again"] = file["plain"]
    file["soft"] = h5py.SoftLink("/plain")


def plain(value: Any) -> Any:
    """Bring a value of h5py to what our reader gives."""
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.ndarray) and value.dtype.kind in "SO":
        return [item.decode() if isinstance(item, bytes) else item for item in value.reshape(-1)]
    return None if isinstance(value, h5py.Empty) else value


def compare(ours: Group, theirs: h5py.Group) -> int:
    assert sorted(ours) == sorted(theirs)
    assert set(ours.attrs) == set(theirs.attrs)
    for name, value in theirs.attrs.items():
        assert np.array_equal(ours.attrs[name], plain(value)) if value is not None else True
    seen = 0
    for name in theirs:
        child, other = ours[name], theirs[name]
        if isinstance(other, h5py.Group):
            seen += compare(child, other)
            continue
        assert isinstance(child, Dataset)
        seen += 1
        read = plain(other[()])
        found = child.value()
        if other.dtype.kind == "c":
            found = found["r"] + 1j * found["i"]
        assert np.array_equal(found, read), name
        assert child.shape == other.shape
    return seen


@pytest.mark.parametrize("version", ["earliest", "v110"])
@pytest.mark.parametrize("block", [0, 512, 2048])
def test_it_reads_what_the_library_writes(tmp_path: Path, version: str, block: int) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver=("earliest", "v108" if version == "earliest" else version), userblock_size=block) as file:
        fill(file, np.random.default_rng(0))
    with h5py.File(tmp_path / "a.h5") as file:
        assert compare(Hdf5(tmp_path / "a.h5").root, file) == 18


def test_a_contiguous_dataset_is_a_view_of_the_file(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.arange(1000.0)
    array = Hdf5(tmp_path / "a.h5").root["a"].load()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_nothing_outside_of_the_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(bytes(40))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["a"] = np.zeros(10, "f4")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["linked"] = h5py.ExternalLink("other.h5", "/a")
        file.create_dataset("elsewhere", (10,), "f4", external=[(str(tmp_path / "raw"), 0, 40)])
        layout = h5py.VirtualLayout((10,), "f4")
        layout[:] = h5py.VirtualSource(tmp_path / "other.h5", "a", (10,))
        file.create_virtual_dataset("virtual", layout)
    root = Hdf5(tmp_path / "a.h5").root
    for name in ("linked", "elsewhere", "virtual"):
        with pytest.raises(UnsafeFormat, match="never opened"):
            root[name].load()


def test_a_chunk_that_unpacks_to_more_than_it_says_is_refused(tmp_path: Path) -> None:
    import zlib

    with h5py.File(tmp_path / "a.h5", "w") as file:
        dataset = file.create_dataset("a", (10,), "u1", chunks=(10,), compression="gzip")
        dataset.id.write_direct_chunk((0,), zlib.compress(bytes(50_000_000)))
    with pytest.raises(LimitExceeded, match="decompresses to more"):
        Hdf5(tmp_path / "a.h5").root["a"].load()


def test_a_dataset_larger_than_the_file_can_hold_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", (2**40,), "f4", chunks=(1024,), compression="gzip")
    with pytest.raises(LimitExceeded, match="claims"):
        Hdf5(tmp_path / "a.h5").root["a"].load()


def test_a_group_may_contain_itself_and_a_link_may_not_lead_to_itself(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        group = file.create_group("a/b")
        group["c"] = file["a"]
        group["data"] = np.zeros(3)
        file["round"] = h5py.SoftLink("/round")
    root = Hdf5(tmp_path / "a.h5").root
    assert root["a/b/c/b/c/b/data"].shape == (3,)
    with pytest.raises(UnsafeFormat, match="more than 8"):
        root["round"]


def test_compression_by_a_plugin_is_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("a", data=np.zeros(100), chunks=(10,), compression="lzf")
    with pytest.raises(UnsupportedFormat, match="32000"):
        Hdf5(tmp_path / "a.h5").root["a"].load()


def test_bytes_that_are_cut_or_blank_are_an_error_that_says_where(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["a"] = np.arange(4000.0)
    whole = path.read_bytes()
    for keep in (0, 7, 8, 90, 500, len(whole) - 8):
        path.write_bytes(whole[:keep])
        with pytest.raises(ConvertError, match=r"a\.h5"):
            Hdf5(path).root["a"].load()
    path.write_bytes(whole[:96] + bytes(len(whole) - 96))
    with pytest.raises(MalformedFile, match="at"):
        Hdf5(path).root["a"].load()
