"""`zoo stylize`, `zoo train-style`: photographs and films repainted, and styles learnt from one picture."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights.wording import counted, escape
from zoo.commands.completion import files
from zoo.commands.console import DeviceOption, JsonOption, QuietOption, err, fail, makeable, out, print_json, unused, value_of, writable
from zoo.commands.interrupts import has_said
from zoo.stylizing.named import UNSTATED, USUAL, styles

if TYPE_CHECKING:
    from zoo.stylizing import StyleRun

FILMS = (".gif", ".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".apng")


def _styles(incomplete: str) -> list[str]:
    return [name for name in styles() if name.startswith(incomplete)] or files(incomplete)


def stylize(
    images: Annotated[
        list[str], typer.Argument(metavar="IMAGE", autocompletion=files, help="Photographs, folders of them, or films: .mp4, .gif.")
    ],
    style: Annotated[
        str, typer.Option("--style", "-s", autocompletion=_styles, help="A style's name, a training's folder, or a network's file.")
    ] = USUAL,
    path: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The painting, or a folder for several. Default: NAME-STYLE.png in this folder."),
    ] = None,
    strength: Annotated[float, typer.Option(min=0.0, max=1.0, help="The painting's share; the rest is the photograph.")] = 1.0,
    keep_colour: Annotated[bool, typer.Option("--keep-colour", help="Keep the photograph's colours, and use only the strokes.")] = False,
    side: Annotated[
        int | None, typer.Option(min=16, help="Longer side in pixels at which to paint. Smaller gives broader strokes.")
    ] = None,
    strip: Annotated[int | None, typer.Option(min=0, help="Rows painted at a time, to save memory. Default: chosen.")] = None,
    flow: Annotated[bool, typer.Option("--flow", help="For films: keep strokes on moving objects, by optical flow.")] = False,
    device: DeviceOption = None,
    fast: Annotated[bool, typer.Option("--fast", help="Tune the network first, for many pictures of one size.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace existing paintings.")] = False,
    list_styles: Annotated[
        bool, typer.Option("--list", help="List the styles that have a name, and stop.", is_eager=True, callback=lambda asked: _list(asked))
    ] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Repaint photographs and films in a style.

    An interrupted run resumes when you repeat the command: finished paintings are kept.
    """
    from zoo.commands.pictures import pictures
    from zoo.commands.watching import watched
    from zoo.images import BadImage
    from zoo.images.kinds import MOVING, OPAQUE, WRITTEN
    from zoo.images.writing import save
    from zoo.stylizing import stylize as paint
    from zoo.stylizing import stylize_video
    from zoo.stylizing.photographs import prepared

    del list_styles
    films = [name for name in images if Path(name).suffix.lower() in FILMS]
    given, left_out = pictures([name for name in images if name not in films])
    several = len(given) + len(films) > 1 or any(Path(name).is_dir() for name in images)
    called = styles()[style].tag if style in styles() else Path(style).stem or "style"
    targets = [_target(name, called, path, several) for name in (*(one.name for one in given), *films)]
    if len(set(targets)) < len(targets):
        raise typer.BadParameter("two photographs have one name, so their paintings would too; paint them one by one", param_hint="IMAGE")
    for number, target in enumerate(targets):
        kinds = tuple(WRITTEN) if number < len(given) else tuple(dict.fromkeys((*FILMS, ".png", *MOVING)))
        if target.suffix.lower() not in kinds:
            what = "painting of a photograph" if number < len(given) else "painted film"
            raise typer.BadParameter(f"a {what} is one of {', '.join(kinds)}, not '{target.name}'", param_hint="--out")
    if several and path is not None:
        makeable(path).mkdir(parents=True, exist_ok=True)
    there = {target for target in targets if several and not replace and target.exists()}  # an interrupted command's, whole
    for target in targets:
        if target not in there:
            unused(target, replace)
            writable(target)
    todo = [(one, target) for one, target in zip(given, targets, strict=False) if target not in there]
    if len(todo) == 1 and not films and WRITTEN[todo[0][1].suffix.lower()] in OPAQUE:  # before a network is fetched for it
        one, target = todo[0]
        try:
            photograph = one.read()
            _keeps_transparency(photograph, one.name, target)
        except BadImage as error:
            if as_json:
                print_json([])
            raise typer.Exit(fail(error, 3 if isinstance(error, FileNotFoundError) else 1)) from None
        todo = [(one._replace(read=lambda: photograph), target)]
    network = prepared(style, device)
    done: list[dict[str, Any]] = []
    failed: list[BadImage] = []
    show = partial(watched, console=err)
    told = {"strength": strength, "keep_colour": keep_colour}
    shown = show("painting", len(given), len(given) - len(todo)) if not quiet and len(given) > 1 else nullcontext(lambda images: None)
    with shown as advance:
        for one, target in todo:
            try:
                painted = paint(one.read(), network, side=side, strip=strip, fast=fast, **told)
            except BadImage as error:
                failed.append(error)
            else:
                save(painted, target)
                done.append({"image": one.name, "painting": str(target), "style": style, "width": painted.width, "height": painted.height})
            advance(1)
    for name, target in zip(films, targets[len(given) :], strict=True):
        if target not in there:
            film = stylize_video(name, target, network, flow=flow, progress=False if quiet else show, **told)
            done.append({"image": name, "painting": str(target), "style": style, "frames": film.frames, "flicker": film.flicker})
    if as_json:
        print_json(done)
    else:
        for row in done:
            out.print(f"painted '{escape(row['painting'])}'", soft_wrap=True)
        if there:
            out.print(f"left alone {counted(len(there), 'painting')} of an earlier call; --replace paints them again", soft_wrap=True)
    codes = {fail(error, 3 if isinstance(error, FileNotFoundError) else 1) for error in failed}
    if codes or left_out:
        raise typer.Exit(min(codes, default=1))


def _target(name: str, style: str, path: Path | None, several: bool) -> Path:
    """Name the painting of a photograph; a film's keeps its ending."""
    film = Path(name).suffix.lower() in FILMS
    usual = f"{Path(name).stem}-{style}{Path(name).suffix if film else '.png'}"
    return Path(usual) if path is None else path / usual if several or path.is_dir() else path


def _keeps_transparency(photograph: Any, name: str, target: Path) -> None:
    """Refuse a painting whose kind of file has no transparency where its photograph has; raises BadImage."""
    from zoo.images import BadImage
    from zoo.images.writing import transparent, writable_as

    see_through = transparent(photograph) if isinstance(photograph, Path) else getattr(photograph, "has_transparency_data", False)
    try:
        writable_as(target, see_through)
    except ValueError as error:
        raise BadImage(f"{name}: {error}") from None


def _list(asked: bool) -> None:
    if not asked:
        return
    for name, row in styles().items():
        licence = f"licence not stated: {UNSTATED}" if row.license == "unstated" else row.license
        here = "ships" if row.sources[0].startswith("package:") else "a download"
        out.print(f"{name:16} {here:10}  {escape(licence)}", soft_wrap=True, highlight=False)
    raise typer.Exit


def train_style(
    data: Annotated[str, typer.Argument(metavar="DATA", autocompletion=files, help="A folder of photographs, tars, Parquet, or a list.")],
    picture: Annotated[Path, typer.Argument(metavar="STYLE", help="The style picture.")],
    folder: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The training's folder, which is then a style.")],
    loss_network: Annotated[
        str, typer.Option(help="What measures style: EfficientNetLite0, SqueezeNet1_0, VGG16 or VGG19.")
    ] = "EfficientNetLite0",
    loss_weights: Annotated[str | None, typer.Option(metavar="WEIGHTS", help="Weights of the loss network: a tag, URL or file.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Johnson, Engstrom or MobileStyle; Johnson.")] = None,
    channels: Annotated[int | None, typer.Option(help="Channels of Johnson's first map; 32. 16 or 8 is smaller and faster.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps; 4000.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Photographs of a step; 8.")] = None,
    size: Annotated[int | None, typer.Option(help="Their side in pixels; 256.")] = None,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate; 0.001.")] = None,
    style_weight: Annotated[float | None, typer.Option(help="Raise it if paintings look too much like photographs; 10.")] = None,
    content_weight: Annotated[float | None, typer.Option(help="Raise it if the content is hard to recognise; 1.")] = None,
    variation_weight: Annotated[float | None, typer.Option(help="Raise it if paintings are noisy; 0.02.")] = None,
    style_side: Annotated[int | None, typer.Option(help="Longer side of the style picture; smaller for finer strokes; 384.")] = None,
    sheet_every: Annotated[int | None, typer.Option(help="Steps between two sheets of paintings; 500.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between two saved states; 500.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, by autocast, or float32; bfloat16 on a GPU.")] = None,
    compile: Annotated[bool | None, typer.Option("--compile", help="Speed up steps with torch.compile.")] = None,
    device: DeviceOption = None,
    license: Annotated[str, typer.Option("--licence", "--license", help="The style's licence.")] = "unstated",
    restart: Annotated[bool, typer.Option("--restart", help="Discard the training in the folder.")] = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Learn a style from one picture; the folder is then a style: `zoo stylize PHOTO --style DIR`.

    An interrupted training resumes when you repeat the command.
    """
    from zoo.stylizing import StyleSettings
    from zoo.stylizing import train_style as train
    from zoo.stylizing.training import Stopped

    known = StyleSettings.__dataclass_fields__
    told = {name: value for name, value in locals().items() if name in known and value is not None}
    with value_of(None):
        StyleSettings.of(told)
    makeable(folder)
    kept: dict[str, Any] = {"loss_network": loss_network, "loss_weights": loss_weights, "license": license, "restart": restart}
    from zoo.commands.watching import watched_style

    try:
        run = train(data, picture, folder, progress=False if quiet else partial(watched_style, console=err), **kept, **told)
    except KeyboardInterrupt as ended:
        if isinstance(ended, Stopped):
            err.print(escape(str(ended)), soft_wrap=True)
            has_said()
        raise
    _show(run, as_json)


def _show(run: StyleRun, as_json: bool) -> None:
    last = run.curve[-1]
    if as_json:
        print_json({"folder": str(run.folder), "steps": run.steps, "resumed": run.resumed, **last, "unreadable": run.unreadable})
        return
    before = f", {run.resumed:,} of them before it was resumed" if run.resumed else ""
    figures = f"style {last['style']:.3f}, content {last['content']:.3f}"
    out.print(f"[bold]{figures}[/bold] after {counted(run.steps, 'step')}{before}; 1 is a photograph that nobody painted", soft_wrap=True)
    out.print(f"use it: zoo stylize PHOTO --style {escape(str(run.folder))}", soft_wrap=True)
