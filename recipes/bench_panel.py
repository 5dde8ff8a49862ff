"""Measure `fast` beside the strongest stock recipe on networks of any library, and how long each takes until it answers.

    python recipes/bench_panel.py torchvision:swin_t@64 zoo:ConvNeXtV2_Tiny@64 zoo:DINOv2_S_14@32x518    # on a GPU
    python recipes/bench_panel.py --device cpu --dtype float32 torchvision:shufflenet_v2_x0_5@1x64       # without one: beside eager alone
    python recipes/bench_panel.py --at-once 5 torchvision:mnasnet1_0@128 timm:ghostnet_100@128 …         # prepared at once, measured alone

The recipe is BatchNorm folded by `torch.fx`, where that can trace the network, `torch.compile`, channels_last, one CUDA graph. In one
process, in turns, medians, weights random and BatchNorm's statistics settled. `ready` is seconds until the first answer, with nothing
compiled before but what a network measured before it left.

With `--at-once` several processes prepare networks on one card, for compiling takes most of the time. Each kernel's timing waits until
no other process times one; while the whole network is timed the other processes stand still. `ready` is longer then, and says little.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.fx.proxy import TraceError

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from bench_modules import GRAPH, module_of  # noqa: E402

from zoo.bench.clock import clock  # noqa: E402
from zoo.bench.peers import WAYS  # noqa: E402
from zoo.bench.subject import IMAGES, SETTLING, Subject, settle  # noqa: E402
from zoo.kernels import fast, why  # noqa: E402
from zoo.kernels.comparing.sample_images import natural_images  # noqa: E402


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


class Turns:
    """One card that several processes share.

    Args:
        lock: of whoever times.
        others: the processes' ids, 0 where one has not begun or has ended.
        place: which of them this one is.
    """

    def __init__(self, lock: Any, others: Any, place: int) -> None:
        self._lock, self._others, self._place = lock, others, place
        others[place] = os.getpid()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let the other processes stand still while the block runs."""
        with self._lock:
            told = [pid for place, pid in enumerate(self._others) if pid and place != self._place]
            for pid in told:
                os.kill(pid, signal.SIGSTOP)
            try:
                yield
            finally:
                for pid in told:
                    os.kill(pid, signal.SIGCONT)

    def share(self) -> None:
        """Have what `fast` times wait for its turn."""
        from zoo.kernels.measuring import timing
        from zoo.kernels.plans import contest, rival

        kernel, whole, plan = timing._apart, rival.alternate, contest.event_time_us

        def one(*args: Any) -> float:
            with self._lock:
                return kernel(*args)

        def rivals(*args: Any) -> Any:
            with self.alone():
                return whole(*args)

        def once(*args: Any, **kwargs: Any) -> float:
            with self.alone():
                return plan(*args, **kwargs)

        timing._apart, rival.alternate, contest.event_time_us = one, rivals, once

    def end(self) -> None:
        """Be stopped no more."""
        with self._lock:
            self._others[self._place] = 0


def work(cells: Any, rows: Any, lock: Any, others: Any, place: int, options: argparse.Namespace) -> None:
    """Measure the cells that a queue holds, in one of several processes."""
    turns = Turns(lock, others, place)
    turns.share()
    while (cell := cells.get()) is not None:
        try:
            rows.put(measure(cell, torch.device(options.device), getattr(torch, options.dtype), options.rounds, turns))
        except Exception as error:  # the other networks are measured all the same
            rows.put(f"{cell}: {type(error).__name__}: {error}")
        gc.collect()
    turns.end()
    rows.put(None)


def at_once(options: argparse.Namespace) -> Iterator[str]:
    """Yield the rows as they come, from several processes."""
    context = multiprocessing.get_context("spawn")
    cells, rows, others = context.Queue(), context.Queue(), context.Array("i", options.at_once)
    for cell in [*options.cells, *[None] * options.at_once]:
        cells.put(cell)
    lock = context.Lock()
    processes = [context.Process(target=work, args=(cells, rows, lock, others, place, options)) for place in range(options.at_once)]
    for process in processes:
        process.start()
    left = len(processes)
    while left:
        if (row := rows.get()) is None:
            left -= 1
        else:
            yield row
    for process in processes:
        process.join()


def measure(cell: str, device: torch.device, dtype: torch.dtype, rounds: int, turns: Turns | None = None) -> str:
    """Measure one LIBRARY:NAME@BATCH[xSIDE] and return its row; what `fast` says of its plan goes to stderr."""
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
        with turns.alone() if turns is not None else nullcontext():
            times = {way: median(found) / 1000 for way, found in clock(device).throughput(calls, rounds).items()}
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
    parser.add_argument("--at-once", type=int, default=1, help="processes that prepare networks; default %(default)s")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    print(f"{torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, {options.dtype}")
    print("| network | batch, side | eager ms | recipe ms | fast ms | over | ready s: recipe | fast | error (eager's) |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    if options.at_once > 1:
        for row in at_once(options):
            print(row, flush=True)
        return
    for cell in options.cells:
        print(measure(cell, device, getattr(torch, options.dtype), options.rounds), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
