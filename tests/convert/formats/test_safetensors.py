from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from convert.formats import safetensors
from weights import header
from weights.errors import LimitExceeded, MalformedFile, UnsupportedFormat

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def packed(header: Any, data: bytes = b"\0" * 8, length: int | None = None) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def every_dtype() -> dict[str, torch.Tensor]:
    made = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for _, name in header.DTYPES.values() if name != "float8_e8m0fnu"}
    return {
        **made,
        "float8_e8m0fnu": torch.tensor([1, 2, 4]).to(torch.float8_e8m0fnu),
        "scalar": torch.tensor(7.0),
        "empty": torch.zeros(0, 3),
    }


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def test_every_dtype_that_we_write_is_read_by_us_and_by_the_library(tmp_path: Path) -> None:
    tensors = every_dtype()
    safetensors.save(tensors, tmp_path / "x.safetensors", {"b": "2", "a": "é"})
    data = bytearray((tmp_path / "x.safetensors").read_bytes())
    assert {n: bits(t) for n, t in safetensors.tensors(data).items()} == {n: bits(t) for n, t in tensors.items()}
    assert header.metadata(data) == {"a": "é", "b": "2"}
    del tensors["float8_e8m0fnu"]  # the library writes it and cannot read it
    safetensors.save(tensors, tmp_path / "x.safetensors")
    theirs = load((tmp_path / "x.safetensors").read_bytes())
    assert {n: bits(t) for n, t in theirs.items()} == {n: bits(t) for n, t in tensors.items()}


def test_what_the_library_wrote_is_read() -> None:
    tensors = every_dtype()
    data = bytearray(save(tensors, {"k": "v"}))
    assert {n: bits(t) for n, t in safetensors.tensors(data).items()} == {n: bits(t) for n, t in tensors.items()}
    assert header.metadata(data) == {"k": "v"}
    assert header.is_safetensors(data)


def test_the_same_tensors_give_the_same_bytes(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(2), "a": torch.ones(3, dtype=torch.float16), "c": torch.ones(1, dtype=torch.int64)}
    notes = {str(i): str(i) for i in range(20)}
    safetensors.save(tensors, tmp_path / "1", notes)
    safetensors.save(dict(reversed(tensors.items())), tmp_path / "2", dict(reversed(notes.items())))
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_strided_tensors_are_written_by_value(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    safetensors.save({"x": tensor, "y": tensor[1:]}, tmp_path / "x")
    read = safetensors.tensors(bytearray((tmp_path / "x").read_bytes()))
    assert torch.equal(read["x"], tensor)
    assert torch.equal(read["y"], tensor[1:])


def test_what_safetensors_has_no_word_for_is_refused(tmp_path: Path) -> None:
    for tensor in (torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()):
        with pytest.raises(UnsupportedFormat, match="can't hold 'x'"):
            safetensors.save({"x": tensor}, tmp_path / "x")


def test_tensors_are_views_of_the_buffer() -> None:
    data = bytearray(save({"x": torch.zeros(4)}))
    tensor = safetensors.tensors(data)["x"]
    data[-16:] = torch.ones(4).numpy().tobytes()
    assert torch.equal(tensor, torch.ones(4))


def test_tensors_outlive_the_last_other_reference_to_a_map(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(save({"x": torch.full((1000,), 3.0)}))
    with (tmp_path / "x").open("rb") as file:
        tensor = safetensors.tensors(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))["x"]
    assert torch.equal(tensor, torch.full((1000,), 3.0))


def test_read_only_and_misaligned_buffers_are_copied() -> None:
    data = save({"x": torch.arange(4.0)})
    assert torch.equal(safetensors.tensors(data)["x"], torch.arange(4.0))
    shifted = packed({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, torch.arange(4.0).numpy().tobytes())
    for spaces in range(4):
        length = int.from_bytes(shifted[:8], "little")
        padded = bytearray((length + spaces).to_bytes(8, "little") + shifted[8 : 8 + length] + b" " * spaces + shifted[8 + length :])
        tensor = safetensors.tensors(padded)["x"]
        assert torch.equal(tensor, torch.arange(4.0))
        assert tensor.data_ptr() % 4 == 0


def test_a_file_of_no_tensors_is_empty() -> None:
    assert safetensors.tensors(packed({}, b"")) == {}


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (b"", MalformedFile, "no safetensors"),
        (packed({"x": F32})[:20], MalformedFile, "cut short"),
        (packed({"x": F32})[:-1], MalformedFile, "cut short"),
        (packed({"x": F32}, b"\0" * 9), MalformedFile, "goes on"),
        (packed({"x": F32}, length=2**63), LimitExceeded, "header of"),
        (packed(b"[1]"), MalformedFile, "not an object"),
        (packed(b'{"x": NaN}'), MalformedFile, "NaN"),
        (packed(b"{" + b"\xff" * 9 + b"}"), MalformedFile, "no JSON"),
        (packed(b'{"x":' * 100_000 + b"1" + b"}" * 100_000), LimitExceeded, "nested more than 64 deep"),  # Python 3.13 reads 9,993 deep
        (packed(b"[" * 400_000), LimitExceeded, "more than"),
        (packed(b'{"x":' + b"9" * 5000 + b"}"), MalformedFile, "no JSON"),
        (packed(b'{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": {}}'), MalformedFile, "'x' twice"),
        (packed({"__metadata__": {"a": 1}}, b""), MalformedFile, "strings"),
        (packed({"x": {"dtype": "F32", "shape": [2]}}), MalformedFile, "needs dtype"),
        (packed({"x": {**F32, "more": 1}}), MalformedFile, "needs dtype"),
        (packed({"x": {**F32, "dtype": "F33"}}), UnsupportedFormat, "F33"),
        (packed({"x": {**F32, "dtype": []}}), UnsupportedFormat, "dtype"),
        (packed({"x": {**F32, "shape": [-2]}}), MalformedFile, "naturals"),
        (packed({"x": {**F32, "shape": [2.0]}}), MalformedFile, "naturals"),
        (packed({"x": {**F32, "shape": [True, 2]}}), MalformedFile, "naturals"),
        (packed({"x": {**F32, "data_offsets": [0, 8, 8]}}), MalformedFile, "naturals"),
        (packed({"x": {**F32, "data_offsets": [8, 0]}}), MalformedFile, "does not fill"),
        (packed({"x": {**F32, "shape": [3]}}), MalformedFile, "does not fill"),
        (packed({"x": {**F32, "shape": [1] * 9}}), LimitExceeded, "dimensions"),
        (packed({"x": {**F32, "shape": [2**31, 0]}}), LimitExceeded, "dimensions"),
        (packed({"x": {**F32, "shape": [2**30, 2**30, 2**30]}}), MalformedFile, "does not fill"),
        (packed({"x": F32, "y": F32}), MalformedFile, "overlaps"),
        (packed({"x": F32, "y": {**F32, "data_offsets": [9, 17]}}, b"\0" * 17), MalformedFile, "hole"),
        (packed({"x": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]}}, b"\0\1\2\0\0\0\0\0"), MalformedFile, "boolean"),
    ],
)
def test_a_header_that_lies_is_refused(data: bytes, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        safetensors.tensors(bytearray(data))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damage_is_an_error_of_ours_or_harmless(draw: st.DataObject) -> None:
    data = bytearray(save({"a": torch.zeros(3), "b": torch.ones(2, 2, dtype=torch.bool)}))
    for _ in range(draw.draw(st.integers(1, 4))):
        data[draw.draw(st.integers(0, len(data) - 1))] = draw.draw(st.integers(0, 255))
    data = data[: draw.draw(st.integers(0, len(data)) | st.just(len(data)))]
    try:
        tensors = safetensors.tensors(data)
    except (MalformedFile, UnsupportedFormat):
        return
    assert sum(t.nbytes for t in tensors.values()) < len(data)
