"""Measure steps of `fast_step` beside `torch.compile`, default and reduce-overhead, on networks of any library.

    python recipes/bench_training.py torchvision:vit_b_16@64 zoo:DINOv2_S_14@16x518 torchvision:swin_t@64    # on a GPU

A step is forward, cross entropy, backward and fused SGD with momentum, under bfloat16's autocast, images and weights channels_last. In one
process, in turns, medians; each way has its own copy of the network. `ready` is seconds until the sixth step is done. `MiB` is what a way
holds, pools of its graphs included, and what a step takes on top. `reserved MiB` is the most that PyTorch's allocator took from the card
until a way was ready, above what was there before. A way whose loss is no number gets no figure. With
`--at-once` several processes prepare networks on one card: `recipes/at_once.py`. `ready` is longer then.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.at_once import measured, processes
from recipes.bench_modules import module_of
from zoo import fast, fast_step, why
from zoo.bench.clock import Memory, clock

STEPS = 6
"""Steps until a way is ready: `fast_step` captures the fourth, reduce-overhead the second or third."""
WAYS = ("compile", "reduce-overhead", "fast")


def step_of(way: str, network: nn.Module, images: Tensor, labels: Tensor, frozen: str) -> tuple[Callable[[], Tensor], Any]:
    """Return a way's step, and the network as it trains."""
    for name, parameter in network.named_parameters():
        if frozen and name.startswith(frozen):
            parameter.requires_grad_(False)
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, 1e-3, momentum=0.9, fused=images.is_cuda)
    loss = nn.CrossEntropyLoss()
    if way == "fast":
        model = fast(network, train=True, example=images, progress=False)
        step = fast_step(model, loss, optimizer)
        return lambda: step(images, labels), model
    compiled = torch.compile(network, mode=None if way == "compile" else way)

    def call() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            found = loss(compiled(images), labels)
        found.backward()
        optimizer.step()
        return found.detach()

    return call, compiled


def measure(cell: str, options: argparse.Namespace) -> str:
    """Measure one LIBRARY:NAME@BATCH[xSIDE] and return its row; what `fast` says of its plan goes to stderr."""
    device, frozen, ways = torch.device(options.device), options.frozen, options.ways.split(",")
    name, _, numbers = cell.rpartition("@")
    batch, side = (int(number) for number in (numbers if "x" in numbers else f"{numbers}x224").split("x"))
    torch.manual_seed(0)
    network = module_of(name).train().to(device).to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, side, side, device=device).contiguous(memory_format=torch.channels_last)
    classes = network.eval()(images[:1]).shape[1]
    labels = torch.randint(classes, (batch,), device=device)
    steps: dict[str, Callable[[], object]] = {}
    seconds: dict[str, float] = {}
    memory: dict[str, float] = {}
    reserved: dict[str, float] = {}
    for way in ways:
        torch.compiler.reset()
        scales = Memory(device)
        taken = _reserved(device, begins=True)
        twin = copy.deepcopy(network).train()
        begun = time.monotonic()
        try:
            step, model = step_of(way, twin, images, labels, frozen)
            loss = step()
            for _ in range(STEPS - 1):
                loss = step()
            if not bool(loss.isfinite()):
                raise ValueError("the loss is no number")
        except Exception as error:  # a way that fails gets no figure, and says why
            print(f"{cell}, {way}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        seconds[way] = time.monotonic() - begun
        reserved[way] = _reserved(device) - taken
        if (peak := scales.peak_mib(step)) is not None:
            memory[way] = peak
        if way == "fast":
            print(f"\n{cell}\n{why(model)}", file=sys.stderr, flush=True)
        steps[way] = step
    times = {way: median(found) / 1000 for way, found in clock(device).throughput(steps, options.rounds).items()}
    peers = [time for way, time in times.items() if way != "fast"]
    over = f"{min(peers) / times['fast']:.2f}" if peers and "fast" in times else "-"

    def row(found: dict[str, Any], form: str) -> list[str]:
        return [format(found[way], form) if way in found else "-" for way in ways]

    share = f"{memory['fast'] / memory['compile']:.2f}" if {"fast", "compile"} <= memory.keys() and memory["compile"] else "-"
    fields = [name, f"{batch}, {side}", *row(times, ".2f"), over, *row(memory, ".0f"), share, *row(reserved, ".0f"), *row(seconds, ".0f")]
    return f"| {' | '.join(fields)} |"


def _reserved(device: torch.device, begins: bool = False) -> float:
    """Return the most that the allocator has had since a way began, or what it has where one `begins`, in MiB; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    if begins:
        torch.cuda.reset_peak_memory_stats(device)
    return (torch.cuda.memory_reserved(device) if begins else torch.cuda.max_memory_reserved(device)) / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="LIBRARY:NAME@BATCH or LIBRARY:NAME@BATCHxSIDE, of torchvision, timm or zoo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--frozen", default="", help="parameters whose names begin so don't learn, as stem")
    parser.add_argument("--ways", default=",".join(WAYS), help="default %(default)s")
    processes(parser)
    options = parser.parse_args(arguments)
    ways = options.ways.split(",")
    if unknown := set(ways) - set(WAYS):
        parser.error(f"--ways {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    device = torch.device(options.device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, bfloat16")
    heads = [f"{way} {what}" for what in ("ms", "MiB", "reserved MiB", "ready s") for way in ways]
    count = len(ways)
    heads = [*heads[:count], "over", *heads[count : 2 * count], "memory over compile's", *heads[2 * count :]]
    print(f"| network | batch, side | {' | '.join(heads)} |")
    print("|---|--:|" + "--:|" * len(heads))
    for row in measured(options.cells, measure, options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
