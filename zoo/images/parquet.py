"""Parquet files that hold images' bytes, as Hugging Face's datasets write them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from weights.documents import MISREAD, read_json, reason
from zoo.images import files
from zoo.images.parquet_pages import Held, TooMuch, check_column, check_rows, groups, limits
from zoo.images.source import Source
from zoo.images.tar import short_names

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = ("image", "img", "jpg", "jpeg", "png", "webp", "bytes", "image_bytes", "content", "data")
"""Names of a column of images, the likeliest first; else the only one that can hold bytes."""
LABELS = ("label", "cls", "labels", "class", "fine_label", "target")
KEPT_GROUPS = 2
"""Row groups that a process keeps: neighbours are asked for one after the other."""


def pyarrow(what: str) -> Any:
    """Import pyarrow, or say how to get it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{what} needs pyarrow, which is not installed: pip install 'kernelzoo[embed]'") from None
    return pyarrow


class Parquet(Source):
    """Images of Parquet files, file after file and row after row.

    The column of images is binary, or a struct with `bytes` in it; a label that Hugging Face's metadata gives a name has that name.
    """

    def __init__(self, where: str, parts: list[str]) -> None:
        pyarrow(f"reading {where}")
        keys: list[str] = []
        labels: list[str | None] = []
        self._parts = parts
        self._groups: list[tuple[int, int, int, tuple[int, int]]] = []
        """Part, number in it, first row among all rows, and the place of the column of images, of every row group."""
        self._columns: list[str] = []
        for number, (part, name) in enumerate(zip(parts, short_names(parts), strict=True)):
            with files.opened(part) as file, _understood(part):
                read, column, told = _read_part(part, file)
            self._columns.append(column)
            row = 0
            for group, (rows, place) in enumerate(read):
                self._groups.append((number, group, len(keys) + row, place))
                row += rows
            keys += [f"{name}#{i}" for i in range(row)]
            labels += told if told is not None else [None] * row
        super().__init__(where, keys, labels, map(files.stamp, parts))
        self._fresh()

    def _fresh(self) -> None:
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_cache", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._fresh()

    def read(self, index: int) -> bytes:
        """Return the bytes of one row's image.

        Raises:
            FileNotFoundError: the row holds none.
        """
        from bisect import bisect_right

        group = bisect_right(self._groups, index, key=lambda entry: entry[2]) - 1
        with self._lock:
            if group not in self._cache:
                self._cache[group] = self._load(group)
                while len(self._cache) > KEPT_GROUPS:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(group)
            values = self._cache[group]
        with _understood(self._parts[self._groups[group][0]]):  # a dictionary may lack what its rows name
            value = values[index - self._groups[group][2]].as_py()
        if value is None:
            raise FileNotFoundError(f"{self._keys[index]} holds no bytes: write the data set with its images inside")
        return value

    def _load(self, group: int) -> pa.Array:
        part, number, _, place = self._groups[group]
        with files.opened(self._parts[part]) as file, _understood(self._parts[part]):
            column = _column(_open(file, [self._columns[part]]), number, place, self._columns[part], self._parts[part])
            return column.field("bytes") if hasattr(column, "field") and column.type.num_fields else column


@contextmanager
def _understood(part: str) -> Iterator[None]:
    """Say of a file that pyarrow can't read which it is."""
    import pyarrow as pa

    try:
        yield
    except (files.StoreFailed, TooMuch):
        raise
    except (pa.ArrowException, OSError, MemoryError, RuntimeError, *MISREAD) as error:
        said = reason(error)
        raise ValueError(said if part in said else f"{part} can't be read as Parquet: {said}; get it again") from None


def _open(file: Any, leaves: list[str]) -> tuple[Held, Any]:
    """Open a file without reading more than its footer; columns that hold bytes or text stay dictionaries."""
    from pyarrow import parquet

    held = Held(file)
    return held, parquet.ParquetFile(held, read_dictionary=leaves, **limits(file))  # pyright: ignore[reportArgumentType]


def _column(opened: tuple[Held, Any], group: int, place: tuple[int, int], leaf: str, part: str) -> pa.Array:
    """Read a column of a row group that takes no more room than the file explains, else TooMuch."""
    held, found = opened
    check_column(held, place, leaf, part)
    return found.read_row_group(group, columns=[leaf], use_threads=False).column(0).combine_chunks()


def _read_part(part: str, file: Any) -> tuple[list[tuple[int, tuple[int, int]]], str, list[str | None] | None]:
    """Return rows and place of each row group, the column that holds images' bytes, and the labels, None where there are none."""
    import pyarrow as pa

    held = Held(file)
    every = groups(held, part)
    check_rows(sum(one.rows for one in every), held.size, part)
    held, opened = _open(file, [])
    schema = opened.schema_arrow
    column = _images(schema, part)
    read = [(one.rows, one.columns[column]) for one in every]
    found = next((name for name in LABELS if name in schema.names), None)
    if found is None:
        return read, column, None
    names = _class_names(schema, found)
    text = pa.types.is_string(schema.field(found).type) or pa.types.is_large_string(schema.field(found).type)
    again = _open(file, [found] if text else [])
    labels: list[str | None] = []
    for group, one in enumerate(every):
        place = next((place for path, place in one.columns.items() if path == found or path.startswith(f"{found}.")), None)
        if place is None:
            raise ValueError(f"a row group has no column {found}")
        values = _column(again, group, place, found, part)
        if pa.types.is_dictionary(values.type):  # of which each text is made once
            texts = values.dictionary.to_pylist()
            labels += [None if i is None else texts[i] for i in values.indices.to_pylist()]
        else:
            named = (names[v] if names and isinstance(v, int) and 0 <= v < len(names) else v for v in values.to_pylist())
            labels += [None if value is None else str(value) for value in named]
    if len(labels) != sum(one.rows for one in every):
        raise ValueError(f"{len(labels)} labels for {sum(one.rows for one in every)} rows")
    return read, column, labels


def _images(schema: pa.Schema, part: str) -> str:
    """Name the column that holds images' bytes, or the field of a struct that does."""
    import pyarrow as pa

    def holds_bytes(kind: pa.DataType) -> bool:
        if pa.types.is_struct(kind):
            return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    able = [field.name for field in schema if holds_bytes(field.type)]
    column = next((name for name in IMAGES if name in able), able[0] if len(able) == 1 else None)
    if column is None:
        what = f"which of {', '.join(able)} holds images is not clear" if able else f"none of {', '.join(schema.names)} holds bytes"
        raise ValueError(f"{part}: {what}; call the column image, binary or a struct of bytes and path")
    return f"{column}.bytes" if pa.types.is_struct(schema.field(column).type) else column


def _class_names(schema: pa.Schema, column: str) -> list[str]:
    """Return the names that Hugging Face's metadata gives to a column of class numbers; [] where it has none."""
    try:
        told = read_json((schema.metadata or {})[b"huggingface"], "its notes")
        return [str(name) for name in told["info"]["features"][column]["names"]]
    except MISREAD:
        return []
