"""Measure int8 and fp8 on a GPU: `fast` in 8 bits beside `fast` in bfloat16, in turns, and certificates on labelled photographs.

    python recipes/eight_bits_gpu.py ResNet50@256:int8 VGG19@256:int8 ViT_B_16@256:fp8 [--rows]
    python recipes/eight_bits_gpu.py EfficientNetLite0@64:int8 --photographs FOLDER [--weights EfficientNetLite0=FILE]

Without photographs the weights are drawn, and what is made of them is compared on made-up images: speed is measured, nothing is proven.
FOLDER holds ImageNet photographs named WNID_label; half of them calibrate, and the other half is compared on. A figure is the median of the
rounds, in each of which both answer several batches, waited for together. `--rows` prints where the time goes.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from pathlib import Path
from statistics import median
from typing import Any

import torch

import zoo
from zoo.labels import labels

TURN = 0.15
"""Seconds of a turn, at least."""


def photographs(folder: Path) -> tuple[list[str], list[int]]:
    """Return files and the indices of their classes: the place of the WordNet id among ImageNet's thousand."""
    wnids = [label.wnid for label in labels("imagenet1k")]
    files = sorted(str(path) for path in folder.iterdir() if path.suffix.lower() in (".jpeg", ".jpg", ".png"))
    return files, [wnids.index(Path(file).name.partition("_")[0]) for file in files]


def timed(calls: dict[str, Any], images: torch.Tensor, rounds: int) -> dict[str, float]:
    """Return milliseconds of a call, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call(images)
            torch.cuda.synchronize()
            count, begun = 0, time.perf_counter()
            while time.perf_counter() - begun < TURN:
                for _ in range(8):
                    call(images)
                torch.cuda.synchronize()
                count += 8
            taken[name].append(1e3 * (time.perf_counter() - begun) / count)
    return {name: median(times) for name, times in taken.items()}


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", metavar="NETWORK@BATCH:KIND")
    parser.add_argument("--photographs", type=Path)
    parser.add_argument("--weights", action="append", default=[], metavar="NAME=FILE")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    files = dict(one.split("=", 1) for one in asked.weights)
    device, found = torch.device("cuda"), []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for cell in asked.cells:
        name, _, rest = cell.partition("@")
        batch, _, kind = rest.partition(":")
        torch.manual_seed(0)
        network: Any = zoo.trained(name, files[name]) if name in files else zoo.trained(name) if asked.photographs else zoo.network(name)
        network.eval()
        for part in network.modules():
            if isinstance(part, torch.nn.Linear) and not part.weight.any():  # a drawn transformer's last layer, which would answer 0
                torch.nn.init.normal_(part.weight, std=0.02)
        record = network.checkpoint if asked.photographs else None
        side = int(record.preprocessing.crop if record else network.input_size)  # which may differ, and the photographs have the former
        images = torch.randn(int(batch), 3, side, side, device=device, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        given: dict[str, Any] = {}
        if asked.photographs:
            given["calibration"], given["labels"] = photographs(asked.photographs)
        else:
            given["tolerance"] = {"error": 1.0}
        begun = time.monotonic()
        wide = zoo.fast(network, device, torch.bfloat16, example=images, progress=False)
        print(f"{cell}: bfloat16 ready in {time.monotonic() - begun:.0f} s", flush=True)
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                narrow = zoo.fast(network, device, kind, example=images, progress=False, **given)
            except ValueError as error:
                print(f"{cell}: {error}", flush=True)
                found.append({"cell": cell, "refused": str(error)})
                continue
        took = time.monotonic() - begun
        if not narrow.proofs:
            print(f"{cell}: {narrow.told[0]}", flush=True)
            found.append({"cell": cell, "refused": narrow.told[0]})
            continue
        ms = timed({"bfloat16": wide, kind: narrow}, images, asked.rounds)
        row = {"cell": cell, "ms": ms, "ratio": ms["bfloat16"] / ms[kind], "seconds": took, "certificate": narrow.proofs[0].lines()}
        found.append(row)
        print(f"{cell}: bfloat16 {ms['bfloat16']:.3f} ms, {kind} {ms[kind]:.3f} ms, {row['ratio']:.2f}x; made in {took:.0f} s", flush=True)
        print(*narrow.proofs[0].lines(), sep="\n", flush=True)
        if asked.rows:
            print(zoo.why(wide), zoo.why(narrow), sep="\n\n", flush=True)
        del wide, narrow
        torch.cuda.empty_cache()
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
