"""`dream`: a picture changed into more of what a network finds in it; `dream_frames` and `dream_video`: again and again, zooming in."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from weights.arguments import forgiving, unknown_keyword, whole, wrong
from weights.progress import Show, show_of
from weights.record import Preprocessing
from zoo.dreaming.cutting import cut
from zoo.dreaming.dreamer import WAYS, Asked, Dreamer, silent
from zoo.dreaming.keeping import Kept, key
from zoo.dreaming.octaves import nearer
from zoo.dreaming.pictures import Picture, read, rounded
from zoo.dreaming.video import Film
from zoo.images.preprocess import is_many

if TYPE_CHECKING:
    from PIL.Image import Image

FADE = 1.005
"""By what DeepDream.jl divides the rate for every frame."""
OPTIONS = ("at", "octaves", "scale", "steps", "rate", "jitter", "guide", "seed", "like", "tile", "preprocessing")
"""Arguments of `dream` that films take too."""


@forgiving
def dream(
    model: nn.Module,
    image: Any,
    *,
    at: str | Sequence[str] | None = None,
    octaves: int | None = None,
    scale: float | None = None,
    steps: int | None = None,
    rate: float | None = None,
    jitter: int | None = None,
    guide: Any = None,
    seed: int = 0,
    like: str = "original",
    tile: int | None = None,
    preprocessing: Preprocessing | None = None,
    keep: str | os.PathLike[str] | None = None,
    progress: bool | Show = True,
) -> Any:
    """Change a picture, step by step, into more of what a layer of a network finds in it.

    Each step goes up the gradient of half the sum of squares of the layer's output. The picture is dreamed small first, then larger
    and larger: each size is an octave, and what was dreamed in one is carried into the next. The network stays as it is, to the byte.

    Example:
        >>> dream(trained(GoogLeNet), "sky.jpg").save("dream.png")  # doctest: +SKIP
        >>> dream(trained(ResNet50), "sky.jpg", at="layer2", guide="flowers.jpg")  # doctest: +SKIP

    Args:
        model: a network of the zoo, what `fast` made of one, or any module that takes images (B, 3, H, W), on any device. In half
            precision it dreams in float32.
        image: a path, a PIL image or an array as `zoo.images.preprocess.open_image` takes them; or a list of these. Pictures of one
            size are dreamed together, with the result that each has alone.
        at: the layer, as `zoo.features` names it, or several, whose objectives are added; a submodule's name of any other module. Left
            out, the layer of the family in `zoo.dreaming.layers`.
        octaves: how many sizes, the picture's own included. Left out, 4, or as many as the picture has room for; DeepDream.jl's 3.
        scale: ratio of one octave to the next, more than 1; left out, 1.4, DeepDream.jl's 2.
        steps: in each octave; left out, 10.
        rate: mean change of a colour by a step, in levels of 0 to 255; left out, 1.5. For DeepDream.jl in normalised numbers, 0.03.
        jitter: the most pixels by which a step rolls the picture, both ways and both axes, before it looks; left out, 32, DeepDream.jl's 0.
        guide: another picture: instead of what the layer finds already, each place is pulled to what the guide has most like it.
        seed: of the rolls. The same seed gives the same bytes on a CPU.
        like: "original", the program of 2015, or "deepdream.jl": pictures of 224 pixels, whose octaves are their middles, enlarged.
        tile: side of the tiles that a large picture is cut into, in pixels; 0 never cuts. Left out, a picture is cut whose maps take
            more than 2.5 GB of memory, 16 GB on a GPU. A network whose layer sees a part of the picture alone gives the same dream; with
            squeeze-and-excitation or attention it gives one like it.
        preprocessing: how the network's images are normalised; left out, as its checkpoint says, else by ImageNet's mean and deviation.
        keep: a file that holds the dream while it is unfinished. An interrupted call that is repeated resumes with it.
        progress: whether a terminal sees a bar; or what shows the steps instead, a `weights.progress.Show`.

    Returns:
        A picture of PIL, upright, of the picture's size, with its transparency and colour profile; a list for a list.

    Raises:
        UnknownTap: the network has no such layer; the message names the nearest.
        BadImage: a picture can't be used.
        NothingToDream: no gradient reaches the picture from the layer, or it is zero.
        ValueError: a picture is too small for the layer or for the octaves, or an argument is out of range.
        TypeError: `model` is no network.
        FloatingPointError: the gradient is NaN or infinite.

    Source:
        Mordvintsev, Olah & Tyka 2015, https://github.com/google/deepdream; https://github.com/avik-pal/DeepDream.jl.
    """
    options = {"octaves": octaves, "scale": scale, "steps": steps, "rate": rate, "jitter": jitter, "seed": seed, "like": like, "tile": tile}
    dreamer = _dreamer("dream", model, at=at, guide=guide, preprocessing=preprocessing, **options)
    many = is_many(image)
    pictures = [read(one, _name(one, f"images[{i}]" if many else "the image")) for i, one in enumerate(image if many else [image])]
    if not pictures:
        raise ValueError("there are no pictures to dream on: the list is empty")
    groups: dict[tuple[int, int], list[int]] = {}
    for i, picture in enumerate(pictures):
        groups.setdefault((picture.levels.shape[1], picture.levels.shape[2]), []).append(i)
    show = show_of(progress)
    for picture in pictures:  # all are looked at before the first is dreamed
        dreamer.octaves(picture)
    found: dict[int, Image] = {}
    batches = [
        group[i : i + count] for size, group in groups.items() for count in [dreamer.together(*size)] for i in range(0, len(group), count)
    ]
    for number, places in enumerate(batches):
        group = [pictures[i] for i in places]
        file = None if keep is None else Path(f"{os.fspath(keep)}{number or ''}")
        kept = Kept(file, "" if file is None else key(dreamer.facts, [*(p.levels for p in group), *dreamer.guide_levels], model))
        made = dreamer.dream(group, kept, show)
        found |= {i: picture.like(levels) for i, picture, levels in zip(places, group, made, strict=True)}
    return [found[i] for i in range(len(pictures))] if many else found[0]


def dream_frames(
    model: nn.Module, image: Any, *, frames: int = 100, zoom: float = 0.05, first: int = 0, progress: bool | Show = True, **options: Any
) -> Iterator[Image]:
    """Dream on a picture, zoom into its middle, dream on that, and so on: the frames of a film, one at a time.

    Each frame is made of the one before it as that can be seen, in 8 bits.

    Example:
        >>> for i, frame in enumerate(dream_frames(trained(GoogLeNet), "sky.jpg", frames=10)):  # doctest: +SKIP
        ...     frame.save(f"{i:05}.png")

    Args:
        model: as for `dream`.
        image: one picture.
        frames: how many there are.
        zoom: share of each side that the next frame loses, at least 0 and less than 1.
        first: number of the first frame to make. If it isn't 0, `image` is the frame before it: so a film goes on.
        progress: as for `dream`.
        options: arguments of `dream`, but `keep`. DeepDream.jl's way divides the rate by 1.005 from frame to frame.

    Yields:
        Pictures of PIL, of the picture's size; frame 0 is what `dream` returns.

    Raises:
        Exception: as `dream`, before the first frame is made.
    """
    frames, first = whole("frames", frames), whole("first", first, 0)
    _check_zoom(zoom)
    dreamer = _dreamer("dream_frames", model, **options)
    picture = read(image, _name(image, "the image"))
    dreamer.octaves(picture)
    return _frames(dreamer, picture, range(first, frames), zoom, show_of(progress))


def dream_video(
    model: nn.Module,
    image: Any,
    out: str | os.PathLike[str],
    *,
    frames: int = 100,
    zoom: float = 0.05,
    fps: float = 15.0,
    restart: bool = False,
    progress: bool | Show = True,
    **options: Any,
) -> Path:
    """Write a film of `dream_frames`; an interrupted call that is repeated resumes behind the last whole frame.

    Frames lie in a folder beside the film, ``dream.mp4.frames``, until the film is written.

    Example:
        >>> dream_video(trained(GoogLeNet), "sky.jpg", "dream.mp4", frames=100)  # doctest: +SKIP

    Args:
        model: as for `dream`.
        image: one picture.
        out: the film: .mp4 by ffmpeg or OpenCV, where one of them is there; .gif; or a name without an ending, a folder of numbered PNG
            files.
        frames: as for `dream_frames`.
        zoom: as for `dream_frames`.
        fps: frames a second, of a film that is no folder.
        restart: whether to throw away frames of an earlier call that was interrupted, whatever their settings.
        progress: as for `dream`.
        options: arguments of `dream`, but `keep`.

    Returns:
        The film's path.

    Raises:
        ValueError: the film's kind is not known or can't be written here, or frames of other settings are there.
        Exception: as `dream`, before anything is written.
    """
    _check_zoom(zoom)
    film = Film(Path(out), fps)
    frames = whole("frames", frames)
    dreamer = _dreamer("dream_video", model, **options)
    picture = read(image, _name(image, "the image"))
    dreamer.octaves(picture)
    film.begin(key(dreamer.facts | {"zoom": zoom}, [picture.levels, *dreamer.guide_levels], model), restart)
    done = film.count(frames)
    if done:
        picture = replace(picture, levels=read(film.frame(done - 1), f"frame {done - 1}").levels)
    for number, frame in enumerate(_frames(dreamer, picture, range(done, frames), zoom, show_of(progress)), done):
        film.add(number, frame)
    return film.end(frames)


def _frames(dreamer: Dreamer, picture: Picture, numbers: range, zoom: float, show: Show) -> Iterator[Image]:
    with show("dreaming frames", numbers.stop, numbers.start) as advance:
        for number in numbers:
            if number:
                levels = nearer(picture.levels[None].to(dreamer.network.dtype), zoom)
                picture = replace(picture, levels=rounded(levels)[0])
            fade = FADE**-number if dreamer.asked.way.normalised else 1.0
            (levels,) = dreamer.dream([picture], Kept(None, ""), silent, number, fade)
            picture = replace(picture, levels=levels)
            yield picture.like(levels)
            advance(1)


def _check_zoom(zoom: float) -> None:
    if not 0 <= zoom < 1:
        raise wrong("zoom", f"zoom is the share of each side that a frame loses, at least 0 and less than 1, got {zoom!r}")


def _name(image: Any, otherwise: str) -> str:
    return os.fsdecode(image) if isinstance(image, str | os.PathLike) else getattr(image, "filename", None) or otherwise


def _dreamer(
    called: str,
    model: nn.Module,
    at: str | Sequence[str] | None = None,
    guide: Any = None,
    preprocessing: Preprocessing | None = None,
    **given: Any,
) -> Dreamer:
    """Check the arguments, and cut the network.

    Raises:
        ValueError: an argument is out of range.
        TypeError: there is no such argument.
    """
    for word in given:
        if word not in OPTIONS:
            raise unknown_keyword(f"{called}()", word, OPTIONS)
    like = given.get("like", "original")
    if like not in WAYS:
        raise wrong("like", f"like is {' or '.join(map(repr, WAYS))}, got {like!r}")
    way, least = WAYS[like], {"steps": 1, "octaves": 1, "jitter": 0, "tile": 0, "seed": 0}
    numbers = {name: whole(name, value, least[name]) for name, value in given.items() if name in least and value is not None}
    scale: float = way.scale if given.get("scale") is None else given["scale"]
    rate: float = way.rate if given.get("rate") is None else given["rate"]
    if not 1 < scale < float("inf"):
        raise wrong("scale", f"scale is the ratio of one octave to the next, more than 1, got {scale!r}")
    if not 0 < rate < float("inf"):
        raise wrong("rate", f"rate is the mean change by a step, more than 0, got {rate!r}")
    shown = None if guide is None else read(guide, _name(guide, "the guide"))
    asked = Asked(
        like,
        way,
        numbers.get("octaves"),
        float(scale),
        numbers.get("steps", way.steps),
        float(rate),
        numbers.get("jitter", way.jitter),
        numbers.get("seed", 0),
        numbers.get("tile"),
        shown,
    )
    return Dreamer(cut(model, at, preprocessing), asked)
