"""Measure `fast` beside the strongest stock recipe on networks of any library, and how long each takes until it answers.

    python recipes/bench_panel.py torchvision:swin_t@64 zoo:ConvNeXtV2_Tiny@64 zoo:DINOv2_S_14@32x518    # on a GPU
    python recipes/bench_panel.py --device cpu --dtype float32 torchvision:shufflenet_v2_x0_5@1x64       # without one: beside eager alone
    python recipes/bench_panel.py --at-once 5 torchvision:mnasnet1_0@128 timm:ghostnet_100@128 …         # prepared at once, measured alone

The recipe is BatchNorm folded by `torch.fx`, where that can trace the network, `torch.compile`, channels_last, one CUDA graph. In one
process, in turns, medians, weights random and BatchNorm's statistics settled. `ready` is seconds until the first answer, with nothing
compiled before but what a network measured before it left.

With `--at-once` several processes prepare networks on one card: `recipes/at_once.py`. `ready` is longer then.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.fx.proxy import TraceError

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.at_once import measured, processes
from recipes.bench_modules import GRAPH, module_of
from zoo.bench.clock import clock
from zoo.bench.peers import WAYS
from zoo.bench.subject import IMAGES, SETTLING, Subject, settle
from zoo.kernels import fast, why
from zoo.kernels.comparing.sample_images import natural_images


def ready(make: Callable[[], Any]) -> tuple[Any, float]:
    """Make a way, call it once, and return it and the seconds that this took."""
    begun = time.monotonic()
    call = make()
    call()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return call, time.monotonic() - begun


def _recipe(subject: Subject) -> Callable[[], Any]:
    """Build the recipe; what torch.fx can't trace keeps its BatchNorms."""
    try:
        return WAYS["recipe"].build(subject, "quick")
    except TraceError as error:
        print(f"{subject.name}: BatchNorms stay, for torch.fx says: {error}", file=sys.stderr, flush=True)
        return GRAPH.build(subject, "quick")


def measure(cell: str, options: argparse.Namespace) -> str:
    """Measure one LIBRARY:NAME@BATCH[xSIDE] and return its row; what `fast` says of its plan goes to stderr."""
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    name, _, numbers = cell.rpartition("@")
    batch, side = (int(number) for number in (numbers if "x" in numbers else f"{numbers}x224").split("x"))
    torch.manual_seed(0)
    module = module_of(name).to(device)
    settle(module, natural_images((SETTLING, 3, side, side), device, seed=IMAGES + 1))
    module.cpu()
    subject = Subject(name, batch, side, device, dtype, module, module, name.partition(":")[0])
    images = subject.input(dtype, channels_last=True)
    made: list[Any] = []

    def ours() -> Callable[[], Any]:
        made.append(fast(module, device, dtype, example=images, progress=False))
        return lambda: made[0](images)

    calls: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    with torch.no_grad():
        calls["fast"], seconds["fast"] = ready(ours)
        if device.type == "cuda":
            calls["recipe"], seconds["recipe"] = ready(lambda: _recipe(subject))
        calls["eager-cl"], seconds["eager-cl"] = ready(lambda: WAYS["eager-cl"].build(subject, "quick"))
        times = {way: median(found) / 1000 for way, found in clock(device).throughput(calls, options.rounds).items()}
    report = why(made[0])
    print(f"\n{cell}\n{report}", file=sys.stderr, flush=True)
    parity = report.parity
    error = "-" if parity is None else f"{parity.fast:.1e} ({parity.eager:.1e})"
    peers = [time for way, time in times.items() if way != "fast"]
    shown = [f"{times[way]:.2f}" if way in times else "-" for way in ("eager-cl", "recipe", "fast")]
    waits = [f"{seconds[way]:.0f}" if way in seconds else "-" for way in ("recipe", "fast")]
    return f"| {name} | {batch}, {side} | {' | '.join(shown)} | {min(peers) / times['fast']:.2f} | {' | '.join(waits)} | {error} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="LIBRARY:NAME@BATCH or LIBRARY:NAME@BATCHxSIDE, of torchvision, timm or zoo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    processes(parser)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, {options.dtype}")
    print("| network | batch, side | eager ms | recipe ms | fast ms | over | ready s: recipe | fast | error (eager's) |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for row in measured(options.cells, measure, options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
