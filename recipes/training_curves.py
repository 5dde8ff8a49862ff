"""Train a network with and without `fast_step` on the same real images in the same order, and draw the losses over each other.

    python recipes/training_curves.py FILE.npz --model ResNet20 --steps 500 --seeds 3 --out curves
    python recipes/training_curves.py FILE.npz --model ViT_Ti_16 --side 224 --batch-size 64 --adamw --lr 5e-4 --out curves-vit

FILE.npz has arrays `jpeg`, `offset` and `label`: image i is the JPEG file jpeg[offset[i]:offset[i+1]]. Three ways: eager in float32,
eager under autocast in bfloat16, and `fast_step(fast(network, train=True))` under the same autocast. A seed fixes the first weights and
the images of every step, so that ways differ by their arithmetic alone. `curves.json` has every loss; what it says of the last steps is
the mean of the last tenth: how far the ways are from each other for each seed, and how far seeds of one way are from each other.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from zoo import CATALOGUE, fast
from zoo.bench.machine import facts, today
from zoo.finetuning.drawing import Curve, chart
from zoo.images.canvas import save
from zoo.kernels.training import fast_step
from zoo.networks.model import Model

WAYS = ("eager float32", "eager bfloat16", "fast_step bfloat16")
SMOOTH = 20


def read(file: Path, device: torch.device) -> tuple[Tensor, Tensor]:
    """Decode all images, each colour of mean 0 and deviation 1, and their labels."""
    arrays = np.load(file)
    jpeg, offset = arrays["jpeg"], arrays["offset"]
    decoded = [np.asarray(Image.open(io.BytesIO(jpeg[a:b].tobytes())).convert("RGB")) for a, b in itertools.pairwise(offset)]
    images = torch.from_numpy(np.stack(decoded)).to(device).permute(0, 3, 1, 2).float()
    images = (images - images.mean((0, 2, 3), keepdim=True)) / images.std((0, 2, 3), keepdim=True)
    return images.contiguous(memory_format=torch.channels_last), torch.from_numpy(arrays["label"].astype(np.int64)).to(device)


def trained_by(way: str, cls: type[Model], seed: int, images: Tensor, labels: Tensor, args: argparse.Namespace) -> list[float]:
    """Return the loss of every step."""
    torch.manual_seed(seed)
    network = cls(num_classes=int(labels.max()) + 1).train().to(images.device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)
    if args.adamw:
        optimizer = torch.optim.AdamW(network.parameters(), args.lr, weight_decay=0.05, fused=images.is_cuda)
    loss_of = nn.CrossEntropyLoss()
    casts = torch.bfloat16 if way.endswith("bfloat16") else None
    step = _stepper(network, loss_of, optimizer, casts, sized(images[: args.batch_size], args.side) if way.startswith("fast") else None)
    order = torch.Generator().manual_seed(1000 + seed)
    found = []
    for number in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, (number + 1) / 50) * (1 - number / args.steps)
        chosen = torch.randint(len(images), (args.batch_size,), generator=order).to(images.device)
        found.append(step(sized(images[chosen], args.side), labels[chosen]))
    return torch.stack(found).float().tolist()


def sized(images: Tensor, side: int | None) -> Tensor:
    """Enlarge images to `side` pixels a side, where that is asked for."""
    if side is None:
        return images
    return nn.functional.interpolate(images, (side, side), mode="bilinear").contiguous(memory_format=torch.channels_last)


def _stepper(
    network: nn.Module, loss_of: nn.Module, optimizer: torch.optim.Optimizer, casts: torch.dtype | None, example: Tensor | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a step as people write it, or `fast_step`'s where there is an example to make it with."""
    device = next(network.parameters()).device.type
    if example is not None:
        with torch.autocast(device, casts, casts is not None):
            model = fast(network, train=True, example=example)
        return fast_step(model, loss_of, optimizer, dtype=casts)

    def plainly(images: Tensor, target: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, casts, casts is not None):
            loss = loss_of(network(images), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return plainly


def smoothed(losses: list[float]) -> list[tuple[float, float]]:
    """Return the mean of the last `SMOOTH` steps at each step."""
    return [(i + 1, statistics.fmean(losses[max(0, i + 1 - SMOOTH) : i + 1])) for i in range(len(losses))]


def main() -> None:
    """Read the command line, train, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--model", default="ResNet20")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--side", type=int, help="of the images in pixels; their own if left out")
    parser.add_argument("--adamw", action="store_true", help="AdamW with a weight decay of 0.05 instead of SGD")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="OUT.json and OUT.png")
    args = parser.parse_args()
    device = torch.device(args.device)
    images, labels = read(args.data, device)
    losses: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        for way in WAYS:
            start = time.monotonic()
            losses[way].append(trained_by(way, CATALOGUE[args.model], seed, images, labels, args))
            print(f"{way}, seed {seed}: {losses[way][-1][-1]:.3f}, {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    tail = max(1, args.steps // 10)
    last = {way: [statistics.fmean(run[-tail:]) for run in runs] for way, runs in losses.items()}
    fast_way = WAYS[2]
    told = {
        "last": last,
        "fast from eager float32": max(abs(a - b) for a, b in zip(last[fast_way], last[WAYS[0]], strict=True)),
        "fast from eager bfloat16": max(abs(a - b) for a, b in zip(last[fast_way], last[WAYS[1]], strict=True)),
        "seed from seed": max(last[WAYS[0]]) - min(last[WAYS[0]]),
    }
    about = {**facts(device), "date": today(), "model": args.model, "steps": args.steps, "batch": args.batch_size}
    args.out.with_suffix(".json").write_text(json.dumps({**about, **told, "losses": losses}) + "\n")
    lines = [Curve(way, smoothed(losses[way][0])) for way in WAYS]
    save(chart(f"{args.model}: loss, mean of {SMOOTH} steps, seed 0", lines, "step"), args.out.with_suffix(".png"))
    print(json.dumps(told))


if __name__ == "__main__":
    sys.exit(main())
