"""`zoo list`, `zoo info`: the networks and what is known of their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

import weights
from weights import Cache, Checkpoint, UnknownWeights
from weights.sources import is_here
from weights.wording import counted, escape
from zoo.browsing.facts import facts
from zoo.commands.completion import names
from zoo.commands.console import JsonOption, ModelArgument, out, print_json
from zoo.commands.speeds import speeds
from zoo.pretrained.names import named
from zoo.pretrained.records import find_record, nearest_with_weights
from zoo.pretrained.run_folder import read_row
from zoo.pretrained.search import IMAGENET, Entry, search
from zoo.variants import CLASSIFICATION, Variant, networks, of_all_tasks, spelt, variants

Sort = Literal["accuracy", "params", "gmacs", "size", "speed"]
SHOWN = 8
"""Checkpoints that `zoo info` shows on its screen."""
WIDTHS = {"network": 18, "params": 7, "GMACs": 5, "MB": 4, "CPU ms": 6, "top-1": 5, "top-5": 5, "on": 8, "px": 3}
"""Columns that are never cut, whatever the terminal; the tag behind them may be."""
USES = {CLASSIFICATION: "zoo predict PHOTO --model", "detection": "zoo detect PHOTO --model"}
"""How a checkpoint is used, by its network's task."""
WIDE = 110
"""Columns of a terminal from which on `zoo list` shows top-5 and licence too."""


def list_models(
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="PATTERN", autocompletion=names, help="Part of a name, resnet, or a pattern, '*resnet*_v2', in any case."),
    ] = None,
    family: Annotated[str | None, typer.Option(help="Only this family: VGG, ResNet, MobileNetV2 …")] = None,
    min_top1: Annotated[float | None, typer.Option(help="Only checkpoints with at least this top-1 accuracy in percent.")] = None,
    max_params: Annotated[str | None, typer.Option(help="Only networks with at most this many parameters: 10M, 500k, 25557032.")] = None,
    max_gmacs: Annotated[float | None, typer.Option(help="Only networks with at most so many 10⁹ multiply-adds per image.")] = None,
    licence: Annotated[
        str | None,
        typer.Option("--licence", "--license", help='Only checkpoints of this licence: "MIT", "unstated" …; "permissive": every use.'),
    ] = None,
    data: Annotated[str | None, typer.Option(help="Only accuracies on these images: ImageNet, CIFAR-10 …")] = None,
    sort: Annotated[
        Sort | None, typer.Option(help="Order: accuracy puts the best first, the others the smallest or fastest. Default: by family.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only networks for this task: classification, detection ….")] = None,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", "-c", help="A line for every checkpoint, not only the default.")] = False,
    as_json: JsonOption = False,
) -> None:
    """List the networks and their default checkpoints, classifiers first."""
    filtered = family is not None or min_top1 is not None or max_params is not None or max_gmacs is not None
    filtered = filtered or licence is not None or data is not None or sort is not None
    known = list(dict.fromkeys(one.task for one in of_all_tasks().values()))
    if task is not None and task not in known:
        raise typer.BadParameter(f"there are no networks for {task!r}; there are some for {', '.join(known)}", param_hint="--task")
    if task not in (None, CLASSIFICATION) and filtered:
        raise typer.BadParameter(f"the other filters are for classifiers; leave them out with --task {task}", param_hint="--task")
    others = _others(pattern, [one for one in known if task in (None, one)]) if not filtered else []
    if task not in (None, CLASSIFICATION) or (others and pattern is not None and not networks(pattern)):
        _show_others(others, pattern, as_json)
        return
    try:
        wanted = {"min_top1": min_top1, "max_params": max_params, "max_gmacs": max_gmacs, "license": licence, "data": data}
        found = search(family=family, all_checkpoints=checkpoints, **wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if pattern is not None:
        called = matching(pattern)
        found = [entry for entry in found if entry.name in called]
    if sort is not None:
        found.sort(key=ORDERS[sort])
    if as_json:
        print_json([*map(_entry, found), *map(_entry, others)])
        return
    if not found:
        asked = family is not None or min_top1 is not None or max_params is not None or licence is not None or data is not None
        out.print("no checkpoint meets all of these; leave one of them out" if asked else "there are no networks", soft_wrap=True)
        raise typer.Exit(1)
    out.print(_table(found, wide=out.width >= WIDE))
    noun = "checkpoint" if checkpoints else "network"
    told = f"GMACs: 10⁹ multiply-adds an image. MB: of the file, ~ if nobody says. CPU ms: {speeds().caption}; blank if not measured."
    out.print(f"[dim]{counted(len(found), noun)}. {told}[/dim]", soft_wrap=True)
    every = "" if checkpoints else " Of each network its default weights are shown: --checkpoints shows all."
    out.print(f"[dim]An accuracy holds for its images and its preprocessing: zoo info NETWORK.{every}[/dim]", soft_wrap=True)
    if others:
        _show_others(others, pattern, as_json=False)


def _others(pattern: str | None, tasks: list[str]) -> list[Entry]:
    """List networks for other tasks than classification, each with its default checkpoint or None."""
    found = [variants(task)[name] for task in tasks if task != CLASSIFICATION for name in networks(pattern or "*", task)]
    return [Entry(one, next((c for c in weights.checkpoints(one.name) if c.default), None)) for one in found]


def _show_others(others: list[Entry], pattern: str | None, as_json: bool) -> None:
    """Show networks for other tasks, a table a task."""
    if as_json:
        print_json([_entry(e) for e in others])
        return
    if not others:
        raise UnknownWeights(f"no network is called like {pattern!r}; `zoo list` shows all {len(of_all_tasks())}.")
    for task in dict.fromkeys(e.variant.task for e in others):
        table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
        for heading in (f"for {task}", "params", "MB", "classes", "mAP", "px", "weights"):
            table.add_column(heading, no_wrap=True, justify="left" if heading in (f"for {task}", "weights") else "right")
        for e in (one for one in others if one.variant.task == task):
            v, c = e.variant, e.checkpoint
            facts = (
                f"{v.params / 1e6:.2f}M",
                _megabytes(v, c),
                str(v.num_classes),
                _metric(c, "map") or _metric(c, "map50"),
                str(v.input_size),
            )
            table.add_row(e.name, *facts, escape(c.tag) if c else "[dim]none[/dim]")
        out.print()
        out.print(table)


def matching(pattern: str) -> set[str]:
    """Name the networks that a pattern means, in any case; without a wildcard it is a part of the name.

    Raises:
        UnknownWeights: it means none.
    """
    found = set(networks(pattern))
    if not found and any(sign in pattern for sign in "*?["):
        raise UnknownWeights(f"no network is called like {pattern!r}; `zoo list` shows all {len(variants())}.")
    return found or {spelt(pattern)}


def _last(value: float | None) -> tuple[bool, float]:
    return value is None, value or 0.0


def _accuracy(entry: Entry) -> tuple[bool, bool, float]:
    """Order by top-1; ImageNet's come first, for accuracies on other images don't compare."""
    row = entry.checkpoint
    top1 = row.metrics.get("top1") if row else None
    return top1 is None, not (row and (row.metrics_data or "").startswith(IMAGENET)), -(top1 or 0.0)


ORDERS: dict[str, Callable[[Entry], Any]] = {
    "accuracy": _accuracy,
    "params": lambda entry: entry.variant.params,
    "gmacs": lambda entry: _last(entry.variant.multiply_adds),
    "size": lambda entry: _size(entry.variant, entry.checkpoint)[0],
    "speed": lambda entry: _last(speeds().plain.get(entry.name)),
}


def _size(variant: Variant, row: Checkpoint | None) -> tuple[int, bool]:
    """Return the bytes of a checkpoint's file, and whether they are known; else those of the parameters in float32."""
    return (row.size_bytes, True) if row and row.size_bytes else (4 * variant.params, False)


def _megabytes(variant: Variant, row: Checkpoint | None) -> str:
    size, known = _size(variant, row)
    return f"{'' if known else '~'}{size / 1e6:.{0 if size >= 1e7 else 1}f}"


def _gmacs(variant: Variant) -> str:
    return "" if variant.multiply_adds is None else f"{variant.multiply_adds / 1e9:.2f}"


def _milliseconds(of: dict[str, float], name: str) -> str:
    return f"{of[name]:.{0 if of[name] >= 100 else 1}f}" if name in of else ""


def _on(row: Checkpoint | None) -> str:
    return escape((row.metrics_data or "").partition(" ")[0].partition("-1k")[0].rstrip(",")) if row and row.metrics else ""


def _metric(row: Checkpoint | None, name: str) -> str:
    return f"{row.metrics[name]:.2f}" if row and name in row.metrics else ""


def _side(variant: Variant, row: Checkpoint | None) -> str:
    return str((row.preprocessing.crop if row else None) or variant.input_size)


def _table(found: list[Entry], wide: bool) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading, width in WIDTHS.items():
        if heading in ("network", "on"):
            table.add_column(heading, no_wrap=True, min_width=width)
        elif wide or heading != "top-5":
            table.add_column(heading, no_wrap=True, min_width=width, justify="right")
    for heading in ("weights", *(["licence"] if wide else [])):
        table.add_column(heading, no_wrap=True)
    for e in found:
        v, c = e.variant, e.checkpoint
        row = [e.name, f"{v.params / 1e6:.2f}M", _gmacs(v), _megabytes(v, c), _milliseconds(speeds().plain, e.name), _metric(c, "top1")]
        row += [_metric(c, "top5")] if wide else []
        row += [_on(c), _side(v, c), escape(c.tag) if c else "[dim]none[/dim]"]
        table.add_row(*row, *([escape(c.license) if c else ""] if wide else []))
    return table


def info(
    model: ModelArgument,
    full: Annotated[bool, typer.Option("--full", help="Show sources, hashes and preprocessing of every checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show a network and its checkpoints. --full shows everything, and NAME:TAG everything about one checkpoint."""
    name, tag = named(model)
    known = of_all_tasks()[name]
    run = tag is not None and Path(tag).is_dir()
    rows = weights.checkpoints(name) if tag is None else (read_row(Path(tag)) if run else find_record(name, tag),)
    full = full or tag is not None
    if as_json:
        print_json(
            {
                "network": known.name,
                "params": known.params,
                "multiply_adds": known.multiply_adds,
                "cpu_ms": speeds().plain.get(known.name),
                "paper": known.paper,
                "min_size": known.min_size,
                "checkpoints": [asdict(c) for c in rows],
            }
        )
        return
    if rows:
        out.print(_checkpoints(known, rows, full))
    if len(rows) > SHOWN and not full:
        out.print(f"[dim]and {len(rows) - SHOWN} more: --full[/dim]")
    out.print(_about(known))
    if not rows:
        if known.task != CLASSIFICATION:
            ways = {
                "segmentation": f"zoo segment PHOTO --model {known.name} --weights FILE",
                "detection": f"zoo detect PHOTO --model {known.name} --weights FILE",
            }
            out.print(f"No pretrained weights are known. Your own: {ways[known.task]}")
            return
        near = ", ".join(c.model for c in nearest_with_weights(known))
        out.print(f"No pretrained weights are known. Nearest with weights: {near}. Your own: zoo add FILE {known.name}:mine")
        return
    if not full:
        default = next((c for c in rows if c.default), rows[0])
        if known.task in USES:
            out.print(f"\nuse: {USES[known.task]} {known.name}:{default.tag}", soft_wrap=True)
        out.print("[dim]preprocessing, sources, hashes and licences of each: --full[/dim]", soft_wrap=True)
        return
    for c in rows:
        out.print(f"\n[bold]{escape(c.tag)}[/bold]{'  (default)' if c.default else ''}")
        out.print(_pairs(facts(c)))


def _checkpoints(known: Variant, rows: tuple[Checkpoint, ...], full: bool) -> Table:
    """Show the default first and the most accurate behind it."""
    order = sorted(rows, key=lambda c: (not c.default, _accuracy(Entry(known, c))))
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (f"{known.name} weights", "top-1", "top-5", "on", "px", "MB", "licence", "here"):
        table.add_column(heading, no_wrap=True, justify="right" if heading in ("top-1", "top-5", "px", "MB") else "left")
    cache = Cache()
    for c in order if full else order[:SHOWN]:
        here = any(cache.lookup(one) for one in c.containers()) or any(is_here(source) for source in c.sources)
        tag = f"{escape(c.tag)}{' [dim]default[/dim]' if c.default else ''}"
        facts = _metric(c, "top1"), _metric(c, "top5"), _on(c), _side(known, c), _megabytes(known, c), escape(c.license)
        table.add_row(tag, *facts, "yes" if here else "")
    return table


def _about(known: Variant) -> Table:
    cost = _milliseconds(speeds().plain, known.name)
    facts = {
        "": known.about,
        "parameters": f"{known.params:,}",
        "multiply-adds": f"{_gmacs(known)}·10⁹ an image of {known.input_size}x{known.input_size} px; it takes {known.min_size} px and more"
        if known.multiply_adds is not None
        else "",
        "task": "" if known.task == CLASSIFICATION else f"{known.task}, {known.num_classes} classes, images of {known.input_size} px",
        "CPU": f"{cost} ms: {speeds().caption}" if cost else "",
        "family, paper": f"{known.family}, {known.paper}",
    }
    return _pairs({name: value for name, value in facts.items() if value})


def _pairs(facts: dict[str, str]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, escape(value, lines=True))
    return table


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "network": entry.name,
        "family": entry.family,
        "params": entry.variant.params,
        "multiply_adds": entry.variant.multiply_adds,
        "cpu_ms": speeds().plain.get(entry.name),
        "input_size": entry.variant.input_size,
        "checkpoint": asdict(entry.checkpoint) if entry.checkpoint else None,
    }
