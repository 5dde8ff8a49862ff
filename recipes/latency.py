"""Time one image that is waited for: `fast`, `fast(static=True)` that copies neither image nor answer, and the strongest stock recipe.

    python recipes/latency.py ResNet18 ResNet50 MobileNetV2 VGG19      # the zoo's networks, on a GPU

bfloat16, one image at the network's own size, weights random. The recipe is BatchNorm folded by `torch.fx`, `torch.compile`, channels_last,
one CUDA graph. In one process, in turns drawn anew each round; a sample is one call and the wait for its end, by the host's clock. With
`--at-once` several processes prepare networks on one card: `recipes/at_once.py`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo
from recipes.at_once import measured, processes
from zoo.bench.clock import clock
from zoo.bench.peers import WAYS
from zoo.bench.subject import IMAGES, SETTLING, Subject, settle
from zoo.kernels.comparing.sample_images import natural_images


def measure(name: str, options: argparse.Namespace) -> str:
    """Time one network and return its row."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    torch.manual_seed(0)
    network = zoo.network(name).to(device)
    side = int(network.input_size)
    settle(network, natural_images((SETTLING, 3, side, side), device, seed=IMAGES + 1))
    network.cpu()
    subject = Subject(name, 1, side, device, dtype, network, network, "zoo")
    images = subject.input(dtype, channels_last=True)
    calls: dict[str, Callable[[], Any]] = {}
    with torch.no_grad():
        for way, static in (("fast", False), ("static", True)):
            model = zoo.fast(network, device, dtype, example=images, progress=False, static=static)
            rooms = model.static_inputs() if static else []
            calls[way] = partial(model, images if not rooms or rooms[0] is None else rooms[0].copy_(images))
        calls["recipe"] = WAYS["recipe"].build(subject, "quick")
        for call in calls.values():
            call()
        times = {way: median(found) for way, found in clock(device).latency(calls, options.rounds).items()}
    shown = [f"{times[way]:.0f}" for way in ("recipe", "fast", "static")]
    over = [f"{times['recipe'] / times[way]:.2f}" for way in ("fast", "static")]
    return f"| {name} | {' | '.join(shown + over)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="+", help="of the zoo")
    parser.add_argument("--rounds", type=int, default=300)
    processes(parser)
    options = parser.parse_args(arguments)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| network | recipe us | fast us | static us | recipe over fast | recipe over static |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in measured(options.networks, measure, options):
        print(row, flush=True)


if __name__ == "__main__":
    main()
