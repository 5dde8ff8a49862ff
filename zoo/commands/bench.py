"""`zoo bench`: what is measured, where it is shown and written."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weights.wording import escape
from zoo.browsing.measured import remember
from zoo.commands.completion import listed_names
from zoo.commands.console import DeviceOption, err, on_device, out, png, print_json, writable
from zoo.pretrained.records import record_of
from zoo.variants import spelt

if TYPE_CHECKING:
    from zoo.bench.inference import Plan
    from zoo.bench.record import Record
    from zoo.networks.model import Model

PICTURED = 6
"""Networks that the grouped picture shows at most."""


def bench(
    what: Annotated[str, typer.Option(help="infer: calls; train: steps; load: construct and load.")] = "infer",
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--models",
            "--model",
            "-m",
            autocompletion=listed_names,
            help="Networks, separated by commas; figure (some well-known ones) or all.",
        ),
    ] = None,
    batches: Annotated[
        str | None, typer.Option(help="Images per call: 1,32,256; on a CPU 1,8. Images per step: 32,256; on a CPU 8.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32; bfloat16 on a GPU, float32 on a CPU.")] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Peers with commas between them; the device's if left out. Inference: eager-fp32, eager-tf32, eager, "
            "eager-cl, compile, max-autotune, recipe, onnxruntime, openvino; on a CPU openvino-shipped, fast-bf16, fast-int8. "
            "Training: eager-cl, compile, max-autotune, fast-recompute, "
            "fast-module."
        ),
    ] = None,
    device: DeviceOption = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples of each way: 20; of a load 5.")] = None,
    tune: Annotated[str | None, typer.Option(help="What fast() tries: none, quick or full. Default: quick.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=writable, help="Write the record to this JSON file after every network and batch."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep what the record has, measure what it lacks.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the record if it is there.")] = False,
    budget_s: Annotated[float | None, typer.Option(min=0, help="Start no further network and batch after so many seconds.")] = None,
    from_json: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Measure nothing, and show these records. The last record wins where several have a cell.",
        ),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=png, help="Draw bars into this PNG, and all networks into FILE-zoo.png.")
    ] = None,
    docs: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=writable, help="Write the record's section into this document.")
    ] = None,
) -> None:
    """Measure, the peers beside ours in one process: parity first, then figures."""
    named = [_network(name) for name in _names(models, "--models")]
    if what == "load":
        if from_json:
            raise typer.BadParameter("records are of infer and train; a load is measured anew each time", param_hint="--from-json")
        ignored = {"--batches": batches, "--dtype": dtype, "--peers": peers, "--device": device, "--tune": tune, "--save": save}
        ignored |= {"--resume": resume, "--replace": replace, "--budget-s": budget_s is not None, "--picture": picture, "--docs": docs}
        if asked := [name for name, value in ignored.items() if value]:
            raise typer.BadParameter("of a load there are --models, --rounds and --json", param_hint=asked[0])
        _load(named or ["VGG19", "ResNet50"], rounds or 5, as_json)
        return
    if what not in ("infer", "train"):
        raise typer.BadParameter(f"there are measurements of infer, train and load, not of {what!r}", param_hint="--what")
    if resume and save is None:
        raise typer.BadParameter("it goes on with a record, so it needs --save FILE", param_hint="--resume")
    if replace and (save is None or resume):
        raise typer.BadParameter("it goes with --save FILE, and without --resume", param_hint="--replace")
    if save is not None and save.exists() and not (resume or replace):
        todo = "--replace writes these records over it" if from_json else "--resume goes on with it, --replace measures all anew"
        raise typer.BadParameter(f"'{save}' is there: {todo}", param_hint="--save")
    absent: list[str] = []
    from zoo.bench import inference, training
    from zoo.bench.cell import DeviceLost
    from zoo.bench.record import merged, trains

    kind: Any = training if what == "train" else inference

    if from_json:
        record = merged(from_json)
        if what == "train" and not trains(record):
            raise typer.BadParameter(f"{from_json[0]} is a record of infer; leave --what out", param_hint="--what")
        ignored = {"--batches": batches, "--dtype": dtype, "--peers": peers, "--device": device, "--rounds": rounds, "--tune": tune}
        ignored |= {"--resume": resume, "--budget-s": budget_s is not None}
        if asked := [name for name, value in ignored.items() if value]:
            raise typer.BadParameter("with --from-json nothing is measured, and all of the record is shown", param_hint=asked[0])
        if save is not None:
            record.write(save)
            if not trains(record):
                remember(save)
    else:
        plan, absent = _plan(what, named, batches, dtype, peers, device, rounds or 20, tune or "quick")
        if save is not None and what == "infer":
            remember(save)
        try:
            record = inference.run(
                plan,
                path=save,
                resume=resume,
                budget_s=budget_s,
                say=lambda line: err.print(line, style="dim", markup=False),
                measure=kind.measure_cell,
            )
        except DeviceLost as error:
            err.print(f"[red]error:[/red] {escape(str(error), lines=True)}", soft_wrap=True)
            raise typer.Exit(1) from None
    _show(record, as_json, absent)
    pictured = [spelt(n) for n in named if n not in ("all", "figure")] or list(kind.FIGURE)
    if not any(model in record.models for model in pictured):
        pictured = record.models
    if picture is not None:
        _draw(record, picture, pictured[:PICTURED])
    if docs is not None:
        from zoo.bench import page

        for path in page.write(record, docs, pictured[:PICTURED]):
            err.print(f"wrote '{escape(str(path))}'", soft_wrap=True)


def _plan(
    what: str, named: list[str], batches: str | None, dtype: str | None, peers: str | None, device: str | None, rounds: int, tune: str
) -> tuple[Plan, list[str]]:
    """Return what to measure, and the peers that belong there and are not installed."""
    from zoo.bench import inference, training
    from zoo.bench.cell import Plan
    from zoo.bench.peers import SHORT, TRAINING, left_out, select

    kind = training if what == "train" else inference
    place = on_device(device)
    dtypes = {str(known).removeprefix("torch."): known for known in SHORT}
    chosen = dtypes.get(dtype or ("bfloat16" if place.type == "cuda" else "float32"))
    if chosen is None:
        raise typer.BadParameter(f"{', '.join(dtypes)}, not {dtype!r}", param_hint="--dtype")
    if tune not in ("none", "quick", "full"):
        raise typer.BadParameter(f"none, quick or full, not {tune!r}", param_hint="--tune")
    table = TRAINING if what == "train" else None
    try:
        ways = select(None if peers is None else _names([peers], "--peers"), place, chosen, table)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--peers") from None
    from zoo.catalogue import CATALOGUE, model_class

    found: dict[str, type[Model]] = {}
    for name in named or ["figure"]:
        for one in CATALOGUE if name == "all" else kind.FIGURE if name == "figure" else [name]:
            cls = model_class(one)
            found[cls.__name__] = cls
    counts = _batches(batches) or (kind.BATCHES if place.type == "cuda" else kind.CPU_BATCHES)
    absent = left_out(place, chosen, table) if peers is None else {}
    for peer, packages in absent.items():
        err.print(f"the peer {peer} is left out: it needs pip install {' '.join(packages)}", soft_wrap=True)
    return Plan(list(found.values()), counts, ways, place, chosen, rounds, tune, what), list(absent)


def _names(given: list[str] | None, option: str) -> list[str]:
    found = [name.strip() for part in given or () for name in part.split(",") if name.strip()]
    if given and not found:
        raise typer.BadParameter("it names nothing; leave it out for the usual ones", param_hint=option)
    return found


def _network(name: str) -> str:
    """Take the network of NAME:TAG, and say that a checkpoint changes no speed."""
    if ":" not in name:
        return name
    record = record_of(name)
    err.print(f"{record.model}:{record.tag} is measured as {record.model}, with random weights: they change no speed", style="dim")
    return record.model


def _batches(text: str | None) -> list[int]:
    try:
        found = [] if text is None else [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if any(batch < 1 for batch in found):
        raise typer.BadParameter(f"numbers above 0 with commas between them, 1,32,256, not {text!r}", param_hint="--batches")
    return found


def _show(record: Record, as_json: bool, absent: list[str]) -> None:
    if as_json:
        sys.stdout.write(record.text())
        return
    from zoo.bench import tables

    table = Table(box=None, header_style="bold")
    for heading in ("network", "batch", "how", "images/s", "10-90 %", "latency ms", "error", "memory MiB", "roofline", "ready s", "ratio"):
        table.add_column(heading, justify="left" if heading in ("network", "how") else "right", no_wrap=heading != "how")
    order = record.models
    for cell in sorted(record.cells, key=lambda cell: (order.index(cell["model"]), cell["batch"])):
        for name in record.ways:
            row = cell["ways"].get(name)
            if row is None:
                continue
            where = cell["model"], str(cell["batch"]), escape(record.label(name))
            if "failed" in row:
                table.add_row(*where, f"[red]{escape(row['failed'])}[/red]")
                continue
            low, high = (1e6 * cell["batch"] / row[key] for key in ("us_high", "us_low"))
            ratio = f"{row['images_s'] / cell['ways'][cell['fastest_peer']]['images_s']:.2f}" if cell.get("fastest_peer") else ""
            memory = "" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f}"
            share = "" if row.get("roofline") is None else f"{row['roofline']:.0%}"
            latency = "" if "latency_us" not in row else f"{row['latency_us'] / 1000:.2f}"
            figures = f"{row['images_s']:,.0f}", f"{low:,.0f}-{high:,.0f}", latency, f"{row['error']:.1e}"
            ready = "" if row["build_s"] is None else f"{row['build_s']:.1f}"
            table.add_row(*where, *figures, memory, share, ready, ratio)
    out.print(table)
    heads, rows = tables.ops(record)
    if rows:
        wins = Table(box=None, header_style="bold", title="what each op wins, over all of it", title_justify="left")
        for heading in heads:
            wins.add_column(heading, justify="left" if heading == "op" else "right")
        for row in rows:
            wins.add_row(*map(escape, row))
        out.print(wins)
    without = f" there is without {', '.join(absent)}, not installed" if absent else ""
    out.print(f"[dim]{escape(record.caption())}; ratio: over the fastest peer{without}[/dim]")


def _draw(record: Record, path: Path, models: list[str] | tuple[str, ...]) -> None:
    from zoo.bench import chart

    written = [chart.save(chart.grouped(record, models), path)]
    if any("ratio" in cell for cell in record.cells):
        written.append(chart.save(chart.overview(record), path.with_name(f"{path.stem}-zoo{path.suffix}")))
    for file in written:
        err.print(f"drew '{escape(str(file))}'", soft_wrap=True)


def _load(models: list[str], rounds: int, as_json: bool) -> None:
    from zoo.bench import load, versions
    from zoo.catalogue import model_class

    results = {name: load(model_class(name), rounds) for name in models}
    if as_json:
        print_json({"machine": versions(), "results": {name: [asdict(t) for t in timings] for name, timings in results.items()}})
        return
    table = Table(box=None, header_style="bold")
    table.add_column("network")
    table.add_column("construct and load, warm cache")
    table.add_column("median ms", justify="right")
    table.add_column("faster", justify="right")
    for name, timings in results.items():
        for t in timings:
            table.add_row(name, t.way, f"{1000 * t.seconds:.1f}", f"{t.ratio:.1f}x")
    out.print(table)
    out.print(f"[dim]{versions()}[/dim]")
