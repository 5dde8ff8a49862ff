"""Small files and short names that ask for much: none takes more memory than twice its size and 200 MB, and the message says why."""

from __future__ import annotations

import io
import json
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from preloaded import python
from pyarrow import parquet

from zoo.images import files, open_source
from zoo.images.parquet_pages import Page, pages

READ = """
import json, sys
sys.path.insert(0, "tests/convert")
import pyarrow.parquet
from hostile import forget_peak, peak_bytes
from zoo.images import open_source
forget_peak()
before, outcome = peak_bytes(), "read"
try:
    source = open_source(sys.argv[1])
    for index in range(0, len(source), max(1, len(source) // 50)):
        source.read(index)
except OSError as error:
    outcome = "read"
except ValueError as error:
    outcome = str(error)
print(json.dumps([outcome, peak_bytes() - before]))
"""


def table(path: Path, columns: dict[str, Any], **how: Any) -> None:
    parquet.write_table(pa.table(columns), path, **{"compression": "zstd", **how})


def repeated(value: bytes | str, count: int) -> pa.ChunkedArray:
    some = pa.array([value] * min(count, 1000))
    return pa.chunked_array([some] * (count // len(some)))


def lying(path: Path) -> None:
    """Write a file whose page says that it is of 2 GB, and its footer that all is small."""
    table(path, {"image": pa.array([b"x" * 100] * 10)}, use_dictionary=False, compression="none", write_statistics=False)
    data = bytearray(path.read_bytes())
    size = next(page.size for page in pages(bytes(data[4:1100])))
    zigzag = _varint(2 * size)
    at = data.index(b"\x15" + zigzag + b"\x15" + zigzag)
    assert len(zigzag) == 2
    data[at + 1 : at + 3] = _varint(2 * (2**31 - 1))  # which moves all that follows, so that the footer's places are wrong too
    path.write_bytes(data)


def _varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found += bytes([number & 0x7F | 0x80])
        number >>= 7
    return found + bytes([number])


SOURCES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "plain": ("unpacks to more than", lambda p: table(p, {"image": repeated(bytes(1_000_000), 300)}, use_dictionary=False)),
    "one value many times": ("read", lambda p: table(p, {"image": repeated(bytes(1_000_000), 300)})),
    "prefixes": (
        "unpacks to more than",
        lambda p: table(p, {"image": repeated(bytes(1_000_000), 300)}, use_dictionary=False, column_encoding={"image": "DELTA_BYTE_ARRAY"}),
    ),
    "rows": (r"claims 3,000,000 rows", lambda p: table(p, {"image": repeated(b"", 3_000_000)})),
    "labels": (
        r"a label of 1,500,000 characters",
        lambda p: table(p, {"image": repeated(b"x", 200), "label": repeated("L" * 1_500_000, 200)}),
    ),
    "a page that lies": (r"damaged|can't be read", lying),
    "a footer that lies": (
        r"can't be read as Parquet",
        lambda p: p.write_bytes(b"PAR1" + b"\x15\x02\x19\xfc\xff\xff\x3d" + bytes(2000) + struct.pack("<I", 2007) + b"PAR1"),
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_memory_is_bounded_by_the_file(name: str, tmp_path: Path) -> None:
    wanted, write = SOURCES[name]
    write(tmp_path / "a.parquet")
    done = subprocess.run([*python(), "-c", READ, str(tmp_path / "a.parquet")], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    outcome, grown = json.loads(done.stdout)
    assert grown <= 2 * (tmp_path / "a.parquet").stat().st_size + 200 * 2**20
    with pytest.raises(AssertionError, match=wanted):
        raise AssertionError(outcome)


def test_a_list_takes_little_more_than_its_lines(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("".join(f"{number:x}\n" for number in range(800_000)))
    done = subprocess.run([*python(), "-c", READ, str(tmp_path / "a.lst")], capture_output=True, text=True, check=False, timeout=300)
    outcome, grown = json.loads(done.stdout)
    assert outcome == "read"
    assert grown <= 2 * (tmp_path / "a.lst").stat().st_size + 200 * 2**20


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_pages_are_those_that_were_written(codec: str, version: str) -> None:
    values = [bytes([number]) * (number % 50) for number in range(200)]
    written = io.BytesIO()
    how = {"use_dictionary": False, "compression": codec, "data_page_version": version, "data_page_size": 500, "write_batch_size": 10}
    parquet.write_table(pa.table({"image": values}), written, **how)
    column = parquet.ParquetFile(written).metadata.row_group(0).column(0)
    start = column.data_page_offset
    found = list(pages(written.getvalue()[start : start + column.total_compressed_size]))
    assert len(found) > 5
    assert sum(page.values for page in found) == 200
    assert {page.encoding for page in found} == {0}
    assert sum(page.size for page in found) <= column.total_uncompressed_size  # which counts the headers too
    assert sum(page.size for page in found) >= sum(4 + len(value) for value in values)


def test_pages_that_are_none_are_refused() -> None:
    good = b"\x15\x00\x15\x14\x15\x14\x2c\x15\x02\x15\x00\x00\x00" + bytes(10)
    assert list(pages(good)) == [Page(10, 1, 0)]
    for length in range(1, len(good)):
        with pytest.raises(ValueError, match="page"):
            list(pages(good[:length]))
    for data in (b"\x15\x00\x15\x13\x15\x14" + bytes(20), b"\x1c" * 100, b"\x19\xf1" + b"\xff" * 30, b"\x1f\x00"):
        with pytest.raises(ValueError, match="page"):
            list(pages(data))


@pytest.mark.parametrize(
    "name", ["{0..2999999}.tar", "{0..999}{0..999}.tar", "{0..999999999999999999}.tar", "{a,b}{0..99}{0..99}{0..99}.tar"]
)
def test_what_braces_stand_for_is_counted_before_it_is_written_out(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"stands for .* files, and at most 100,000 are taken: put the files in a folder"):
        open_source(tmp_path / name)


def test_braces_stand_for_what_they_did() -> None:
    assert files.expand("{00..02}-{a,b}.tar") == [f"0{n}-{letter}.tar" for n in range(3) for letter in "ab"]
    assert files.expand("{8..11}") == ["8", "9", "10", "11"]
    assert files.expand("{x}{") == ["{x}{"]
    assert files.expand("{a,}{3..1}.tar") == []


@pytest.mark.parametrize(
    "url",
    [
        "reference://x.json",
        "zip://a.png::file:///x.zip",
        "simplecache::memory://x",
        "memory://a::reference://b",
        "REFERENCE://x",
        "data://x",
    ],
)
def test_urls_of_other_schemes_are_refused_by_name(url: str, tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text(f"memory://{url}\n{url}\n")
    for where in (url, str(tmp_path / "a.lst")):
        with pytest.raises(ValueError, match=r"is not read: a URL of images begins with one of abfs://, .*, ssh://$"):
            open_source(where)


def test_what_opens_an_address_is_not_told(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("zip://ada:secret@host/x?token=secret\n")
    with pytest.raises(ValueError, match=r"a\.lst can't be used: zip://host/x\?token=… is not read") as refused:
        open_source(tmp_path / "a.lst")
    assert "secret" not in str(refused.value)
