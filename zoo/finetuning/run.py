"""`finetune(MobileNetV2, "photos")`: the whole way from a folder of images to a source that `trained` knows."""

from __future__ import annotations

import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import torch

from weights import Preprocessing
from weights.arguments import forgiving
from weights.documents import MISREAD, json_file, reason, table
from weights.places import at_home
from weights.whole import room, write_whole
from zoo.catalogue import CATALOGUE
from zoo.finetuning import checkpoint, report
from zoo.finetuning.batches import Batches, Unreadable, in_memory
from zoo.finetuning.distributed import World, world
from zoo.finetuning.loop import Trainer, channels_last
from zoo.finetuning.metrics import Metrics
from zoo.finetuning.network import Subject, class_and_weights, rebuilt, subject
from zoo.finetuning.plan import plan_of
from zoo.finetuning.progress import Show, show_of
from zoo.finetuning.settings import Settings
from zoo.finetuning.splits import Split, class_weights, classes_of, open_data, split
from zoo.images import Source
from zoo.images.kinds import endings
from zoo.networks.model import Model
from zoo.pretrained.run_folder import CONFIG, WEIGHTS, write_result
from zoo.pretrained.trained import trained

log = logging.getLogger("zoo")

CHANGEABLE = (
    "lr", "clip", "dtype", "workers", "device", "save_steps", "save_minutes", "compile", "fast", "max_unreadable", "patience",
)  # fmt: skip
"""Options that a resumed run may change; all others would make it another run."""
FACTS: dict[str, type | tuple[type, ...]] = {
    "model": str,
    "options": dict,
    "num_classes": int,
    "in_channels": int,
    "classes": list,
    "preprocessing": dict,
    "base": (dict, NoneType),
    "new_head": bool,
    "data": str,
    "val": (str, NoneType),
    "fingerprints": list,
    "settings": dict,
}
"""Without these no run can go on."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a finished run is.

    Attributes:
        folder: `trained(model, folder)` loads its weights, `report.html` shows them.
        model: those weights, in eval mode, on the CPU; None in all processes but the first.
        classes: in the order of the logits.
        metrics: of the kept weights on what was set aside; None where nothing was.
        steps: optimiser steps that were done.
        resumed: of those, steps that earlier calls did.
        replayed: of those, since it began or was resumed, steps that a CUDA graph replayed.
        history: the lines of `log.jsonl`.
        unreadable: reasons by the names of images that could not be read, those that `Source.left_out` names among them.
    """

    folder: Path
    model: Model | None
    classes: list[str]
    metrics: Metrics | None
    steps: int
    resumed: int
    replayed: int
    history: list[dict[str, Any]]
    unreadable: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Ready:
    """A run that is about to begin or to go on."""

    subject: Subject
    settings: Settings
    train: Split
    val: Split | None
    facts: dict[str, Any]


@forgiving
def finetune(
    model: type[Model] | Model | str | None = None,
    data: str | os.PathLike[str] | Source | None = None,
    out: str | os.PathLike[str] = "runs/finetune",
    *,
    val: str | os.PathLike[str] | Source | None = None,
    weights: str | os.PathLike[str] | None = None,
    from_scratch: bool = False,
    resume: bool = False,
    restart: bool = False,
    options: Mapping[str, Any] | None = None,
    preprocessing: Preprocessing | None = None,
    progress: bool | Show = True,
    **settings: Any,
) -> Run:
    """Teach a network the classes of a folder of images, and leave a folder from which `trained` loads it.

    Under torchrun all processes call it with the same arguments; the first one writes.

    Args:
        model: a class or its name, "mobilenetv2", which gets its default weights and a head for the data's classes; or a network, which
            is copied.
        data: what `zoo.images.open_source` takes: a folder with a folder of images a class, tar shards, Parquet files; or a folder of
            these named train and val (valid, validation, test). Without images to measure on, a share of each class is set aside.
        out: the run's folder.
        val: images to measure on, like `data`.
        weights: of a class: a tag, URL or path, as `trained` takes it.
        from_scratch: fresh weights instead.
        resume: go on with the run that is in `out`; model and data may be left out, and of the settings a few may change.
        restart: throw away the run that is in `out`. One that ended before its first step was saved goes without being asked for.
        options: constructor keywords of a class.
        preprocessing: instead of the checkpoint's.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `zoo.finetuning.progress.Show`.
        **settings: see `zoo.finetuning.settings.Settings`.

    Returns:
        The run; its model is loaded from the folder.

    Raises:
        ValueError, TypeError: an argument or the data can't be used; the message says what to do. Nothing was written.
        FileExistsError: `out` holds a run of which a step was saved, and neither `resume` nor `restart` is true.
        FileNotFoundError: nothing is at `data`, or with `resume` no run in `out`.
        NotFinite: the loss became NaN; the last good state is in `out`.
        Stopped: Ctrl-C; the state is in `out`.
        WeightsError: the weights can't be had.

    Example:
        >>> run = finetune(MobileNetV2, "photos/", "runs/one", epochs=10)  # doctest: +SKIP
        >>> predict(run.model, "cat.jpg")  # doctest: +SKIP
    """
    folder = at_home(out)
    with world(settings.get("device")) as here, quiet_random(), _one_voice(here):
        if resume:
            told = {
                "weights": weights,
                "from_scratch": from_scratch,
                "options": options,
                "preprocessing": preprocessing,
                "restart": restart,
            }
            if given := [name for name, value in told.items() if value]:
                raise ValueError(f"a resumed run has its own {', '.join(given)}: {folder} says which; leave them out")
            ready = _again(model, data, folder, val, settings)
        else:
            if model is None or data is None:
                raise ValueError("finetune() needs a network and images: finetune(MobileNetV2, 'photos')")
            if (folder / CONFIG).exists() and not restart and checkpoint.saved_step(folder) != 0:
                raise FileExistsError(
                    f"'{folder}' holds a run: resume=True goes on with it, restart=True throws it away; or name another folder"
                )
            wanted = Settings.of(settings)
            train, measured = open_data(data, val, wanted.layout)
            classes = classes_of(train, measured)
            built = subject(
                model, classes, wanted, named=weights, from_scratch=from_scratch, options=options or {}, preprocessing=preprocessing
            )
            parts = split(train, measured, built.classes, wanted)
            facts = _facts(built, wanted, data, val, (train, measured), here)
            ready = _Ready(built, wanted, *parts, facts)
        return _run(ready, folder, here, resume, progress)


def _run(ready: _Ready, folder: Path, here: World, resume: bool, progress: bool | Show) -> Run:
    settings, built = ready.settings, ready.subject
    cls = type(built.network)  # FSDP gives the network another
    if settings.fsdp and here.size == 1:
        raise ValueError("fsdp divides a network among processes: start them with torchrun --nproc-per-node N -m zoo finetune …")
    unreadable = Unreadable(len(ready.train) + len(ready.val or ()), settings.max_unreadable)
    train = batches_of(ready.train, built, settings, here, unreadable)
    val = None if ready.val is None else batches_of(ready.val, built, settings, here, unreadable)
    counts = np.bincount(train.part.targets, minlength=len(built.classes))
    gone = [name for name, count in zip(built.classes, counts, strict=True) if not count]
    if gone:
        raise ValueError(f"no image of {', '.join(gone[:5])} can be read: {next(iter(unreadable.reasons.values()))}")
    plan = plan_of(settings, len(train), here.size, built)
    if here.first:
        with room(folder):
            folder.mkdir(parents=True, exist_ok=True)
        checkpoint.sweep(folder)
        if not resume and (folder / CONFIG).exists():
            checkpoint.clear(folder)
    here.barrier()
    network = built.network
    if not settings.fsdp:  # else it need not fit: each layer is moved when it is divided
        network = network.to(here.device)
        if channels_last(settings, here):
            network = network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    show = show_of(progress, here.first)
    before = (checkpoint.saved_step(folder) or 0) if resume else 0
    with show(plan.total, before) as told:
        trainer = Trainer(network, train, val, settings, plan, here, folder, unreadable, told)
        if resume:
            trainer.resume(*checkpoint.read(folder / checkpoint.LAST))
            if trainer.done and here.first:
                log.warning(
                    "the run in %s is at its end, step %d: nothing is left to learn, it is only measured again", folder, trainer.step
                )
        else:
            trainer.save(best=False)
            if here.first:  # after the state: a folder with settings can be resumed
                write_whole(folder / CONFIG, json.dumps(ready.facts, indent=1) + "\n")
        with _benchmarked():
            trainer.run()
    here.barrier()
    tensors, facts = checkpoint.read(folder / checkpoint.BEST)
    checkpoint.restore(tensors, trainer.model, None, trainer.average)
    measured = trainer.evaluate(precise=True) if val is not None else None
    metrics = measured.metrics if measured else None
    left_out, others = _left_alone(ready, unreadable)
    if here.first:
        prefix = "ema." if trainer.average is not None else "model."
        row = write_result(
            folder,
            {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)},
            model=cls.variant().__name__,
            options=built.options,
            classes=built.classes,
            preprocessing=built.steps,
            base=built.base,
            metrics=_percentages(metrics),
            metrics_data=f"{metrics.count} images of {ready.facts['val'] or ready.facts['data']}" if metrics else None,
        )
        about = {
            **ready.facts,
            "result": {
                "weights": str(folder / WEIGHTS),
                "sha256": row.sha256,
                "kept": f"step {facts['step']} of {trainer.step}",
                "learnt from": f"{len(train)} images of {len(built.classes)} classes; {row.provenance}",
                "steps": "; ".join(trainer.how) or "none since it was resumed",
                **({"left alone": endings(others)} if others else {}),
            },
            "unreadable": left_out,
            "kernels": trainer.kernels,
        }
        report.write(folder, about, built.classes, measured, ready.val.source if ready.val else None)
        if left_out:
            write_whole(folder / "unreadable.txt", "".join(f"{key}\t{why}\n" for key, why in left_out.items()))
    here.barrier()
    loaded = trained(cls, folder) if here.first else None
    return Run(folder, loaded, built.classes, metrics, trainer.step, before, trainer.replayed, report.history(folder), left_out)


def _left_alone(ready: _Ready, unreadable: Unreadable) -> tuple[dict[str, str], dict[str, int]]:
    """Collect the reasons why images of both sources are not used, by their names, and how many other files there are of each ending."""
    sources = [ready.train.source]
    if ready.val is not None and ready.val.source is not sources[0]:
        sources.append(ready.val.source)
    left_out = {one.key: f"{one.key}: {one.why}" for source in sources for one in source.left_out}
    return left_out | unreadable.reasons, dict(sum((Counter(source.others) for source in sources), Counter()))


def _heeded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a run's settings as they were heeded: earlier versions took more epochs of the head than there are, and did so many."""
    head, epochs = settings.get("head_epochs"), settings.get("epochs")
    if isinstance(head, int) and isinstance(epochs, int) and settings.get("steps") is None:
        return settings | {"head_epochs": min(head, epochs)}
    return settings


def _again(model: Any, data: Any, folder: Path, val: Any, changed: Mapping[str, Any]) -> _Ready:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no run to go on with: there is no {path}")
    facts, steps = _known(path)
    frozen = [name for name in changed if name not in CHANGEABLE and changed[name] != facts["settings"].get(name, ...)]
    if frozen:
        raise ValueError(
            f"a resumed run keeps its {', '.join(frozen)}; it may change {', '.join(CHANGEABLE)}. To train on from its weights, begin "
            "another run with --weights and this folder"
        )
    settings = Settings.of({**facts["settings"], **changed})
    if isinstance(model, str):
        model, told = class_and_weights(model)
        if told is not None:
            raise ValueError(f"a resumed run has its own weights: {folder} says which; name the network alone, or leave it out")
    cls = model if isinstance(model, type) else type(model) if model is not None else CATALOGUE.get(facts["model"])
    if cls is None:
        raise ValueError(f"{facts['model']} is no network of the catalogue: give its class too, finetune({facts['model']}, resume=True, …)")
    if cls.variant().__name__ != facts["model"]:
        raise ValueError(f"{folder} is a run of {facts['model']}, not of {cls.variant().__name__}")
    train, measured = open_data(data or facts["data"], val or facts["val"], settings.layout)
    for source, known in zip((train, measured), facts["fingerprints"], strict=True):
        if (source.fingerprint if source else None) != known:
            where = source.where if source else facts["val"]
            raise ValueError(f"{where} holds other images than when {folder} began; start a new run, or bring the images back")
    try:
        network = rebuilt(cls, facts)
    except MISREAD as error:
        raise _damaged(path, error) from error
    built = Subject(network, facts["classes"], steps, facts["options"], facts["base"], facts["new_head"])
    return _Ready(built, settings, *split(train, measured, built.classes, settings), facts)


def _known(path: Path) -> tuple[dict[str, Any], Preprocessing]:
    """Read what a run wrote down when it began, and its preprocessing."""
    try:
        facts = table(json_file(path), FACTS)
        facts = facts | {"settings": _heeded(facts["settings"])}
        steps = {**facts["preprocessing"], "mean": tuple(facts["preprocessing"]["mean"]), "std": tuple(facts["preprocessing"]["std"])}
        Settings.of(facts["settings"])
        if not all(isinstance(name, str) for name in facts["classes"]) or len(facts["classes"]) != facts["num_classes"]:
            raise ValueError(f"{facts['num_classes']} classes have {len(facts['classes'])} names")
        if len(facts["fingerprints"]) != 2:
            raise ValueError("fingerprints are those of two sources")
        if (base := facts["base"]) is not None:
            table(base, {"name": str, "sha256": (str, NoneType), "license": (str, NoneType)})
        return facts, Preprocessing(**steps)
    except MISREAD as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is damaged ({reason(error)}), and it says what the run is: bring it back, or {checkpoint.AFRESH}")


def batches_of(part: Split, built: Subject, settings: Settings, here: World, unreadable: Unreadable) -> Batches:
    """Make the batches of a split, from memory where its images fit."""
    kept = in_memory(part, built.steps, settings, unreadable)
    part, images = kept or (part, None)
    weights = class_weights(part) if settings.balance else np.ones(len(part), dtype=np.float32)
    return Batches(part, built.steps, settings, here, weights, unreadable, images)


def _facts(built: Subject, settings: Settings, data: Any, val: Any, sources: tuple[Source, Source | None], here: World) -> dict[str, Any]:
    """Collect what a resumed run needs, and what a reader of the folder wants to know."""
    train, measured = sources
    return {
        "model": type(built.network).variant().__name__,
        "options": built.options,
        "num_classes": built.network.num_classes,
        "in_channels": built.network.in_channels,
        "classes": built.classes,
        "preprocessing": asdict(built.steps),
        "base": built.base,
        "new_head": built.new_head,
        "data": train.where if isinstance(data, Source) else os.fspath(data),
        "val": None if val is None or measured is None else measured.where,
        "fingerprints": [train.fingerprint, measured.fingerprint if measured else None],
        "settings": settings.table(),
        "processes": here.size,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _percentages(metrics: Metrics | None) -> dict[str, float]:
    if metrics is None:
        return {}
    found = {"top1": round(100 * metrics.accuracy, 4)}
    return found if metrics.top5 is None else found | {"top5": round(100 * metrics.top5, 4)}


@contextmanager
def quiet_random() -> Iterator[None]:
    """Leave the caller's random numbers alone."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        yield


@contextmanager
def _one_voice(here: World) -> Iterator[None]:
    """Let only the first process warn; the others would say the same."""
    before = log.level
    log.setLevel(before if here.first else logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@contextmanager
def _benchmarked() -> Iterator[None]:
    """Let cuDNN choose by timing: all images have one size."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
