"""Whoever reads a safetensors file believes the same of its header: a file that one refuses, all refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from convert.formats import safetensors
from weights.errors import ConvertError, MalformedFile
from weights.fingerprint import fingerprint
from weights.finite import check_file
from weights.header import MAX_HEADER_BYTES, check_complete, entries, metadata

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
READERS: dict[str, Callable[[Path], object]] = {
    "download": lambda path: check_complete(path, "here"),
    "values": lambda path: check_file(path, "here"),
    "lock": lambda path: fingerprint(memoryview(path.read_bytes()), "here"),
    "network": lambda path: safetensors.tensors(path.read_bytes()),
    "conversion": lambda path: safetensors.read(path).close(),
}


def packed(header: Any, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        packed({"x": F32})[:30],
        packed({"x": F32})[:-1],
        packed({"x": F32}, bytes(9)),
        packed({"x": F32, "y": F32}),
        packed({"x": {**F32, "data_offsets": [1, 9]}}, bytes(9)),
        packed({"x": {**F32, "shape": [3]}}),
        packed({"x": {**F32, "dtype": "F33"}}),
        packed(b'{"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}, "x": {}}'),
        packed(b"[" * 400_000),
        packed(b" " * (MAX_HEADER_BYTES + 1)),
        packed({"x": {**F32, "data_offsets": [0, 10**4299]}}),
        packed({"x": {**F32, "shape": [0], "data_offsets": [10**4299] * 2}}),
        packed(b" " + json.dumps({"x": F32}).encode()),
        packed({"\ud800": F32}),
        packed({"__metadata__": {"by": "\udfff"}, "x": F32}),
    ],
    ids=[
        "empty",
        "half a header",
        "short",
        "long",
        "overlap",
        "hole",
        "shape",
        "dtype",
        "twice",
        "deep",
        "huge",
        "far",
        "far and empty",
        "blank",
        "no text",
        "no text in notes",
    ],
)
def test_a_file_that_one_reader_refuses_all_refuse(data: bytes, reader: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(data)
    with pytest.raises(ConvertError):
        READERS[reader](tmp_path / "w")


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_whole_all_take(reader: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(packed({"__metadata__": {"by": "me"}, "x": F32}))
    READERS[reader](tmp_path / "w")


def test_a_boolean_that_is_neither_is_refused_by_both_who_make_tensors(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(packed({"x": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\1\7"))
    with safetensors.read(tmp_path / "w") as source, pytest.raises(MalformedFile, match="other than 0 and 1"):
        source.tensors["x"].array()
    with pytest.raises(MalformedFile, match="other than 0 and 1"):
        safetensors.tensors((tmp_path / "w").read_bytes())


@pytest.mark.parametrize("reader", READERS)
def test_notes_that_are_null_are_none_as_for_safetensors_itself(reader: str, tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(packed({"__metadata__": None, "x": F32}))
    READERS[reader](tmp_path / "w")
    assert set(load((tmp_path / "w").read_bytes())) == {"x"}
    assert metadata((tmp_path / "w").read_bytes()) == {}


@pytest.mark.parametrize(
    "fields", [{}, {**F32, "dtype": "F33"}, {**F32, "shape": [-1]}, {**F32, "shape": [3]}, {**F32, "data_offsets": [2, 10]}]
)
def test_a_message_repeats_no_more_of_a_name_than_one_reads(fields: dict[str, Any]) -> None:
    with pytest.raises(ConvertError) as error:
        entries(packed({"x" * 100_000: fields}, bytes(10)))
    assert "xxx" in str(error.value)
    assert len(str(error.value)) < 500


def test_what_is_another_kind_of_file_comes_with_the_way_out(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(b"PK\3\4" * 100)
    with pytest.raises(ConvertError, match=r'here is no safetensors file: .*; for a \.pth, say format = "pytorch"\.$'):
        check_complete(tmp_path / "w", "here")
