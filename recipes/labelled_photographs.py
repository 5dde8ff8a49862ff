"""Measure ImageNet checkpoints on a folder of labelled photographs: top-1 and top-5 in percent, and the time of each.

python recipes/labelled_photographs.py FOLDER EfficientNetLite0:google_in1k MobileNetV2:imagenet1k_v1

A photograph's name begins with its class's WordNet id: n02123045_tabby.JPEG. A hundred of them tell a wrong normalisation from the right
one, and no more: they are no validation set.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from PIL import Image

import zoo
from zoo.labels import labels as labels_named
from zoo.networks.model import Model
from zoo.pretrained.records import record_of


def photographs(folder: Path) -> tuple[list[Path], torch.Tensor]:
    """List the files whose names begin with an ImageNet class's WordNet id, and their classes."""
    place = {label.wnid: number for number, label in enumerate(labels_named("imagenet1k"))}
    files = [file for file in sorted(folder.iterdir()) if file.name.partition("_")[0] in place]
    if not files:
        raise SystemExit(f"{folder} has no photograph named like n02123045_tabby.JPEG")
    return files, torch.tensor([place[file.name.partition("_")[0]] for file in files])


def measure(model: Model, files: list[Path], labels: torch.Tensor) -> tuple[float, float]:
    """Return top-1 and top-5 in percent."""
    hits = torch.zeros(2)
    with torch.inference_mode():
        for number in range(0, len(files), 20):
            images = [Image.open(file) for file in files[number : number + 20]]
            best = model(model.preprocess(images)).topk(5).indices == labels[number : number + 20, None]
            hits += torch.stack([best[:, 0].sum(), best.any(1).sum()])
    top1, top5 = (100 * hits / len(files)).tolist()
    return top1, top5


def main() -> None:
    """Print a line for each checkpoint."""
    parser = argparse.ArgumentParser(description="Measure ImageNet checkpoints on labelled photographs.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoints", nargs="+", metavar="NETWORK:TAG")
    asked = parser.parse_args()
    files, labels = photographs(asked.folder)
    for name in asked.checkpoints:
        record, begun = record_of(name), time.perf_counter()
        top1, top5 = measure(zoo.trained(zoo.CATALOGUE[record.model], record.tag), files, labels)
        print(f"{record.model}:{record.tag}: {top1:.1f} / {top5:.1f} % of {len(files)}, {time.perf_counter() - begun:.1f} s")


if __name__ == "__main__":
    main()
