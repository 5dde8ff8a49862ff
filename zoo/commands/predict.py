"""`zoo predict`, `zoo demo`: pictures classified, and shown with their labels."""

from __future__ import annotations

import shutil
import sys
from dataclasses import asdict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weights.wording import escape
from zoo.commands.completion import names
from zoo.commands.console import (
    BatchSizeOption,
    BuildOption,
    DeviceOption,
    FrozenOption,
    ImagesArgument,
    JsonOption,
    QuietOption,
    WeightsOfOption,
    WeightsOption,
    build_options,
    chosen,
    on_device,
    out,
    png,
    print_json,
)
from zoo.commands.int8 import CalibrationOption, DtypeOption, check_options, narrowed

if TYPE_CHECKING:
    from zoo.commands.pictures import Picture
    from zoo.prediction.predict import Prediction

DRAWN = 60
"""Pictures on a contact sheet at most."""
PREDICTS = "The network, or a run's folder. Default: the best ImageNet checkpoint on this machine."


def predict(
    images: ImagesArgument,
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=PREDICTS)] = None,
    tag: WeightsOption = None,
    weights_of: WeightsOfOption = None,
    option: BuildOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many labels to show.")] = 5,
    batch_size: BatchSizeOption = 32,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    calibration: CalibrationOption = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, max=1, help="With int8: the least share of images that keep their top-1 class; 0.98.")
    ] = None,
    frozen: FrozenOption = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=png, help=f"Draw up to {DRAWN} pictures with their labels into this PNG."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Classify pictures."""
    from zoo.catalogue import model_class
    from zoo.commands.pictures import called, classified, end, pictures, tell_by, tell_drawn
    from zoo.images import BadImage
    from zoo.pretrained.trained import trained

    model, tag, why = chosen(model, tag)
    cls = model_class(model)
    built = build_options(option, cls)
    place = on_device(device)
    check_options(dtype, calibration, tolerance)
    given, left_out = pictures(images, picture)
    network = trained(cls, tag, progress=not quiet, frozen=frozen or None, weights_of=weights_of, **built).to(place)
    quick = narrowed(network, dtype, calibration, tolerance, "a smaller number", quiet=quiet)
    record = network.checkpoint
    found: list[tuple[Picture, list[Prediction]]] = []
    failed: list[BadImage] = []
    for one, row in classified(quick, given, top, batch_size):
        if isinstance(row, BadImage):
            failed.append(row)
            continue
        found.append((one, row))
        if not as_json:
            _print_predictions(one.name, row)
    drawn = None if picture is None or not found else _drawn(found[:DRAWN], picture, called(network))
    if as_json:
        print_json([_entry(one.name, called(network), row) for one, row in found])
    elif found:
        tell_by(network, why)
        if record is not None and record.labels is None and network.classes is None:
            out.print("[dim]its classes have no names; zoo add FILE NAME:TAG --labels LIST gives them a list's[/dim]", soft_wrap=True)
        tell_drawn(drawn, f"the first {DRAWN} of {len(found):,}" if len(found) > DRAWN else "")
    end(len(found), len(given) + left_out, failed, "classified", as_json)


def _entry(name: str, called: str, row: list[Prediction]) -> dict[str, Any]:
    uncertain = bool(row) and row[0].uncertain
    return {"image": name, "network": called, "uncertain": uncertain, "predictions": [asdict(x) for x in row]}


def _print_predictions(name: str, row: list[Prediction]) -> None:
    uncertain = "  [yellow]uncertain: it may show none of the classes[/yellow]" if row and row[0].uncertain else ""
    out.print(f"[bold]{escape(name)}[/bold]{uncertain}", soft_wrap=True)
    for x in row:
        out.print(f"  {100 * x.probability:6.2f} %  {escape(x.label)}{f'  [dim]{escape(x.wnid)}[/dim]' if x.wnid else ''}")


def _drawn(found: list[tuple[Picture, list[Prediction]]], picture: Path, heading: str) -> Path:
    from zoo.prediction.contact_sheet import contact_sheet

    titles = [PurePath(one.name).name for one, _ in found]
    return contact_sheet([(one.read(), row) for one, row in found], picture, titles=titles, heading=heading)


def demo(
    files: Annotated[list[Path] | None, typer.Argument(metavar="IMAGE", help="Pictures of your own, besides the bundled ones.")] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", callback=png, help="Draw the contact sheet into this PNG.")] = Path("demo.png"),
) -> None:
    """Classify photographs offline, by the best ImageNet checkpoint on this machine, and draw a contact sheet."""
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
        table.add_row(escape(file.stem), escape(said), f"{100 * first.probability:.1f}", f"[dim]{escape(rest)}[/dim]")
    out.print(table)
    contact_sheet(
        list(zip(shown, found, strict=True)),
        picture,
        titles=[file.stem for file in shown],
        heading=f"{record.model}:{record.tag}, which knows {network.num_classes} classes",
    )
    top1 = record.metrics.get("top1")
    out.print(
        f"\nBy {escape(by)}." + (f" It has {top1:.1f} % of {escape(str(record.metrics_data))} right." if top1 else ""), soft_wrap=True
    )
    out.print("\nA ResNet50 from its file, ready to use (random weights, warm cache):")
    for timing in load(CATALOGUE["ResNet50"], rounds=3, with_timm=False):
        out.print(f"  {1000 * timing.seconds:7.1f} ms  {timing.way}{f', {timing.ratio:.1f}x faster' if timing.ratio > 1 else ''}")
    command = escape("zoo" if shutil.which("zoo") else sys.argv[0])
    out.print(f"\nDrawn in [bold]'{escape(str(picture))}'[/bold].", soft_wrap=True)
    out.print(f"Next: {command} list, {command} info VGG19, {command} predict PHOTO", soft_wrap=True)
