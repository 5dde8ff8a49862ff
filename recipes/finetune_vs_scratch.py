"""Compare fine-tuning with training from scratch at equal steps, on real images, and draw both curves.

    python recipes/finetune_vs_scratch.py CIFAR WEIGHTS --model ResNet32 --out runs/compared

CIFAR is a folder with `cifar10_train.npz` and `cifar10_test.npz` (arrays `jpeg`, `offset`, `label`: image i is the JPEG file
jpeg[offset[i]:offset[i+1]]); WEIGHTS is what `trained` takes. Some of the images are laid into folders first, as people have theirs.
Both networks see the same images in the same order, with the same batch and schedule; only the highest learning rate is each one's own.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from zoo import CATALOGUE
from zoo.finetuning import finetune
from zoo.finetuning.drawing import Curve, chart
from zoo.images.canvas import save

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def lay_out(file: Path, folder: Path, count: int) -> None:
    """Write the first `count` images of a file, the same number of each class, as folder/<class>/<number>.jpg."""
    arrays = np.load(file)
    jpeg, offset, labels = arrays["jpeg"], arrays["offset"], arrays["label"]
    had: Counter[str] = Counter()
    for index, number in enumerate(labels):
        name = CLASSES[number]
        if had[name] < count // len(CLASSES):
            had[name] += 1
            path = folder / name / f"{index:05d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg[offset[index] : offset[index + 1]].tobytes())


def main() -> None:
    """Read the command line, train twice and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cifar", type=Path)
    parser.add_argument("weights")
    parser.add_argument("--model", default="ResNet32")
    parser.add_argument("--out", type=Path, default=Path("runs/compared"))
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--eval-every", type=int, default=30)
    parser.add_argument("--device")
    args = parser.parse_args()
    data = args.out / "data"
    lay_out(args.cifar / "cifar10_train.npz", data / "train", args.images)
    lay_out(args.cifar / "cifar10_test.npz", data / "test", args.test)
    curves: list[Curve] = []
    told: dict[str, object] = {}
    starts: dict[str, dict[str, Any]] = {"fine-tuned": {"weights": args.weights}, "from scratch": {"from_scratch": True}}
    for name, start in starts.items():
        run = finetune(
            CATALOGUE[args.model],
            data,
            args.out / name.replace(" ", "_"),
            steps=args.steps,
            batch_size=args.batch_size,
            eval_every=args.eval_every,
            device=args.device,
            **start,
        )
        points = [(row["step"], row["accuracy"]) for row in run.history if row["kind"] == "eval"]
        curves.append(Curve(name, points))
        told[name] = {"curve": points, "best": max(accuracy for _, accuracy in points)}
    save(chart(f"{args.model}: accuracy on {args.test} test images, %", curves, "step"), args.out / "compared.png")
    (args.out / "compared.json").write_text(json.dumps(told, indent=1) + "\n")
    print(json.dumps(told))


if __name__ == "__main__":
    sys.exit(main())
