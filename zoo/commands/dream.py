"""`zoo dream`: pictures and films of what a network sees in them."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from weights.wording import counted, escape
from zoo.commands.completion import files, names
from zoo.commands.console import (
    BuildOption,
    DeviceOption,
    FrozenOption,
    JsonOption,
    QuietOption,
    WeightsOfOption,
    WeightsOption,
    build_options,
    chosen,
    err,
    makeable,
    on_device,
    out,
    print_json,
    spares_inputs,
    unused,
    value_of,
    writable,
)
from zoo.commands.interrupts import has_said

if TYPE_CHECKING:
    from zoo.networks.model import Model

DREAMS = "The network, or a run's folder. Default: the best ImageNet checkpoint on this machine."
MARK = ".dreaming"
"""In a folder of dreams, or behind the name of the only one, while there is more to do: which are finished, and by which settings."""


def dream(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", autocompletion=files, help="Pictures.")],
    output: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The dream, .png, .jpg, .webp or .tif; of several pictures, a folder."),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", autocompletion=names, help=DREAMS)] = None,
    tag: WeightsOption = None,
    weights_of: WeightsOfOption = None,
    option: BuildOption = None,
    at: Annotated[
        list[str] | None, typer.Option("--at", help="The layer, layer3 or stride/16. Repeatable. Default: chosen for the network.")
    ] = None,
    octaves: Annotated[int | None, typer.Option(min=1, help="Sizes to dream at; 4, or as many as the picture has room for.")] = None,
    scale: Annotated[float | None, typer.Option(help="Ratio of one size to the next; 1.4.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps at each size; 10.")] = None,
    rate: Annotated[float | None, typer.Option(help="Mean change of a colour per step, in levels of 0 to 255; 1.5.")] = None,
    jitter: Annotated[int | None, typer.Option(min=0, help="Pixels by which a step may shift the picture; 32.")] = None,
    guide: Annotated[Path | None, typer.Option(metavar="IMAGE", help="A picture whose content the dream is drawn to.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the shifts. The same seed gives the same bytes on a CPU.")] = 0,
    like: Annotated[str, typer.Option(help="original, or deepdream.jl for that package's way.")] = "original",
    tile: Annotated[
        int | None, typer.Option(min=0, help="Side in pixels of the tiles that a large picture is cut into; 0 never cuts.")
    ] = None,
    video: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a film that zooms into dream after dream: .mp4, .gif, or a folder of frames.")
    ] = None,
    frames: Annotated[int, typer.Option(min=1, help="Frames of the film.")] = 100,
    zoom: Annotated[float, typer.Option(help="Share of each side that a frame loses.")] = 0.05,
    fps: Annotated[float, typer.Option(help="Frames a second.")] = 15.0,
    device: DeviceOption = None,
    restart: Annotated[bool, typer.Option("--restart", help="Discard what an interrupted run finished.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace dreams and films that are there, but no folder of frames.")] = False,
    frozen: FrozenOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Change a picture into more of what a network sees in it, or dream a film.

    An interrupted run resumes when you repeat the command.
    """
    from zoo.catalogue import model_class
    from zoo.commands.watching import watched
    from zoo.dreaming.run import dream as one_dream
    from zoo.dreaming.run import dream_video
    from zoo.images.writing import check_picture
    from zoo.pretrained.trained import trained

    places = _places(images, output, video)
    model, tag, why = chosen(model, tag)
    settings: dict[str, Any] = {"at": at, "octaves": octaves, "scale": scale, "steps": steps, "rate": rate, "jitter": jitter}
    settings |= {"guide": guide, "seed": seed, "like": like, "tile": tile}
    said = f"{model}:{tag}" if tag else model
    finished = _Finished(_mark(output, len(images), video), f"{said} {settings}", restart)
    unfinished = [image for image, target in zip(images, places, strict=True) if target is None or target.name not in finished.names]
    for picture in [*unfinished, *([guide] if guide else [])]:
        check_picture(picture)  # before a network is fetched for it
    for target in [place for place in places if place is not None and place.name not in finished.names]:
        unused(target, replace or restart)
    if video is not None and video.suffix:
        unused(video, replace or restart)
    cls = model_class(model)
    built, place = build_options(option, cls), on_device(device)
    network: Model = trained(cls, tag, progress=not quiet, frozen=frozen or None, weights_of=weights_of, **built).to(place)
    shown: dict[str, Any] = {"progress": False if quiet else partial(watched, console=err)}
    made: list[dict[str, str]] = []
    try:
        for image, target in zip(images, places, strict=True):
            if target is None:
                continue
            kept = target.with_name(f"{target.name}.unfinished")
            if restart:
                kept.unlink(missing_ok=True)
            if target.name not in finished.names:
                _save(one_dream(network, image, keep=kept, **settings, **shown), target)
                finished.add(target.name)
            made.append({"image": str(image), "dream": str(target)})
        if video is not None:
            film = dream_video(network, images[0], video, frames=frames, zoom=zoom, fps=fps, restart=restart, **settings, **shown)
            made.append({"image": str(images[0]), "film": str(film)})
        finished.end()
    except KeyboardInterrupt:
        err.print("interrupted; what was dreamed is kept: the same command resumes with it")
        has_said()
        raise
    if as_json:
        print_json([row | {"network": said} for row in made])
        return
    for row in made:
        out.print(f"dreamed '{escape(row.get('dream') or row['film'])}'", soft_wrap=True, highlight=False)
    out.print(f"[dim]by {escape(said)}{f', {escape(why)}' if why else ''}; another: --model NETWORK[/dim]", soft_wrap=True)
    if finished.found:
        out.print(f"[dim]{counted(finished.found, 'picture')} finished by the run before[/dim]")


def _save(image: Any, target: Path) -> None:
    from zoo.images.writing import save

    save(image, target)


def _places(images: list[Path], output: Path | None, video: Path | None) -> list[Path | None]:
    """Say where the dream of each picture goes, before anything is computed for it; None where only a film is asked for."""
    from zoo.images.writing import transparent, writable_as

    if folder := next((image for image in images if image.is_dir()), None):
        raise typer.BadParameter(f"'{folder}' is a folder; give its pictures, {folder / '*.jpg'}", param_hint="IMAGE")
    if output is None and video is None:
        raise typer.BadParameter("name the dream, --out dream.png, or a film, --video dream.mp4")
    if video is not None:
        if len(images) > 1:
            raise typer.BadParameter("a film is of one picture", param_hint="--video")
        if video.suffix:
            writable(video)
        else:
            makeable(video)
    if output is None:
        return [None] * len(images)
    if len(images) == 1 and (output.suffix or not output.is_dir()):
        writable(output)
        spares_inputs(output, images)
        alpha = transparent(images[0])
        with value_of("--out"):
            writable_as(output, alpha)
        return [output]
    with value_of("--out"):
        if output.suffix and not output.is_dir():
            raise ValueError(f"the dreams of {len(images)} pictures go into a folder, and '{output.name}' is a file's name")
    makeable(output)
    places = [output / f"{image.stem}.png" for image in images]
    twice = next((place for place in places if places.count(place) > 1), None)
    if twice is not None:
        raise typer.BadParameter(f"two pictures would be '{twice}': rename one, or dream them one at a time", param_hint="--out")
    for place in places:
        spares_inputs(place, images)
    output.mkdir(parents=True, exist_ok=True)
    return list(places)


def _mark(output: Path | None, count: int, video: Path | None) -> Path | None:
    """Say where is noted what an interrupted run has finished; None where it has but one thing to finish."""
    if output is None or (count == 1 and video is None):
        return None
    return output / MARK if count > 1 or output.is_dir() else output.with_name(f"{output.name}{MARK}")


class _Finished:
    """Which dreams an interrupted run has finished."""

    def __init__(self, mark: Path | None, settings: str, restart: bool) -> None:
        self.mark, self.settings, self.names = mark, settings, set[str]()
        if self.mark and self.mark.is_file() and not restart:
            try:
                kept = json.loads(self.mark.read_text(encoding="utf-8"))
                self.names = set(kept["finished"]) if kept["settings"] == settings else set()
            except (ValueError, KeyError, TypeError):  # cut off: all are dreamed again
                self.names = set()
        self.found = len(self.names)

    def add(self, name: str) -> None:
        from weights.whole import write_whole

        self.names.add(name)
        if self.mark:
            write_whole(self.mark, json.dumps({"settings": self.settings, "finished": sorted(self.names)}))

    def end(self) -> None:
        if self.mark:
            self.mark.unlink(missing_ok=True)
