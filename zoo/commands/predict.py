"""`zoo predict`, `zoo demo`: pictures classified, and shown with their labels."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from weights.wording import counted
from zoo.commands.completion import names
from zoo.commands.console import (
    BuildOption,
    FrozenOption,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    fail,
    out,
    png,
    print_json,
)

if TYPE_CHECKING:
    from zoo.images.preprocess import BadImage
    from zoo.prediction.predict import Prediction

PREDICTS = "The network, or a run's folder; if left out, the best ImageNet checkpoint that is on this machine."


def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures to classify.")],
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=PREDICTS)] = None,
    tag: WeightsOption = None,
    option: BuildOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many labels to show.")] = 5,
    frozen: FrozenOption = False,
    sheet: Annotated[Path | None, typer.Option(callback=png, help="Also draw the pictures with their labels into this PNG.")] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Classify pictures."""
    from zoo.catalogue import model_class
    from zoo.images.preprocess import BadImage
    from zoo.prediction.predict import predict as classify
    from zoo.pretrained.offline import usual
    from zoo.pretrained.run_folder import named
    from zoo.pretrained.trained import trained

    why = ""
    if model is not None:
        model, tag = named(model, tag)
    elif tag is not None:
        raise typer.BadParameter("--weights names a checkpoint of a network: name that too, --model NETWORK")
    else:
        record, why = usual()
        model, tag = record.model, record.tag
    cls = model_class(model)
    network = trained(cls, tag, progress=not quiet, frozen=frozen or None, **build_options(option, cls))
    record = network.checkpoint
    called = f"{type(network).__name__} {record.tag if record else ''}".strip()
    found: list[tuple[Path, list[Prediction]]] = []
    failed: list[BadImage] = []
    try:
        found = list(zip(images, classify(network, list(images), top=top), strict=True))
    except BadImage:  # one bad picture does not spoil the others
        for path in images:
            try:
                found.append((path, classify(network, path, top=top)))
            except BadImage as error:
                failed.append(error)
    if sheet is not None and found:
        from zoo.prediction.contact_sheet import contact_sheet

        contact_sheet(found, sheet, titles=[p.name for p, _ in found], heading=called)
    if as_json:
        print_json([{"image": str(p), "network": called, "predictions": [asdict(x) for x in row]} for p, row in found])
    else:
        knows = why or f"which knows {counted(network.num_classes, 'class', 'classes')}"
        _print_predictions(found, f"{called}, {knows}", sheet if found else None)
    codes = {fail(error, 3 if isinstance(error, FileNotFoundError) else 1) for error in failed}
    if codes:
        raise typer.Exit(min(codes))


def _print_predictions(found: list[tuple[Path, list[Prediction]]], by: str, sheet: Path | None) -> None:
    for path, row in found:
        out.print(f"[bold]{escape(str(path))}[/bold]", soft_wrap=True)
        for x in row:
            out.print(f"  {100 * x.probability:6.2f} %  {escape(x.label)}{f'  [dim]{x.wnid}[/dim]' if x.wnid else ''}")
    if found:
        out.print(f"[dim]by {escape(by)}; another: --model NETWORK[/dim]", soft_wrap=True)
    if sheet is not None:
        out.print(f"[dim]drawn in {escape(str(sheet))}[/dim]", soft_wrap=True)


def demo(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[IMAGE...]", help="Pictures of your own, besides the bundled ones.")
    ] = None,
    sheet: Annotated[Path, typer.Option("--sheet", callback=png, help="Where the contact sheet goes.")] = Path("demo.png"),
) -> None:
    """Classify photographs offline, by the best ImageNet checkpoint that is on this machine, and draw a contact sheet."""
    from zoo.bench import load
    from zoo.catalogue import CATALOGUE
    from zoo.commands.demo import pictures
    from zoo.prediction.contact_sheet import contact_sheet
    from zoo.prediction.predict import predict as classify
    from zoo.pretrained.offline import usual
    from zoo.pretrained.trained import trained

    shown = [*pictures(required=not files), *(files or [])]
    record, why = usual()
    network = trained(CATALOGUE[record.model], record.tag)
    by = f"{record.model}:{record.tag}, {why}"
    found = classify(network, shown, top=3)
    table = Table(box=None, header_style="bold")
    for heading in ("picture", "label", "%", "then"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    for file, row in zip(shown, found, strict=True):
        first, rest = row[0], ", ".join(f"{x.label} {100 * x.probability:.0f}" for x in row[1:])
        said = f"uncertain: {first.label}" if first.uncertain else first.label
        table.add_row(escape(file.stem), said, f"{100 * first.probability:.1f}", f"[dim]{rest}[/dim]")
    out.print(table)
    contact_sheet(
        list(zip(shown, found, strict=True)),
        sheet,
        titles=[file.stem for file in shown],
        heading=f"{record.model}:{record.tag}, which knows {network.num_classes} classes",
    )
    top1 = record.metrics.get("top1")
    out.print(f"\nBy {escape(by)}." + (f" It has {top1:.1f} % of {record.metrics_data} right." if top1 else ""), soft_wrap=True)
    out.print("\nA ResNet50 from its file, ready to use (random weights, warm cache):")
    for timing in load(CATALOGUE["ResNet50"], rounds=3, with_timm=False):
        out.print(f"  {1000 * timing.seconds:7.1f} ms  {timing.way}{f', {timing.ratio:.1f}x faster' if timing.ratio > 1 else ''}")
    command = escape("zoo" if shutil.which("zoo") else sys.argv[0])
    out.print(f"\nDrawn in [bold]{escape(str(sheet))}[/bold].", soft_wrap=True)
    out.print(f"Next: {command} list, {command} info VGG19, {command} predict PHOTO", soft_wrap=True)
