"""`embed`: vectors of many images, written so that a killed run goes on where it was."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch

from weights.arguments import forgiving
from weights.progress import Show, show_of
from zoo.catalogue import model_class
from zoo.embedding.decoding import Decoder, Decoding, processes
from zoo.embedding.extracting import extractor
from zoo.embedding.feeding import Feeder
from zoo.embedding.flow import flow, held
from zoo.embedding.parts import Workplace
from zoo.embedding.plan import Plan, chunks
from zoo.embedding.prepare import Int8, check_probe, prepared, probe
from zoo.embedding.report import Report
from zoo.embedding.writing import check_output, finish
from zoo.images import Source, open_source
from zoo.images.kinds import kind_of_names
from zoo.networks.fingerprint import state_digest
from zoo.networks.model import Model
from zoo.pretrained.names import named
from zoo.pretrained.run_folder import place_of
from zoo.pretrained.trained import trained


@forgiving
def embed(
    model: Model | str,
    data: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    at: str | Sequence[str] = "embedding",
    *,
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | Literal["int8"] | None = None,
    fast: bool = True,
    calibration: Any = None,
    tolerance: Any = None,
    decode: Literal["cpu", "gpu"] = "cpu",
    workers: int | None = None,
    dedupe: bool = False,
    restart: bool = False,
    engine: Literal["local", "ray"] = "local",
    progress: bool | Show = True,
) -> Report:
    """Compute the features of every image and write them, a row an image, in the images' order.

    Finished parts are kept beside the output until all are there; the same call goes on with them after whatever ended the run, and the
    output is byte for byte that of a run that was not disturbed. Batches are fixed ranges of the images, so no number depends on
    timing, on the count of processes or on where a run was interrupted; another batch size, device or dtype may change last bits, and
    is therefore another job. Images that can't be used have no row; the report and a file beside the output list them.

    Args:
        model: what `trained` returns, which is neither moved nor changed; or the name of a checkpoint, "resnet50:imagenet1k_v1".
        data: the images, as `zoo.images.open_source` takes them, or what it returns.
        out: a .parquet, .npy (one tap; its rows' keys are in .npy.index.jsonl beside it) or .safetensors file; with Ray a folder.
        at: taps as `features` takes them; each is a column. A map becomes the mean over its positions.
        batch_size: images that go through the network at once; None is 256 on a GPU, 32 on a CPU.
        device: where the network runs; None is the current CUDA device if there is one, else the CPU.
        dtype: that it computes in; None is what `fast` takes there, without `fast` the model's own. Vectors are float32.
            "int8", on a CPU, needs `calibration`; see [int8](int8.md).
        fast: whether to run on `zoo.fast`'s kernels.
        calibration: with int8, 64 images or more as `fast` takes them: a folder, a list of paths, a preprocessed tensor. Half of them
            calibrate; on the other half the vectors are compared with float32's, and the report has the certificate.
        tolerance: with int8, the largest relative error of the vectors, {"error": 0.1}; 0.1 if left out.
        decode: "gpu" decodes JPEGs by nvJPEG, whose pixels differ from Pillow's by a few levels; the default's are `model.preprocess`'s
            own, bit for bit.
        workers: processes that decode; None chooses, 0 decodes in this one. With Ray tasks that decode at a time, at least 1.
        dedupe: leave out images whose bytes are those of an earlier one.
        restart: throw away what an earlier run finished, and replace the output when this one has.
        engine: "ray" computes on a Ray cluster, see `zoo.embedding.cluster`.
        progress: whether a terminal sees a bar; or what shows the images instead, a `weights.progress.Show`.

    Returns:
        What was written, what was left out, and what limited the speed.

    Raises:
        FileExistsError: the output is finished already.
        ValueError: an argument, the model's checkpoint or the images' source can't be used; or finished parts are those of another job.
        OSError: a remote source failed for good, or a decoding process died; what is finished is kept.
        FloatingPointError: the network computes NaN or infinity for an image.
        WeightsError: no network is called so, or its weights can't be had.

    Example:
        >>> embed(trained(ResNet50), "photos/", "vectors.parquet")  # doctest: +SKIP
    """
    begun = time.monotonic()
    show = show_of(progress)
    source = data if isinstance(data, Source) else open_source(data)
    if engine not in ("local", "ray"):
        raise ValueError(f'the engine is "local" or "ray", got {engine!r}')
    where = _device(device, engine)
    if isinstance(model, str):
        name, tag = named(model)
        model = trained(model_class(name), tag, progress=progress is not False)
    int8 = _int8(model, dtype, where, fast, engine, calibration, tolerance)
    plan = make_plan(model, source, at, batch_size, where, None if int8 else dtype, fast, decode, dedupe, engine)  # type: ignore[arg-type]
    if int8:
        plan = replace(plan, dtype=int8.name)
    if engine == "ray":
        from zoo.embedding.cluster import embed_on_ray

        half = cast("torch.dtype | None", dtype)
        return embed_on_ray(model, source, Path(out), plan, dtype=half, workers=workers, restart=restart, progress=show)
    path = check_output(Path(out), plan)
    workers = processes(where, source) if workers is None else workers
    if workers < 0 or (workers and not source.shared):
        why = "what lies in this process's memory is decoded in it: workers=0" if workers > 0 else "0 or more"
        raise ValueError(f"workers is the number of decoding processes, got {workers}; {why}")
    report = Report(path, workers=workers, kind=kind_of_names(item.key for item in source))
    place = Workplace(path, plan, restart)
    try:
        todo = place.unfinished(plan)
        report.computed = sum(map(len, todo))
        report.resumed = plan.images - report.computed
        if todo:
            network = prepared(model, plan, where, None if int8 else cast("torch.dtype | None", dtype), int8)
            report.certificate = [line for proof in getattr(network, "proofs", ()) for line in proof.lines()]
            feeder = Feeder(network, plan.preprocessing, where, plan.batch_size)
            found = probe(feeder, plan)
            check_probe(found, place.probe, place.folder) if place.probe else place.keep_probe(found)
            _compute(feeder, source, plan, place, todo, report, show, begun)
        finish(path, source, plan, place, report)
    finally:
        place.close()
    report.seconds = time.monotonic() - begun
    return report


def make_plan(
    model: Model,
    source: Source,
    at: str | Sequence[str],
    batch_size: int | None,
    device: torch.device,
    dtype: torch.dtype | None,
    fast: bool,
    decode: str,
    dedupe: bool,
    engine: str = "local",
) -> Plan:
    """Check what `embed` was given and write it down."""
    name = type(model).__name__
    if not hasattr(model, "checkpoint"):
        todo = "trained(ResNet50) has one; call your own network yourself, on images that you prepared"
        raise TypeError(f"embed() takes a network that knows its preprocessing, and {name} is no network of the zoo: {todo}")
    record = model.checkpoint
    if record is None:
        raise ValueError(f"this {name} is untrained, so no preprocessing belongs to it; use trained({name})")
    steps = record.preprocessing
    if steps.crop is None or len(steps.mean) not in (1, 3):
        raise ValueError(f"embed() needs preprocessing that crops pictures of 1 or 3 channels to one size; {name} {record.tag} has {steps}")
    if decode not in ("cpu", "gpu"):
        raise ValueError(f'decode is "cpu" or "gpu", got {decode!r}')
    if decode == "gpu" and device.type != "cuda":
        raise ValueError(f'decode="gpu" needs the network on a GPU too, and it is to run on {device}')
    count = (256 if device.type == "cuda" else 32) if batch_size is None else batch_size
    if count < 1:
        raise ValueError(f"batch_size is at least 1, got {count}")
    taps = extractor(model, at).taps
    if dtype is None and fast:
        from zoo.kernels.arguments import dtype_of

        dtype = torch.bfloat16 if engine == "ray" and device.type == "cuda" else dtype_of(None, device)
    computed = dtype or next(model.parameters()).dtype
    return Plan(
        model=name,
        options=dict(record.options),
        tag=record.tag,
        weights=state_digest(model),
        place=place_of(record),
        at=taps,
        preprocessing=steps,
        source=source.where,
        fingerprint=source.fingerprint,
        images=len(source),
        batch_size=count,
        device=device.type,
        dtype=str(computed).removeprefix("torch."),
        kernels="fast" if fast else "plain",
        decode=decode,
        dedupe=dedupe,
    )


def _int8(model: Model, dtype: Any, where: torch.device, fast: bool, engine: str, calibration: Any, tolerance: Any) -> Int8 | None:
    """Read what was given for int8; None where it is not asked for."""
    from zoo.kernels.arguments import narrow_of

    narrow = narrow_of(dtype)
    if narrow is None:
        if calibration is not None or tolerance is not None:
            raise ValueError(f'{"calibration" if calibration is not None else "tolerance"} goes with dtype="int8", got dtype={dtype!r}')
        return None
    if narrow == "auto":
        raise ValueError('embed() takes no dtype="auto": which precision is the fastest depends on timing, and rows must not')
    if narrow != "int8":
        raise ValueError(f'embed() takes no dtype="{narrow}": 8 bits are "int8" on a CPU there; on a GPU use torch.bfloat16')
    if calibration is None:
        raise ValueError('dtype="int8" needs calibration=, 64 images or more of the kind that are embedded')
    if where.type != "cpu" or not fast or engine != "local":
        raise ValueError('dtype="int8" goes with device="cpu", fast=True and engine="local"')
    if model.checkpoint is None:
        name = type(model).__name__
        raise ValueError(f"this {name} is untrained, so no preprocessing belongs to it; use trained({name})")
    from zoo.kernels.quantizing.images import digest_of

    images = model.batch_of(calibration)
    return Int8(images, tolerance, f"int8 by {len(images)} images {digest_of(images)[:12]}, tolerance {tolerance or 'as usual'}")


def _device(device: torch.device | str | None, engine: str) -> torch.device:
    from zoo.kernels.arguments import device_of

    if engine == "ray":  # the GPUs are those of the cluster, not of this machine
        from zoo.embedding.cluster import device_of_cluster

        return device_of_cluster(device)

    return device_of(device)


def _compute(
    feeder: Feeder, source: Source, plan: Plan, place: Workplace, todo: list[range], report: Report, progress: Show, start: float
) -> None:
    ranges = [chunk for part in todo for batch in plan.batches(part) for chunk in chunks(batch)]
    decoder = Decoder(source, plan.preprocessing, gpu=plan.decode == "gpu")
    keep = held(plan, feeder.gpu)
    begun = feeder.seconds
    with (
        Decoding(decoder, ranges, report.workers, held=keep, pinned=feeder.gpu, polite=not feeder.gpu) as arriving,
        progress(f"embedding by {plan.model}", plan.images, report.resumed) as advance,
    ):
        meter = flow(feeder, source, plan, todo, arriving, lambda part, rows: rows.save(place.path(part)), advance)
    meter.tell(report, feeder.seconds - begun, start)
