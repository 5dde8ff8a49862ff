"""Measure how far the gradients of a training step are from float32, way by way, beside plain eager's under the same autocast.

    python recipes/gradient_errors.py timm:pvt_v2_b1@64 --ways chains,islands,whole,compile            # on a GPU
    python recipes/gradient_errors.py timm:pvt_v2_b1@4x64 --device cpu --ways islands,whole

bfloat16's autocast, made-up images, a fixed gradient of the outputs, means over --draws sets of images. "chains", "islands" and "whole" are
the ways of `fast(model, train=True)`, whichever would win; "compile" is `torch.compile` of the network. Each row says how many times
eager's error a way has, as the geometric mean over all parameters; then the parameters for which that is most.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recipes.bench_modules import module_of
from zoo.kernels.comparing.precision import casts_of, products
from zoo.kernels.comparing.sample_images import natural_images
from zoo.kernels.training import shared
from zoo.kernels.training.chains import steps_of, without_any
from zoo.kernels.training.checking import replay_of
from zoo.kernels.training.contest import compiled
from zoo.kernels.training.record import record
from zoo.kernels.training.segments import inductor
from zoo.kernels.training.undrawn import Undrawn

WAYS = ("chains", "islands", "whole", "compile")
SHOWN = 12
"""Parameters that are named."""


def way_of(way: str, network: nn.Module, images: Tensor) -> Callable[[Tensor], Any]:
    """Return a call of the network by a way."""
    if way == "compile":
        return torch.compile(network)
    recording = record(network, (images,), {}, images.device)
    steps, _, counted = steps_of(recording, without_any(recording) if way == "whole" else {})
    if way == "chains":
        replay = replay_of(recording, steps, counted, None, beside=True)
    else:
        replay = compiled(recording, steps, counted, inductor, None, beside=True)
    if replay is None:
        raise SystemExit(f"{way}: nothing is left for the compiler")
    places = replay.at(network)
    return lambda given: replay(places, [given])


def gradients(network: nn.Module, call: Callable[[Tensor], Any], images: Tensor, seed: int) -> list[Tensor]:
    """Return the gradients of all parameters for a fixed gradient of the outputs."""
    out: Tensor = call(images)
    drawn = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed)).to(out.device, out.dtype)
    found = torch.autograd.grad(out, list(network.parameters()), drawn, allow_unused=True)
    return [torch.zeros(()) if one is None else one.double() for one in found]


def errors(got: list[Tensor], right: list[Tensor]) -> list[float]:
    """Return the logarithm of each gradient's relative error."""
    return [math.log(float((a - b).norm() / b.norm().clamp_min(1e-30)) + 1e-12) for a, b in zip(got, right, strict=True)]


def measure(cell: str, options: argparse.Namespace) -> None:
    """Print the rows of one network."""
    name, _, numbers = cell.rpartition("@")
    batch, side = (int(number) for number in (numbers if "x" in numbers else f"{numbers}x224").split("x"))
    device = torch.device(options.device)
    torch.manual_seed(0)
    network = module_of(name).train().to(device).to(memory_format=torch.channels_last)
    sets = [
        natural_images((batch, 3, side, side), device, seed).contiguous(memory_format=torch.channels_last) for seed in range(options.draws)
    ]
    names = [name for name, _ in network.named_parameters()]
    with Undrawn(), shared.alone(), products(tf32=False):
        right = [gradients(network, network, images, seed) for seed, images in enumerate(sets)]
        with torch.autocast(device.type, torch.bfloat16), casts_of(device):
            usual = [errors(gradients(network, network, images, seed), right[seed]) for seed, images in enumerate(sets)]
            print(f"{cell}, {options.device}: eager's error {math.exp(fmean(fmean(one) for one in usual)):.2e}", flush=True)
            for way in options.ways.split(","):
                call = way_of(way, network, sets[0])
                found = [errors(gradients(network, call, images, seed), right[seed]) for seed, images in enumerate(sets)]
                over = [fmean(a[i] - b[i] for a, b in zip(found, usual, strict=True)) for i in range(len(names))]
                worst = sorted(zip(over, names, strict=True), reverse=True)[:SHOWN]
                said = ", ".join(f"{name} {math.exp(ratio):.2f}" for ratio, name in worst)
                print(f"| {way} | {math.exp(fmean(over)):.3f} | {said} |", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="LIBRARY:NAME@BATCH or LIBRARY:NAME@BATCHxSIDE, of torchvision, timm or zoo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ways", default=",".join(WAYS), help="default %(default)s")
    parser.add_argument("--draws", type=int, default=3, help="sets of images; default %(default)s")
    options = parser.parse_args(arguments)
    if unknown := set(options.ways.split(",")) - set(WAYS):
        parser.error(f"--ways {', '.join(sorted(unknown))}: there are {', '.join(WAYS)}")
    for cell in options.cells:
        measure(cell, options)


if __name__ == "__main__":
    main()
