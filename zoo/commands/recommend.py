"""`zoo recommend`: which checkpoint to start from, for these images, on this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import DeviceOption, JsonOption, QuietOption, err, makeable, out, png, print_json, value_of
from zoo.commands.interrupts import has_said

if TYPE_CHECKING:
    from zoo.recommendation import Recommendation

SHOWN = 6
"""Candidates that were not compared, which are named at most."""


def recommend(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            autocompletion=files,
            help="A folder with a folder of images a class, or with train and val folders of these; tars; Parquet; a list.",
        ),
    ],
    labels: Annotated[
        str | None,
        typer.Option("--labels", metavar="FILE", help="Lines of key, tab or comma, label, or JSON; the folders' names if left out."),
    ] = None,
    no_labels: Annotated[
        bool, typer.Option("--no-labels", help="Compare without labels, which says less, whatever the folders are.")
    ] = False,
    max_ms: Annotated[float | None, typer.Option(help="Milliseconds that one image may take on the device, by fast().")] = None,
    max_mb: Annotated[float | None, typer.Option(help="Megabytes that the checkpoint's file may have.")] = None,
    license: Annotated[
        str | None, typer.Option("--licence", "--license", help='Only this licence, "MIT" for example; "permissive": every use.')
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model", "-m", autocompletion=names, help="A candidate, NETWORK or NETWORK:TAG, or a run's folder; may be repeated."
        ),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Compare only what is on this machine; else a few others are fetched.")
    ] = False,
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="At most 300 images and 6 candidates: a first answer.")] = False,
    folds: Annotated[int, typer.Option(min=2, help="Of the cross-validation; each class needs so many images.")] = 5,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", callback=png, help="Draw accuracy over time into this PNG.")] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where vectors, times and scores are kept; in the cache of weights if left out.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Compute and time anew what an earlier call kept.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare checkpoints on your images and say which to start fine-tuning from, on this machine.

    An interrupted run resumes when the same command is given again. Exits with 1 where nothing is within the budget.
    """
    from zoo.recommendation import Budget
    from zoo.recommendation import recommend as compare

    if labels is not None and no_labels:
        raise typer.BadParameter("--labels gives labels and --no-labels does without; leave one out", param_hint="--labels")
    for name, value in (("--max-ms", max_ms), ("--max-mb", max_mb)):
        if value is not None and not value > 0:
            raise typer.BadParameter(f"a positive number, not {value:g}", param_hint=name)
    with value_of(None):
        budget = Budget(max_ms, max_mb, license)
    options: dict[str, Any] = {"models": model, "offline": offline, "device": device, "quick": quick, "folds": folds, "restart": restart}
    options["folder"] = None if folder is None else makeable(folder)
    options["progress"] = _watch(quiet)
    try:
        found = compare(data, False if no_labels else labels, budget, **options)
    except KeyboardInterrupt:
        err.print("interrupted; what is finished is kept: the same command resumes with it")
        has_said()
        raise
    drawn = None if picture is None else found.picture(picture)
    if as_json:
        print_json({**found.facts(), "picture": None if drawn is None else str(drawn)})
    else:
        _show(found, drawn)
    if found.best is None:
        raise typer.Exit(1)


def _watch(quiet: bool) -> Any:
    """Return what shows the work: bars on a terminal, lines in a log; a quiet command shows nothing."""
    from zoo.commands.watching import watched
    from zoo.recommendation.progress import Watch

    class Lines(Watch):
        def images(self, name: str, total: int, done: int) -> AbstractContextManager[Callable[[int], None]]:
            if not err.is_terminal:
                self.say(f"{name} {counted(total, 'image')}")
            return watched(name, total, done, console=err)

        def say(self, line: str) -> None:
            err.print(line, markup=False, highlight=False, soft_wrap=True)

    return False if quiet else Lines()


def _show(found: Recommendation, drawn: Path | None) -> None:
    for number, line in enumerate(found.table().splitlines()):
        style = "bold" if number == 0 or line.startswith("->") else ""
        out.print(escape(line), style=style, highlight=False, soft_wrap=True)
    by = f"{found.measure} of {counted(found.images, 'image')}"
    if found.labelled:
        by += f" in {counted(len(found.classes), 'class', 'classes')}, {found.folds} folds; guessing has {found.chance:.1f} %"
    out.print(
        f"[dim]-> recommended, = tied with it. {escape(by)}. ± is one standard error. ms: one image on {escape(found.device)}[/dim]",
        soft_wrap=True,
    )
    out.print()
    for line in found.reasons:
        out.print(escape(line), highlight=False, soft_wrap=True)
    for line in found.cannot_tell:
        out.print(f"[yellow]{escape(line)}[/yellow]", highlight=False, soft_wrap=True)
    for name, why in list(found.skipped.items())[:SHOWN]:
        out.print(f"[dim]not compared: {escape(name)}: {escape(why)}[/dim]", soft_wrap=True)
    if (more := len(found.skipped) - SHOWN) > 0:
        out.print(f"[dim]and {more} more: --json lists all[/dim]")
    if found.resumed:
        out.print(f"[dim]{counted(found.resumed, 'result')} of an earlier run reused: --restart computes anew[/dim]", soft_wrap=True)
    if drawn is not None:
        out.print(f"[dim]drawn in '{escape(str(drawn))}'[/dim]", soft_wrap=True)
    if found.best is not None:
        out.print(f"\n{escape(found.trained)}", highlight=False, soft_wrap=True)
        out.print(f"[dim]next: zoo finetune PHOTOS --model {escape(found.best.name)}[/dim]", soft_wrap=True)
