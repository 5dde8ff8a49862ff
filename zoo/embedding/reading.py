"""Reading embeddings back, in whichever format they were written."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from convert.formats import safetensors
from weights.documents import misread, read_json, reason, table
from weights.errors import ConvertError
from zoo.embedding.writing import COLUMNS, index_of
from zoo.images.parquet import pyarrow

ABOUT = "kernelzoo.embedding"
AGAIN = "Write it anew: zoo embed with restart=True"


class DamagedEmbeddings(ValueError):
    """A file holds no embeddings, or damaged ones."""


@dataclass(slots=True)
class Embeddings:
    """Vectors of images, in the order of their source.

    Attributes:
        keys: of the images.
        labels: None where an image has none.
        index: places in the source, int64 (N,); those of images without a row are missing.
        vectors: {tap: float32 (N, D)}.
        about: what they were computed with: model, tag, weights, preprocessing, source, and more; {} where nobody noted it.
        path: where they were read from.
    """

    keys: list[str]
    labels: list[str | None]
    index: np.ndarray
    vectors: dict[str, np.ndarray]
    about: dict[str, Any]
    path: Path

    def tap(self, name: str | None = None) -> str:
        """Return the name of the one tap, or check the one that is asked for.

        Raises:
            ValueError: there is no such tap, or there are several and none was named.
        """
        if name is None and len(self.vectors) == 1:
            return next(iter(self.vectors))
        if name is None or name not in self.vectors:
            asked = f"no {name!r} in it" if name is not None else "several, so say which with --at (at=…)"
            raise ValueError(f"{self.path} has the vectors of {', '.join(self.vectors)}: {asked}")
        return name


def as_embeddings(given: Embeddings | str | os.PathLike[str]) -> Embeddings:
    """Return embeddings as they are, and read those whose file is named; raises as `read`.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(given, Embeddings):
        return given
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"embeddings are what read() returns, or the file that embed() wrote, got {type(given).__name__}")
    return read(given)


def read(path: str | os.PathLike[str]) -> Embeddings:
    """Read what `embed` wrote.

    Args:
        path: a .parquet, .npy or .safetensors file, or the folder of parts that a Ray run wrote.

    Raises:
        FileNotFoundError: there is none, or a .npy's index is missing.
        DamagedEmbeddings: it holds no embeddings, or is damaged.
        ValueError: embeddings have no such ending.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; zoo embed DATA -o {path} writes it")
    reader = _parquet if path.is_dir() else {".parquet": _parquet, ".npy": _npy, ".safetensors": _safetensors}.get(path.suffix)
    if reader is None:
        raise ValueError(f"embeddings are a .parquet, .npy or .safetensors file or a folder of .parquet parts, got {path.name}")
    what = f"{path} holds no embeddings that can be read"
    try:
        with misread(what, AGAIN, DamagedEmbeddings, wraps=ConvertError):
            found = reader(path)
            _check(found)
            return found
    except (SyntaxError, TokenError) as error:  # of NumPy, which parses a header as Python
        raise DamagedEmbeddings(f"{what} ({reason(error)}). {AGAIN}.") from error


def _check(found: Embeddings) -> None:
    """See that the parts belong together, and are what the rest of the program takes them for."""
    table(found.about)
    rows = len(found.keys)
    index = np.asarray(found.index)
    if len(found.labels) != rows or index.shape != (rows,) or index.dtype.kind not in "iu":
        raise ValueError(f"{rows:,} keys, {len(found.labels):,} labels, and places of shape {index.shape}")
    if not all(isinstance(key, str) for key in found.keys) or not all(isinstance(label, str | None) for label in found.labels):
        raise TypeError("a key or a label is no text")
    for tap, vectors in found.vectors.items():
        if vectors.ndim != 2 or len(vectors) != rows or vectors.dtype.kind != "f":
            raise ValueError(f"the vectors of {tap!r} have shape {vectors.shape} and are {vectors.dtype}, for {rows:,} rows")


def _parquet(path: Path) -> Embeddings:
    pa = pyarrow(f"reading {path.name}")
    files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DamagedEmbeddings(f"{path} holds no part-*.parquet")
    try:
        return _of_table(pa, path, pa.concat_tables([pa.parquet.ParquetFile(file).read() for file in files]))
    except (pa.ArrowException, OSError) as error:
        raise DamagedEmbeddings(f"{path} can't be read as Parquet: {reason(error)}. {AGAIN}.") from None


def _of_table(pa: Any, path: Path, table: Any) -> Embeddings:
    taps = [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]
    if not taps or not set(COLUMNS) <= set(table.schema.names):
        raise DamagedEmbeddings(
            f"{path} has the columns {', '.join(table.schema.names)}; embeddings have {', '.join(COLUMNS)} and one a tap"
        )
    vectors = {}
    for tap in taps:
        column = table.column(tap).combine_chunks()
        vectors[tap] = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    notes = (table.schema.metadata or {}).get(ABOUT.encode(), b"{}")
    index = table.column("index").to_numpy()
    about = read_json(notes, f"the note of {path}", AGAIN)
    return Embeddings(table.column("key").to_pylist(), table.column("label").to_pylist(), index, vectors, about, path)


def _npy(path: Path) -> Embeddings:
    beside = index_of(path)
    if not beside.is_file():
        raise FileNotFoundError(f"{beside} is not there; it names the rows of {path.name}, which zoo embed wrote beside it")
    lines = [read_json(line, beside, AGAIN) for line in beside.read_text(encoding="utf-8").split("\n") if line]
    about, rows = table(lines[0]["about"], {"at": list}), lines[1:]
    vectors = np.load(path, mmap_mode="r", allow_pickle=False)
    keys, labels, index = [row["key"] for row in rows], [row["label"] for row in rows], [row["index"] for row in rows]
    if vectors.ndim != 2 or len(vectors) != len(rows):
        raise DamagedEmbeddings(
            f"{path} has the shape {vectors.shape}, and {beside.name} names {len(rows)} rows; they don't belong together"
        )
    return Embeddings(keys, labels, np.array(index, np.int64), {about["at"][0]: vectors}, about, path)


def _safetensors(path: Path) -> Embeddings:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise DamagedEmbeddings(f"{path} is empty")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    notes = safetensors.metadata(buffer)
    tensors = {name: value.numpy() for name, value in safetensors.tensors(buffer).items()}
    if ABOUT not in notes:
        raise DamagedEmbeddings(f"{path} holds {', '.join(list(tensors)[:4]) or 'nothing'}, no embeddings that zoo embed wrote")
    about = table(read_json(notes[ABOUT], f"the note of {path}", AGAIN), {"at": list})
    classes = read_json(notes["kernelzoo.classes"], f"the classes of {path}", AGAIN)
    if not tensors:
        return Embeddings([], [], np.zeros(0, np.int64), {tap: np.zeros((0, 0), np.float32) for tap in about["at"]}, about, path)
    text, ends = tensors["key"].tobytes(), tensors["key.end"].tolist()
    keys = [text[start:end].decode("utf-8") for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    labels = [None if number < 0 else classes[number] for number in tensors["label"].tolist()]
    return Embeddings(keys, labels, tensors["index"], {tap: tensors[tap] for tap in about["at"]}, about, path)
