"""Measure how fast `zoo finetune` learns on 1, 2, 4 … GPUs of this machine, each number in processes of its own.

    python recipes/finetune_scaling.py --gpus 1,2,4 --out scaling.json

The images are noise, decoded once into each GPU's memory, so that what is measured is the network, the optimiser and NCCL, not the
decoder; the batch of each GPU stays the same, so 4 GPUs do 4 times the work in a step. The rate is taken between log lines after the
first third of the steps. `--fsdp` divides the network instead of copying it; `--fast` and `--no-fast` say how steps are done, which is said
by their number otherwise; `--device cpu` measures gloo, for a trial.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

import numpy as np
import torch

from zoo import CATALOGUE
from zoo.finetuning import finetune
from zoo.images import Source


class Noise(Source):
    """Pictures of noise, each its own."""

    def __init__(self, count: int, side: int) -> None:
        self._side = side
        super().__init__("noise", [f"{i:06d}.bmp" for i in range(count)], [f"class{i % 10}" for i in range(count)], [side])

    def read(self, index: int) -> bytes:
        """Make one file."""
        from PIL import Image

        pixels = np.random.default_rng(index).integers(0, 256, (self._side, self._side, 3), np.uint8)
        file = BytesIO()
        Image.fromarray(pixels).save(file, "BMP")
        return file.getvalue()


def child(args: argparse.Namespace) -> None:
    """Train in one of the processes that torchrun started."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    done = finetune(
        CATALOGUE[args.model],
        Noise(max(args.images, 2 * args.batch_size * size), args.side),
        args.out,
        from_scratch=True,
        steps=args.steps,
        batch_size=args.batch_size * size,
        size=args.side,
        val_share=0.0,
        eval_every=1_000_000,
        device=args.device,
        fsdp=args.fsdp,
        fast=args.fast,
        dtype="bfloat16",
        progress=False,
        lr=1e-4,
    )
    if done.model is not None:  # the first process
        (args.out / "replayed").write_text(str(done.replayed))


def measure(args: argparse.Namespace, gpus: int) -> dict[str, float]:
    """Start `gpus` processes and read their rate from the log."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}", __file__, "--child"]
        told = ["--model", args.model, "--batch-size", args.batch_size, "--side", args.side, "--steps", args.steps, "--images", args.images]
        told += ["--out", out] + (["--fsdp"] if args.fsdp else []) + (["--device", args.device] if args.device else [])
        told += [] if args.fast is None else ["--fast" if args.fast else "--no-fast"]
        subprocess.run([*launch, *map(str, told)], check=True)
        replayed = int((out / "replayed").read_text())
        rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    looked = {row["time"]: row["step"] for row in rows if row["kind"] == "train" and row["step"] > args.steps / 3}  # losses come in bunches
    (begin, first), *_, (end, last) = looked.items()
    rate = (last - first) / (end - begin)
    return {
        "gpus": gpus,
        "images_s": gpus * args.batch_size * rate,
        "ms_a_step": 1000 / rate,
        "loss": rows[-1]["loss"],
        "replayed": replayed,
    }


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", default="1,2,4")
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--batch-size", type=int, default=512, help="images of a step on each GPU")
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--fsdp", action="store_true")
    parser.add_argument("--fast", action=argparse.BooleanOptionalAction)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path, default=Path("scaling.json"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    rows: list[dict[str, float]] = []
    for gpus in args.gpus.split(","):
        row = measure(args, int(gpus))
        rows.append(row)
        row["efficiency"] = row["images_s"] / (rows[0]["images_s"] * row["gpus"] / rows[0]["gpus"])
        print(json.dumps(row), flush=True)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    about = {
        "device": device,
        "torch": torch.__version__,
        "model": args.model,
        "batch": args.batch_size,
        "side": args.side,
        "fsdp": args.fsdp,
    }
    args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
