"""Vectors of a folder of images: timm's way of inference beside ours, in turns, medians.

The clock of every way begins when its first image is begun to be decoded, and ends with the last vector: a clock that begins with
the first batch counts images that processes had decoded before it began, thousands where they work ahead. Starting processes and
building networks is told apart from it.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zoo.embedding import Report, embed
from zoo.images import open_source
from zoo.networks.model import Model

DISTINCT = 512
"""Photographs that are generated; the folder lists each as often as a run needs."""
SECONDS = 10.0
"""That a run lasts at least: filling and draining the processes then hardly counts."""
MARGIN = 1.6
"""By how much a way may be faster than what the sizes were chosen by."""
TIMM_NAMES = {
    "MobileNetV2": "mobilenetv2_100",
    "MobileNetV3Large": "mobilenetv3_large_100",
    "MobileNetV3Small": "mobilenetv3_small_100",
    "EfficientNetB0": "efficientnet_b0",
}
"""What timm calls a network, where that is not our name in small letters."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to embed a folder.

    Attributes:
        name: of the way.
        images_s: images per second from the first image's decoding to the last vector; the median of the rounds.
        low: the slowest round.
        high: the fastest.
        flowed: seconds of that; the median of the rounds.
        seconds: of the whole run: starting processes, building the network, writing; the median of the rounds.
    """

    name: str
    images_s: float
    low: float
    high: float
    flowed: float
    seconds: float


def compare(
    model: Model, folder: Path, *, batch_size: int, workers: int, device: torch.device, rounds: int, say: Callable[[str], None]
) -> tuple[list[Way], Report]:
    """Embed a folder by each way in turn; returns timm's ways first, ours last, and the report of our last round.

    Every way reads the same files with as many decoding processes and the same preprocessing, and ends with vectors in a file. Ours
    hashes the images too, and keeps finished parts. A round more at the beginning does not count.

    Args:
        model: with a record; its weights don't matter.
        folder: of class folders, as timm's `ImageDataset` takes it.
        batch_size: images at once.
        workers: decoding processes.
        device: where the network runs.
        rounds: that count.
        say: is told every measurement.
    """
    source = open_source(folder)
    flowed: dict[str, list[float]] = {}
    spent: dict[str, list[float]] = {}
    report: Report | None = None
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as scratch:
        ways: dict[str, Callable[[], float | Report]] = {}
        for name, options in peers(device).items():
            ways[name] = _timm_way(model, folder, Path(scratch) / "timm.npy", batch_size, workers, device, **options)
        ways["zoo embed"] = lambda: embed(
            model,
            source,
            Path(scratch) / "ours.parquet",
            batch_size=batch_size,
            workers=workers,
            device=device,
            restart=True,
            progress=False,
        )
        for round_ in range(rounds + 1):
            for name, call in ways.items():
                gc.collect()
                start = time.perf_counter()
                told = call()
                seconds = time.perf_counter() - start
                report, rate = (told, told.images_s) if isinstance(told, Report) else (report, told)
                say(f"round {round_}: {name} {rate:,.1f} images/s, {seconds:.1f} s in all")
                if round_:
                    flowed.setdefault(name, []).append(rate)
                    spent.setdefault(name, []).append(seconds)
    if report is None:
        raise RuntimeError("no way of ours ran")
    median = statistics.median
    total = len(source)
    found = []
    for name, rates in flowed.items():
        usual = median(rates)
        found.append(Way(name, usual, min(rates), max(rates), total / usual, median(spent[name])))
    return found, report


def peers(device: torch.device) -> dict[str, dict[str, Any]]:
    """Name timm's ways: its script's defaults, and on a GPU the flags that its users add for speed."""
    if device.type == "cpu":
        return {"timm": {}}
    return {"timm": {}, "timm, bfloat16 and channels_last": {"dtype": torch.bfloat16, "channels_last": True}}


def _timm_way(
    model: Model,
    folder: Path,
    output: Path,
    batch_size: int,
    workers: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> Callable[[], float]:
    """Return what timm's inference script does: its data set, its transforms, its loader, its network without a classifier.

    It gives the images per second from the first image's decoding on.
    """
    import timm
    from timm.data.dataset import ImageDataset
    from timm.data.loader import create_loader

    record = model.checkpoint
    if record is None or record.preprocessing.crop is None or record.preprocessing.resize is None:
        raise ValueError(f"{type(model).__name__} has no record that resizes and crops")
    steps, side = record.preprocessing, record.preprocessing.crop
    layout = torch.channels_last if channels_last else torch.contiguous_format
    name = type(model).__name__
    data = {"interpolation": steps.interpolation, "mean": steps.mean, "std": steps.std, "crop_pct": side / (steps.resize or side)}

    def run() -> float:
        network = timm.create_model(TIMM_NAMES.get(name, name.lower()), num_classes=0)
        network = network.to(device).to(memory_format=layout).eval()  # pyright: ignore[reportCallIssue]  # torch's stubs miss it
        images_of: Any = Clocked(ImageDataset(str(folder)))
        loader = create_loader(
            images_of,
            input_size=(3, side, side),
            batch_size=batch_size,
            is_training=False,
            use_prefetcher=device.type == "cuda",
            num_workers=workers,
            device=device,
            **data,
        )
        found = []
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            for images, _ in loader:
                images = images.to(device, memory_format=layout)
                found.append(network(images).float().cpu().numpy())
        ended = time.monotonic()
        rate = sum(map(len, found)) / (ended - images_of.begun.value)
        np.save(output, np.concatenate(found))
        return rate

    return run


class Clocked:
    """Another's data set, and when the first of its images was asked for, in whichever process.

    Attributes:
        images: the data set.
        begun: by `time.monotonic`, which all processes share; 0 before.
    """

    def __init__(self, images: Any) -> None:
        self.images, self.begun = images, multiprocessing.Value("d", 0.0)
        self._told = False

    @property
    def transform(self) -> Any:
        """Of the data set; timm's loader sets it."""
        return self.images.transform

    @transform.setter
    def transform(self, transform: Any) -> None:
        self.images.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        if not self._told:
            self._told, now = True, time.monotonic()
            with self.begun.get_lock():
                self.begun.value = min(now, self.begun.value or now)
        return self.images[index]


def enough(decoding: float, computing: float, batch_size: int) -> int:
    """Return how many images make a run of `SECONDS` at these rates, whole batches."""
    return max(2, math.ceil(MARGIN * SECONDS * min(decoding, computing) / batch_size)) * batch_size
