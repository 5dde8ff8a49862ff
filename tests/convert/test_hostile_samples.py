"""Samples made by hand of every class that is known to have brought a reader down, each refused with its reason."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from convert import formats, sandbox
from convert.formats import matconvnet, npz, onnx, pytorch, safetensors
from convert.source import Part, in_memory
from weights import ConvertError, LimitExceeded, MalformedFile, UnsafeFormat

STATE = OrderedDict(a=torch.arange(6.0).reshape(2, 3), b=torch.ones(4))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def repacked(path: Path, content: dict[str, bytes], names: dict[str, str] | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in content.items():
            archive.writestr(zipfile.ZipInfo((names or {}).get(name, name)), data)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "x.pth")
    return tmp_path / "x.pth"


PICKLES: dict[str, tuple[bytes, type[Exception]]] = {
    "eval": (b"cbuiltins\neval\n(X\x04\x00\x00\x001+12tR.", UnsafeFormat),
    "python 2's names": (b"c__builtin__\nexec\n(X\x04\x00\x00\x00passtR.", UnsafeFormat),
    "a name from the stack": (b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93X\x04\x00\x00\x00true\x85R.", UnsafeFormat),
    "an instance": (b"(X\x04\x00\x00\x00trueios\nsystem\n.", UnsafeFormat),
    "torch's own loader": (b"ctorch.storage\n_load_from_bytes\n(C\x01xtR.", UnsafeFormat),
    "torch.load": (b"ctorch\nload\n(X\x01\x00\x00\x00xtR.", UnsafeFormat),
    "a dotted name": (b"\x8c\x05torch\x8c\x0bSize.__init\x93.", UnsafeFormat),
    "extension registry": (b"\x82\x01.", MalformedFile),
    "a bytearray of 2 GB": (b"}X\x01\x00\x00\x00xcbuiltins\nbytearray\nJ\x00\x94\x35\x77\x85Rs.", MalformedFile),
    "items set in a tensor": (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x06tQ"
        b"K\x00K\x06\x85K\x01\x85\x89NtR(X\x01\x00\x00\x00kK\x01u.",
        MalformedFile,
    ),
    "a state set in a tensor": (
        b"}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x70tQK\x00K\x06\x85K\x01\x85\x89NtR(K\x01K\x02tbs.",
        MalformedFile,
    ),
    "a storage of another type": (
        b"}X\x01\x00\x00\x00xctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nDoubleStorage\nX\x01\x00\x00\x000"
        b"X\x03\x00\x00\x00cpuK\x06tQK\x00K\x06\x85K\x01\x85\x89NtRs.",
        MalformedFile,
    ),
    "lists in one another": (b"]" * 5000 + b"a" * 4999 + b".", MalformedFile),
}


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused_and_nothing_is_built(name: str, saved: Path) -> None:
    code, error = PICKLES[name]
    content = {key: b"\x80\x04" + code if key.endswith("data.pkl") else data for key, data in members(saved).items()}
    begun = time.process_time()
    with pytest.raises(error, match=r"x\.pth"):
        pytorch.read(repacked(saved, content))
    assert time.process_time() - begun < 2


def test_sixty_doublings_cost_nothing(saved: Path) -> None:
    """2**60 leaves, in 60 lists of two: whoever walks them never comes back."""
    doubled = b"]q\x000" + b"".join(b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) + b"0" for n in range(60))
    content = members(saved)
    inner = next(key for key in content if key.endswith("data.pkl"))
    content[inner] = b"\x80\x02" + doubled + b"}X\x01\x00\x00\x00xh\x3cs."
    begun = time.process_time()
    with pytest.raises(MalformedFile, match="no tensors"):
        pytorch.read(repacked(saved, content))
    assert time.process_time() - begun < 1


def test_an_archive_that_says_two_things_is_refused(saved: Path) -> None:
    whole, content = saved.read_bytes(), members(saved)
    inner = next(key for key in content if key.endswith("data.pkl"))
    with pytest.raises(MalformedFile, match=r"2 data\.pkl"):
        pytorch.read(repacked(saved, {**content, "other/data.pkl": content[inner]}))
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(saved, "a") as archive:
        archive.writestr(zipfile.ZipInfo(inner), content[inner])
    with pytest.raises(MalformedFile, match="twice"):
        pytorch.read(saved)
    at = whole.rindex(b"PK\1\2", 0, whole.rindex(b"PK\5\6"))
    lied = bytearray(whole)
    lied[at + 42 : at + 46] = struct.pack("<I", 0)  # the last file is said to lie where the first does
    saved.write_bytes(lied)
    with pytest.raises(MalformedFile, match=r"over another|two names"):
        pytorch.read(saved)
    lied = bytearray(whole)
    lied[at + 20 : at + 28] = struct.pack("<II", 2**32 - 2, 2**32 - 2)
    saved.write_bytes(lied)
    with pytest.raises(LimitExceeded, match="unpack"):
        pytorch.read(saved)


@pytest.mark.parametrize("ratio", [10, 100, 250])
def test_a_bomb_of_any_ratio_is_refused_before_it_unpacks(ratio: int, tmp_path: Path) -> None:
    size = 2**20 * ratio
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        head = b"\x93NUMPY\1\0\x76\0" + f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size},), }}".encode().ljust(117) + b"\n"
        with archive.open("a.npy", "w") as file:
            file.write(head)
            for _ in range(ratio):
                file.write(bytes(2**20))
    if size < 200 * 2**20:  # what the limit leaves to small files
        assert npz.read(tmp_path / "bomb.npz").tensors["a"].shape == (size,)
        return
    with pytest.raises(LimitExceeded, match="unpack"):
        npz.read(tmp_path / "bomb.npz")


def test_members_over_one_another_unpack_to_no_more_than_the_limit(tmp_path: Path) -> None:
    """As 42.zip of 2019: a thousand names for the same bytes."""
    np.savez(tmp_path / "a.npz", a=np.zeros(2**18, "u1"))
    whole = (tmp_path / "a.npz").read_bytes()
    start, end = whole.index(b"PK\1\2"), whole.index(b"PK\5\6")
    entry = whole[start:end]
    entries = b"".join(entry[:46] + f"{n:05}".encode() + entry[51:] for n in range(1000))
    tail = whole[end : end + 8] + struct.pack("<HHIIH", 1000, 1000, len(entries), start, 0)
    (tmp_path / "a.npz").write_bytes(whole[:start] + entries + tail)
    with pytest.raises(ConvertError):
        npz.read(tmp_path / "a.npz")


PLACES = [
    "..", "../w.bin", "a/../../w.bin", "/etc/passwd", "//host/share/w.bin", "\\\\host\\share\\w.bin", "C:/w.bin", "file:///etc/passwd",
    "w.bin\0.txt", "link", "folder link/w.bin", "hard", "fifo", "folder", ".", "", "~/w.bin", "/dev/zero",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_external_data_is_a_plain_file_of_this_folder_alone(place: str, tmp_path: Path) -> None:
    import onnx as library
    from onnx import TensorProto, helper

    folder = tmp_path / "model"
    (folder / "folder").mkdir(parents=True)
    (tmp_path / "w.bin").write_bytes(bytes(4096))
    (folder / "link").symlink_to(tmp_path / "w.bin")
    (folder / "folder link").symlink_to(tmp_path)
    os.link(tmp_path / "w.bin", folder / "hard")
    os.mkfifo(folder / "fifo")
    held = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    held.external_data.add(key="location", value=place)
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [], [held])
    library.save_model(helper.make_model(graph), folder / "x.onnx")
    with pytest.raises((UnsafeFormat, MalformedFile), match=r"only|not there"):
        onnx.read(folder / "x.onnx")


@pytest.mark.parametrize(("offset", "length"), [("-1", "16"), ("0", "2000"), ("4090", "16"), ("x", "16"), (str(2**63), "16"), ("0", "-16")])
def test_external_data_that_lies_about_its_place_is_refused(offset: str, length: str, tmp_path: Path) -> None:
    import onnx as library
    from onnx import TensorProto, helper

    (tmp_path / "w.bin").write_bytes(bytes(4096))
    held = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "w.bin"), ("offset", offset), ("length", length)):
        held.external_data.add(key=key, value=value)
    graph = helper.make_graph([helper.make_node("Identity", ["w"], ["y"])], "g", [], [], [held])
    library.save_model(helper.make_model(graph), tmp_path / "x.onnx")
    with pytest.raises(MalformedFile, match=r"claims|has offset"):
        onnx.read(tmp_path / "x.onnx")


def nested(depth: int) -> bytes:
    """Graphs in one another, by hand: the library itself refuses to write so many."""
    graph = b""
    for _ in range(depth):
        attribute = b"\x0a\x01g\x32" + varint(len(graph)) + graph
        node = b"\x22\x02If\x2a" + varint(len(attribute)) + attribute
        graph = b"\x0a" + varint(len(node)) + node
    return b"\x08\x08\x3a" + varint(len(graph)) + graph


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def test_five_thousand_graphs_in_one_another_end_soon(tmp_path: Path) -> None:
    (tmp_path / "x.onnx").write_bytes(nested(5000))
    begun = time.process_time()
    with suppress(ConvertError):
        onnx.read(tmp_path / "x.onnx")
    assert time.process_time() - begun < 3


@pytest.mark.parametrize("code", [0, 8, 11, 16, 5000, 2**31 - 1, 2**32 - 1])
def test_a_type_code_that_matlab_has_not_is_refused(code: int, tmp_path: Path) -> None:
    """SciPy 1.17 dies of these: it takes the code for a place in a table."""
    savemat(tmp_path / "x.mat", {"w": np.arange(64.0).reshape(8, 8)})
    data = bytearray((tmp_path / "x.mat").read_bytes())
    at = data.index(np.arange(64.0).reshape(8, 8).tobytes(order="F")[:64]) - 8
    data[at : at + 4] = struct.pack("<I", code)
    (tmp_path / "x.mat").write_bytes(data)
    with pytest.raises(ConvertError, match=r"x\.mat"), matconvnet.read(tmp_path / "x.mat") as source:
        [tensor.array() for tensor in source.tensors.values()]


def test_dimensions_and_cells_beyond_all_files_are_refused(tmp_path: Path) -> None:
    savemat(tmp_path / "x.mat", {"w": np.zeros((3, 7))})
    data = (tmp_path / "x.mat").read_bytes()
    at = data.index(struct.pack("<ii", 3, 7))
    for rows, columns in ((2**31 - 1, 2**31 - 1), (-1, -21), (2**31 - 1, 1)):
        (tmp_path / "x.mat").write_bytes(data[:at] + struct.pack("<ii", rows, columns) + data[at + 8 :])
        with pytest.raises(ConvertError, match=r"x\.mat"), matconvnet.read(tmp_path / "x.mat") as source:
            [tensor.array() for tensor in source.tensors.values()]
    deep: object = np.zeros(2)
    for _ in range(300):
        cell = np.empty((1, 1), object)
        cell[0, 0] = deep
        deep = cell
    savemat(tmp_path / "deep.mat", {"layers": deep})
    with pytest.raises(ConvertError, match=r"deep\.mat"):
        matconvnet.read(tmp_path / "deep.mat")


NAMES = ["", "\0", "../../etc/passwd", "/etc/passwd", "a" * 1000, "e\u0301", "\u202eexe", "a\nb", "\x1b[2J", "CON", "a/b\\c", "\ud800"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_is_never_a_place(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from zoo.commands.app import main

    tensors = {name: torch.ones(2), "x.weight": torch.ones(3, 3)}
    torch.save(tensors, tmp_path / "x.pth")
    with sandbox.read(tmp_path / "x.pth") as source:
        assert set(source.tensors) == set(tensors)
        assert source.tensors[name].array().tolist() == [1, 1]
    assert main(["inspect", str(tmp_path / "x.pth"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b[2J" not in shown
    assert "\0" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["x.pth"]


def test_a_name_of_a_megabyte_is_refused(tmp_path: Path) -> None:
    torch.save({"a" * 2**20: torch.ones(2), "b": torch.ones(1)}, tmp_path / "x.pth")
    with pytest.raises(LimitExceeded, match="a name of 1048576"):
        pytorch.read(tmp_path / "x.pth")


def drawn(draw: random.Random) -> dict[str, np.ndarray]:
    """Draw a state dict: names, dtypes, shapes and values of all kinds, NaN and subnormal ones too."""
    made = {}
    for _ in range(draw.randrange(1, 12)):
        shape = tuple(draw.randrange(0 if draw.random() < 0.1 else 1, 6) for _ in range(draw.randrange(5)))
        dtype = np.dtype(draw.choice(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "?"]))
        count = int(np.prod(shape))
        raw = bytes(draw.randrange(2) for _ in range(count)) if dtype == np.bool_ else draw.randbytes(count * dtype.itemsize)
        leaf = draw.choice(("weight", "bias", "running_mean")) if len(shape) < 3 else "bias"  # an .npz of kernels leaves their layout open
        made[f"m{draw.randrange(10**6)}.{leaf}"] = np.frombuffer(raw, dtype).reshape(shape)
    return made


def as_parts(state: dict[str, np.ndarray]) -> list[Part]:
    return [Part(name.rpartition(".")[0], "linear", {name.rpartition(".")[2]: in_memory(name, array)}) for name, array in state.items()]


WRITERS: dict[str, Callable[[dict[str, np.ndarray], Path], None]] = {
    "safetensors": lambda state, path: safetensors.write(as_parts(state), path, metadata={}),
    "npz": lambda state, path: npz.write(as_parts(state), path, metadata={}),
    "pytorch": lambda state, path: pytorch.write(as_parts(state), path, metadata={}),
}


def round_trip(format: str, count: int, folder: Path) -> None:
    draw = random.Random(0)
    for _ in range(count):
        state = drawn(draw)
        for name in ("first", "second"):
            WRITERS[format](state, folder / name)
        first, second = (hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("first", "second"))
        assert first == second
        with formats.read(folder / "first", format) as source:
            assert set(source.tensors) == set(state)
            for name, array in state.items():
                found = source.tensors[name].array()
                assert (found.dtype, found.shape, found.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("format", WRITERS)
def test_random_state_dicts_come_back_bit_for_bit(format: str, tmp_path: Path) -> None:
    round_trip(format, 30, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("format", WRITERS)
def test_a_thousand_random_state_dicts_come_back_bit_for_bit(format: str, tmp_path: Path) -> None:
    round_trip(format, 1000, tmp_path)


def test_a_pickle_of_the_newest_protocol_reads_too(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "x.pth", pickle_protocol=pickle.HIGHEST_PROTOCOL)
    found = pytorch.read(tmp_path / "x.pth").tensors
    assert all(np.array_equal(found[name].load(), tensor.numpy()) for name, tensor in STATE.items())
