"""Profile a network on a GPU: which kernels a captured step, or a call, spends its time in, and how long nothing runs.

    python recipes/profile_gpu.py --model ResNet50 --batch-size 32 --what train --out profile

Kernels are counted by who wrote them: the zoo's by file of `zoo/kernels/ops`, cuDNN's and cuBLAS's together, PyTorch's optimisers, its
other kernels, copies. Kernels that begin before others end count in full, so that shares may add up to more than the whole.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zoo import CATALOGUE
from zoo.bench.learner import learner_of
from zoo.bench.machine import facts, today
from zoo.bench.peers import OURS, TRAINING, WAYS
from zoo.bench.subject import subject
from zoo.kernels import ops
from zoo.kernels.measuring.timing import alternate

CALLS, WARMUPS, SAMPLES = 5, 6, 15
"""Calls that are profiled, made before, and timed without the profiler, which makes kernels no slower but gaps longer."""
LIBRARIES = re.compile(r"cudnn|cublas|cutlass|xmma|nvjet|gemm|gemv|sm\d\d_|convolve|wgrad|dgrad|fprop|splitK", re.IGNORECASE)
OPTIMISERS = re.compile(r"Fused(Sgd|Adam)")


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel that ran, in microseconds.

    Attributes:
        name: as CUDA knows it.
        start: when it began.
        end: when it was done.
    """

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Share:
    """What some kernels take of a call.

    Attributes:
        name: theirs, or of who wrote them.
        us: the time of all.
        launches: how many.
    """

    name: str
    us: float
    launches: float


def kind_of(name: str, own: dict[str, str]) -> str:
    """Return who wrote a kernel.

    Args:
        name: of the kernel.
        own: the zoo's kernels, see `own_kernels`.
    """
    if name in own:
        return f"zoo: {own[name]}"
    if name.startswith(("Memcpy", "Memset")):
        return "copies, fills"
    if OPTIMISERS.search(name):
        return "PyTorch: optimiser"
    if "at::native" not in name and LIBRARIES.search(name):
        return "cuDNN, cuBLAS"
    return "PyTorch: others"


def own_kernels() -> dict[str, str]:
    """Return the files of `zoo/kernels/ops` by the names of the kernels in them; several share some names."""
    found: dict[str, set[str]] = defaultdict(set)
    for file in sorted(Path(ops.__path__[0]).glob("*.py")):
        module = importlib.import_module(f"{ops.__name__}.{file.stem}")
        for value in vars(module).values():
            written = getattr(value, "fn", None)  # of what Triton compiles, or interprets
            if inspect.isfunction(written) and written.__module__ == module.__name__:
                found[written.__name__].add(file.stem.lstrip("_"))
    return {name: " or ".join(sorted(files)) for name, files in found.items()}


def shares(spans: Sequence[Span], calls: int, label: Callable[[str], str]) -> tuple[list[Share], float]:
    """Return what kernels of one label take of a call, the largest first, and the microseconds in which nothing runs.

    Args:
        spans: of all kernels that were profiled.
        calls: how many calls these are of.
        label: of a kernel, by its name.

    Raises:
        ValueError: no kernel ran.
    """
    if not spans:
        raise ValueError("no kernel ran: was this captured on a GPU?")
    took: dict[str, list[float]] = defaultdict(list)
    idle, end = 0.0, min(span.start for span in spans)
    for span in sorted(spans, key=lambda span: span.start):
        took[label(span.name)].append(span.end - span.start)
        idle += max(0.0, span.start - end)
        end = max(end, span.end)
    found = [Share(name, sum(times) / calls, len(times) / calls) for name, times in took.items()]
    return sorted(found, key=lambda share: -share.us), idle / calls


def table(found: Sequence[Share], idle: float, us: float, ready_s: float) -> str:
    """Return the shares as Markdown, over the time of a call that was measured without the profiler, and after how long it was ready."""
    lines = ["| kernels | ms | launches | of the time |", "|---|--:|--:|--:|"]
    lines += [f"| {s.name} | {s.us / 1000:.2f} | {s.launches:.0f} | {s.us / us:.0%} |" for s in found]
    return "\n".join(
        [
            *lines,
            f"| nothing | {idle / 1000:.2f} | | {idle / us:.0%} |",
            f"| a call | {us / 1000:.2f} | | |",
            "",
            f"ready after {ready_s:.0f} s",
        ]
    )


def profiled(call: Callable[[], object]) -> list[Span]:
    """Return the kernels of `CALLS` calls."""
    kernels = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kernels, acc_events=True) as found:  # else it warns that a later cycle would clear these
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    there = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return [Span(event.name, event.time_range.start, event.time_range.end) for event in there]


def main() -> int:
    """Read the command line, profile, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="ResNet50", choices=sorted(CATALOGUE), metavar="NETWORK")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--what", choices=("train", "infer"), default="train")
    parser.add_argument("--out", type=Path, default=Path("profile"), help="OUT.json, with the kernels by name too")
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not torch.cuda.is_available():
        print("a profile of kernels needs a GPU that PyTorch sees", file=sys.stderr)
        return 1
    device = torch.device("cuda", torch.cuda.current_device())
    torch.backends.cudnn.benchmark = True
    s = subject(CATALOGUE[args.model], args.batch_size, device, torch.bfloat16)
    start = time.monotonic()
    with torch.inference_mode(args.what == "infer"):
        call = TRAINING[OURS].build(learner_of(s, s.own, s.dtype), "quick") if args.what == "train" else WAYS[OURS].build(s, "quick")
        for _ in range(WARMUPS):
            call()
        torch.cuda.synchronize()
        ready_s = time.monotonic() - start
        us = statistics.median(alternate({args.what: call}, SAMPLES)[args.what])
        spans = profiled(call)
    own = own_kernels()
    found, idle = shares(spans, CALLS, lambda name: kind_of(name, own))
    kernels, _ = shares(spans, CALLS, str)
    about = {**facts(device), "date": today(), "model": args.model, "batch": args.batch_size, "what": args.what, "us": us}
    about |= {"idle_us": idle, "ready_s": round(ready_s, 1)}
    listed = {"kinds": [asdict(share) for share in found], "kernels": [asdict(share) for share in kernels]}
    Path(f"{args.out}.json").write_text(json.dumps(about | listed, indent=1) + "\n")
    print(table(found, idle, us, ready_s))
    return 0


if __name__ == "__main__":
    sys.exit(main())
