"""Train MobileNetV2 with a stem for 32-pixel images on CIFAR-10, by `zoo.finetuning.finetune`, from JPEG copies of the images.

    python recipes/mobilenetv2_cifar10.py DATA --out runs/mobilenetv2_cifar10

DATA is a folder with `train/<class>/*` and `test/<class>/*` images, or with `cifar10_train.npz` and `cifar10_test.npz` (arrays `jpeg`,
`offset`, `label`: image i is the JPEG file jpeg[offset[i]:offset[i+1]]). Only the train split is learnt from, and the test split is
measured once, on the last state. `--holdout` sets a tenth of the train images aside instead and never reads the test split: so
settings are chosen. On a GPU the images stay in its memory, and shifts and mirrors are made there. What it leaves, `zoo predict` takes:

    zoo predict PHOTO --model runs/mobilenetv2_cifar10

On folders of images the command does nearly the same:

    zoo finetune DATA --model MobileNetV2 --from-scratch --size 32 --option stem_stride=1 --option early_stride=1 --epochs 80 \\
        --batch-size 256 --lr 0.2
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from weights import Preprocessing
from zoo import MobileNetV2
from zoo.finetuning import Run, finetune
from zoo.images import Source

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STEPS = Preprocessing(32, 32, "bilinear", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


SMALL = {"stem_stride": 1, "early_stride": 1}
"""For images of 32 pixels: neither the first convolution nor the second stage has a stride, so the last map is 4x4."""


class Packed(Source):
    """CIFAR-10's images as JPEG files end to end in one .npz file."""

    def __init__(self, file: Path) -> None:
        arrays = np.load(file)
        self._jpeg, self._offset = arrays["jpeg"], arrays["offset"]
        count = len(self._offset) - 1
        labels = [CLASSES[number] for number in arrays["label"]]
        super().__init__(str(file), [f"{i:05d}.jpg" for i in range(count)], labels, [b - a for a, b in pairwise(self._offset.tolist())])

    def read(self, index: int) -> bytes:
        """Return one file's bytes."""
        return self._jpeg[self._offset[index] : self._offset[index + 1]].tobytes()


def split(data: Path, name: str) -> Source | Path:
    """Find one split of CIFAR-10."""
    packed = data / f"cifar10_{name}.npz"
    if packed.is_file():
        return Packed(packed)
    if (data / name).is_dir():
        return data / name
    raise SystemExit(f"{data} has neither {packed.name} nor a folder {name}/; see the head of {Path(__file__).name}")


def train(args: argparse.Namespace) -> Run:
    """Train as `args` say."""
    measured = {"val_share": 0.1} if args.holdout else {"val": split(args.data, "test")}
    usual = {"epochs": args.epochs} if args.steps is None else {"steps": args.steps}
    return finetune(
        MobileNetV2,
        split(args.data, "train"),
        args.out,
        from_scratch=True,
        options={"dropout": args.dropout, **SMALL},
        preprocessing=STEPS,
        batch_size=args.batch_size,
        optimizer="sgd",
        lr=args.lr,
        weight_decay=args.weight_decay,
        label_smoothing=args.label_smoothing,
        warmup=0.1,
        ema=args.ema,
        eval_every=args.eval_every or 1_000_000,  # once, at the end
        device=args.device,
        compile=args.compile,
        seed=args.seed,
        **measured,
        **usual,
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the CIFAR-10 images")
    parser.add_argument("--out", type=Path, default=Path("runs/mobilenetv2_cifar10"))
    parser.add_argument("--epochs", type=int, default=80)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--ema", type=float, default=0.0)
    parser.add_argument("--eval-every", type=int)
    parser.add_argument("--holdout", action="store_true", help="measure on a tenth of the train images instead of the test split")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    started = time.monotonic()
    run = train(args)
    assert run.metrics is not None
    told = {"top1": 100 * run.metrics.accuracy, "steps": run.steps, "seconds": round(time.monotonic() - started, 1), "out": str(run.folder)}
    print(json.dumps(told))


if __name__ == "__main__":
    sys.exit(main())
