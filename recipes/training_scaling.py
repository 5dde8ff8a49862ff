"""Measure how fast `fast_step` trains on 1, 2, 4 … GPUs of this machine, under DistributedDataParallel over NCCL, and draw it.

    torchrun --standalone --nproc-per-node 4 recipes/training_scaling.py --model ResNet50 --batch-size 256 --out scaling

Each GPU has a batch of its own, so four do four times the work in a step. All counts are measured by the same processes, the first of
them alone, then the first two, and so on, several rounds in turns; a step is timed from a barrier to the slowest process's end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zoo import CATALOGUE, fast
from zoo.bench.machine import facts, today
from zoo.finetuning.drawing import Curve, chart
from zoo.images.canvas import save
from zoo.kernels.training import FastStep, fast_step

WARMUPS = 8


def stepper(args: argparse.Namespace, group: Any, device: torch.device) -> FastStep:
    """Make a step of a network that a group of processes trains."""
    torch.manual_seed(0)
    network = CATALOGUE[args.model](num_classes=1000).train().to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(args.batch_size, 3, args.side, args.side, device=device).contiguous(memory_format=torch.channels_last)
    casts = torch.bfloat16 if device.type == "cuda" else None
    with torch.autocast(device.type, casts, casts is not None):
        model = fast(network, train=True, example=images, progress=False)
    wrapped = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, process_group=group)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
    return fast_step(wrapped, nn.CrossEntropyLoss(), optimizer, dtype=casts)


def span(step: FastStep, batch: tuple[Any, Any], count: int, device: torch.device, group: Any) -> float:
    """Return the seconds of one step, of the slowest process of a group."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    dist.barrier(group)
    start = time.perf_counter()
    for _ in range(count):
        step(*batch)
    wait()
    took = torch.tensor((time.perf_counter() - start) / count, device=device)
    dist.all_reduce(took, dist.ReduceOp.MAX, group=group)
    return float(took)


def main() -> None:
    """Read the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ResNet50")
    parser.add_argument("--batch-size", type=int, default=256, help="images of a step on each GPU")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of a round")
    parser.add_argument("--out", type=Path, default=Path("scaling"), help="OUT.json and OUT.png")
    args = parser.parse_args()
    rank, there = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if there else torch.device("cpu")
    if there:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if there else "gloo")
    world = dist.get_world_size()
    counts = [count for count in (1, 2, 4, 8, 16) if count <= world]
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    generator = torch.Generator().manual_seed(rank)
    batch = (
        torch.randn(args.batch_size, 3, args.side, args.side, generator=generator).to(device).contiguous(memory_format=torch.channels_last),
        torch.randint(1000, (args.batch_size,), generator=generator).to(device),
    )
    samples: dict[int, list[float]] = {count: [] for count in counts}
    steps = {count: stepper(args, groups[count], device) for count in counts if rank < count}
    for count, step in steps.items():
        del count
        for _ in range(WARMUPS):
            step(*batch)
    for _ in range(args.rounds):
        for count in counts:
            dist.barrier()
            if rank < count:
                samples[count].append(span(steps[count], batch, args.steps, device, groups[count]))
    if rank == 0:
        rates = {count: count * args.batch_size / statistics.median(times) for count, times in samples.items()}
        rows = [{"gpus": count, "images_s": rate, "a_gpu": rate / rates[1] / count} for count, rate in rates.items()]
        about = {**facts(device), "date": today(), "model": args.model, "batch": args.batch_size, "side": args.side}
        args.out.with_suffix(".json").write_text(json.dumps({**about, "unchanged": steps[1].unchanged, "rows": rows}, indent=1) + "\n")
        lines = [Curve("measured", [(r["gpus"], r["images_s"]) for r in rows]), Curve("ideal", [(c, c * rates[1]) for c in counts])]
        save(chart(f"{args.model}: images/s trained, {args.batch_size} a GPU", lines, "GPUs"), args.out.with_suffix(".png"))
        print(json.dumps(rows))
    dist.barrier()
    for step in steps.values():
        step.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
