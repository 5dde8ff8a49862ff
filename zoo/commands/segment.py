"""`zoo segment`: the class of every pixel of photographs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import (
    BuildOption,
    FrozenOption,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    fail,
    on_device,
    out,
    png,
    print_json,
)
from zoo.commands.console import device as device_option

if TYPE_CHECKING:
    from zoo.segmentation import Segmentation

USUAL = "DeepLabV3_ResNet50"
SEGMENTS = f"The segmenter, or NAME:TAG; zoo list --task segmentation shows them. Default: {USUAL}."


def segment(
    images: Annotated[
        list[str],
        typer.Argument(metavar="IMAGE", autocompletion=files, help="Pictures, folders, .tar shards, .parquet files, or lists of these."),
    ],
    model: Annotated[str, typer.Option("--model", "-m", autocompletion=names, help=SEGMENTS)] = USUAL,
    tag: WeightsOption = None,
    option: BuildOption = None,
    device: Annotated[str, typer.Option(callback=device_option, help="cpu, cuda or cuda:1.")] = "cpu",
    frozen: FrozenOption = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=png, help="Draw the classes of the first photograph, with a legend, into this PNG."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the class of every pixel of photographs."""
    from zoo.catalogue import any_class
    from zoo.commands.pictures import pictures
    from zoo.images import BadImage
    from zoo.images.preprocess import open_image
    from zoo.pretrained.names import named
    from zoo.pretrained.trained import trained
    from zoo.segmentation import Segmenter
    from zoo.segmentation import segment as find

    known, weights = named(model, tag)
    cls: Any = any_class(known)
    if not issubclass(cls, Segmenter):
        told = f"{cls.__name__} is a network for {cls.task}; zoo list --task segmentation shows segmenters"
        raise typer.BadParameter(told, param_hint="--model")
    built = build_options(option, cls)
    place = on_device(device)
    given, left_out = pictures(images)
    network = trained(cls, weights, progress=not quiet, frozen=frozen or None, **built).to(place)
    rows: list[dict[str, Any]] = []
    failed: list[BadImage] = []
    saved: Path | None = None
    for one in given:
        try:
            read = open_image(one.read(), name=one.name)
        except BadImage as error:
            failed.append(error)
            continue
        found: Any = find(network, read)
        rows.append({"image": one.name, **found.numbers()})
        if picture is not None and saved is None:
            saved = found.save(read, picture)
        if not as_json:
            _print(one.name, found)
    if as_json:
        print_json(rows)
    elif rows:
        record = network.checkpoint
        called = cls.__name__ if record is None else f"{cls.__name__}:{record.tag}"
        told = f"by {called}, which knows {counted(network.num_classes, 'class', 'classes')}"
        out.print(f"[dim]{escape(told)}; another: --model NETWORK[/dim]", soft_wrap=True)
        if saved is not None:
            out.print(f"[dim]drawn in '{escape(str(saved))}'{', the first photograph' if len(rows) > 1 else ''}[/dim]", soft_wrap=True)
        else:
            out.print("[dim]--picture classes.png draws it[/dim]", soft_wrap=True)
    codes = {fail(error, 3 if isinstance(error, FileNotFoundError) else 1) for error in failed}
    if (asked := len(given) + left_out) > 1 and rows and not as_json:
        out.print(f"[dim]{len(rows):,} of {counted(asked, 'image')} segmented[/dim]")
    if codes:
        raise typer.Exit(min(codes))


def _print(name: str, found: Segmentation) -> None:
    width, height = found.size
    out.print(f"[bold]{escape(name)}[/bold]  {width} x {height} pixels", soft_wrap=True)
    for label, share in found.areas.items():
        out.print(f"  {100 * share:6.2f} %  {escape(label)}", soft_wrap=True, highlight=False)
