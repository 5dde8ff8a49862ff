"""Decoding in processes of their own: ranges of a source go out, uint8 pixels come back in the same order."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from threading import Thread
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weights import Preprocessing
from zoo.embedding.shelf import Shelf, pixels_at
from zoo.images import BadImage, Source
from zoo.images.files import StoreFailed, is_url
from zoo.images.preprocess import ORIENTATION, pixels_of
from zoo.images.reading import opened

AHEAD = 4
"""Chunks that every process works ahead."""
NICE = 10
"""By how much decoding gives way to a network on the same CPU."""


@dataclass(slots=True)
class Chunk:
    """What one process made of a few images.

    Attributes:
        rows: their indices in the source.
        pixels: uint8 (n, H, W, C), resized and cropped; zeros where there is nothing to show, anything where the GPU is to decode.
        digests: BLAKE3 of their bytes, uint8 (n, 32); zeros where they could not be read.
        problems: {index: why the image can't be used}.
        files: {index: bytes} of images that the GPU is to decode.
        begun: when it was begun, by `time.monotonic`, which all processes share.
        seconds: that it took.
        failure: why the run has to stop, "" if it hasn't.
        place: on the shelf, where the pixels are on one.
    """

    rows: range
    pixels: Tensor
    digests: np.ndarray
    problems: dict[int, str] = field(default_factory=dict)
    files: dict[int, Tensor] = field(default_factory=dict)
    begun: float = 0.0
    seconds: float = 0.0
    failure: str = ""
    place: int | None = None


class Decoder(Dataset[Chunk]):
    """Reads, hashes and preprocesses ranges of a source.

    Args:
        source: the images.
        preprocessing: of the checkpoint; its crop makes all images one size.
        gpu: whether upright baseline JPEGs are left to the GPU.
    """

    def __init__(self, source: Source, preprocessing: Preprocessing, gpu: bool = False) -> None:
        self.source, self.preprocessing, self.gpu = source, preprocessing, gpu
        self.side, self.channels = preprocessing.crop or 0, len(preprocessing.mean)

    def __getitem__(self, rows: range) -> Chunk:
        return self.decode(rows, torch.zeros(len(rows), self.side, self.side, self.channels, dtype=torch.uint8))

    def decode(self, rows: range, into: Tensor) -> Chunk:
        """Decode images into `into`, uint8 (n, H, W, C)."""
        begun = time.monotonic()
        chunk = Chunk(rows, into, np.zeros((len(rows), 32), np.uint8), begun=begun)
        pixels = into.numpy()
        for place, index in enumerate(rows):
            name = self.source[index].key
            try:
                data = self.source.read(index)
            except FileNotFoundError as error:
                chunk.problems[index] = f"it is not there: {error}"
                continue
            except OSError as error:
                if isinstance(error, StoreFailed) or is_url(self.source.where):  # the network's trouble is no property of the image
                    chunk.failure = str(error)
                    break
                chunk.problems[index] = f"it can't be read: {error.strerror or error}"
                continue
            except ValueError as error:  # a package that is missing here, a damaged Parquet file: the source's trouble too
                chunk.failure = str(error)
                break
            chunk.digests[place] = np.frombuffer(blake3(data).digest(), np.uint8)
            try:
                image = opened(data, name)
                if self.gpu and image.format == "JPEG" and image.mode in ("RGB", "L") and image.getexif().get(ORIENTATION, 1) == 1:
                    chunk.files[index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    continue
                pixels[place] = pixels_of(image, self.preprocessing, name)
            except BadImage as error:
                chunk.problems[index] = str(error).removeprefix(f"{name}: ")
        for index in chunk.problems:
            pixels[index - rows.start] = 0
        chunk.seconds = time.monotonic() - begun
        return chunk


class _Remote(Dataset[dict[str, Any]]):
    """What runs in a decoding process: pixels go onto the shelf, and everything else, which is small, through a pipe."""

    def __init__(self, decoder: Decoder, memory: Tensor) -> None:
        self._decoder, self._memory = decoder, memory

    def __getitem__(self, what: tuple[range, int]) -> dict[str, Any]:
        rows, place = what
        side, channels = self._decoder.side, self._decoder.channels
        chunk = self._decoder.decode(rows, pixels_at(self._memory, place, len(rows), side, channels))
        files: dict[int, int | bytes] = {}
        for index, file in chunk.files.items():  # a file lies where its pixels would
            area = chunk.pixels[index - rows.start].view(-1)
            fits = len(file) <= len(area)
            files[index] = len(file) if fits else file.numpy().tobytes()
            if fits:
                area[: len(file)] = file
        told = {name: getattr(chunk, name) for name in ("rows", "digests", "problems", "begun", "seconds", "failure")}
        return {**told, "files": files, "place": place}


class Decoding:
    """Chunks in the order of their ranges, decoded by processes, or here where there are none; to be used in a `with`.

    torch's DataLoader is used for its order and its watch over processes that die. The processes come from a fork server, which was
    started before there were threads or a GPU context: neither survives a fork.

    Args:
        decoder: what they run.
        ranges: of indices, one a chunk, of `CHUNK` at most.
        workers: how many processes.
        held: chunks that are not given back by `done` at a time, at most.
        pinned: whether a GPU fetches the pixels.
        polite: whether the processes give way to others on a busy CPU.
    """

    def __init__(self, decoder: Decoder, ranges: Sequence[range], workers: int, *, held: int, pinned: bool, polite: bool) -> None:
        self._decoder, self._ranges, self._workers, self._polite = decoder, ranges, workers, polite
        self._shelf: Shelf | None = None
        if workers and ranges:
            rows = max(map(len, ranges))
            places = min(len(ranges), workers * AHEAD + held + 1)
            self._shelf = Shelf(places, rows * decoder.side * decoder.side * decoder.channels, pinned)

    def __enter__(self) -> Decoding:
        return self

    def __exit__(self, *error: object) -> None:
        if self._shelf is not None:
            self._shelf.close()

    def __iter__(self) -> Iterator[Chunk]:
        if self._shelf is None:
            yield from (self._decoder[rows] for rows in self._ranges)
            return
        context = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(["zoo.embedding.decoding", "PIL.JpegImagePlugin"])
        asked: Any = _Asked(self._ranges, self._shelf)
        for told in DataLoader(
            _Remote(self._decoder, self._shelf.memory),
            sampler=asked,
            batch_size=None,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            multiprocessing_context=context,
            prefetch_factor=AHEAD,
            worker_init_fn=functools.partial(_begin, self._polite),
        ):
            yield self._arrived(told, self._shelf)

    def done(self, chunks: Iterable[Chunk]) -> None:
        """Let the memory of chunks be written to again."""
        for chunk in chunks:
            if self._shelf is not None and chunk.place is not None:
                self._shelf.give(chunk.place)
                chunk.place = None

    def _arrived(self, told: dict[str, Any], shelf: Shelf) -> Chunk:
        rows, files = told["rows"], told.pop("files")
        pixels = shelf.pixels(told["place"], len(rows), self._decoder.side, self._decoder.channels)
        chunk = Chunk(pixels=pixels, **told)
        for index, file in files.items():
            here = pixels[index - rows.start].view(-1)
            chunk.files[index] = here[:file] if isinstance(file, int) else torch.frombuffer(bytearray(file), dtype=torch.uint8)
        return chunk


class _Asked:
    """What the processes are asked for: a range, and a place for its pixels, which is taken as late as possible."""

    def __init__(self, ranges: Sequence[range], shelf: Shelf) -> None:
        self._ranges, self._shelf = ranges, shelf

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[tuple[range, int]]:
        return ((rows, self._shelf.take()) for rows in self._ranges)


def processes(device: torch.device, source: Source) -> int:
    """Choose how many processes decode: a core each, one left to the network; none for images that only this process can read."""
    if not source.shared:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, cores - 1 if device.type == "cuda" else cores // 2), 64)


def _as_it_is(told: Any) -> Any:
    return told


def _begin(polite: bool, worker: int) -> None:
    """Let a process end with the one that it works for, whose death a fork server between them would hide from torch's watchdog."""
    del worker
    parent = multiprocessing.parent_process()
    if parent is not None:
        Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    if polite:
        os.nice(NICE)


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def decode_on_gpu(chunk: Chunk, preprocessing: Preprocessing, device: torch.device) -> dict[int, Tensor]:
    """Decode, resize and crop a chunk's JPEGs by nvJPEG.

    Its pixels differ from Pillow's in the last bits of the inverse transform and in the filter of the resize, by a few of 255 levels.

    Returns:
        {index: uint8 (H, W, C)} on the device; what can't be decoded is in `chunk.problems` instead.
    """
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms.v2 import functional as F
    from torchvision.transforms.v2.functional import InterpolationMode

    rgb = len(preprocessing.mean) == 3
    mode = ImageReadMode.RGB if rgb else ImageReadMode.GRAY
    found: dict[int, Tensor] = {}
    names = list(chunk.files)
    try:
        images = decode_jpeg(list(chunk.files.values()), mode=mode, device=device)
    except RuntimeError:  # one of them is damaged: find out which
        images = []
        for index in names:
            try:
                images.append(decode_jpeg(chunk.files[index], mode=mode, device=device))
            except RuntimeError as error:
                images.append(None)
                chunk.problems[index] = f"nvJPEG can't decode it ({str(error).splitlines()[0]}); it is cut off or damaged: get it again"
    for index, image in zip(names, images, strict=True):
        if image is None:
            continue
        if preprocessing.resize is not None:
            sides = [preprocessing.resize] * (2 if preprocessing.squash else 1)
            image = F.resize(image, sides, InterpolationMode(preprocessing.interpolation), antialias=True)
        if preprocessing.crop is not None:
            image = F.center_crop(image, [preprocessing.crop, preprocessing.crop])
        found[index] = image.permute(1, 2, 0)
    return found
