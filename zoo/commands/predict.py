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
from zoo.commands.console import (
    BuildOption,
    FrozenOption,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    fail,
    names,
    out,
    png,
    print_json,
)

if TYPE_CHECKING:
    from zoo.images.preprocess import BadImage
    from zoo.prediction.predict import Prediction

PREDICTS = "The network, or a run's folder; ResNet20, of CIFAR-10's ten classes, comes with the package and needs no download."


def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures to classify.")],
    model: Annotated[str, typer.Option("--model", "-m", autocompletion=names, help=PREDICTS)] = "ResNet20",
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
    from zoo.pretrained.run_folder import named
    from zoo.pretrained.trained import trained

    model, tag = named(model, tag)
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
        _print_predictions(found, f"{called}, which knows {counted(network.num_classes, 'class', 'classes')}", sheet if found else None)
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
    """Classify pictures with the embedded checkpoint, offline, and draw a contact sheet."""
    from zoo.bench import load
    from zoo.catalogue import CATALOGUE
    from zoo.commands.demo import HEADING, classify, pictures
    from zoo.prediction.contact_sheet import contact_sheet
    from zoo.pretrained.trained import trained

    network = trained(CATALOGUE["ResNet20"])
    shown = classify(network, [*pictures(required=not files), *(files or [])])
    table = Table(box=None, header_style="bold")
    for heading in ("picture", "label", "%", "then"):
        table.add_column(heading, justify="right" if heading == "%" else "left")
    for title, _, row in shown:
        rest = ", ".join(f"{x.label} {100 * x.probability:.0f}" for x in row[1:])
        table.add_row(escape(title), row[0].label, f"{100 * row[0].probability:.1f}", f"[dim]{rest}[/dim]")
    out.print(table)
    contact_sheet([(view, row) for _, view, row in shown], sheet, titles=[t for t, _, _ in shown], heading=HEADING, columns=4)
    top1 = network.checkpoint.metrics["top1"] if network.checkpoint else 0
    out.print(f"\n{HEADING}. It has {top1:.2f} % of CIFAR-10's test images right.", soft_wrap=True)
    out.print("\nA ResNet50 from its file, ready to use (random weights, warm cache):")
    for timing in load(CATALOGUE["ResNet50"], rounds=3, with_timm=False):
        out.print(f"  {1000 * timing.seconds:7.1f} ms  {timing.way}{f', {timing.ratio:.1f}x faster' if timing.ratio > 1 else ''}")
    command = escape("zoo" if shutil.which("zoo") else sys.argv[0])
    out.print(f"\nDrawn in [bold]{escape(str(sheet))}[/bold].", soft_wrap=True)
    out.print(f"Next: {command} list, {command} info VGG19, {command} predict PHOTO --model ResNet50", soft_wrap=True)
