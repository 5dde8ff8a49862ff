"""Measure int8 on a CPU: speed over OpenVINO in float32 and as shipped, certificates on photographs, embeddings of CIFAR-10.

    python recipes/int8_cpu.py --photographs FOLDER [--mobilenetv2 FILE] [--cifar FOLDER --resnet20 FILE] --out docs/notes/int8.json

FOLDER holds labelled ImageNet photographs named WNID_label; half of them calibrate, the other half is compared on. MobileNetV2's weights
are torchvision's IMAGENET1K_V1 file; the EfficientNets' come with `kernelzoo[imagenet]`. ResNet50 has random weights: its speed is
measured, and nothing is proven. `--more NAME=FILE` adds checkpoints of other networks. CIFAR's folder holds cifar10_train.npz and
cifar10_test.npz. The figures are written after every network, and a network that is in the file already is left out.

Engines take turns in one process, so that what else runs on the machine slows all of them. A figure is the median over the rounds of the
mean of a turn; the spread is from the 10th to the 90th percentile of the rounds; batch 1 gets twice the rounds. The processor's time of
all threads stands beside the clock's, which waits for other processes too, and so does the load of the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from zoo import Model, fast, trained, why
from zoo.embedding.extracting import extractor
from zoo.kernels.engines.openvino import imported
from zoo.kernels.quantizing.certificate import paired
from zoo.kernels.quantizing.quantized import machine
from zoo.labels import labels

BATCHES = (1, 8)
NEIGHBOURS = 20
SETTLE, TURN = 0.06, 0.2
"""Seconds of rest before a turn, in which threads of the one before stop spinning, and of calls in a turn, at least."""


def openvino_as(network: nn.Module, images: Tensor, hint: str | None) -> Callable[[Tensor], Any]:
    """Return OpenVINO's own conversion of a network; `hint` None leaves the precision to OpenVINO."""
    ov = imported()
    converted = ov.convert_model(network, example_input=images, input=[tuple(images.shape)])
    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": torch.get_num_threads(), "ENABLE_CPU_PINNING": False}
    request = (
        ov.Core().compile_model(converted, "CPU", settings | ({"INFERENCE_PRECISION_HINT": hint} if hint else {})).create_infer_request()
    )
    return lambda x: request.infer([x.numpy()], share_inputs=True, share_outputs=True)[0]


def timed(calls: dict[str, Callable[[Tensor], Any]], images: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Time calls in turns: milliseconds of the clock, and of the processor, which other processes disturb less."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            time.sleep(SETTLE)
            call(images)  # with cold caches
            count, wall, busy = 0, time.perf_counter(), time.process_time()
            while count < 2 or time.perf_counter() - wall < TURN:
                call(images)
                count += 1
            taken[name].append((1e3 * (time.perf_counter() - wall) / count, 1e3 * (time.process_time() - busy) / count))
    found: dict[str, dict[str, float]] = {}
    for name, turns in taken.items():
        for kind, times in zip(("", "busy_"), zip(*turns, strict=True), strict=True):
            low, middle, high = np.percentile(times, [10, 50, 90]).tolist()
            found.setdefault(name, {}).update({f"{kind}ms": middle, f"{kind}low": low, f"{kind}high": high})
    return found


def photographs(folder: Path) -> tuple[list[str], list[int]]:
    """Return files and the indices of their classes: the place of the WordNet id among ImageNet's thousand."""
    wnids = [label.wnid for label in labels("imagenet1k")]
    files = sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    return files, [wnids.index(Path(file).name.partition("_")[0]) for file in files]


def measured(name: str, model: Model, given: dict[str, Any], rounds: int, ours: bool) -> dict[str, Any]:
    """Quantise a network, and time it beside OpenVINO and, if `ours`, `fast` in float32 and bfloat16."""
    start = time.monotonic()
    row: dict[str, Any] = {"network": name, "load_before": os.getloadavg()[0], "times": {}}
    try:
        small = fast(model, "cpu", "int8", progress=False, **given)
        row["certificate"], row["why"] = small.proofs[0].facts(), str(why(small))
    except ValueError as error:
        return row | {"refused": str(error)}
    row["quantised_s"] = time.monotonic() - start
    side = model.input_size
    for batch in BATCHES:
        images = torch.randn(batch, 3, side, side, generator=torch.Generator().manual_seed(0))
        calls: dict[str, Any] = {
            "OpenVINO float32": openvino_as(model, images, "f32"),
            "OpenVINO as shipped": openvino_as(model, images, None),
            "fast int8": small,
        }
        if ours:
            calls["fast float32"] = fast(model, "cpu", example=images, progress=False)
            calls["fast bfloat16"] = fast(model, "cpu", torch.bfloat16, example=images, progress=False)
        small(images)
        row["times"][str(batch)] = timed(calls, images, rounds if batch > 1 else 2 * rounds)
    return row | {"load_after": os.getloadavg()[0], "seconds": time.monotonic() - start}


def nearest(train: Tensor, known: Tensor, test: Tensor) -> Tensor:
    """Return the class that most of the nearest neighbours have, by cosine."""
    train, test = (nn.functional.normalize(one, dim=1) for one in (train, test))
    votes = known[(test @ train.T).topk(NEIGHBOURS).indices]
    return votes.mode(1).values


def pictures(file: Path, span: slice) -> tuple[list[Image.Image], Tensor]:
    """Return images and classes of a file of CIFAR-10 as JPEG, which is sorted by classes, in a fixed drawn order."""
    held = np.load(file)
    jpeg, offset, label = held["jpeg"], held["offset"], held["label"]
    drawn = torch.randperm(len(label), generator=torch.Generator().manual_seed(0)).numpy()[span]
    images = [Image.open(io.BytesIO(jpeg[offset[i] : offset[i + 1]].tobytes())).convert("RGB") for i in drawn]
    return images, torch.from_numpy(label[drawn]).long()


def embeddings(folder: Path, model: Model, count: tuple[int, int]) -> dict[str, Any]:
    """Compare k-NN on CIFAR-10 by embeddings in float32 and in int8, calibrated on half of 200 other training images."""
    train, known = pictures(folder / "cifar10_train.npz", slice(count[0]))
    test, truth = pictures(folder / "cifar10_test.npz", slice(count[1]))
    others, _ = pictures(folder / "cifar10_train.npz", slice(49_800, 50_000))
    network = extractor(model, "embedding")
    example = model.preprocess(others[:1])
    small = fast(network, "cpu", "int8", calibration=model.preprocess(others), progress=False)
    single = fast(network, "cpu", example=example, progress=False)
    vectors: dict[str, list[list[Tensor]]] = {"float32": [[], []], "int8": [[], []]}
    for part, images in enumerate((train, test)):
        for image in images:
            x = model.preprocess([image])
            for name, call in (("float32", single), ("int8", small)):
                vectors[name][part].append(call(x)["embedding"])
    found = {name: nearest(torch.cat(one), known, torch.cat(two)) for name, (one, two) in vectors.items()}
    right = {name: answers == truth for name, answers in found.items()}
    accuracy = {name: 100 * one.double().mean().item() for name, one in right.items()}
    gained, lost = int((right["int8"] & ~right["float32"]).sum()), int((right["float32"] & ~right["int8"]).sum())
    figures = {"train": count[0], "test": count[1], "k": NEIGHBOURS, "accuracy": accuracy, "difference": paired(gained, lost, count[1])}
    return figures | {"certificate": small.proofs[0].facts()}


def main() -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--photographs", type=Path, required=True)
    parser.add_argument("--mobilenetv2", type=Path)
    parser.add_argument("--more", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--cifar", type=Path)
    parser.add_argument("--resnet20", metavar="FILE", help="a ResNet20 trained on CIFAR-10, for its embeddings")
    parser.add_argument("--only", nargs="*", help="these networks alone; none with an empty list")
    parser.add_argument("--ours", action="store_true", help="time fast() in float32 and bfloat16 too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    files, classes = photographs(asked.photographs)
    record: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {"networks": []}
    record |= {"machine": machine("openvino"), "threads": asked.threads, "rounds": asked.rounds, "photographs": len(files)}
    real = {"calibration": files, "labels": classes}
    sources: dict[str, Callable[[], Any]] = {
        "EfficientNetLite0": lambda: trained(zoo.EfficientNetLite0),
        "EfficientNetLite1": lambda: trained(zoo.EfficientNetLite1),
    }
    if asked.mobilenetv2:
        sources["MobileNetV2"] = lambda: trained(zoo.MobileNetV2, str(asked.mobilenetv2))
    for one in asked.more:
        network, _, file = one.partition("=")
        sources[network] = lambda network=network, file=file: trained(network, file)
    done = {row["network"] for row in record["networks"]}
    for name, make in sources.items():
        if name not in done and (asked.only is None or name in asked.only):
            record["networks"].append(measured(name, make(), real, asked.rounds, asked.ours))
            asked.out.write_text(json.dumps(record, indent=1))
    if "ResNet50" not in done and (asked.only is None or "ResNet50" in asked.only):
        torch.manual_seed(0)
        network = zoo.ResNet50().eval()
        record["networks"].append(measured("ResNet50", network, {"tolerance": {"error": 10.0}}, asked.rounds, asked.ours))
        asked.out.write_text(json.dumps(record, indent=1))
    known: dict[str, Any] = record.setdefault("cifar", {})
    if asked.cifar and asked.resnet20 and "ResNet20" not in known:
        known["ResNet20"] = embeddings(asked.cifar, trained(zoo.ResNet20, asked.resnet20), (3000, 5000))
        asked.out.write_text(json.dumps(record, indent=1))
    if asked.cifar and "EfficientNetLite0" not in known:
        known["EfficientNetLite0"] = embeddings(asked.cifar, trained(zoo.EfficientNetLite0), (1000, 1000))
        asked.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
