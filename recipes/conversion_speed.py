"""Time conversions of VGG19 against a copy of the file: `python recipes/conversion_speed.py [FOLDER]`.

Writes VGG19 with random weights as .pth, .npz and .h5, and converts each to safetensors without a proof. The files are in the page cache.
Prints the best wall time of five, that of `shutil.copyfile`, the least processor time, and the most memory that the process and its readers
took. It needs 4 GB of disk; docs/notes/converting.md quotes what it printed.
"""

from __future__ import annotations

import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from convert.formats import safetensors
from zoo import VGG19
from zoo.conversion.convert import convert

ENDINGS = ("pth", "npz", "h5")
REPEATS = 5


def processor() -> float:
    """Tell the processor time of this process and of the readers that it has ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def best(call: Callable[[], object], gone: Path) -> tuple[float, float]:
    """Time several calls, each without the file that the last one wrote: the least wall time, and the least processor time."""
    wall: list[float] = []
    busy: list[float] = []
    for _ in range(REPEATS):
        gone.unlink(missing_ok=True)
        begun, before = time.perf_counter(), processor()
        call()
        wall.append(time.perf_counter() - begun)
        busy.append(processor() - before)
    return min(wall), min(busy)


def main() -> None:
    """Print a line a format."""
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as name:
        folder = Path(name)
        torch.manual_seed(0)
        safetensors.save(VGG19().state_dict(), folder / "vgg19.safetensors")
        for ending in ENDINGS:
            said: dict[str, Any] = {"to_convention": "correlation"} if ending == "npz" else {}
            convert(folder / "vgg19.safetensors", folder / f"vgg19.{ending}", VGG19, prove=False, **said)
        made, copied = folder / "made.safetensors", folder / "copied"
        for ending in ENDINGS:
            source = folder / f"vgg19.{ending}"
            copy, _ = best(lambda source=source: shutil.copyfile(source, copied), copied)
            mine, busy = best(lambda source=source: convert(source, made, VGG19, prove=False), made)
            peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)) >> 10
            times = f"{mine:.2f} s, {mine / copy:.1f} times the copy ({copy:.2f} s)"
            print(f".{ending}: {times}; {busy:.2f} s of processors; at most {peak} MB a process")


if __name__ == "__main__":
    main()
