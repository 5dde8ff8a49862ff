"""`zoo segment`: the class of every pixel of photographs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights.wording import escape
from zoo.commands.completion import names
from zoo.commands.console import (
    BuildOption,
    DeviceOption,
    FrozenOption,
    ImagesArgument,
    JsonOption,
    QuietOption,
    WeightsOption,
    build_options,
    on_device,
    out,
    png,
    print_json,
)

if TYPE_CHECKING:
    from zoo.segmentation import Segmentation

USUAL = "DeepLabV3_ResNet50"
SEGMENTS = f"The segmenter, or NAME:TAG; zoo list --task segmentation shows them. Default: {USUAL}."


def segment(
    images: ImagesArgument,
    model: Annotated[str, typer.Option("--model", "-m", autocompletion=names, help=SEGMENTS)] = USUAL,
    tag: WeightsOption = None,
    option: BuildOption = None,
    device: DeviceOption = None,
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
    from zoo.commands.pictures import end, pictures, tell_by, tell_drawn
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
    given, left_out = pictures(images, picture)
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
        tell_by(network)
        tell_drawn(saved, "the first photograph" if len(rows) > 1 else "", "--picture classes.png draws it")
    end(len(rows), len(given) + left_out, failed, "segmented", as_json)


def _print(name: str, found: Segmentation) -> None:
    width, height = found.size
    out.print(f"[bold]{escape(name)}[/bold]  {width} x {height} pixels", soft_wrap=True)
    for label, share in found.areas.items():
        out.print(f"  {100 * share:6.2f} %  {escape(label)}", soft_wrap=True, highlight=False)
