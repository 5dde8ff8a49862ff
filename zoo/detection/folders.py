"""Many photographs: `detect_folder` writes what is on each, and goes on where it was killed."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from weights.arguments import forgiving, whole
from weights.documents import json_file
from weights.errors import MalformedFile
from weights.progress import Show, show_of
from weights.whole import sync_folder, write_whole
from zoo.detection import coco
from zoo.detection.detections import Detections
from zoo.detection.detector import Detector
from zoo.detection.run import detect
from zoo.images import BadImage, Source, decode, open_source
from zoo.networks.fingerprint import state_digest

PART = 64
"""Photographs of a part at least: what a killed run computes again at most."""
RESULTS, IMAGES, WORKPLACE = "detections.json", "images.json", ".unfinished"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Written:
    """What a run wrote.

    Attributes:
        results: a file of COCO's results, a row a thing.
        images: a file with a row a photograph: its id, name, width and height, or why it was left out.
        photographs: how many were looked at.
        left_out: names of those that can't be used, with the reasons.
        things: how many were found.
        resumed: photographs that an earlier run had done.
    """

    results: Path
    images: Path
    photographs: int
    left_out: tuple[tuple[str, str], ...]
    things: int
    resumed: int


@forgiving
def detect_folder(
    model: Detector,
    data: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    threshold: float | None = None,
    overlap: float | None = None,
    *,
    batch_size: int = 8,
    restart: bool = False,
    progress: bool | Show = True,
) -> Written:
    """Find the things on every photograph of a folder, and write them in COCO's form.

    Finished parts are kept in the output's folder until all are there. The same call goes on with them after whatever ended the run, and
    writes the very bytes of a run that was not disturbed: batches are fixed ranges of the photographs.

    Args:
        model: a detector, as `trained` returns it, on any device.
        data: the photographs, as `zoo.images.open_source` takes them, or what it returns.
        out: a folder, which is made; `detections.json` and `images.json` are written there.
        threshold: as `detect` takes it.
        overlap: as `detect` takes it.
        batch_size: photographs that go through the network at once.
        restart: throw away what an earlier run finished.
        progress: whether a terminal sees a bar; or what shows the photographs instead, a `weights.progress.Show`.

    Raises:
        FileExistsError: the results are there already, or another process is writing them.
        ValueError: an argument or the source can't be used; or finished parts are those of another job.
        OSError: a file can't be written.

    Example:
        >>> detect_folder(trained(YoloFastest), "photos/", "found/").things  # doctest: +SKIP
    """
    batch_size = whole("batch_size", batch_size)
    source = data if isinstance(data, Source) else open_source(data)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    place = folder / WORKPLACE
    results, images = folder / RESULTS, folder / IMAGES
    for finished in (results, images):
        if finished.exists() and not restart and not place.is_dir():
            raise FileExistsError(f"{finished} is there already; restart=True computes it again, or name another folder")
    place.mkdir(exist_ok=True)
    lock = FileLock(place / "lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise FileExistsError(f"another process is writing into {folder}; wait for it, or name another folder") from None
    try:
        plan = _plan(model, source, threshold, overlap, batch_size)
        _settle(place, plan, restart)
        step = -(-PART // batch_size) * batch_size
        parts = [range(start, min(start + step, len(source))) for start in range(0, len(source), step)]
        todo = {file: part for number, part in enumerate(parts) if not (file := place / f"{number:06d}.json").exists()}
        resumed = len(source) - sum(map(len, todo.values()))
        with show_of(progress)("detecting", len(source), resumed) as advance:
            for file, part in todo.items():
                write_whole(file, json.dumps(_part(model, source, part, threshold, overlap, batch_size)), sync=True)
                advance(len(part))
        rows = [json_file(place / f"{number:06d}.json", "Delete it and call again: it is computed anew") for number in range(len(parts))]
        found = [row for part in rows for row in part["results"]]
        seen = [row for part in rows for row in part["images"]]
        write_whole(images, _lines(seen), sync=True)
        write_whole(results, _lines(found), sync=True)
        sync_folder(folder)
    finally:
        lock.release()
    shutil.rmtree(place)
    left_out = tuple((row["file_name"], row["left_out"]) for row in seen if "left_out" in row)
    return Written(results, images, len(seen) - len(left_out), left_out, len(found), resumed)


def _plan(model: Detector, source: Source, threshold: float | None, overlap: float | None, batch_size: int) -> dict[str, Any]:
    """Write down the facts that decide every number."""
    record = model.checkpoint
    parameter = next(model.parameters())
    return {
        "format": FORMAT,
        "model": type(model).__name__,
        "weights": state_digest(model),
        "preprocessing": None if record is None else repr(record.preprocessing),
        "image_size": repr(getattr(model, "image_size", None)),
        "source": source.where,
        "fingerprint": source.fingerprint,
        "threshold": model.threshold if threshold is None else float(threshold),
        "overlap": model.overlap if overlap is None else float(overlap),
        "batch_size": batch_size,
        "device": parameter.device.type,
        "dtype": str(parameter.dtype),
    }


def _settle(place: Path, plan: dict[str, Any], restart: bool) -> None:
    """Take up the parts that are there, if they are of this very job."""
    manifest = place / "job.json"
    old = None
    if manifest.exists() and not restart:
        try:
            old = json_file(manifest)
        except MalformedFile as error:
            raise ValueError(f"{error}; restart=True begins anew") from error
    if old is not None and old != plan:
        other = [name for name in plan if not isinstance(old, dict) or old.get(name) != plan[name]]
        raise ValueError(f"{place} has finished parts of another job: it differs in {', '.join(other)}; restart=True throws them away")
    if old is None:
        for file in place.glob("*.json"):
            file.unlink()
        write_whole(manifest, json.dumps(plan), sync=True)


def _part(
    model: Detector, source: Source, part: range, threshold: float | None, overlap: float | None, batch_size: int
) -> dict[str, list[dict[str, Any]]]:
    labels = None if model.checkpoint is None else model.checkpoint.labels
    rows: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    for start in range(part.start, part.stop, batch_size):
        batch = range(start, min(start + batch_size, part.stop))
        read = [_read(source, index) for index in batch]
        usable = [one for one in read if not isinstance(one, str)]
        answers = iter(detect(model, usable, threshold, overlap, batch_size) if usable else [])
        for index, one in zip(batch, read, strict=True):
            name = source[index].key
            about: dict[str, Any] = {"id": coco.image_id(name), "file_name": name}
            if isinstance(one, str):
                images.append({**about, "left_out": one})
                continue
            answer: Detections = next(answers)
            images.append({**about, "width": answer.size[0], "height": answer.size[1]})
            rows += coco.results(answer, name, labels)
    return {"results": rows, "images": images}


def _read(source: Source, index: int) -> Any:
    """Decode a photograph, or say why it can't be."""
    key = source[index].key
    try:
        return decode(source.read(index), key)
    except (BadImage, OSError) as error:
        return str(error)


def _lines(rows: list[dict[str, Any]]) -> str:
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n" if rows else "[]\n"
