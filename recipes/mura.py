"""Fine-tune DenseNet169 on MURA: abnormal or normal, one decision a study of several views.

    python recipes/mura.py MURA-v1.1 --out runs/mura

MURA-v1.1 holds `train/` and `valid/` with `XR_WRIST/patient00011/study1_negative/image1.png`. As in Rajpurkar et al. 2017
(https://arxiv.org/abs/1712.06957, section 3): DenseNet169 from ImageNet, 320x320 pixels, mirrors and turns of up to 30 degrees, batch 8,
Adam at 1e-4, a cross-entropy whose weights make abnormal and normal count the same within each kind of study, the mean probability
of a study's views above 0.5, Cohen's kappa. Other than there: two logits for one (the same function: a softmax of two is the sigmoid of
their difference), a cosine for the learning rate's steps, one network for an ensemble of five.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from zoo import CATALOGUE
from zoo.finetuning import Run, finetune
from zoo.finetuning.network import usual


def train(args: argparse.Namespace) -> Run:
    """Fine-tune as `args` say."""
    cls = CATALOGUE[args.model]
    length = {"epochs": args.epochs} if args.steps is None else {"steps": args.steps}
    return finetune(
        cls,
        args.data,
        args.out,
        from_scratch=args.from_scratch,
        weights=args.weights,
        layout="studies",
        preprocessing=replace(usual(cls), resize=args.size, crop=args.size),
        augment="none",
        rotate=30.0,
        batch_size=args.batch_size,
        optimizer="adamw",
        lr=args.lr,
        weight_decay=0.0,
        head_epochs=0,
        balance=True,
        monitor="kappa",
        patience=args.patience,
        device=args.device,
        workers=args.workers,
        seed=args.seed,
        **length,
    )


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="MURA-v1.1")
    parser.add_argument("--out", type=Path, default=Path("runs/mura"))
    parser.add_argument("--model", default="DenseNet169")
    parser.add_argument("--weights")
    parser.add_argument("--from-scratch", action="store_true")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--patience", type=int)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--device")
    parser.add_argument("--seed", type=int, default=0)
    run = train(parser.parse_args())
    assert run.metrics is not None
    print(json.dumps({"kappa": run.metrics.kappa, "accuracy": 100 * run.metrics.accuracy, "studies": run.metrics.count}))


if __name__ == "__main__":
    sys.exit(main())
