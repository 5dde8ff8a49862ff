"""Films: numbered frames on the disk while one is made, then MP4, GIF or a folder."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weights.whole import whole, write_whole
from zoo.images.writing import save

if TYPE_CHECKING:
    from PIL.Image import Image

MOVIES = (".mp4", ".mov", ".mkv")
NOTE = "dream.txt"
"""Beside unfinished frames: which dream they are of."""


@dataclass(frozen=True)
class Film:
    """A film that is being made.

    Attributes:
        path: where it will be.
        fps: frames a second.

    Raises:
        ValueError: of no kind that can be written here.
    """

    path: Path
    fps: float

    def __post_init__(self) -> None:
        suffix, stem = self.path.suffix.lower(), self.path.stem
        if not 0 < self.fps <= 240:
            raise ValueError(f"fps is a number of frames a second, more than 0 and at most 240, got {self.fps!r}")
        if suffix and suffix not in (*MOVIES, ".gif"):
            raise ValueError(
                f"'{self.path.name}' is no film's name: name it '{stem}.mp4', '{stem}.gif', or '{stem}' for a folder of frames"
            )
        if suffix in MOVIES and encoder() is None:
            raise ValueError(
                f"'{self.path.name}' needs ffmpeg or OpenCV, and neither is here: pip install opencv-python-headless, or name it "
                f"'{stem}.gif', or '{stem}' for a folder of numbered frames"
            )
        if self.path.is_dir() == bool(suffix) and self.path.exists():
            raise ValueError(f"'{self.path}' is there already and is {'a folder' if suffix else 'a file'}: name another place")

    @property
    def folder(self) -> Path:
        """Where its frames lie."""
        return self.path.with_name(f"{self.path.name}.frames") if self.path.suffix else self.path

    def frame(self, number: int) -> Path:
        """Return the place of a frame."""
        return self.folder / f"{number:05}.png"

    def begin(self, dream: str, restart: bool) -> None:
        """Make the folder, or go on with one of the same dream.

        Raises:
            ValueError: it holds something else.
        """
        note = self.folder / NOTE
        if self.folder.is_dir() and any(self.folder.iterdir()):
            known = note.read_text(encoding="utf-8") if note.is_file() else None
            if known is None and not (restart and self.path.suffix):
                raise ValueError(f"'{self.folder}' holds other files: name another place for the frames, or empty it first")
            if known != dream:
                if not restart:
                    raise ValueError(
                        f"'{self.folder}' holds frames of a dream with other settings; restart=True throws them away, or name another film"
                    )
                shutil.rmtree(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if restart:
            for place in self.folder.glob("*.png"):
                place.unlink()
        write_whole(note, dream)

    def count(self, frames: int) -> int:
        """Count the frames that are there, up to the first that isn't."""
        return next((number for number in range(frames) if not self.frame(number).is_file()), frames)

    def add(self, number: int, frame: Image) -> None:
        """Write a frame, whole or not at all."""
        save(frame, self.frame(number))

    def end(self, frames: int) -> Path:
        """Write the film of its frames, one in memory at a time, and remove them; a folder stays."""
        if self.path.suffix:
            with whole(self.path, by=self.path.with_name(f".{self.path.stem}.unfinished{self.path.suffix}")) as unfinished:
                pictures = (self.frame(number) for number in range(frames))
                (_gif if self.path.suffix.lower() == ".gif" else _movie)(pictures, unfinished, self.fps)
            shutil.rmtree(self.folder)
        else:
            (self.folder / NOTE).unlink()
        return self.path


def encoder() -> str | None:
    """Name what writes films here: ffmpeg, OpenCV, or nothing."""
    if shutil.which("ffmpeg"):
        return "ffmpeg"
    return "OpenCV" if importlib.util.find_spec("cv2") else None


def opaque(place: Path) -> np.ndarray:
    """Read a frame as a film shows it: uint8 (H, W, 3), on white, with even sides, for which the last row or column is repeated."""
    from zoo.images.preprocess import open_image

    pixels = np.asarray(open_image(place))
    return np.pad(pixels, [(0, pixels.shape[0] % 2), (0, pixels.shape[1] % 2), (0, 0)], mode="edge")


def _movie(places: Iterator[Path], path: Path, fps: float) -> None:
    first = opaque(next(places))
    write, close = (_by_ffmpeg if encoder() == "ffmpeg" else _by_opencv)(path, fps, first.shape[1], first.shape[0])
    try:
        write(first)
        for place in places:
            write(opaque(place))
    finally:
        close()


def _by_ffmpeg(path: Path, fps: float, width: int, height: int) -> tuple[Callable[[np.ndarray], Any], Callable[[], None]]:
    size = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps)]
    how = ["-c:v", "libx264", "-crf", "18", "-pix_fmt", "yuv420p", "-movflags", "+faststart"]
    line = ["ffmpeg", "-loglevel", "error", "-y", *size, "-i", "pipe:0", *how, str(path)]
    running = subprocess.Popen(line, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    into: Any = running.stdin
    errors: Any = running.stderr

    def close() -> None:
        with suppress(BrokenPipeError):
            into.close()
        said = errors.read().decode(errors="replace").strip()
        errors.close()
        if running.wait():
            raise OSError(f"ffmpeg could not write '{path.name}': {said.splitlines()[-1] if said else f'exit code {running.returncode}'}")

    def write(pixels: np.ndarray) -> None:
        with suppress(BrokenPipeError):  # it has ended, and `close` tells why
            into.write(pixels.tobytes())

    return write, close


def _by_opencv(path: Path, fps: float, width: int, height: int) -> tuple[Callable[[np.ndarray], Any], Callable[[], None]]:
    import cv2

    film = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), fps, (width, height))
    if not film.isOpened():
        raise OSError(f"OpenCV can't write '{path.name}': its build has no encoder for it; install ffmpeg, or name it '{path.stem}.gif'")
    return lambda pixels: film.write(np.ascontiguousarray(pixels[:, :, ::-1])), film.release


def _gif(places: Iterator[Path], path: Path, fps: float) -> None:
    from PIL import Image

    frames = (Image.fromarray(opaque(place)).convert("P", palette=Image.Palette.ADAPTIVE) for place in places)
    next(frames).save(path, "GIF", save_all=True, append_images=frames, duration=round(1000 / fps), loop=0)
