"""The same job on a Ray cluster: tasks decode, actors hold the network, and each part of the result is a file of its own.

Ray Data moves the parts: decoding runs wherever there is a core, the network on actors with a GPU each where the cluster has GPUs. A task
or an actor that dies is started again by Ray, and its part is computed again; a part's file has a fixed name and appears whole,
so nothing is lost or doubled. The output is a folder of Parquet files whose names sort in the source's order; it must lie, as the
source does, where every machine reaches it. Finished parts outlive the driver: the same call goes on with them.

Machines of different kinds round differently in the last bits, as do different numbers of threads, so each part's file notes a probe of
the network that computed it.
"""

from __future__ import annotations

import json
import logging
import pickle
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weights import documents
from weights.progress import Show
from weights.whole import whole
from zoo.embedding.decoding import Decoder
from zoo.embedding.feeding import Feeder
from zoo.embedding.flow import Rows
from zoo.embedding.parts import Workplace
from zoo.embedding.plan import Plan, chunks
from zoo.embedding.prepare import prepared, probe
from zoo.embedding.report import Report, Skipped
from zoo.embedding.writing import Block, list_left_out, parquet_options, table
from zoo.images import Source
from zoo.images.parquet import pyarrow
from zoo.networks.model import Model

PART_ROWS = 256
"""Images in a part at least: many small parts are what a cluster can spread, and start again."""
PROBLEMS, PROBE, COPIES = b"kernelzoo.problems", b"kernelzoo.probe", b"kernelzoo.copies"


def ray() -> Any:
    """Import Ray, or say how to get it; connect to the cluster that the environment names, or start one on this machine."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise ValueError("engine='ray' needs Ray, which is not installed: pip install 'kernelzoo[ray]'") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray


def device_of_cluster(device: torch.device | str | None) -> torch.device:
    """Return where actors run: what was asked for, else a GPU if the cluster has one."""
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if ray().cluster_resources().get("GPU", 0) else "cpu")


class Decoding:
    """Decodes parts; runs as Ray tasks."""

    def __init__(self, source: Source, plan: Plan) -> None:
        self.plan, self.decoder = plan, Decoder(source, plan.preprocessing, gpu=plan.decode == "gpu")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Turn {"start", "stop"} of one part into its pixels."""
        part = range(int(batch["start"][0]), int(batch["stop"][0]))
        torch.set_num_threads(1)
        decoded = [[self.decoder[chunk] for chunk in chunks(rows)] for rows in self.plan.batches(part)]
        failure = next((chunk.failure for row in decoded for chunk in row if chunk.failure), "")
        if failure:
            raise OSError(failure)
        return {"start": batch["start"], "stop": batch["stop"], "decoded": np.array([pickle.dumps(decoded, protocol=5)], dtype=object)}


class Embedding:
    """Holds the network, and writes the parts that come by; runs as Ray actors."""

    def __init__(self, model: Model, source: Source, plan: Plan, folder: str, dtype: torch.dtype | None) -> None:
        device = torch.device(plan.device)
        self.source, self.plan, self.folder = source, plan, Path(folder)
        self.feeder = Feeder(prepared(model, plan, device, dtype), plan.preprocessing, device, plan.batch_size)
        self.probe = probe(self.feeder, plan)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Compute and write one part; returns how many images it was, and the seconds that the network took."""
        part = range(int(batch["start"][0]), int(batch["stop"][0]))
        rows, begun = Rows(part, lambda index: self.source[index].key), self.feeder.seconds
        for taken in pickle.loads(batch["decoded"][0]):
            rows.take(taken, self.feeder.finish(self.feeder.start(taken)))
        self._write(part, rows)
        return {"images": np.array([len(part)]), "seconds": np.array([self.feeder.seconds - begun])}

    def _write(self, part: range, rows: Rows) -> None:
        from pyarrow import parquet

        done = rows.part()
        kept = np.flatnonzero(done.readable.numpy())
        vectors = {tap: values.numpy()[kept] for tap, values in done.vectors.items()}
        block = Block(kept.astype(np.int64) + part.start, done.digests.numpy()[kept], vectors)
        notes = {**self.plan.notes(), PROBLEMS.decode(): json.dumps(done.problems), PROBE.decode(): self.probe}
        path = part_path(self.folder, part)
        with whole(path) as unfinished:  # a part may run twice at once, where Ray gave one up
            parquet.write_table(table(block, self.source, self.plan, notes), unfinished, **parquet_options())


def part_path(folder: Path, part: range) -> Path:
    """Return where a part's file is."""
    return folder / f"part-{part.start:012d}.parquet"


def embed_on_ray(
    model: Model, source: Source, out: Path, plan: Plan, *, dtype: torch.dtype | None, workers: int | None, restart: bool, progress: Show
) -> Report:
    """Do what `embed` does with `engine="ray"`.

    Raises:
        ValueError: Ray or pyarrow is missing, the source lies in this process's memory, or `workers` is below 1.
        FileExistsError: the output is finished already.
    """
    begun = time.perf_counter()
    pyarrow(f"writing {out.name}")
    if out.suffix in (".npy", ".safetensors"):
        raise ValueError(f"Ray writes a folder of Parquet files, so the output can't be {out.name!r}; name a folder")
    if not source.shared:
        raise ValueError(f"{source.where} lies in this process's memory, where no other of the cluster reaches it")
    if workers is not None and workers < 1:
        raise ValueError(f"workers is how many of Ray's tasks decode at a time, at least 1; got {workers}")
    out = out.absolute()
    place = Workplace(out, plan, restart)
    try:
        parts = plan.parts(PART_ROWS)
        todo = [part for part in parts if not part_path(place.folder, part).exists()]
        report = Report(out, computed=sum(map(len, todo)))
        report.resumed = plan.images - report.computed
        if todo:
            _compute(ray(), model, source, plan, place.folder, todo, dtype, workers, report, progress)
        _settle(source, plan, place.folder, parts, report)
        place.become(out)
    finally:
        place.close()
    list_left_out(out, source, report)
    report.seconds = time.perf_counter() - begun
    return report


def _compute(
    ray: Any,
    model: Model,
    source: Source,
    plan: Plan,
    folder: Path,
    todo: list[range],
    dtype: torch.dtype | None,
    workers: int | None,
    report: Report,
    progress: Show,
) -> None:
    resources = ray.cluster_resources()
    gpu = plan.device.startswith("cuda")
    cores, devices = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
    if gpu and not devices:
        raise ValueError("the network is to run on a GPU, and the Ray cluster has none; --device cpu (device='cpu') needs none")
    actors = min(devices if gpu else max(1, cores // 2), len(todo))
    context, log = ray.data.DataContext.get_current(), logging.getLogger("ray.data")
    shown, level = context.enable_progress_bars, log.level
    context.enable_progress_bars = False  # ours counts images
    log.setLevel(logging.ERROR)
    try:
        rows = ray.data.from_items([{"start": part.start, "stop": part.stop} for part in todo], override_num_blocks=len(todo))
        given = {"model": model, "source": source, "plan": plan, "folder": str(folder), "dtype": dtype}
        hands = {} if workers is None else {"compute": ray.data.TaskPoolStrategy(size=workers)}
        flow = rows.map_batches(Decoding(source, plan).__call__, batch_size=1, num_cpus=1, **hands).map_batches(
            Embedding,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=actors),
            fn_constructor_kwargs=given,
            **({"num_gpus": 1} if gpu else {"num_cpus": 1}),
        )
        first, done, network_s = 0.0, 0, 0.0
        with progress(f"embedding by {plan.model} on {actors} actors", plan.images, report.resumed) as advance:
            for row in flow.iter_rows():
                now = time.perf_counter()
                if first:
                    done += row["images"]
                    report.images_s = done / (now - first)
                first, network_s = first or now, network_s + row["seconds"]
                advance(row["images"])
    finally:
        context.enable_progress_bars = shown
        log.setLevel(level)
    report.model_images_s = report.computed / network_s * actors if network_s else 0.0
    report.workers = cores if workers is None else min(workers, cores)


def _settle(source: Source, plan: Plan, folder: Path, parts: list[range], report: Report) -> None:
    """Read what the parts tell, and take copies out of them."""
    from pyarrow import parquet

    seen: dict[str, int] = {}
    todo = "Delete it and call again: it is computed anew"
    for part in parts:
        path = part_path(folder, part)
        schema = parquet.read_schema(path)
        problems = documents.table(documents.read_json(schema.metadata[PROBLEMS], path, todo))
        report.unreadable += [Skipped(source[int(index)].key, int(index), why) for index, why in problems.items()]
        report.widths = {tap: schema.field(tap).type.list_size for tap in plan.at}
        if not plan.dedupe:
            report.rows += parquet.read_metadata(path).num_rows
            continue
        told = parquet.ParquetFile(path).read(columns=["index", "blake3"])
        keep, copies = [], documents.table(documents.read_json(schema.metadata.get(COPIES, b"{}"), path, todo))
        for row, (index, digest) in enumerate(zip(told["index"].to_pylist(), told["blake3"].to_pylist(), strict=True)):
            first = seen.setdefault(digest, index)
            if first == index:
                keep.append(row)
            else:
                copies[index] = first
        report.rows += len(keep)
        if len(keep) < len(told):
            rows = parquet.ParquetFile(path).read().take(keep)
            noted = rows.replace_schema_metadata({**schema.metadata, COPIES: json.dumps(copies)})
            with whole(path) as unfinished:
                parquet.write_table(noted, unfinished, **parquet_options())
        report.copies += [Skipped(source[int(i)].key, int(i), "", source[first].key) for i, first in copies.items()]
