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
from weights.errors import MalformedFile
from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import (
    BuildOption,
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
from zoo.commands.console import device as device_option
from zoo.pretrained.run_folder import CONFIG

if TYPE_CHECKING:
    from zoo.finetuning import Run


def finetune(
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="DATA",
            autocompletion=files,
            help="A folder with a folder of images a class, or with train and val folders of these; tars; Parquet.",
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
    epochs: Annotated[int | None, typer.Option(help="Passes over the images; 10.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps, instead of epochs.")] = None,
    head_epochs: Annotated[int | None, typer.Option(help="Epochs, of those, in which only the new head learns.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per step, over all processes; 64.")] = None,
    accumulate: Annotated[int | None, typer.Option(help="Compute a step in so many parts, to save memory.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adamw.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay; biases and norms have none.")] = None,
    layer_decay: Annotated[float | None, typer.Option(help="Factor of the learning rate from a layer to the one before it.")] = None,
    label_smoothing: Annotated[float | None, typer.Option(help="Share of a target for all other classes.")] = None,
    randaugment: Annotated[int | None, typer.Option(help="RandAugment's magnitude, 1..30.")] = None,
    mixup: Annotated[float | None, typer.Option(help="mixup: alpha of its Beta distribution, 0.2.")] = None,
    cutmix: Annotated[float | None, typer.Option(help="CutMix: alpha of its Beta distribution, 1.0.")] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of the running mean of the weights, 0.999.")] = None,
    balance: Annotated[bool | None, typer.Option("--balance", help="Weight rare classes more.")] = None,
    freeze_norm: Annotated[bool | None, typer.Option("--freeze-norm", help="Keep BatchNorm's statistics.")] = None,
    clip: Annotated[float | None, typer.Option(help="Greatest norm of the gradient.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many evaluations without improvement.")] = None,
    size: Annotated[int | None, typer.Option(help="Side of the images in pixels.")] = None,
    device: Annotated[str | None, typer.Option(callback=device_option, help="cpu, cuda or cuda:1.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, by autocast, or float32; bfloat16 on a GPU.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode.")] = None,
    fast: Annotated[
        bool | None, typer.Option("--fast/--no-fast", help="Train on the zoo's kernels. Default: on a GPU, for enough steps.")
    ] = None,
    fsdp: Annotated[bool | None, typer.Option("--fsdp", help="Divide the network among the processes of torchrun.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    more: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Any other setting, warmup=0.1. Repeatable.")
    ] = None,
    option: BuildOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Teach a network the classes of your images; `torchrun --nproc-per-node 4 -m zoo finetune …` uses several GPUs.

    Use the run's folder like a checkpoint: `zoo predict PHOTO --model FOLDER`, trained(MobileNetV2, "FOLDER").
    """
    from zoo.commands.watching import watched_steps
    from zoo.finetuning import Settings, Stopped, find_rate
    from zoo.finetuning import finetune as train

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
        raise
    if int(os.environ.get("RANK", "0")) == 0:
        _show(run, as_json)


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
        return "nothing of the run is kept, for it had not begun to learn: the same command begins it again"
    return f"the steps since the last save are lost; go on with: zoo finetune --resume {folder}"


def _settings() -> dict[str, Any]:
    from zoo.finetuning import Settings

    return {field.name: field.type for field in fields(Settings)}


def _more(pairs: list[str] | None) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"a setting looks like warmup=0.1, not {pair!r}", param_hint="--set")
        if name not in _settings():
            hint = did_you_mean(name, _settings()) or f"; there are {', '.join(_settings())}"
            raise typer.BadParameter(f"there is no setting {name!r}{hint}", param_hint="--set")
        try:
            found[name] = read_json(value, name)
        except MalformedFile:
            found[name] = value
    return found
