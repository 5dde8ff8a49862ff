"""Decoding in processes of their own: ranges of a source go out, uint8 pixels come back in the same order."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from threading import Thread
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from weights import Preprocessing
from zoo.images import BadImage, Source
from zoo.images.decoding import opened
from zoo.images.files import StoreFailed, is_url
from zoo.preprocess import ORIENTATION, pixels_of

AHEAD = 4
"""Chunks that every process works ahead."""
NICE = 10
"""By how much decoding gives way to a network on the same CPU."""


@dataclass(slots=True)
class Chunk:
    """What one process made of a few images.

    Attributes:
        rows: their indices in the source.
        pixels: uint8 (n, H, W, C), resized and cropped; zeros where there is nothing to show.
        digests: BLAKE3 of their bytes, uint8 (n, 32); zeros where they could not be read.
        problems: {index: why the image can't be used}.
        files: {index: bytes} of images that the GPU is to decode.
        seconds: that it took.
        failure: why the run has to stop, "" if it hasn't.
    """

    rows: range
    pixels: Tensor
    digests: Tensor
    problems: dict[int, str] = field(default_factory=dict)
    files: dict[int, Tensor] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""

    def pin_memory(self, device: Any = None) -> Chunk:
        """Move the pixels to where a GPU can fetch them from while the CPU goes on."""
        self.pixels = self.pixels.pin_memory()
        return self


class Decoder(Dataset[Chunk]):
    """Reads, hashes and preprocesses ranges of a source.

    Args:
        source: the images.
        preprocessing: of the checkpoint; its crop makes all images one size.
        gpu: whether upright baseline JPEGs are left to the GPU.
    """

    def __init__(self, source: Source, preprocessing: Preprocessing, gpu: bool = False) -> None:
        self.source, self.preprocessing, self.gpu = source, preprocessing, gpu

    def __getitem__(self, rows: range) -> Chunk:
        begun = time.perf_counter()
        side, channels = self.preprocessing.crop or 0, len(self.preprocessing.mean)
        chunk = Chunk(rows, torch.zeros(len(rows), side, side, channels, dtype=torch.uint8), torch.zeros(len(rows), 32, dtype=torch.uint8))
        pixels = chunk.pixels.numpy()
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
            chunk.digests[place] = torch.frombuffer(bytearray(blake3(data).digest()), dtype=torch.uint8)
            try:
                image = opened(data, name)
                if self.gpu and image.format == "JPEG" and image.mode in ("RGB", "L") and image.getexif().get(ORIENTATION, 1) == 1:
                    chunk.files[index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                    continue
                pixels[place] = pixels_of(image, self.preprocessing, name)
            except BadImage as error:
                chunk.problems[index] = str(error).removeprefix(f"{name}: ")
        chunk.seconds = time.perf_counter() - begun
        return chunk


def loader(decoder: Decoder, ranges: Sequence[range], workers: int, pinned: bool, polite: bool) -> DataLoader[Chunk]:
    """Return chunks in the order of `ranges`, decoded by `workers` processes, or here where that is 0.

    torch's DataLoader is used for its shared memory, its pinning thread and its watch over processes that die. The processes come from
    a fork server, which was started before there were threads or a GPU context: neither survives a fork.

    Args:
        decoder: what they run.
        ranges: of indices, one a chunk.
        workers: how many processes.
        pinned: whether to pin the pixels for a GPU.
        polite: whether the processes give way to others on a busy CPU.
    """
    several: dict[str, Any] = {}
    if workers:
        context = multiprocessing.get_context("forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn")
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(["zoo.embedding.decoding", "PIL.JpegImagePlugin"])
        several = {"multiprocessing_context": context, "prefetch_factor": AHEAD, "worker_init_fn": functools.partial(_begin, polite)}
    return DataLoader(
        decoder,
        sampler=ranges,  # pyright: ignore[reportArgumentType]  # an index is a range: whatever the data set takes
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=pinned,
        **several,
    )


def processes(device: torch.device, source: Source) -> int:
    """Choose how many processes decode: a core each, one left to the network; none for images that only this process can read."""
    if not source.shared:
        return 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(1, cores - 1 if device.type == "cuda" else cores // 2), 64)


def _as_it_is(chunk: Any) -> Chunk:
    return chunk


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
            image = F.resize(image, [preprocessing.resize], InterpolationMode(preprocessing.interpolation), antialias=True)
        if preprocessing.crop is not None:
            image = F.center_crop(image, [preprocessing.crop, preprocessing.crop])
        found[index] = image.permute(1, 2, 0)
    return found
