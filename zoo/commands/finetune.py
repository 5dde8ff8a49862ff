"""`zoo finetune`: what is trained, how, and where its result goes."""

from __future__ import annotations

import os
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weights.arguments import did_you_mean
from weights.documents import read_json
from weights.errors import MalformedFile, WeightsError
from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import (
    BuildOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    err,
    makeable,
    naming_what_is_here,
    out,
    print_json,
    value_of,
)
from zoo.commands.interrupts import has_said
from zoo.pretrained.run_folder import CONFIG

if TYPE_CHECKING:
    from zoo.finetuning import Run
    from zoo.training import Taught


def finetune(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            autocompletion=files,
            help="A folder with a folder of images a class, or with train and val folders of these; tars; Parquet. "
            "For a detector or segmenter: COCO's JSON, or a folder as VOC or YOLO have them.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", autocompletion=names, help="The network; MobileNetV2, small enough to train without a GPU."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder; runs/finetune.")] = None,
    tag: WeightsOption = None,
    scratch: Annotated[bool, typer.Option("--from-scratch", help="Start from random weights.")] = False,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Resume this run. A few settings may change, such as --lr.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard the run in the folder.")] = False,
    find_lr: Annotated[bool, typer.Option("--find-lr", help="Only suggest a learning rate, and draw its curve as PNG.")] = False,
    val: Annotated[
        str | None,
        typer.Option(autocompletion=files, help="Validation images. Default: DATA's val folder, or else a share of DATA."),
    ] = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The photographs of COCO's annotations. Default: searched for.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The split of a detector's VOC folder: train …. Default: every annotation.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the images. Default: 10.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    head_epochs: Annotated[
        int | None, typer.Option(help="Epochs, of those, in which only the new head learns. Default: one of ten, with a new head.")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Images per step, over all processes. Default: 64, or fewer if there are fewer.")
    ] = None,
    accumulate: Annotated[int | None, typer.Option(help="Compute a step in so many parts, to save memory.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw. Default: sgd.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate. Default: the optimiser's, by the batch.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay; biases and norms have none. Default: the optimiser's.")] = None,
    layer_decay: Annotated[
        float | None, typer.Option(help="Factor of the learning rate from a layer to the one before it. Default: 1.")
    ] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of a target for all other classes. Default: 0.")] = None,
    randaugment: Annotated[int | None, typer.Option(help="RandAugment's magnitude, 1..30. Default: off.")] = None,
    mixup: Annotated[float | None, typer.Option(help="mixup: alpha of its Beta distribution; 0.2 is usual. Default: off.")] = None,
    cutmix: Annotated[float | None, typer.Option(help="CutMix: alpha of its Beta distribution; 1.0 is usual. Default: off.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of the running mean of the weights; 0.999 is usual. Default: off.")] = None,
    balance: Annotated[bool | None, typer.Option("--balance", help="Weight rare classes more.")] = None,
    freeze_norm: Annotated[bool | None, typer.Option("--freeze-norm", help="Keep BatchNorm's statistics.")] = None,
    clip: Annotated[float | None, typer.Option(help="Greatest norm of the gradient. Default: none.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many evaluations without improvement. Default: never.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the images in pixels. Default: the checkpoint's.")] = None,
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, by autocast, or float32. Default: bfloat16 on a GPU.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode. Default: one a core, at most 8.")] = None,
    fast: Annotated[
        bool | None, typer.Option("--fast/--no-fast", help="Train on the zoo's kernels. Default: on a GPU, for enough steps.")
    ] = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp", help="Divide the network among the processes of torchrun.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. Default: 0.")] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, warmup=0.1. Repeatable.")
    ] = None,
    option: BuildOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Teach a network the classes of your images; `torchrun --nproc-per-node 4 -m zoo finetune …` uses several GPUs.

    Use the run's folder like a checkpoint: `zoo predict PHOTO --model FOLDER`, trained(MobileNetV2, "FOLDER").

    Detectors and segmenters learn too, from annotated photographs, by SGD: `zoo detect PHOTO --model FOLDER`.
    """
    given = {name: value for name, value in locals().items() if value is not None and value is not False}
    task = _task(model, tag, resume)
    if task != "classification":
        _teach(task, given, more, option)
        return
    from zoo.commands.watching import watched_steps
    from zoo.finetuning import Settings, Stopped, find_rate
    from zoo.finetuning import finetune as train

    if extra := [f"--{name}" for name, value in {"images": images, "split": split}.items() if value is not None]:
        raise typer.BadParameter("it is a detector's or segmenter's; a classifier's images lie in a folder a class", param_hint=extra[0])
    told = {name: value for name, value in locals().items() if name in _settings() and value is not None} | _more(more)
    with value_of(None):
        Settings.of(told)
    asked: str | None = None
    if resume is not None:
        others = {"DATA": data, "--model": model, "--out": folder, "--weights": tag, "--from-scratch": scratch, "--val": val}
        others |= {"--option": option, "--restart": restart, "--find-lr": find_lr}
        if given := [name for name, value in others.items() if value]:
            raise typer.BadParameter(
                f"the run in '{resume}' has its own images, network and weights, so leave {' and '.join(given)} out", param_hint="--resume"
            )
        named: dict[str, Any] = {"model": None, "data": None, "out": resume, "resume": True}
    elif data is None:
        raise typer.BadParameter("which images? A folder with a folder a class, or --resume FOLDER", param_hint="DATA")
    else:
        from zoo.catalogue import model_class
        from zoo.pretrained.names import named as read_names

        asked = model or tag
        model, tag = read_names(model or "MobileNetV2", tag)
        cls, folder = model_class(model), makeable(folder or Path("runs/finetune"))
        if "num_classes" in (built := build_options(option, cls)):
            raise typer.BadParameter("the data say how many classes there are; leave num_classes out", param_hint="--option")
        named = {"model": cls, "data": data, "weights": tag, "from_scratch": scratch, "options": built}
        if find_lr:
            rates = find_rate(**named, val=val, **told)
            folder.mkdir(parents=True, exist_ok=True)
            drawn = rates.draw(folder / "rates.png")
            if as_json:
                print_json({"lr": rates.suggested, "rates": rates.rates, "losses": rates.losses, "picture": str(drawn)})
                return
            out.print(f"the loss falls fastest at --lr {rates.suggested:.2g}; drawn in '{escape(str(drawn))}'", soft_wrap=True)
            return
        named |= {"out": folder, "val": val, "restart": restart}
    try:
        with naming_what_is_here(resume is None and not asked):
            run = train(**named, progress=False if quiet else partial(watched_steps, console=err), **told)
    except FileExistsError:
        todo = f"zoo finetune --resume {folder} goes on with it, --restart throws it away; or name another folder with --out"
        raise FileExistsError(f"'{folder}' holds a run: {todo}") from None
    except KeyboardInterrupt as ended:
        err.print(escape(str(ended) if isinstance(ended, Stopped) else _left(named["out"]), lines=True), soft_wrap=True)
        has_said()
        raise
    if int(os.environ.get("RANK", "0")) == 0:
        _show(run, as_json)


LEARNT_BY = ("epochs", "batch_size", "lr", "weight_decay", "clip", "seed")
"""Options that detectors and segmenters take too."""


def _task(model: str | None, tag: str | None, resume: Path | None) -> str:
    """Return the task of the network that is asked for; of a name that nobody knows "classification", which says so."""
    if resume is not None:
        from zoo.training.run import task_of

        return task_of(resume)
    if model is None:
        return "classification"
    from zoo.catalogue import any_class
    from zoo.pretrained.names import named as read_names

    try:
        return any_class(read_names(model, tag)[0]).task
    except WeightsError:
        return "classification"


def _teach(task: str, given: dict[str, Any], more: list[str] | None, option: list[str] | None) -> None:
    """Teach a detector or a segmenter."""
    from zoo.catalogue import any_class
    from zoo.commands.watching import watched_steps
    from zoo.pretrained.names import named as read_names
    from zoo.training import LearningSettings, teach

    settings = {name: given[name] for name in LEARNT_BY if name in given} | _more(more, LearningSettings)
    known = {"data", "model", "folder", "tag", "scratch", "resume", "restart", "val", "images", "split", "size", "device", "more", "option"}
    if unknown := [name for name in given if name not in known | {*LEARNT_BY, "quiet", "as_json"}]:
        flag = f"--{unknown[0].replace('_', '-')}"
        raise typer.BadParameter(f"it is a classifier's, and a network for {task} does not take it", param_hint=flag)
    quiet, as_json = given.get("quiet", False), given.get("as_json", False)
    progress = False if quiet else partial(watched_steps, console=err)
    if "resume" in given:
        others = [name for name in given if name not in ("resume", "device", "quiet", "as_json")]
        if others:
            raise typer.BadParameter(
                f"the run in '{given['resume']}' goes on as it began: leave out {', '.join(others)}", param_hint="--resume"
            )
        run = teach(out=given["resume"], resume=True, device=given.get("device"), progress=progress)
    else:
        if "data" not in given:
            raise typer.BadParameter("which photographs? COCO's JSON, a VOC or YOLO folder, or --resume FOLDER", param_hint="DATA")
        name, tag = read_names(given["model"], given.get("tag"))
        folder = makeable(given.get("folder", Path("runs/finetune")))
        built = build_options(option, any_class(name))
        if "num_classes" in built:
            raise typer.BadParameter("the data say how many classes there are; leave num_classes out", param_hint="--option")
        how = {key: given.get(key) for key in ("val", "images", "split", "size", "device")}
        begins = {"weights": tag, "from_scratch": "scratch" in given, "options": built, "restart": "restart" in given}
        try:
            run = teach(name, given["data"], folder, progress=progress, **how, **begins, **settings)
        except FileExistsError:
            todo = f"zoo finetune --resume {folder} goes on with it, --restart throws it away; or name another folder with --out"
            raise FileExistsError(f"'{folder}' holds a run: {todo}") from None
    if int(os.environ.get("RANK", "0")) == 0:
        _show_taught(run, task, as_json)


def _show_taught(run: Taught, task: str, as_json: bool) -> None:
    if as_json:
        told = {"folder": str(run.folder), "steps": run.steps, "resumed": run.resumed, "loss": run.loss, "metrics": dict(run.measured)}
        print_json({**told, "learnt_from": run.photographs[0], "measured_on": run.photographs[1], "classes": list(run.classes)})
        return
    says = {"map": "mAP", "map50": "mAP at 50 %", "miou": "mIoU", "pixels": "pixels right"}
    figures = ", ".join(f"{says[name]} {100 * value:.1f}" for name, value in run.measured.items())
    measured = f"{figures} on {counted(run.photographs[1], 'photograph')}" if figures else "measured on nothing: --val names photographs"
    before = f", {run.resumed:,} of them before it was resumed" if run.resumed else ""
    out.print(f"[bold]{measured}[/bold], after {counted(run.steps, 'step')}{before}, loss {run.loss:.3f}", soft_wrap=True)
    place = escape(str(run.folder))
    command = "detect" if task == "detection" else "segment"
    out.print(f"use it: zoo {command} PHOTO --model {place}", soft_wrap=True)
    out.print(f'[dim]trained({type(run.model).__name__}, "{place}")[/dim]', soft_wrap=True)


def _show(run: Run, as_json: bool) -> None:
    metrics = run.metrics
    if as_json:
        measured = None if metrics is None else {**metrics.summary(), "classes": metrics.rows(run.classes)}
        print_json(
            {"folder": str(run.folder), "steps": run.steps, "resumed": run.resumed, "metrics": measured, "unreadable": run.unreadable}
        )
        return
    for reason in list(run.unreadable.values())[:5]:
        err.print(f"[yellow]left out:[/yellow] {escape(reason)}", soft_wrap=True)
    if metrics is not None:
        table = Table(box=None, header_style="bold")
        for heading in ("class", "measured", "precision", "recall", "F1"):
            table.add_column(heading, justify="left" if heading == "class" else "right")
        for row in metrics.rows(run.classes)[:40]:
            figures = (f"{100 * row[name]:.1f}" for name in ("precision", "recall", "f1"))
            table.add_row(escape(row["class"]), str(row["images"]), *figures)
        out.print(table)
        figures = f"{100 * metrics.accuracy:.2f} % of {metrics.count} right, F1 {100 * metrics.macro_f1:.2f} %, kappa {metrics.kappa:.3f}"
        before = f", {run.resumed:,} of them before it was resumed" if run.resumed else ""
        out.print(f"[bold]{figures}[/bold], after {counted(run.steps, 'step')}{before}", soft_wrap=True)
    name = type(run.model).__name__ if run.model is not None else "MODEL"
    out.print(
        f"wrote '{escape(str(run.folder / 'report.html'))}'; use it: zoo predict PHOTO --model {escape(str(run.folder))}", soft_wrap=True
    )
    out.print(f'[dim]trained({name}, "{escape(str(run.folder))}")[/dim]', soft_wrap=True)


def _left(folder: Path) -> str:
    """Say what is there of a run that was ended in the middle of something."""
    if not (folder / CONFIG).is_file():
        return "interrupted; nothing of the run is kept, for it had not begun to learn: the same command begins it again"
    return f"interrupted; the steps since the last save are lost; go on with: zoo finetune --resume {folder}"


def _settings() -> dict[str, Any]:
    from zoo.finetuning import Settings

    return {field.name: field.type for field in fields(Settings)}


def _more(pairs: list[str] | None, kind: Any = None) -> dict[str, Any]:
    known = _settings() if kind is None else {field.name: field.type for field in fields(kind)}
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"a setting looks like warmup=0.1, not {pair!r}", param_hint="--set")
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise typer.BadParameter(f"there is no setting {name!r}{hint}", param_hint="--set")
        try:
            found[name] = read_json(value, name)
        except MalformedFile:
            found[name] = value
    return found
