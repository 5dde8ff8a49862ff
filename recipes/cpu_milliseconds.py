"""Measure what one image costs each network on this machine's CPU, for `zoo list` and `zoo info`: zoo/data/cpu.json.

python recipes/cpu_milliseconds.py                  # every network, about ten minutes; let nothing else run
python recipes/cpu_milliseconds.py VGG19 ResNet50   # these anew, the others as they stand, which must be of the same machine

The networks are plain PyTorch in float32, as `trained` returns them. Their weights are drawn, with statistics that keep every map's values
where trained ones have them, for numbers next to zero would be slow. A figure is the median of calls that are waited for.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch

from zoo.bench.clock import clock, median_and_spread
from zoo.bench.machine import facts, today
from zoo.bench.subject import subject
from zoo.catalogue import CATALOGUE, model_class
from zoo.commands.speeds import TABLE, Speeds, read
from zoo.networks.model import Model

ROUNDS = 15
CPU = torch.device("cpu")


def milliseconds(cls: type[Model], rounds: int = ROUNDS) -> float:
    """Return the median time of a call with one image."""
    s = subject(cls, 1, CPU, torch.float32)
    images = s.input(torch.float32)
    with torch.inference_mode():
        found = clock(CPU).latency({"plain": lambda: s.own(images)}, rounds)["plain"]
    return round(median_and_spread(found)[0] / 1000, 1)


def merged(path: Path, machine: str, found: dict[str, float]) -> Speeds:
    """Put figures into a table, in the catalogue's order; those of another machine go."""
    there = read(path) if path.is_file() else None
    kept = there.plain if there and there.machine == machine else {}
    plain = kept | found
    return Speeds(machine, today(), {name: plain[name] for name in CATALOGUE if name in plain})


def main() -> None:
    """Measure, and write the table after each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(CATALOGUE))
    parser.add_argument("--out", type=Path, default=TABLE)
    options = parser.parse_args()
    about = facts(CPU)
    machine = f"{about['threads']} threads of {about['device']}, torch {about['versions']['torch'].partition('+')[0]}"
    for name in options.networks:
        found = milliseconds(cls := model_class(name))
        table = merged(options.out, machine, {cls.__name__: found})
        options.out.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
        print(f"{cls.__name__:24} {found:8.1f} ms", flush=True)


if __name__ == "__main__":
    main()
