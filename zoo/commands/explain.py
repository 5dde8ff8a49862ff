"""`zoo explain`: which parts of a picture speak for a network's answer."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

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

if TYPE_CHECKING:
    from zoo.commands.pictures import Picture
    from zoo.explanation import Explanation
    from zoo.explanation.run import Explainer

DRAWN = 20
"""Pictures on a sheet at most."""
ABREAST = 5
"""Maps beside each other on a sheet of all methods."""
QUICK = 64
"""Steps of integrated gradients on a sheet of all methods."""
EXPLAINS = "The network, or a run's folder. Default: the best ImageNet checkpoint on this machine."
TARGET = (
    "The class to explain, by name, WordNet id or number; a group, 'dog'; or a difference, 'cat - dog'. May be "
    "repeated. If left out, the most probable class."
)


def explain(
    images: ImagesArgument,
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=EXPLAINS)] = None,
    tag: WeightsOption = None,
    weights_of: WeightsOfOption = None,
    option: BuildOption = None,
    method: Annotated[
        str | None,
        typer.Option(help="gradcam, hirescam, integrated-gradients, occlusion, lrp, …. A wrong name lists all. Default: gradcam."),
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help=TARGET)] = None,
    at: Annotated[str | None, typer.Option(help="The layer of the map, layer3. Default: the last map.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Explain so many of the most probable classes.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All methods for this network, except those of hundreds of passes.")] = False,
    measured: Annotated[
        bool, typer.Option("--measure", help="Measure the method on these pictures: deletion, insertion, shuffled weights.")
    ] = False,
    batch_size: BatchSizeOption = 32,
    device: DeviceOption = None,
    frozen: FrozenOption = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", callback=png, help=f"Draw up to {DRAWN} pictures with their maps into this PNG."),
    ] = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which parts of a picture speak for a network's answer."""
    from zoo.catalogue import model_class
    from zoo.commands.pictures import end, pictures, tell_by, tell_drawn
    from zoo.images import BadImage
    from zoo.pretrained.trained import trained

    if every and (method is not None or measured):
        raise typer.BadParameter("--all takes all methods; leave out --method and --measure", param_hint="--all")
    if target and top is not None:
        raise typer.BadParameter("--top takes the most probable classes and --target named ones; give one of them", param_hint="--top")
    model, tag, why = chosen(model, tag)
    cls = model_class(model)
    built = build_options(option, cls)
    place = on_device(device)
    given, left_out = pictures(images, picture)
    network = trained(cls, tag, progress=not quiet, frozen=frozen or None, weights_of=weights_of, **built).to(place)
    wanted = [_target(one) for one in target] if target else None
    explainers, refused = _explainers(network, method, wanted, at, top, batch_size, every)
    found: list[list[list[Explanation]]] = []
    failed: list[BadImage] = []
    for one in given:
        rows: list[list[Explanation]] = []
        try:
            read = one.read()
            for explainer in list(explainers):
                rows += _rows(explainer, read, one, explainers, refused, every)
        except BadImage as error:
            failed.append(error)
            continue
        found.append(rows)
        if not as_json:
            _print(one.name, rows)
    numbers = _measured(network, given, method, wanted, at, batch_size) if measured and found else None
    drawn = None if picture is None or not found else _drawn(found, picture, every)
    if as_json:
        shown = [each.numbers() for rows in found for row in rows for each in row]
        print_json(
            {"explanations": shown, "left_out": [*dict.fromkeys(refused)], "measured": None if numbers is None else numbers.numbers()}
        )
    elif found:
        if numbers is not None:
            for line in numbers.lines():
                out.print(escape(line), highlight=False, soft_wrap=True)
        for line in dict.fromkeys(refused):
            out.print(f"[dim]left out: {escape(line)}[/dim]", soft_wrap=True)
        tell_by(network, why)
        tell_drawn(drawn, f"the first {DRAWN} of {len(found):,}" if len(found) > DRAWN else "", "--picture why.png draws it")
    end(len(found), len(given) + left_out, failed, "explained", as_json)


def _target(word: str) -> Any:
    """Read one target of the command line; " - " stands between the two of a difference."""
    parts = [part.strip() for part in word.split(" - ")]
    return tuple(parts) if len(parts) == 2 else word


def _explainers(
    network: Any, method: str | None, wanted: list[Any] | None, at: str | None, top: int | None, batch_size: int, every: bool
) -> tuple[list[Explainer], list[str]]:
    """Make what answers: one for the method, or one for each method that the network has; and what the others said."""
    from zoo.explanation import METHODS, CannotExplain
    from zoo.explanation.run import Explainer

    if not every:
        return [Explainer(network, method, wanted, at, top, batch_size)], []
    found: list[Explainer] = []
    refused: list[str] = []
    for one in METHODS.values():
        if one.long:
            continue
        try:
            layer = at if one.place == "tap" or one.reads_layer else None
            options = {"most": QUICK} if "most" in one.options else {}
            found.append(Explainer(network, one.name, wanted, layer, top, batch_size, options=options))
        except CannotExplain as error:
            if error.argument:  # no method would take it
                raise
            refused.append(str(error))
    return found, refused


def _rows(
    explainer: Explainer, read: Any, one: Picture, explainers: list[Explainer], refused: list[str], every: bool
) -> list[list[Explanation]]:
    """Explain one picture by one method; with `every`, a method that the network has not is left out from then on."""
    from dataclasses import replace

    from zoo.explanation import CannotExplain

    try:
        return [[replace(each, name=one.name) for each in row] for row in explainer.each(read)]
    except CannotExplain as error:
        if not every or error.argument:
            raise
        refused.append(str(error))
        explainers.remove(explainer)
        return []


def _measured(network: Any, given: list[Picture], method: str | None, wanted: list[Any] | None, at: str | None, batch_size: int) -> Any:
    from zoo.explanation import measure
    from zoo.images import BadImage

    if wanted and len(wanted) > 1:
        raise typer.BadParameter("--measure follows the probability of one class; give one --target", param_hint="--target")
    read: list[Any] = []
    for one in given:
        try:
            picture = one.read()
            network.preprocess(picture)
            read.append(picture)
        except BadImage:  # told already
            continue
    return measure(network, read, method, wanted[0] if wanted else None, at, batch_size=batch_size)


def _print(name: str, rows: list[list[Explanation]]) -> None:
    out.print(f"[bold]{escape(name)}[/bold]", soft_wrap=True)
    for row in rows:
        for one in row:
            chance = "" if one.probability is None else f"{100 * one.probability:6.2f} %  "
            out.print(f"  {chance}{escape(one.label)}  [dim]{escape(_said(one))}[/dim]", soft_wrap=True)


def _said(one: Explanation) -> str:
    """Say in a line what a map shows."""
    region, how = one.region, f"{one.method} at {one.at}"
    error = "" if one.error is None else f"; error {one.error:.1%}"
    if region is None:
        return f"{how}: no positive evidence{error}"
    left, top, right, bottom = region.box
    return f"{how}: {region.share:.0%} of the evidence in {right - left} x {bottom - top} pixels from ({left}, {top}){error}"


def _drawn(found: list[list[list[Explanation]]], picture: Path, every: bool) -> Path:
    from zoo.explanation.sheet import row, save_sheet

    rows = []
    for shown in found[:DRAWN]:
        if not every:
            rows += [row(cards) for cards in shown]
            continue
        for cards in zip_longest(*shown):  # a target's by all methods, in lines of a few; some methods know no target
            target = [card for card in cards if card is not None]
            lines = [target[start : start + ABREAST] for start in range(0, len(target), ABREAST)]
            rows += [row(line, "" if number else None, picture=not number) for number, line in enumerate(lines)]
    return save_sheet(rows, picture)
