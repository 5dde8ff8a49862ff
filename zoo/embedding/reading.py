"""Reading embeddings back, in whichever format they were written."""

from __future__ import annotations

import json
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from convert.formats import safetensors
from zoo.embedding.writing import COLUMNS, index_of
from zoo.images.parquet import pyarrow

ABOUT = "kernelzoo.embedding"


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


def read(path: str | os.PathLike[str]) -> Embeddings:
    """Read what `embed` wrote.

    Args:
        path: a .parquet, .npy or .safetensors file, or the folder of parts that a Ray run wrote.

    Raises:
        FileNotFoundError: there is none, or a .npy's index is missing.
        ValueError: it holds no embeddings, or is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there; zoo embed DATA -o {path} writes it")
    if path.is_dir() or path.suffix == ".parquet":
        return _parquet(path)
    if path.suffix == ".npy":
        return _npy(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    raise ValueError(f"embeddings are a .parquet, .npy or .safetensors file or a folder of .parquet parts, got {path.name}")


def _parquet(path: Path) -> Embeddings:
    pa = pyarrow(f"reading {path.name}")
    files = sorted(path.glob("part-*.parquet")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no part-*.parquet")
    try:
        table = pa.concat_tables([pa.parquet.ParquetFile(file).read() for file in files])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} can't be read as Parquet: {str(error).splitlines()[0]}") from None
    taps = [field.name for field in table.schema if pa.types.is_fixed_size_list(field.type)]
    if not taps or not set(COLUMNS) <= set(table.schema.names):
        raise ValueError(f"{path} has the columns {', '.join(table.schema.names)}; embeddings have {', '.join(COLUMNS)} and one a tap")
    vectors = {}
    for tap in taps:
        column = table.column(tap).combine_chunks()
        vectors[tap] = column.flatten().to_numpy(zero_copy_only=False).reshape(len(table), column.type.list_size)
    notes = (table.schema.metadata or {}).get(ABOUT.encode(), b"{}")
    index = table.column("index").to_numpy()
    return Embeddings(table.column("key").to_pylist(), table.column("label").to_pylist(), index, vectors, json.loads(notes), path)


def _npy(path: Path) -> Embeddings:
    beside = index_of(path)
    if not beside.is_file():
        raise FileNotFoundError(f"{beside} is not there; it names the rows of {path.name}, which zoo embed wrote beside it")
    try:
        lines = [json.loads(line) for line in beside.read_text(encoding="utf-8").splitlines()]
        about, rows = lines[0]["about"], lines[1:]
        vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        keys, labels, index = [row["key"] for row in rows], [row["label"] for row in rows], [row["index"] for row in rows]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{path} and {beside.name} are no embeddings: {error}") from None
    if vectors.ndim != 2 or len(vectors) != len(rows):
        raise ValueError(f"{path} has the shape {vectors.shape}, and {beside.name} names {len(rows)} rows; they don't belong together")
    return Embeddings(keys, labels, np.array(index, np.int64), {about["at"][0]: vectors}, about, path)


def _safetensors(path: Path) -> Embeddings:
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    notes = safetensors.metadata(buffer)
    tensors = {name: value.numpy() for name, value in safetensors.tensors(buffer).items()}
    if ABOUT not in notes:
        raise ValueError(f"{path} holds {', '.join(list(tensors)[:4]) or 'nothing'}, no embeddings that zoo embed wrote")
    about, classes = json.loads(notes[ABOUT]), json.loads(notes["kernelzoo.classes"])
    if not tensors:
        return Embeddings([], [], np.zeros(0, np.int64), {tap: np.zeros((0, 0), np.float32) for tap in about["at"]}, about, path)
    text, ends = tensors["key"].tobytes(), tensors["key.end"].tolist()
    keys = [text[start:end].decode("utf-8") for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    labels = [None if number < 0 else classes[number] for number in tensors["label"].tolist()]
    return Embeddings(keys, labels, tensors["index"], {tap: tensors[tap] for tap in about["at"]}, about, path)
