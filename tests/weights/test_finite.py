"""NaN and infinity are found in every kind of number, at install, and nothing of the file stays."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hubserver import HubServer

import weights
from weights import Checkpoint
from weights.errors import MalformedFile, NonFinite
from weights.finite import CHUNK, MASKS, check_file, check_values
from weights.header import DTYPES

Make = Callable[..., Checkpoint]
# the largest finite number, infinity or what comes behind it, and NaN with the sign set, as bits
EDGES = {
    "F64": ("<u8", 0x7FEF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0xFFF8_0000_0000_0000),
    "F32": ("<u4", 0x7F7F_FFFF, 0x7F80_0000, 0xFFC0_0000),
    "C64": ("<u4", 0x7F7F_FFFF, 0x7F80_0000, 0xFFC0_0000),
    "F16": ("<u2", 0x7BFF, 0x7C00, 0xFE00),
    "BF16": ("<u2", 0x7F7F, 0x7F80, 0xFFC0),
    "F8_E5M2": ("u1", 0x7B, 0x7C, 0xFE),
    "F8_E4M3": ("u1", 0x7E, 0x7F, 0xFF),  # it has no infinity
    "F8_E8M0": ("u1", 0xFE, 0xFF, 0xFF),
}


def file(values: np.ndarray, dtype: str) -> bytes:
    count = values.nbytes // DTYPES[dtype][0]
    header = json.dumps({"w": {"dtype": dtype, "shape": [count], "data_offsets": [0, values.nbytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + values.tobytes()


def test_every_kind_of_number_that_can_be_infinite_is_known() -> None:
    assert EDGES.keys() == MASKS.keys()


@pytest.mark.parametrize("dtype", EDGES)
@pytest.mark.parametrize("at", [0, CHUNK, CHUNK + 6])
def test_one_value_anywhere_is_found_and_the_largest_number_is_one(tmp_path: Path, dtype: str, at: int) -> None:
    kind, largest, *others = EDGES[dtype]
    path = tmp_path / "w"
    values = np.full(CHUNK + 8, largest, kind)
    path.write_bytes(file(values, dtype))
    check_file(path, "here")
    for bits in others:
        values[at] = bits
        with pytest.raises(NonFinite, match="here: the tensor 'w'") as caught:
            check_values(values.data, dtype, "w", "here")
        assert caught.value.tensor == "w"
        path.write_bytes(file(values, dtype))
        with pytest.raises(NonFinite):
            check_file(path, "here")


def test_whole_numbers_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "w").write_bytes(file(np.full(9, -1, "<i4"), "I32"))
    check_file(tmp_path / "w", "here")


@pytest.mark.parametrize("offsets", [[0, 3], [-90, -80], ["0", "4"], [0]])
def test_a_header_that_describes_another_file_is_an_error_that_says_so(tmp_path: Path, offsets: list[object]) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    (tmp_path / "w").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(MalformedFile, match="here"):
        check_file(tmp_path / "w", "here")


@pytest.mark.parametrize("converted", [False, True])
def test_it_is_refused_at_install_and_nothing_stays(hub: HubServer, record: Make, own_cache: Path, converted: bool) -> None:
    data = file(np.array([1, np.nan], "<f4"), "F32")
    row = record(hub.file("w", data), format="pytorch" if converted else "safetensors")
    with pytest.raises(NonFinite, match="tensor 'w' holds NaN"):
        weights.get(row, to_safetensors=lambda source, made, row: made.write_bytes(source.read_bytes()) and None)
    assert not [path for name in ("blobs", "partial", "refs") for path in (own_cache / name).rglob("*") if path.is_file()]
