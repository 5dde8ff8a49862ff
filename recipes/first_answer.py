"""Measure how long a network takes until it answers, with nothing cached: the stock recipe, and `fast` tuned before or behind the calls.

    python recipes/first_answer.py ResNet50@32 Swin_T@64          # the zoo's networks, batch
    python recipes/first_answer.py --ways recipe,quick ResNet50@1

Every way runs in a process of its own with empty caches of Triton, Inductor and the zoo. The clock starts behind the imports, when the
network and its images are on the GPU. `first` is the first answer; `ready` when calls have reached their speed: with "background" the
first call by the plan. `longest` is the longest call between the two, and `ms` what a call takes then. `quick again` is a second process
with the first one's caches. `shipped` is "quick" with the choices that the package brings for this GPU; the others go without.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("recipe", "none", "quick", "quick again", "background", "shipped")
CALLS = 20
"""Calls behind each other that make a figure of speed."""


def measured(way: str, name: str, batch: int) -> dict[str, Any]:
    """Measure one way in this process."""
    import torch

    import zoo
    from zoo.bench.peers import WAYS as PEERS
    from zoo.bench.subject import Subject
    from zoo.kernels.tuning import choices

    if way != "shipped":
        choices.SHIPPED = None
    device, dtype = torch.device("cuda"), torch.bfloat16
    torch.manual_seed(0)
    network = zoo.network(name).eval()
    side = int(network.input_size)
    subject = Subject(name, batch, side, device, dtype, network, network, "zoo")
    images = subject.input(dtype, channels_last=True)
    torch.cuda.synchronize()
    begun = time.monotonic()
    model: Any = None
    if way == "recipe":
        run: Callable[[], Any] = PEERS["recipe"].build(subject, "quick")
    else:
        tune: Any = "quick" if way == "shipped" else way.partition(" ")[0]
        model = zoo.fast(network, device, dtype, tune=tune, example=images, progress=False)
        run = partial(model, images)

    def timed() -> float:
        start = time.monotonic()
        with torch.no_grad():
            run()
        torch.cuda.synchronize()
        return time.monotonic() - start

    found: dict[str, Any] = {"longest": timed()}
    found["first"] = time.monotonic() - begun
    if way == "background":
        while not (said := zoo.why(model)).plans:
            if said.unplanned or said.unchanged:
                raise RuntimeError(str(said))
            found["longest"] = max(found["longest"], timed())
            time.sleep(0.02)
        run()
    found["ready"] = time.monotonic() - begun
    found["ms"] = 1e3 * median(timed() for _ in range(CALLS))
    if way != "recipe":
        found["said"] = str(zoo.why(model)).splitlines()[-1]
    return found


def started(way: str, name: str, batch: int, caches: str, profile: bool) -> dict[str, Any]:
    """Measure one way in a process of its own with caches of its own."""
    places = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "ZOO_CACHE": "zoo", "XDG_CACHE_HOME": "other"}
    env = os.environ | {variable: str(Path(caches) / folder) for variable, folder in places.items()}
    command = [sys.executable, __file__, "--one", way, f"{name}@{batch}", *(["--profile"] if profile else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=env | {"PYTHONPATH": f"{ROOT}:{env.get('PYTHONPATH', '')}"})
    if profile:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        said = [line for line in done.stderr.splitlines() if "rror:" in line]
        return {"failed": said[-1] if said else f"exit status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="+", help="NETWORK@BATCH, of the zoo")
    parser.add_argument("--ways", default=",".join(WAYS), help="default %(default)s")
    parser.add_argument("--profile", action="store_true", help="print what the functions of the first answer took, by Python's profiler")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cells = [(name, int(batch or 1)) for name, _, batch in (cell.partition("@") for cell in options.cells)]
    if options.one:
        profiler = cProfile.Profile() if options.profile else None
        found = measured(options.one, *cells[0]) if profiler is None else profiler.runcall(measured, options.one, *cells[0])
        if profiler is not None:
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(80)
        print(json.dumps(found))
        return
    print("| network | batch | way | first s | ready s | longest call s | ms |")
    print("|---|--:|---|--:|--:|--:|--:|")
    for name, batch in cells:
        with tempfile.TemporaryDirectory() as caches:
            for way in options.ways.split(","):
                own = "quick" if way == "quick again" else way
                found = started(way, name, batch, str(Path(caches) / own), options.profile)
                if "failed" in found:
                    print(f"| {name} | {batch} | {way} | {found['failed']} | | | |", flush=True)
                    continue
                row = [f"{found[key]:.{digits}f}" for key, digits in (("first", 1), ("ready", 1), ("longest", 2), ("ms", 2))]
                print(f"| {name} | {batch} | {way} | {' | '.join(row)} |", flush=True)
                if "said" in found:
                    print(f"{name}@{batch}, {way}: {found['said']}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
