"""Films through a style network, frame by frame, without the flicker that each frame's own statistics make.

An instance norm measures every frame anew, so brightness and colours jump with whatever enters the picture. Here its statistics are
averaged over frames. What still moves, strokes on things that stand still, is held by optical flow where that is wanted.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weights import MissingLibrary
from weights.arguments import forgiving
from weights.places import at_home
from weights.progress import Show, show_of
from weights.whole import whole
from zoo.images.kinds import MOVING
from zoo.stylizing.named import USUAL
from zoo.stylizing.networks import StyleNetwork, moments
from zoo.stylizing.painting import as_batch, coloured_as, paint
from zoo.stylizing.photographs import prepared

if TYPE_CHECKING:
    from PIL.Image import Image

KEPT = 0.9
"""Share of a norm's statistics that stays from one frame to the next."""
HELD = 0.6
"""Share of the last painting, moved along the flow, in the next one."""
AGREES = 12.0
"""Levels of 0..255 by which a pixel may differ from where the flow says that it came from; beyond, something was uncovered."""
ANIMATIONS = tuple(MOVING)


class Averaged:
    """The running mean of each norm's statistics over the frames of a film.

    Args:
        kept: share that stays from one frame to the next, 0 to below 1; 0 gives each frame its own.
    """

    def __init__(self, kept: float = KEPT) -> None:
        self.kept = kept
        self._found: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def of(self, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        """Take in what one frame says, and return the mean."""
        now = moments(x)
        if norm in self._found:
            now = tuple(self.kept * old + (1 - self.kept) * new for old, new in zip(self._found[norm], now, strict=True))
        self._found[norm] = now[0], now[1]
        return self._found[norm]


@dataclass(frozen=True)
class Film:
    """What `stylize_video` wrote.

    Attributes:
        path: of the film.
        frames: how many it has.
        flicker: mean difference between a painting and the one before, in levels of 0..255, less that of the photographs.
    """

    path: Path
    frames: int
    flicker: float


def painted_frames(
    network: nn.Module,
    frames: Iterable[Image],
    *,
    strength: float = 1.0,
    keep_colour: bool = False,
    kept: float = KEPT,
    flow: bool = False,
) -> Iterator[np.ndarray]:
    """Paint frames of one size, in their order.

    Args:
        network: a style network, on the device where it is to paint.
        frames: RGB pictures.
        strength: as for `stylize`.
        keep_colour: likewise.
        kept: share of the norms' statistics that stays from frame to frame.
        flow: whether the last painting, moved along the optical flow, holds the next one; needs OpenCV.

    Yields:
        uint8 (H, W, 3).

    Raises:
        ValueError: the frames differ in size.
        MissingLibrary: `flow` without OpenCV.
    """
    statistics = Averaged(kept) if isinstance(network, StyleNetwork) and kept else None
    place = next(network.parameters()).device
    last: tuple[np.ndarray, np.ndarray] | None = None
    for frame in frames:
        if last is not None and frame.size != last[0].shape[1::-1]:
            raise ValueError(
                f"a film's frames have one size, and {frame.width}x{frame.height} follows {last[0].shape[1]}x{last[0].shape[0]}"
            )
        x = as_batch(frame, place)
        y = paint(network, x, statistics=statistics).clamp(0, 255)
        if keep_colour:
            y = coloured_as(y, x[0])
        mixed = (x[0] + strength * (y - x[0])).clamp(0, 255).permute(1, 2, 0).cpu().numpy()
        photograph = np.asarray(frame)
        if flow and last is not None:
            mixed = _held(mixed, photograph, *last)
        last = photograph, mixed
        yield mixed.round().astype(np.uint8)


def _held(painting: np.ndarray, now: np.ndarray, before: np.ndarray, painted_before: np.ndarray) -> np.ndarray:
    """Mix in the last painting where the flow says that a pixel came from. Source: Ruder et al. 2016, https://arxiv.org/abs/1604.08610."""
    cv2 = _opencv("flow=True")
    grey = [cv2.cvtColor(image, cv2.COLOR_RGB2GRAY) for image in (now, before)]
    flow = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM).calc(grey[0], grey[1], None)
    rows, columns = np.mgrid[: now.shape[0], : now.shape[1]].astype(np.float32)
    to = columns + flow[..., 0], rows + flow[..., 1]
    came_from = cv2.remap(before, *to, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE).astype(np.float32)
    moved = cv2.remap(painted_before, *to, cv2.INTER_LINEAR, borderMode=cv2.BORDER_REPLICATE)
    inside = (to[0] >= 0) & (to[0] <= now.shape[1] - 1) & (to[1] >= 0) & (to[1] <= now.shape[0] - 1)
    valid = inside & (np.abs(came_from - now).mean(-1) < AGREES)
    share = HELD * valid[..., None].astype(np.float32)
    return share * moved + (1 - share) * painting


@forgiving
def stylize_video(
    film: str | os.PathLike[str],
    out: str | os.PathLike[str],
    style: str | os.PathLike[str] | nn.Module = USUAL,
    *,
    strength: float = 1.0,
    keep_colour: bool = False,
    kept: float = KEPT,
    flow: bool = False,
    device: str | torch.device | None = None,
    progress: bool | Show = True,
) -> Film:
    """Repaint a film in a style. Its sound is not copied.

    Args:
        film: an animated GIF, WebP or PNG, or with OpenCV (`pip install 'kernelzoo[video]'`) whatever that reads: .mp4, .mov, .avi.
        out: the file to write, of the same kinds; it is written whole or not at all.
        style: as for `stylize`.
        strength: likewise.
        keep_colour: likewise.
        kept: share of the norms' statistics that stays from one frame to the next, 0 to 0.99: the more, the calmer.
        flow: whether strokes are held to what they lie on by optical flow; needs OpenCV, and takes about twice as long.
        device: as for `stylize`.
        progress: whether a terminal sees a bar; or what shows the frames instead, a `weights.progress.Show`.

    Returns:
        What was written, and how much it flickers.

    Raises:
        FileNotFoundError: there is no such film.
        ValueError: it can't be read, or an argument is out of its range.
        MissingLibrary: it needs OpenCV, which is not installed.
        UnknownWeights, WeightsError: the style can't be had.

    Example:
        >>> stylize_video("clip.mp4", "painted.mp4", "woodcut").frames  # doctest: +SKIP
        250
    """
    source, target = at_home(film), at_home(out)
    if not isinstance(strength, int | float) or not 0 <= strength <= 1:
        raise ValueError(f"strength is 0 to 1, the painting's share, got {strength!r}")
    if not isinstance(kept, int | float) or not 0 <= kept <= 0.99:
        raise ValueError(f"kept is 0 to 0.99, the share of a norm's statistics that stays from frame to frame, got {kept!r}")
    if not source.is_file():
        raise FileNotFoundError(f"'{source}' is no file; name a film")
    if flow:
        _opencv("flow=True")
    network = prepared(style, device)
    count, rate, frames = _opened(source)
    apart: list[float] = []
    written = 0
    last: tuple[np.ndarray, np.ndarray] | None = None
    with closing(frames), _writer(target, rate) as write, show_of(progress)("painting", count, 0) as advance:
        held: list[np.ndarray] = []

        def watched() -> Iterator[Image]:
            for frame in frames:
                held[:] = [np.asarray(frame)]
                yield frame

        for painting in painted_frames(network, watched(), strength=strength, keep_colour=keep_colour, kept=kept, flow=flow):
            write(painting)
            if last is not None:
                apart.append(_difference(painting, last[1]) - _difference(held[0], last[0]))
            last = held[0], painting
            written += 1
            advance(1)
        if not written:
            raise ValueError(f"'{source}' has no frame that can be read; it is cut off or no film")
    return Film(target, written, float(np.mean(apart)) if apart else 0.0)


def _difference(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(np.int16) - other).mean())


def _opencv(why: str) -> Any:
    try:
        import cv2
    except ImportError:
        raise MissingLibrary(f"{why} needs OpenCV: pip install 'kernelzoo[video]'") from None
    return cv2


def _opened(path: Path) -> tuple[int, float, Generator[Image]]:
    """Return the number of frames, how many a second, and the frames."""
    from PIL import Image as Pillow
    from PIL import UnidentifiedImageError

    if path.suffix.lower() in (*ANIMATIONS, ".png"):
        kinds = ("GIF", "WEBP", "PNG")
        try:
            with Pillow.open(path, formats=kinds) as image:
                count = getattr(image, "n_frames", 1)
                wait_ms = float(image.info.get("duration", 100) or 100)
        except UnidentifiedImageError:
            raise ValueError(f"'{path}' can't be read as an animation; it is cut off or of another kind") from None

        def animation() -> Generator[Image]:
            with Pillow.open(path, formats=kinds) as image:
                for number in range(count):
                    image.seek(number)
                    yield image.convert("RGB")

        return count, 1000 / wait_ms, animation()
    cv2 = _opencv(f"a film of the kind {path.suffix or 'without an ending'}")
    reader = cv2.VideoCapture(str(path))
    if not reader.isOpened():
        raise ValueError(f"'{path}' can't be read as a film; it is cut off, or of a kind that OpenCV does not know")

    def film() -> Generator[Image]:
        try:
            while True:
                there, pixels = reader.read()
                if not there:
                    return
                yield Pillow.fromarray(pixels[..., ::-1])
        finally:
            reader.release()

    count = max(0, int(reader.get(cv2.CAP_PROP_FRAME_COUNT)))
    return count, float(reader.get(cv2.CAP_PROP_FPS)) or 25.0, film()


@contextmanager
def _writer(path: Path, rate: float) -> Iterator[Callable[[np.ndarray], None]]:
    """Write frames into a film that appears whole or not at all."""
    from PIL import Image as Pillow

    part = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")  # writers go by the ending
    if path.suffix.lower() in (*ANIMATIONS, ".png"):
        kept: list[Image] = []
        with whole(path, by=part) as unfinished:
            yield lambda frame: kept.append(Pillow.fromarray(frame))
            if kept:
                kind = MOVING.get(path.suffix.lower(), "PNG")
                kept[0].save(unfinished, kind, save_all=True, append_images=kept[1:], duration=round(1000 / rate), loop=0)
        return
    cv2 = _opencv(f"a film of the kind {path.suffix or 'without an ending'}")
    writer: Any = None

    def write(frame: np.ndarray) -> None:
        nonlocal writer
        if writer is None:
            code = cv2.VideoWriter_fourcc(*("MJPG" if path.suffix.lower() == ".avi" else "mp4v"))
            writer = cv2.VideoWriter(str(part), code, rate, frame.shape[1::-1])
            if not writer.isOpened():
                raise ValueError(f"'{path}' can't be written as a film; name it .mp4 or .avi")
        writer.write(np.ascontiguousarray(frame[..., ::-1]))

    with whole(path, by=part):
        try:
            yield write
        finally:
            if writer is not None:
                writer.release()
