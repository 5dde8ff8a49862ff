"""Measure `fast` on torchvision's, timm's or the zoo's networks beside eager and `torch.compile` with and without a graph, folded or not.

    python recipes/bench_modules.py --save modules.json torchvision:vit_b_16@16 timm:vit_base_patch16_224@1 zoo:ConvNeXtV2_Tiny@64
    python recipes/bench_modules.py --peers graph,recipe torchvision:swin_t@64 zoo:DINOv2_S_14@32x518   # some peers, another side

In one process, in turns, medians, weights random, on the GPU if there is one, else on the CPU, where nothing can be captured. A way whose
answer is further from float32's than twice plain eager's, and ours than 1.1 times, gets no figure; in float32 1e-4 is allowed. BatchNorms
stay where they are: there are none in transformers to fold. PyTorch's compiler takes up to a minute a network.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weights.whole import write_whole
from zoo.bench.cell import measured
from zoo.bench.clock import clock
from zoo.bench.inference import Plan, compete
from zoo.bench.peers import WAYS, Call, Way, graphed
from zoo.bench.subject import IMAGES, SETTLING, Subject, settle
from zoo.bench.tables import over
from zoo.kernels.comparing.sample_images import natural_images


def _graph(s: Subject, tune: str) -> Call:
    return graphed(WAYS["compile"].build(s, tune))


GRAPH = Way("graph", "compile+graph", "`torch.compile`, its calls recorded in one CUDA graph; nothing is copied", _graph, devices=("cuda",))


def module_of(name: str) -> nn.Module:
    """Build a network by its library and name, as "timm:vit_base_patch16_224", with random weights, none of them zero.

    Raises:
        ValueError: there is no such library or network; the message says so.
    """
    library, _, own = name.partition(":")
    try:
        if library == "torchvision":
            import torchvision

            module = torchvision.models.get_model(own, weights=None)
        elif library == "timm":
            import timm

            module = timm.create_model(own)
        elif library == "zoo":
            import zoo

            module = zoo.network(own)
        else:
            raise ValueError("write torchvision:NAME, timm:NAME or zoo:NAME")
    except (ImportError, KeyError, RuntimeError, ValueError) as error:
        raise ValueError(f"{name} can't be built: {error}") from error
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():  # heads of zeros answer zero, which nothing can be compared with
        if parameter.dim() > 1 and not parameter.is_meta and not bool(parameter.detach().any()):
            parameter.data.normal_(0, 0.02, generator=generator)
    return module.eval()


def measure(name: str, batch: int, plan: Plan, side: int = 224) -> dict[str, Any]:
    """Measure one network at one batch; a cell as `zoo.bench.inference.measure_cell` returns it, with `model` as it was asked for."""
    torch.manual_seed(0)

    def act(cell: dict[str, Any]) -> None:
        module = module_of(name).to(plan.device)
        settle(module, natural_images((SETTLING, 3, side, side), plan.device, seed=IMAGES + 1))
        module.cpu()
        s = Subject(name, batch, side, plan.device, plan.dtype, module, module, name.partition(":")[0])
        compete(cell, plan, s, clock(plan.device))

    return measured(plan, name, side, batch, act)


def row(cell: dict[str, Any], ways: Sequence[Way]) -> str:
    """Return a line of the table: milliseconds of every way, ours over the fastest peer, bold where we are no slower, and the errors."""
    found = [cell["ways"].get(way.name, {}) for way in ways]
    times = [f"{one['us'] / 1000:.2f}" if "us" in one else "-" for one in found]
    ratio = over(cell)
    errors = [f"{error:.1e}" if error is not None else "-" for error in (cell["ways"]["fast"].get("error"), cell.get("plain_error"))]
    return f"| {cell['model']} | {cell['batch']} | {' | '.join(times)} | {ratio} | {errors[0]} ({errors[1]}) |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is asked for, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="LIBRARY:NAME@BATCH or LIBRARY:NAME@BATCHxSIDE, as torchvision:swin_t@16")
    parser.add_argument("--save", type=Path, help="write the figures to this JSON; cells that are there, measured alike, stay")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--side", type=int, default=224, help="of the images, in pixels; default %(default)s")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each way; default %(default)s")
    parser.add_argument("--peers", help="some of eager-cl, compile, graph, recipe, with commas; default all that the device has")
    parser.add_argument("--tune", choices=("none", "quick", "full"), default="quick")
    options = parser.parse_args(arguments)
    asked: list[tuple[str, int, int]] = []
    for cell in options.cells:
        name, _, numbers = cell.rpartition("@")
        batch, _, side = numbers.partition("x")
        side = side or str(options.side)
        if ":" not in name or not (batch.isdecimal() and side.isdecimal()) or int(batch) < 1:
            parser.error(f"{cell}: write LIBRARY:NAME@BATCH or LIBRARY:NAME@BATCHxSIDE, as torchvision:swin_t@16")
        asked.append((name, int(batch), int(side)))
    if options.save is not None and not options.save.absolute().parent.is_dir():
        parser.error(f"there is no folder {options.save.parent}; make it first")
    if options.side < 1 or any(side < 1 for _, _, side in asked):
        parser.error("images have a side of 1 pixel or more")
    for name in dict.fromkeys(name for name, _, _ in asked):
        try:
            with torch.device("meta"):
                module_of(name)
        except ValueError as error:
            parser.error(str(error))
    there = torch.cuda.is_available()
    peers = {"eager-cl": WAYS["eager-cl"], "compile": WAYS["compile"], **({"graph": GRAPH, "recipe": WAYS["recipe"]} if there else {})}
    if unknown := set((options.peers or "").split(",")) - {"", *peers}:
        parser.error(f"--peers {', '.join(sorted(unknown))}: there are {', '.join(peers)}")
    ways = [WAYS["fast"], *(way for name, way in peers.items() if not options.peers or name in options.peers.split(","))]
    plan = Plan([], [], ways, torch.device("cuda" if there else "cpu"), getattr(torch, options.dtype), max(1, options.rounds), options.tune)
    about, cells = plan.about(), list[dict[str, Any]]()
    if options.save is not None and options.save.is_file():
        try:
            kept = json.loads(options.save.read_text("utf-8"))
            known = [cell for cell in kept["cells"] if (cell["model"], cell["batch"], cell["size"]) not in asked]
        except (OSError, ValueError, KeyError, TypeError):
            parser.error(f"{options.save} is no record of this script; take another file")
        if any(kept.get(key) != about[key] for key in ("device", "dtype", "versions")):
            parser.error(f"{options.save} was measured on another device, with other versions or in another dtype; take another file")
        cells = known
    print(f"| network | batch | {' | '.join(way.label.format(dtype=options.dtype) for way in ways)} | over the fastest | error (eager's) |")
    print("|---|--:|" + "--:|" * (len(ways) + 2))
    for name, batch, side in asked:
        cell = measure(name, batch, plan, side)
        cells.append(cell)
        print(row(cell, ways), flush=True)
        for way, found in cell["ways"].items():
            if "failed" in found:
                print(f"{name} at {batch}, {way}: {found['failed']}", file=sys.stderr)
        if options.save is not None:
            write_whole(options.save, json.dumps({**about, "cells": cells}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted; what is measured is in the record")
