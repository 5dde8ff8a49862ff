"""Train the checkpoint that ships in the wheel: ResNet20 on CIFAR-10, from JPEG copies of the images.

    python recipes/resnet20_cifar10.py DATA --out resnet20_cifar10.safetensors

DATA is a folder with `train/<class>/*` and `test/<class>/*` images, or with `cifar10_train.npz` and `cifar10_test.npz` (arrays
`jpeg`, `offset`, `label`: image i is the JPEG file jpeg[offset[i]:offset[i+1]]). Only the train split is trained on; the test split is
measured once, after the last step. `--holdout 5000` sets train images aside instead and never reads the test split: so the settings
below were chosen. He et al. 2015, section 4.2, augment by a 4-pixel pad and crop and a mirror image, as here.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from zoo import ResNet20

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def read_split(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Decode one split to images, uint8 (N, 3, 32, 32), and labels, int64 (N,)."""
    packed = data / f"cifar10_{split}.npz"
    if packed.is_file():
        arrays = np.load(packed)
        raw, offset = arrays["jpeg"].tobytes(), arrays["offset"]
        files: Sequence[io.BytesIO | Path] = [io.BytesIO(raw[a:b]) for a, b in itertools.pairwise(offset)]
        labels = arrays["label"].astype(np.int64)
    elif (data / split).is_dir():
        found = [(path, i) for i, name in enumerate(CLASSES) for path in sorted((data / split / name).iterdir())]
        files, labels = [path for path, _ in found], np.array([i for _, i in found], dtype=np.int64)
    else:
        raise SystemExit(f"{data} has neither {packed.name} nor a folder {split}/; see the head of {Path(__file__).name}")
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(labels)


def normalise(images: Tensor) -> Tensor:
    """Turn uint8 images (B, 3, H, W) into what the network reads."""
    mean, std = (torch.tensor(v, device=images.device).view(1, 3, 1, 1) for v in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def augment(images: Tensor) -> Tensor:
    """Shift each image of (B, 3, 32, 32) by up to 4 pixels over zeros and mirror half of them."""
    count, _, height, width = images.shape
    padded = F.pad(images, (4, 4, 4, 4))
    rows = torch.randint(9, (count, 1), device=images.device) + torch.arange(height, device=images.device)
    columns = torch.randint(9, (count, 1), device=images.device) + torch.arange(width, device=images.device)
    mirrored = torch.rand(count, 1, device=images.device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    batch = torch.arange(count, device=images.device).view(-1, 1, 1)
    return padded.permute(0, 2, 3, 1)[batch, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Measure top-1 in percent, in eval mode and float32."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(normalise(x)).argmax(1) == y).sum()) for x, y in zip(images.split(1000), labels.split(1000), strict=True))
    model.train()
    return 100 * right / len(labels)


def make_step(model: nn.Module, optimizer: torch.optim.Optimizer, args: argparse.Namespace) -> Callable[[Tensor, Tensor], Tensor]:
    """Make the function that trains on one batch and returns its loss; on a GPU it is captured as one CUDA graph."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(model(images), labels, label_smoothing=args.label_smoothing)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if args.device == "cpu":
        return step
    inputs = torch.zeros(args.batch_size, 3, 32, 32, device=args.device)
    targets = torch.zeros(args.batch_size, dtype=torch.long, device=args.device)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # capture needs warm allocators, optimiser buffers and cuDNN plans
        for _ in range(3):
            step(inputs, targets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(inputs, targets)
    model.load_state_dict(start)
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()

    def replay(images: Tensor, labels: Tensor) -> Tensor:
        inputs.copy_(images)
        targets.copy_(labels)
        graph.replay()
        return loss

    return replay


def train(args: argparse.Namespace) -> dict[str, object]:
    """Train as `args` say, write the checkpoint and its log, and return the log."""
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = torch.backends.cudnn.benchmark = True
    images, labels = (t.to(args.device) for t in read_split(args.data, "train"))
    if args.holdout:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(20)).to(args.device)
        held, kept = order[: args.holdout], order[args.holdout :]
        split, seen, answers = "holdout", images[held], labels[held]
        images, labels = images[kept], labels[kept]
    else:
        split = "test"
        seen, answers = (t.to(args.device) for t in read_split(args.data, split))
    images = normalise(images)
    model = ResNet20().to(args.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    rate = torch.tensor(0.0, device=args.device)
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=0.9, nesterov=True, fused=True)
    step = make_step(model, optimizer, args)
    steps = len(labels) // args.batch_size
    epochs, started = [], time.time()
    for epoch in range(args.epochs):
        losses = torch.zeros((), device=args.device)
        order = torch.randperm(len(labels), device=args.device)[: steps * args.batch_size]
        batches = zip(augment(images[order]).split(args.batch_size), labels[order].split(args.batch_size), strict=True)
        for index, (batch, wanted) in enumerate(batches):
            done = (epoch * steps + index) / (args.epochs * steps)
            warm = min(1.0, done * args.epochs / 5)
            rate.fill_(args.lr * warm * (1 - done))
            losses += step(batch, wanted)
        epochs.append({"epoch": epoch + 1, "loss": round(float(losses) / steps, 4), "seconds": round(time.time() - started, 1)})
        if args.holdout and (epoch + 1) % 20 == 0:
            epochs[-1]["holdout_top1"] = accuracy(model, seen, answers)
        print(json.dumps(epochs[-1]), flush=True)
    log: dict[str, object] = {
        "recipe": "recipes/resnet20_cifar10.py",
        "settings": {k: v for k, v in vars(args).items() if k not in ("data", "out")},
        f"{split}_top1": accuracy(model, seen, answers),
        "images": len(labels),
        "device": torch.cuda.get_device_name() if args.device != "cpu" else platform.processor(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "date": time.strftime("%Y-%m-%d"),
        "epochs": epochs,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    save_file(state, args.out, metadata={"format": "pt"})
    args.out.with_suffix(".json").write_text(json.dumps(log, indent=1) + "\n")
    return log


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the CIFAR-10 images")
    parser.add_argument("--out", type=Path, default=Path("resnet20_cifar10.safetensors"))
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--label-smoothing", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--holdout", type=int, default=0, help="train images to set aside and measure on, instead of the test split")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    log = train(parser.parse_args())
    print(json.dumps({k: v for k, v in log.items() if k != "epochs"}))


if __name__ == "__main__":
    main()
