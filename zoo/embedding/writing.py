"""The finished file: parts in order, without what could not be used, as Parquet, .npy with an index, or safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from convert.formats import safetensors
from weights.whole import room, sync_file, sync_folder, write_whole
from zoo.embedding.parts import Part, Workplace
from zoo.embedding.plan import Plan
from zoo.embedding.report import Report, Skipped
from zoo.images import Source
from zoo.images.parquet import pyarrow

COLUMNS = ("key", "label", "index", "blake3")


@dataclass(slots=True)
class Block:
    """The rows of a part that the output has.

    Attributes:
        indices: in the source, int64 (n,).
        digests: uint8 (n, 32).
        vectors: {tap: float32 (n, D)}.
    """

    indices: np.ndarray
    digests: np.ndarray
    vectors: dict[str, np.ndarray]


def check_output(out: Path, plan: Plan) -> Path:
    """Return the output's path, or say before anything is computed why it can't be written.

    Raises:
        ValueError: no format has this suffix, .npy can't hold several taps, a tap's name is that of a column, pyarrow is missing, or
            the folder is.
    """
    if out.suffix not in WRITERS:
        raise ValueError(f"the output is a {', '.join(WRITERS)} file, got {out.name!r}")
    if out.suffix == ".npy" and len(plan.at) > 1:
        raise ValueError(f"a .npy file holds one tap's vectors, and {', '.join(plan.at)} are several; write .parquet or .safetensors")
    if taken := set(plan.at) & set(COLUMNS):
        raise ValueError(f"a column of the output is called {taken.pop()} already, so no tap can be")
    if out.suffix == ".parquet":
        pyarrow(f"writing {out.name}")
    if not out.absolute().parent.is_dir():
        raise ValueError(f"there is no folder {out.absolute().parent}; make it first")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it")
    return out


def index_of(out: Path) -> Path:
    """Return the file that names the rows of a .npy; its name is nobody else's, as that of a list of images might be."""
    return out.with_name(f"{out.name}.index.jsonl")


def finish(out: Path, source: Source, plan: Plan, place: Workplace, report: Report) -> None:
    """Merge the parts into the output and take the workplace away; the output appears whole."""
    keep = _keep(source, plan, place, report)
    report.rows = sum(len(rows) for rows in keep)
    first = Part.load(place.path(plan.parts()[0]))
    report.widths = {tap: first.vectors[tap].shape[1] for tap in plan.at}
    finished = place.folder / f"finished{out.suffix}"
    with room(out, finished, _needs(report)):
        WRITERS[out.suffix](out, place.folder, source, plan, report, lambda: _blocks(plan, place, keep))
        list_left_out(out, source, report)
        sync_file(finished)
        finished.replace(out)
        sync_folder(out.parent)  # before the parts go
    place.remove()


def _needs(report: Report) -> int:
    """Count the bytes of the vectors, which are nearly all of the output."""
    return 4 * report.rows * sum(report.widths.values())


def list_left_out(out: Path, source: Source, report: Report) -> None:
    """Write the images that have no row into a file beside the output, JSON lines; take an earlier one away where all have.

    What the source left out when it was opened comes last, without an index.
    """
    report.unreadable += [Skipped(one.key, None, one.why) for one in source.left_out]
    report.others = dict(source.others)
    listed = out.with_name(f"{out.name}.left-out.jsonl")
    entries = sorted([*report.unreadable, *report.copies], key=lambda entry: (entry.index is None, entry.index or 0))
    if entries:
        lines = ({"key": e.key, "index": e.index, **({"copy_of": e.copy_of} if e.copy_of is not None else {"why": e.why})} for e in entries)
        write_whole(listed, "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines), sync=True)
        report.listed = listed
    else:
        listed.unlink(missing_ok=True)


def _keep(source: Source, plan: Plan, place: Workplace, report: Report) -> list[np.ndarray]:
    """Choose the rows of each part, and note in the report what has none."""
    seen: dict[bytes, int] = {}
    keep: list[np.ndarray] = []
    for bounds in plan.parts():
        part = Part.load(place.path(bounds))
        report.unreadable += [Skipped(source[index].key, index, why) for index, why in part.problems.items()]
        rows = part.readable.numpy().copy()
        if plan.dedupe:
            for row in np.flatnonzero(rows):
                first = seen.setdefault(part.digests[row].numpy().tobytes(), bounds.start + int(row))
                if first != bounds.start + row:
                    rows[row] = False
                    report.copies.append(Skipped(source[bounds.start + int(row)].key, bounds.start + int(row), "", source[first].key))
        keep.append(np.flatnonzero(rows))
    return keep


def _blocks(plan: Plan, place: Workplace, keep: list[np.ndarray]) -> Iterator[Block]:
    for bounds, rows in zip(plan.parts(), keep, strict=True):
        part = Part.load(place.path(bounds))
        vectors = {tap: part.vectors[tap].numpy()[rows] for tap in plan.at}
        yield Block(rows.astype(np.int64) + bounds.start, part.digests.numpy()[rows], vectors)


def table(block: Block, source: Source, plan: Plan, notes: dict[str, str]) -> Any:
    """Return rows as an Arrow table: key, label, index, blake3, and a list of fixed length for every tap."""
    import pyarrow as pa

    items = [source[index] for index in block.indices.tolist()]
    arrays = [
        pa.array([item.key for item in items], pa.string()),
        pa.array([item.label for item in items], pa.string()),
        pa.array(block.indices, pa.int64()),
        pa.array([digest.tobytes().hex() for digest in block.digests], pa.string()),
    ]
    for tap in plan.at:
        values = np.ascontiguousarray(block.vectors[tap], np.float32)
        arrays.append(pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1), pa.float32()), values.shape[1]))
    named = zip([*COLUMNS, *plan.at], arrays, strict=True)
    return pa.Table.from_arrays(arrays, schema=pa.schema([pa.field(name, array.type) for name, array in named], metadata=notes))


def parquet_options() -> dict[str, Any]:
    """Return how Parquet is written, so that a new default of the library changes no file."""
    return {
        "version": "2.6",
        "data_page_version": "1.0",
        "compression": "zstd",
        "compression_level": 1,  # of float32 vectors level 3 makes files 5 % smaller and takes twice the time
        "use_dictionary": ["label"],
        "write_statistics": list(COLUMNS[:3]),
    }


def _parquet(out: Path, folder: Path, source: Source, plan: Plan, report: Report, blocks: Callable[[], Iterator[Block]]) -> None:
    from pyarrow import parquet

    del report
    writer = None
    unfinished = folder / f"finished{out.suffix}"
    try:
        for block in blocks():
            rows = table(block, source, plan, plan.notes())
            if writer is None:
                writer = parquet.ParquetWriter(unfinished, rows.schema, **parquet_options())
            if len(rows):
                writer.write_table(rows, row_group_size=len(rows))
    finally:
        if writer is not None:
            writer.close()


def _npy(out: Path, folder: Path, source: Source, plan: Plan, report: Report, blocks: Callable[[], Iterator[Block]]) -> None:
    (tap,) = plan.at
    _vectors(folder / f"finished{out.suffix}", tap, report, blocks)
    unfinished = folder / "finished.jsonl"
    with unfinished.open("w", encoding="utf-8") as file:
        file.write(json.dumps({"about": json.loads(plan.notes()["kernelzoo.embedding"])}) + "\n")
        for block in blocks():
            for index, digest in zip(block.indices.tolist(), block.digests, strict=True):
                item = source[index]
                row = {"key": item.key, "label": item.label, "index": index, "blake3": digest.tobytes().hex()}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
    sync_file(unfinished)
    unfinished.replace(index_of(out))


def _safetensors(out: Path, folder: Path, source: Source, plan: Plan, report: Report, blocks: Callable[[], Iterator[Block]]) -> None:
    tensors = {}
    for number, tap in enumerate(plan.at):
        if report.rows:
            tensors[tap] = torch.from_numpy(_vectors(folder / f"finished-{number}.npy", tap, report, blocks))
    every = list(blocks())
    indices = np.concatenate([block.indices for block in every])
    items = [source[index] for index in indices.tolist()]
    if report.rows:
        tensors["index"] = torch.from_numpy(indices)
        tensors["blake3"] = torch.from_numpy(np.concatenate([block.digests for block in every]))
        numbers = {label: number for number, label in enumerate(source.classes)}
        tensors["label"] = torch.tensor([-1 if item.label is None else numbers[item.label] for item in items], dtype=torch.int32)
        texts = [item.key.encode("utf-8", "surrogateescape") for item in items]
        tensors["key"] = torch.frombuffer(bytearray(b"".join(texts)), dtype=torch.uint8)
        tensors["key.end"] = torch.tensor(np.cumsum([len(text) for text in texts]), dtype=torch.int64)
    notes = {**plan.notes(), "kernelzoo.classes": json.dumps(source.classes)}
    safetensors.save(tensors, folder / f"finished{out.suffix}", notes)


def _vectors(path: Path, tap: str, report: Report, blocks: Callable[[], Iterator[Block]]) -> np.ndarray:
    """Write one tap's vectors without holding them all in memory; returns the file, mapped."""
    shape = (report.rows, report.widths[tap])
    if not report.rows:
        np.save(path, np.zeros(shape, np.float32))
        return np.load(path)
    whole = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
    _reserve(path)
    row = 0
    for block in blocks():
        values = block.vectors[tap]
        whole[row : row + len(values)] = values
        row += len(values)
    whole.flush()
    return whole


def _reserve(path: Path) -> None:
    """Take the room of a file that is mapped: a disk that fills up later would end the process by a signal."""
    if hasattr(os, "posix_fallocate"):
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


WRITERS: dict[str, Callable[[Path, Path, Source, Plan, Report, Callable[[], Iterator[Block]]], None]] = {
    ".parquet": _parquet,
    ".npy": _npy,
    ".safetensors": _safetensors,
}
