"""Time one step of a dream against the same step in eager PyTorch, in turns: medians, and only after both gave the same picture.

    python recipes/bench_dream.py --device cuda --model GoogLeNet --size 1024
    python recipes/bench_dream.py --device cpu --model ResNet18 --size 96 --rounds 5

The rival is a careful user's step: the network cut at the same layer, its parameters frozen, the gradient of the picture alone, everything
left on the device. With --channels-last its network and its picture have that layout. Weights are drawn at random: no time depends on them.
`throughput` is steps behind each other, as a dream takes them; `latency` is one step that is waited for. The status is 1 where the pictures
differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

from zoo import CATALOGUE, features
from zoo.bench.clock import clock
from zoo.dreaming.cutting import IMAGENET, cut
from zoo.dreaming.gradients import Pull
from zoo.dreaming.stepping import CapturedSteps, steps
from zoo.networks.model import Model

RATE = 1.5
LEVELS = 1.0
"""By how much pictures may differ in the mean after the steps that are compared: roundings turn a few ReLUs."""


def drawn(name: str, device: torch.device) -> Model:
    """Build a network whose BatchNorms keep maps at one size."""
    torch.manual_seed(0)
    network = CATALOGUE[name]().eval()
    for layer in network.modules():
        if isinstance(layer, nn.BatchNorm2d):
            nn.init.uniform_(layer.weight, 0.8, 1.2)
    return network.to(device)


def eager(network: Model, at: str, x: Tensor, channels_last: bool) -> Callable[[tuple[int, int]], Tensor]:
    """Return a step as it is written by hand; it changes `x` and returns it."""
    network = network.requires_grad_(False)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    taken = features(network, at).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    mean, std = (torch.tensor(numbers, device=x.device).view(1, 3, 1, 1) for numbers in (IMAGENET.mean, IMAGENET.std))

    def step(offset: tuple[int, int]) -> Tensor:
        nonlocal x
        rolled = torch.roll(x, offset, (2, 3)).to(memory_format=layout).requires_grad_()
        a = taken((rolled / 255 - mean) / std)[at]
        (g,) = torch.autograd.grad(a, rolled, a.detach())
        with torch.no_grad():
            x = torch.roll(rolled + RATE * g / g.abs().mean(), (-offset[0], -offset[1]), (2, 3)).clamp(0, 255)
        return x

    return step


def main() -> int:
    """Compare, then time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", default="GoogLeNet")
    parser.add_argument("--at", help="the layer; the usual one if left out")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--channels-last", action="store_true", help="the rival's layout")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    network = drawn(asked.model, device)
    ours_at = cut(network, asked.at, IMAGENET)
    (at,) = ours_at.at
    picture = torch.rand(1, 3, asked.size, asked.size, device=device).mul_(255)
    ones = torch.ones(1, 3, 1, 1, device=device)
    ours = steps(Pull(ours_at, ones, torch.zeros_like(ones)), picture.clone(), RATE, 0.0, 255.0)
    theirs = eager(network, at, picture.clone(), asked.channels_last)
    shown = picture
    for offset in ((3, -5), (0, 7), (-8, 2)):
        ours.take(offset, lambda done: None)
        shown = theirs(offset)
    apart, moved = float((ours.x - shown).abs().mean()), float((shown - picture).abs().mean())
    way = "CUDA graph" if isinstance(ours, CapturedSteps) else "one call after the other"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(f"{asked.model} at {at}, {asked.size} px on {place}, ours: {way}")
    print(f"after 3 steps the pictures have moved by {moved:.2f} levels and are {apart:.3f} apart")
    if not apart < LEVELS < moved:
        print("no time is printed: the pictures differ")
        return 1
    calls = {"ours": lambda: ours.take((4, -9), lambda done: None), "eager": lambda: theirs((4, -9))}
    for kind in ("throughput", "latency"):
        samples = getattr(clock(device), kind)(calls, asked.rounds)
        found = {name: statistics.median(times) / 1000 for name, times in samples.items()}
        print(f"{kind}: ours {found['ours']:.3f} ms, eager PyTorch {found['eager']:.3f} ms a step, {found['eager'] / found['ours']:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
