"""`zoo embed`, `zoo search`, `zoo knn`: vectors of many images, and what they know."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import (
    BuildOption,
    DeviceOption,
    JsonOption,
    QuietOption,
    WeightsOfOption,
    WeightsOption,
    build_options,
    err,
    makeable,
    naming_what_is_here,
    out,
    png,
    print_json,
    spares_inputs,
    writable,
)
from zoo.commands.int8 import CalibrationOption, check_int8
from zoo.commands.interrupts import has_said
from zoo.pretrained.names import named

if TYPE_CHECKING:
    from zoo.embedding import Embeddings, Neighbour, Report

SHOWN = 5
"""Images without a row that are named at most; the file beside the output has all."""
DTYPES = ("float32", "bfloat16", "float16", "int8")

USUAL = "ResNet50"
EMBEDS = "The network, or a run's folder."
ModelOption = Annotated[str, typer.Option("--model", "-m", autocompletion=names, help=EMBEDS)]
FileArgument = Annotated[Path, typer.Argument(metavar="EMBEDDINGS", help="What `zoo embed` wrote.")]
AtOption = Annotated[str | None, typer.Option("--at", help="The tap, if there are several.")]


def embed(
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            autocompletion=files,
            help="A folder, .tar shards, .parquet files, a list of paths or URLs; or a URL of these.",
        ),
    ],
    path: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE", help="A .parquet, .npy or .safetensors file; with Ray a folder."),
    ],
    model: ModelOption = USUAL,
    tag: WeightsOption = None,
    weights_of: WeightsOfOption = None,
    option: BuildOption = None,
    at: Annotated[list[str] | None, typer.Option("--at", help="A tap, layer3 or stride/16. Repeatable: each is a column.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Images at once; 256 on a GPU, 32 on a CPU.")] = None,
    device: DeviceOption = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16, on a CPU int8. Default: as fast() chooses.")] = None,
    calibration: CalibrationOption = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, max=1, help="With int8: the largest relative error of the vectors; 0.1.")
    ] = None,
    fast: Annotated[bool, typer.Option("--fast/--no-fast", help="Run on kernels chosen for the network and this machine.")] = True,
    decode: Annotated[str, typer.Option(help="cpu, or gpu: nvJPEG, faster, but pixels differ by a few levels.")] = "cpu",
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode. Default: chosen.")] = None,
    dedupe: Annotated[bool, typer.Option("--dedupe", help="Leave out images with the same bytes as an earlier one.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if an image could not be used.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an earlier run finished, and replace the output.")] = False,
    engine: Annotated[str, typer.Option(help="local, or ray: the same on a Ray cluster.")] = "local",
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compute the vectors of many images, and write a row per image, in the images' order.

    An interrupted run resumes when you repeat the command.
    """
    from zoo import embedding
    from zoo.catalogue import model_class
    from zoo.commands.watching import watched
    from zoo.embedding.writing import WRITERS
    from zoo.images import open_source
    from zoo.pretrained.trained import trained

    for value, allowed, hint in ((decode, ("cpu", "gpu"), "--decode"), (engine, ("local", "ray"), "--engine"), (dtype, DTYPES, "--dtype")):
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{', '.join(allowed)}, not {value!r}", param_hint=hint)
    check_int8(dtype, calibration, tolerance)
    if dtype == "int8" and (not fast or engine != "local"):
        raise typer.BadParameter("int8 goes without --no-fast and without --engine ray", param_hint="--dtype")
    if engine == "local" and path.suffix not in WRITERS:
        raise typer.BadParameter(f"the output is a {', '.join(WRITERS)} file, not {path.name!r}", param_hint="--out")
    makeable(path) if engine == "ray" else writable(path)
    usual = model == USUAL and tag is None
    model, tag = named(model, tag)
    cls = model_class(model)
    source, told = open_source(data), None if calibration is None else open_source(calibration)  # before a network is fetched for them
    with naming_what_is_here(usual):
        network = trained(cls, tag, progress=not quiet, weights_of=weights_of, **build_options(option, cls))
    options: dict[str, Any] = {"batch_size": batch_size, "device": device, "dtype": _dtype(dtype), "fast": fast, "decode": decode}
    options |= {"calibration": told, "tolerance": None if tolerance is None else {"error": tolerance}}
    options |= {"workers": workers, "dedupe": dedupe, "restart": restart, "engine": engine}
    options["progress"] = False if quiet else partial(watched, console=err)
    try:
        report = embedding.embed(network, source, path, at or "embedding", **options)
    except ValueError as error:
        if not (refused := getattr(error, "found", "")):  # of `NotCertified`, whose message speaks Python
            raise
        todo = "give --calibration more images, --tolerance a larger number, or use --dtype bfloat16"
        raise typer.BadParameter(f"{refused}; {todo}", param_hint="--dtype") from None
    except KeyboardInterrupt:
        err.print("interrupted; finished parts are kept: the same command resumes with them")
        has_said()
        raise
    if as_json:
        print_json(report.facts())
    else:
        _show(report)
    if report.unreadable:
        some = "".join(f"\n  {e.key}: {e.why}" for e in report.unreadable[:SHOWN])
        more = f"\n  … all of them in {report.listed}" if len(report.unreadable) > SHOWN else f"\nlisted in {report.listed}"
        err.print(f"[yellow]warning:[/yellow] {counted(len(report.unreadable), 'image')} can't be used, without a row:", end="")
        err.print(escape(some + more, lines=True), highlight=False, soft_wrap=True)
        if strict:
            raise typer.Exit(1)


def search(
    embeddings: FileArgument,
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="What to look for.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", autocompletion=names, help="The network, or a run's folder, if the file doesn't say.")
    ] = None,
    tag: WeightsOption = None,
    k: Annotated[int, typer.Option("-k", min=1, help="How many to show.")] = 8,
    at: AtOption = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", callback=png, help="Draw the image and what was found into this PNG.")
    ] = None,
    data: Annotated[str | None, typer.Option(autocompletion=files, help="Where the images are now, if they have moved.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the images most like another, by the cosine of their vectors."""
    from zoo.embedding import nearest, read
    from zoo.embedding.neighbours import model_of

    del quiet
    spares_inputs(picture, [image])
    known = read(embeddings)
    network = model_of(known, model, tag)
    found = nearest(known, network, image, k, at)
    if picture is not None:
        _draw(known, image, found, picture, data)
    how = f"cosine of {known.tap(at)} vectors, {type(network).__name__}, among {counted(len(known.keys), 'image')} of {embeddings}"
    if as_json:
        print_json({"image": str(image), "how": how, "found": [asdict(neighbour) for neighbour in found]})
        return
    table = Table(box=None, header_style="bold")
    for heading in ("cosine", "image", "label"):
        table.add_column(heading, justify="right" if heading == "cosine" else "left", overflow="fold")
    for neighbour in found:
        table.add_row(f"{neighbour.similarity:.4f}", escape(neighbour.key), escape(neighbour.label or ""))
    out.print(table)
    out.print(f"[dim]{escape(how)}[/dim]", soft_wrap=True)
    if picture is not None:
        out.print(f"[dim]drawn in '{escape(str(picture))}'[/dim]", soft_wrap=True)


def knn(
    embeddings: FileArgument,
    labels: Annotated[
        str | None,
        typer.Option("--labels", metavar="FILE", help="Labels: key, tab or comma, label per line, or JSON. Default: the file's own."),
    ] = None,
    test: Annotated[Path | None, typer.Option(metavar="EMBEDDINGS", help="Test on these vectors, and learn from the others.")] = None,
    at: AtOption = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Neighbours that vote.")] = 20,
    folds: Annotated[int, typer.Option(min=2, help="Folds of the linear classifier's cross-validation.")] = 10,
    linear: Annotated[bool, typer.Option("--linear/--no-linear", help="Fit the linear classifier too.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Measure what vectors know of labels: accuracy of a k-NN and of a linear classifier."""
    from zoo.embedding import knn as measure
    from zoo.embedding import read

    result = measure(
        read(embeddings),
        None if labels == "label" else labels,
        at=at,
        k=k,
        test=None if test is None else read(test),
        folds=folds,
        linear=linear,
    )
    if as_json:
        print_json(asdict(result))
        return
    table = Table(box=None, header_style="bold")
    table.add_column("classifier")
    table.add_column("right %", justify="right")
    table.add_row(f"k-NN, k={result.k}", f"{result.knn:.2f}")
    if result.linear is not None:
        table.add_row(f"linear, penalty {result.penalty:g}", f"{result.linear:.2f}")
    table.add_row("[dim]the most frequent class[/dim]", f"[dim]{result.chance:.2f}[/dim]")
    out.print(table)
    out.print(f"[dim]{result.tap}, {counted(result.classes, 'class', 'classes')}. {escape(result.how)}[/dim]", soft_wrap=True)


def _dtype(name: str | None) -> Any:
    import torch

    return name if name in (None, "int8") else getattr(torch, name)


def _show(report: Report) -> None:
    from zoo.images.kinds import endings

    columns = ", ".join(f"{tap} ({width:,})" for tap, width in report.widths.items())
    of = "" if report.rows == report.asked else f" of {report.asked:,}"
    out.print(f"{report.rows:,}{of} {'image' if report.asked == 1 else 'images'} embedded in {_time(report)}", soft_wrap=True)
    for line in report.certificate:
        out.print(f"[dim]{escape(line)}[/dim]", soft_wrap=True)
    if report.copies:
        out.print(f"left out {counted(len(report.copies), 'copy', 'copies')}, listed in '{escape(str(report.listed))}'", soft_wrap=True)
    if report.others:
        out.print(f"left alone {endings(report.others)}", soft_wrap=True)
    out.print(f"wrote '{escape(str(report.path))}': {counted(report.rows, 'row')} of {escape(columns)}", soft_wrap=True)


def _time(report: Report) -> str:
    """Say how long it took and why: "33 s (30 s preparing; 41/s then, limited by JPEG decoding)"."""
    seconds = f"{report.seconds:,.{0 if report.seconds >= 10 else 1}f} s"
    before = f", {report.resumed:,} of them by an earlier run" if report.resumed else ""
    if not report.limited_by:
        return f"{seconds}{before}"
    preparing = f"{report.preparing_s:,.{0 if report.preparing_s >= 10 else 1}f} s preparing"
    return f"{seconds} ({preparing}; {report.images_s:,.0f}/s then, limited by {report.limited_by}){before}"


def _draw(known: Embeddings, image: Path, found: list[Neighbour], picture: Path, data: str | None) -> None:
    from zoo.embedding.neighbours import pictures
    from zoo.images import decode
    from zoo.images.preprocess import open_image
    from zoo.prediction.contact_sheet import Line, contact_sheet

    files = pictures(known, found, data)
    if not all(files):
        missing = next(n.key for n, file in zip(found, files, strict=True) if not file)
        raise FileNotFoundError(f"{missing} is no longer where it was embedded from; say with --data where the images are now")
    entries: list[tuple[Any, list[Line]]] = [(open_image(image), [])]
    for neighbour, file in zip(found, files, strict=True):
        line = Line(neighbour.label or "", f"cosine {neighbour.similarity:.3f}", max(0.0, neighbour.similarity))
        entries.append((decode(file or b""), [line]))
    titles = [f"asked: {image.name}", *(neighbour.key for neighbour in found)]
    contact_sheet(entries, picture, titles=titles, heading=f"most like {image.name}, by the cosine of their vectors")
