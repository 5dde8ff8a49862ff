"""Small files that ask for much: none takes more memory than twice its size and 200 MB, or more time than its bytes explain."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from preloaded import python

from convert.formats import npz

READ = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tests/convert")
from hostile import forget_peak, peak_bytes
from convert import formats
forget_peak()
before, outcome = peak_bytes(), "read"
try:
    for tensor in formats.read(Path(sys.argv[2]), sys.argv[1]).tensors.values():
        tensor.load().max(initial=0)
except ValueError as error:
    outcome = type(error).__name__
print(json.dumps([outcome, peak_bytes() - before]))
"""
MANY = 5_000_000


def zipped(method: int = zipfile.ZIP_STORED, **members: bytes) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "/").replace("_", "."), data)
    return file.getvalue()


def saved(pickled: bytes) -> bytes:
    """What torch.save would write of a pickle."""
    return zipped(a__data_pkl=b"\x80\x02" + pickled, a__version=b"3\n")


def mat(*sizes: int) -> bytes:
    """A MAT file of compressed variables of zeros."""

    def element(kind: int, data: bytes) -> bytes:
        return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)

    found = b"MATLAB 5.0 MAT-file".ljust(124) + b"\0\1IM"
    for number, size in enumerate(sizes):
        parts = element(6, struct.pack("<II", 6, 0)) + element(5, struct.pack("<ii", size, 1)) + element(1, b"v%d" % number)
        packed = zlib.compress(element(14, parts + element(9, bytes(8 * size))), 9)
        found += struct.pack("<II", 15, len(packed)) + packed
    return found


def numpy(size: int) -> bytes:
    head = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({size},), }}".ljust(117).encode()
    return b"\x93NUMPY\1\0\x76\0" + head + b"\n" + bytes(4 * size)


FILES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "lists": ("pytorch", lambda: saved(b"](" + b"]" * MANY + b"e.")),
    "sets": ("pytorch", lambda: saved(b"](" + b"\x8f" * MANY + b"e.")),
    "memorised": ("pytorch", lambda: saved(b"](" + b"N\x94" * (MANY // 2) + b"e.")),
    "names": ("pytorch", lambda: saved(b"}(" + b"".join(b"X\6\0\0\0%06dN" % number for number in range(MANY // 12)) + b"u.")),
    "lists alone": ("theano", lambda: b"\x80\2](" + b"]" * MANY + b"e."),
    "one variable": ("matconvnet", lambda: mat(24_000_000)),
    "variables": ("matconvnet", lambda: mat(*[3_000_000] * 8)),
    "within the limit": ("matconvnet", lambda: mat(3_000_000)),
    "packed": ("npz", lambda: zipped(zipfile.ZIP_DEFLATED, a_npy=numpy(48_000_000))),
}


@pytest.mark.parametrize("name", FILES)
def test_memory_is_bounded_by_the_file(name: str, tmp_path: Path) -> None:
    format, make = FILES[name]
    (tmp_path / "file").write_bytes(make())
    done = subprocess.run([*python(), "-c", READ, format, str(tmp_path / "file")], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome, grown = json.loads(done.stdout)
    assert outcome in ("read", "LimitExceeded", "MalformedFile")
    assert grown <= 2 * (tmp_path / "file").stat().st_size + 200 * 2**20


def test_an_archive_of_many_packed_members_is_read_in_time(tmp_path: Path) -> None:
    """Its directory was read for each of them: 6,000 took two minutes."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.arange(3, dtype=np.float32))
    with zipfile.ZipFile(tmp_path / "many.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(6000):
            archive.writestr(f"layer{number}.weight.npy", file.getvalue())
    begun = time.process_time()
    found = npz.read(tmp_path / "many.npz").tensors
    assert all(np.array_equal(found[f"layer{number}.weight"].load(), [0, 1, 2]) for number in range(0, 6000, 10))
    assert time.process_time() - begun < 20


def test_a_directory_is_counted_before_it_is_read(tmp_path: Path) -> None:
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", *[20, 3, 20, 0], *[0] * 4, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0) + b"a"
    size = 400_000 * len(entry)
    last = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, size, 4, 0)
    (tmp_path / "file").write_bytes(b"PK\3\4" + entry * 400_000 + last)
    done = subprocess.run([*python(), "-c", READ, "npz", str(tmp_path / "file")], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome, grown = json.loads(done.stdout)
    assert outcome == "LimitExceeded"
    assert grown < 60 * 2**20
