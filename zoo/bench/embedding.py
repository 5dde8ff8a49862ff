"""`python -m zoo.bench.embedding`: vectors of a folder of images, timm's way of inference beside ours, in turns, medians."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from zoo.bench.machine import versions
from zoo.console import err, out, print_json
from zoo.embedding import Report, embed
from zoo.images import Source, open_source
from zoo.model import Model
from zoo.search import model_class
from zoo.trained import find_record

SIZE = 500, 375
"""Of a generated photograph: ImageNet's usual size."""
QUALITY = 90
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
        images_s: images per second from the first batch on; the median of the rounds.
        low: the slowest round.
        high: the fastest.
        seconds: of the whole run: starting processes, building the network, writing; the median of the rounds.
    """

    name: str
    images_s: float
    low: float
    high: float
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
    return [Way(name, median(rates), min(rates), max(rates), median(spent[name])) for name, rates in flowed.items()], report


def peers(device: torch.device) -> dict[str, dict[str, Any]]:
    """Name timm's ways: its script's defaults, and on a GPU the flags that its users add for speed."""
    if device.type == "cpu":
        return {"timm": {}}
    return {"timm": {}, "timm, bfloat16 and channels_last": {"dtype": torch.bfloat16, "channels_last": True}}


def alone(model: Model, source: Source, batch_size: int, workers: int, device: torch.device) -> tuple[float, float]:
    """Measure the two rates that limit a run: decoding without a network, and the fast network without decoding.

    Returns:
        Images per second of each.
    """
    from zoo.embedding.decoding import Decoder, loader
    from zoo.embedding.feeding import Feeder
    from zoo.embedding.plan import chunks
    from zoo.embedding.prepare import prepared
    from zoo.embedding.run import make_plan

    plan = make_plan(model, source, "embedding", batch_size, device, None, True, "cpu", False)
    ranges = [chunk for batch in plan.batches(range(len(source))) for chunk in chunks(batch)]
    first, count, kept = 0.0, 0, []
    for chunk in loader(Decoder(source, plan.preprocessing), ranges, workers, pinned=device.type == "cuda", polite=False):
        now = time.perf_counter()
        count += len(chunk.rows) if first else 0
        first = first or now
        kept = [*kept, chunk] if sum(len(c.rows) for c in kept) + len(chunk.rows) <= batch_size else kept
    decoding = count / max(time.perf_counter() - first, 1e-9)
    feeder = Feeder(prepared(model, plan, device, None), plan.preprocessing, device, batch_size)
    feeder.finish(feeder.start(kept))
    times = []
    for _ in range(10):
        before = feeder.seconds
        feeder.finish(feeder.start(kept))
        times.append(feeder.seconds - before)
    return decoding, batch_size / statistics.median(times)


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

    It gives the images per second from the first batch on.
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
        loader = create_loader(
            ImageDataset(str(folder)),
            input_size=(3, side, side),
            batch_size=batch_size,
            is_training=False,
            use_prefetcher=device.type == "cuda",
            num_workers=workers,
            device=device,
            **data,
        )
        found, first = [], 0.0
        with torch.inference_mode(), torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            for images, _ in loader:
                images = images.to(device, memory_format=layout)
                found.append(network(images).float().cpu().numpy())
                first = first or time.perf_counter()
        rate = sum(map(len, found[1:])) / (time.perf_counter() - first)
        np.save(output, np.concatenate(found))
        return rate

    return run


def photographs(folder: Path, count: int) -> None:
    """Write pictures with the spectrum of photographs as JPEG, in two folders."""
    from PIL import Image

    from zoo.kernels.parity import natural_images

    width, height = SIZE
    for start in range(0, count, 64):
        block = natural_images((min(64, count - start), 3, height, width), torch.device("cpu"))
        low, high = block.amin((1, 2, 3), keepdim=True), block.amax((1, 2, 3), keepdim=True)
        pixels = (255 * (block - low) / (high - low)).round().to(torch.uint8).permute(0, 2, 3, 1).numpy()
        for number, array in enumerate(pixels, start):
            # every generated block is alike: a shift makes each picture another file
            path = folder / ("even", "odd")[number % 2] / f"{number:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.roll(array, number, axis=1)).save(path, quality=QUALITY)


def main(
    model: Annotated[str, typer.Option("--model", "-m", help="A network that timm has too.")] = "ResNet50",
    folder: Annotated[Path | None, typer.Option(help="Class folders of images; generated if left out.")] = None,
    images: Annotated[int, typer.Option(min=2, help="How many to generate.")] = 512,
    batch_size: Annotated[int | None, typer.Option(min=1, help="256 on a GPU, 32 on a CPU.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Decoding processes of every way.")] = None,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    device: Annotated[str | None, typer.Option(help="cuda or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Embed one folder by timm's inference and by ours, in turns; print medians, and the rates that limit ours."""
    from zoo.embedding.decoding import processes

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    cls = model_class(model)
    torch.manual_seed(0)
    network = cls().eval()
    network.checkpoint = find_record(cls)
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as scratch:
        where = folder or Path(scratch)
        if folder is None:
            photographs(where, images)
        source = open_source(where)
        count = batch_size or (256 if place.type == "cuda" else 32)
        hands = workers or processes(place, source)
        ways, report = compare(
            network,
            where,
            batch_size=count,
            workers=hands,
            device=place,
            rounds=rounds,
            say=lambda line: err.print(line, style="dim", markup=False),
        )
        decoding, computing = alone(network, source, count, hands, place)
        total = len(source)
    about = {"images": total, "model": model, "batch_size": count, "workers": hands, "device": str(place), "machine": versions()}
    rates = {"decoding_alone": decoding, "network_alone": computing, "pipeline": report.images_s, "limit": report.limit}
    if as_json:
        print_json({"about": about, "ways": [asdict(way) for way in ways], "rates": rates})
        return
    _show(ways, about, rates)


def _show(ways: Sequence[Way], about: dict[str, Any], rates: dict[str, Any]) -> None:
    table = Table(box=None, header_style="bold")
    for heading in ("way", "images/s", "slowest to fastest", "times the first", "whole run s"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for way in ways:
        table.add_row(
            way.name,
            f"{way.images_s:,.1f}",
            f"{way.low:,.1f}-{way.high:,.1f}",
            f"{way.images_s / ways[0].images_s:.2f}",
            f"{way.seconds:.1f}",
        )
    out.print(table)
    flowing, decoding, computing = rates["pipeline"], rates["decoding_alone"], rates["network_alone"]
    shares = (
        f"{flowing / decoding:.2f} of decoding alone ({decoding:,.1f}), {flowing / computing:.2f} of the network alone ({computing:,.1f})"
    )
    out.print(f"once it flows, zoo embed makes {flowing:,.1f} images/s: {shares}", soft_wrap=True)
    out.print(f"[dim]{json.dumps(about)}[/dim]", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
