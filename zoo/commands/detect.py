"""`zoo detect`: what is where on photographs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from weights.wording import counted, escape
from zoo.commands.completion import names
from zoo.commands.console import (
    BatchSizeOption,
    BuildOption,
    DeviceOption,
    FrozenOption,
    ImagesArgument,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    err,
    makeable,
    on_device,
    out,
    print_json,
    writable,
)
from zoo.commands.int8 import CalibrationOption, DtypeOption, check_options, narrowed

if TYPE_CHECKING:
    from zoo.commands.pictures import Picture
    from zoo.detection import Detections, Detector

DETECTS = "The detector, or NAME:TAG; zoo list --task detection shows them."


def drawable(place: Path | None) -> Path | None:
    """Refuse a picture of a kind that nothing here writes, and one that can't be written."""
    from zoo.images.kinds import WRITTEN

    if place is not None and place.suffix.lower() not in WRITTEN:
        raise typer.BadParameter(f"a picture ends in {', '.join(WRITTEN)}, not '{place.name}'")
    return writable(place)


Cfg = Annotated[
    Path | None, typer.Option(metavar="FILE", help="A Darknet network of your own: its .cfg; --weights then names its .weights.")
]
Names = Annotated[Path | None, typer.Option("--names", metavar="FILE", help="Names of its classes, one a line, with --cfg.")]
Threshold = Annotated[float | None, typer.Option(min=0, max=1, help="The lowest score to report. Default: the network's own.")]
Overlap = Annotated[
    float | None, typer.Option(min=0, max=1, help="The IoU above which the weaker of two boxes is dropped. Default: the network's own.")
]


def detect(
    images: ImagesArgument,
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=DETECTS)] = None,
    tag: WeightsOption = None,
    cfg: Cfg = None,
    called: Names = None,
    option: BuildOption = None,
    threshold: Threshold = None,
    overlap: Overlap = None,
    batch_size: BatchSizeOption = 8,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    calibration: CalibrationOption = None,
    tolerance: Annotated[
        float | None, typer.Option(min=0, max=1, help="With int8: the largest relative error of what the network computes; 0.1.")
    ] = None,
    frozen: FrozenOption = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=drawable, help="Draw boxes and names of the first photograph into this picture."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Write all results into this folder, in COCO's format. An interrupted run resumes."
        ),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="With --out: discard what an earlier run finished.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find things on photographs: boxes in the photograph's own pixels."""
    check_options(dtype, calibration, tolerance)
    if folder is not None:
        if dtype == "int8":
            raise typer.BadParameter("int8 goes without --out, whose runs resume in float32", param_hint="--dtype")
        network = detector(model, tag, cfg, called, option, device, quiet, frozen)
        _folder(network, images, folder, threshold, overlap, batch_size, restart, quiet, as_json, picture)
        return
    from zoo.commands.pictures import pictures

    given, left_out = pictures(images, picture)
    network = detector(model, tag, cfg, called, option, device, quiet, frozen)
    error = None if tolerance is None else {"error": tolerance}
    quick = narrowed(network, dtype, calibration, error, "a larger number", quiet=quiet)
    _shown(network, quick, given, left_out, threshold, overlap, batch_size, picture, as_json)


def detector(
    model: str | None,
    tag: str | None,
    cfg: Path | None,
    called: Path | None,
    option: list[str] | None,
    device: str | None,
    quiet: bool,
    frozen: bool,
) -> Detector:
    """Build the detector that the options name, on its device."""
    from zoo.catalogue import any_class
    from zoo.detection import Detector, darknet
    from zoo.pretrained.names import named
    from zoo.pretrained.trained import trained

    if cfg is not None:
        if model is not None or tag is None:
            raise typer.BadParameter("--cfg describes a network and --weights names its file; --model is left out", param_hint="--cfg")
        cls: Any = darknet(cfg, names=called)
        weights: Any = Path(tag)
    else:
        if called is not None:
            raise typer.BadParameter("--names are of a network that --cfg describes", param_hint="--names")
        if model is None:
            raise typer.BadParameter("name a detector, or describe one of your own with --cfg and --weights", param_hint="--model")
        known, weights = named(model, tag)
        cls = any_class(known)
    if not issubclass(cls, Detector):
        told = f"{cls.__name__} is a network for {cls.task}; zoo list --task detection shows detectors"
        raise typer.BadParameter(told, param_hint="--model")
    built = build_options(option, cls)
    place = on_device(device)
    return trained(cls, weights, progress=not quiet, frozen=frozen or None, **built).to(place)


def _shown(
    network: Detector,
    quick: Any,
    given: list[Picture],
    left_out: int,
    threshold: float | None,
    overlap: float | None,
    batch_size: int,
    picture: Path | None,
    as_json: bool,
) -> None:
    from zoo.commands.pictures import end, tell_by, tell_drawn
    from zoo.detection import coco, drawing
    from zoo.images import BadImage

    labels = None if network.checkpoint is None else network.checkpoint.labels
    rows: list[dict[str, Any]] = []
    failed: list[BadImage] = []
    seen, saved = 0, None
    for start in range(0, len(given), batch_size):
        for one, read, found in _answers(quick, given[start : start + batch_size], threshold, overlap, failed):
            seen += 1
            if picture is not None and saved is None:
                saved = drawing.save(drawing.drawn(read, found), picture)
            if as_json:
                rows += coco.results(found, one.name, labels)
            else:
                _print(one.name, found)
    if as_json:
        print_json(rows)
    elif seen:
        tell_by(network)
        if not (labels or network.called):
            out.print("[dim]its classes have no names; --names FILE gives them some, one a line[/dim]", soft_wrap=True)
        tell_drawn(saved, "the first photograph" if seen > 1 else "")
    end(seen, len(given) + left_out, failed, "looked at", as_json)


def _answers(
    network: Any, batch: list[Picture], threshold: float | None, overlap: float | None, failed: list[Any]
) -> list[tuple[Picture, Any, Detections]]:
    """Look at pictures together; one that can't be used is told, and spoils no other."""
    from zoo.detection import detect as find
    from zoo.images import BadImage
    from zoo.images.preprocess import open_image

    there: list[tuple[Picture, Any]] = []
    for one in batch:
        try:
            there.append((one, open_image(one.read(), name=one.name)))
        except BadImage as error:
            failed.append(error)
    found = find(network, [read for _, read in there], threshold, overlap, len(batch)) if there else []
    return [(one, read, answer) for (one, read), answer in zip(there, found, strict=True)]


def _print(name: str, found: Detections) -> None:
    out.print(f"[bold]{escape(name)}[/bold]{'' if len(found) else '  nothing found'}", soft_wrap=True)
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 2), pad_edge=False)
    for heading in ("score", "label", "left", "top", "right", "bottom"):
        table.add_column(heading, justify="left" if heading == "label" else "right", no_wrap=True)
    for box, score, label in zip(found.boxes.tolist(), found.scores.tolist(), found.names, strict=True):
        table.add_row(f"{score:.3f}", escape(label), *(f"{edge:.0f}" for edge in box))
    if len(found):
        out.print(table)


def _folder(
    network: Detector,
    images: list[str],
    folder: Path,
    threshold: float | None,
    overlap: float | None,
    batch_size: int,
    restart: bool,
    quiet: bool,
    as_json: bool,
    picture: Path | None,
) -> None:
    from zoo.commands.watching import watched
    from zoo.detection import detect_folder
    from zoo.images import open_source

    if len(images) != 1 or picture is not None:
        raise typer.BadParameter("--out takes one folder, shard or list of photographs, and no --picture", param_hint="--out")
    source = open_source(images[0])
    show = False if quiet else partial(watched, console=err)
    written = detect_folder(network, source, makeable(folder), threshold, overlap, batch_size=batch_size, restart=restart, progress=show)
    if as_json:
        print_json(
            {
                "results": str(written.results),
                "images": str(written.images),
                "photographs": written.photographs,
                "things": written.things,
                "resumed": written.resumed,
                "left_out": dict(written.left_out),
            }
        )
        return
    before = f", {written.resumed:,} of them by an earlier run" if written.resumed else ""
    told = f"{counted(written.things, 'thing')} on {counted(written.photographs, 'photograph')}{before}"
    out.print(f"{told}: '{escape(str(written.results))}'", soft_wrap=True)
    for name, why in written.left_out[:5]:
        reason = why if why.startswith(name) else f"{name}: {why}"
        err.print(f"[yellow]left out:[/yellow] {escape(reason)}", soft_wrap=True)
    if written.left_out:
        out.print(f"[dim]{counted(len(written.left_out), 'image')} left out, all in '{escape(str(written.images))}'[/dim]", soft_wrap=True)


def evaluate(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="COCO's annotations, instances_val2017.json; or a folder as VOC has them, VOC2007.")
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=DETECTS)] = None,
    tag: WeightsOption = None,
    cfg: Cfg = None,
    called: Names = None,
    option: BuildOption = None,
    images: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The photographs of COCO's annotations. Default: searched for.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="The split of a VOC folder: test, val …. Default: every annotation.")] = None,
    overlap: Overlap = None,
    points: Annotated[int | None, typer.Option(help="11 for VOC 2007's measure. Default: the area under the curve.")] = None,
    every: Annotated[bool, typer.Option("--classes", help="Show the average precision of each class too.")] = False,
    batch_size: BatchSizeOption = 8,
    device: DeviceOption = None,
    frozen: FrozenOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure a detector: COCO's mean average precision, or VOC's on VOC data."""
    from zoo.commands.pictures import called as called_as
    from zoo.commands.watching import watched
    from zoo.detection import evaluate as measured
    from zoo.detection.truths import read_truths

    if points not in (None, 11):
        raise typer.BadParameter("11 is the number of VOC 2007's points; leave it out for the area", param_hint="--points")
    known = read_truths(data, images, split)
    network = detector(model, tag, cfg, called, option, device, quiet, frozen)
    who = called_as(network)
    show = False if quiet else partial(watched, console=err)
    found = measured(network, known, overlap=overlap, batch_size=batch_size, points=points, progress=show)
    if as_json:
        shown = {"network": who, "photographs": found.photographs, **found.precision.numbers()}
        print_json({**shown, "voc_map50": found.voc, "classes": dict(found.classes), "unknown": list(found.unknown)})
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    numbers = {"VOC's mAP50": found.voc} if found.voc is not None else {}
    for name, value in {**numbers, **{SAYS[name]: value for name, value in found.precision.numbers().items()}}.items():
        table.add_row(name, "nothing to measure" if value < 0 else f"{100 * value:.1f}")
    out.print(table)
    if every:
        inner = Table(box=None, header_style="dim", padding=(0, 2, 0, 0), pad_edge=False)
        inner.add_column("class")
        inner.add_column("AP", justify="right")
        for name, value in found.classes.items():
            inner.add_row(escape(name), f"{100 * value:.1f}")
        out.print(inner)
    told = f"{counted(found.photographs, 'photograph')}, by {who}"
    out.print(f"[dim]{escape(told)}[/dim]", soft_wrap=True)
    if found.unknown:
        out.print(f"[dim]not known to it, and counted: {escape(', '.join(found.unknown))}[/dim]", soft_wrap=True)


SAYS = {
    "ap": "AP, overlaps .50 to .95",
    "ap50": "AP at .50",
    "ap75": "AP at .75",
    "ap_small": "AP, small things",
    "ap_medium": "AP, medium things",
    "ap_large": "AP, large things",
    "ar1": "recall, 1 a photograph",
    "ar10": "recall, 10 a photograph",
    "ar100": "recall, 100 a photograph",
    "ar_small": "recall, small things",
    "ar_medium": "recall, medium things",
    "ar_large": "recall, large things",
}
"""What `zoo evaluate` calls COCO's numbers."""
