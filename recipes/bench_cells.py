"""Measure many networks and batches on GPUs whose minutes cost: compile the peers' kernels by all cores first, then measure one by one.

    python recipes/bench_cells.py --cells cells.txt --save gpu0.json --seconds 580 --compilers 15

`cells.txt` has a line a cell, "ResNet50 32", in the order in which they are wanted. Kernels of `fast` come from `compile_ahead.py`, whose
folder TRITON_CACHE_DIR names. With several GPUs start a process for each, with its own CUDA_VISIBLE_DEVICES and --save and the same
--claims, all but one with --compilers 0: each takes the next cell that nobody has taken who still runs. What is measured is in the record
at once; started again, cells that are there with all of these peers are not measured again. `zoo bench --from-json` puts records
together. No cell is begun when less time is left than the longest took, half a minute at least. The status is 0 where all cells are
measured, 3 where some are left.

Seconds until ready are left out of the record, for what was compiled before does not count in them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from typing import Any
from unittest import mock

import torch
from filelock import FileLock, Timeout

from zoo import CATALOGUE
from zoo.bench.inference import DeviceLost, Plan, run
from zoo.bench.peers import WAYS, select
from zoo.bench.record import Record
from zoo.bench.subject import subject, tf32

Cell = tuple[str, int]
LEAST = 30.0
"""Seconds that a cell takes, about: none is begun when fewer are left, or fewer than the longest has taken."""


def cells_of(path: Path) -> list[Cell]:
    """Read networks and batches, a line each.

    Raises:
        ValueError: a line is none such; the message names it.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] not in CATALOGUE or not words[1].isdecimal() or int(words[1]) < 1:
            raise ValueError(f'{path}, line {number}: {line.strip()!r} is no network of `zoo list` and a batch, as "ResNet50 32"')
        found.append((words[0], int(words[1])))
    return found


class Claims:
    """Which cells are measured, and which are just now: files in a folder that processes share. What a process held is free when it ends.

    Args:
        folder: is made where it is missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    @contextmanager
    def taken(self, cell: Cell) -> Iterator[bool]:
        """Hold a cell inside of the block; False where it is measured, or somebody holds it."""
        lock = FileLock(self.folder / f"{cell[0]}-{cell[1]}.lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield not self.is_done(cell)
        finally:
            lock.release()

    def is_done(self, cell: Cell) -> bool:
        """Tell whether a cell is measured."""
        return self._file(cell).is_file()

    def done(self, cell: Cell, is_so: bool = True) -> None:
        """Say that a cell is measured, or is to be again."""
        if is_so:
            self._file(cell).touch()
        else:
            self._file(cell).unlink(missing_ok=True)

    def _file(self, cell: Cell) -> Path:
        return self.folder / f"{cell[0]}-{cell[1]}.done"


def compile_peer(cell: Cell) -> None:
    """Let torch.compile make what the stock recipe runs at a cell, into its cache."""
    name, batch = cell
    with torch.no_grad(), tf32(False):
        WAYS["recipe"].build(subject(CATALOGUE[name], batch, torch.device("cuda"), torch.bfloat16), "none")()
    torch.cuda.synchronize()


def _work(cells: Any, compiling: Callable[[Cell], None]) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            cell = cells.get(timeout=0.2)
        except Empty:
            return
        try:
            compiling(cell)
        except Exception as error:  # the measurement will say so again
            print(f"{cell[0]} at {cell[1]}: {type(error).__name__}: {str(error).splitlines()[:1]}", file=sys.stderr, flush=True)
        torch._dynamo.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def compile_peers(cells: Sequence[Cell], processes: int, seconds: float, compiling: Callable[[Cell], None] = compile_peer) -> None:
    """Compile by several processes for so many seconds; which launch parameters are best, found beside others, is forgotten again."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    for cell in cells:
        queue.put(cell)
    workers = [context.Process(target=_work, args=(queue, compiling), daemon=True) for _ in range(processes)]
    until = time.monotonic() + seconds
    with mock.patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS="1", OMP_NUM_THREADS="1"):
        for worker in workers:
            worker.start()
    for worker in workers:
        worker.join(max(0.1, until - time.monotonic()))
        worker.kill()
        worker.join()
    queue.cancel_join_thread()
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    for found in Path(cache_dir()).rglob("*.best_config"):
        found.unlink(missing_ok=True)


def measure(cells: Sequence[Cell], plan: Plan, save: Path, claims: Claims, until: float) -> None:
    """Measure cells into a record until a time (of `time.monotonic`)."""
    longest = LEAST
    for cell in cells:
        start = time.monotonic()
        if start > until - longest:
            return
        with claims.taken(cell) as mine:
            if mine:
                _measure(cell, plan, save)
                claims.done(cell)
        longest = max(longest, time.monotonic() - start)


def _measure(cell: Cell, plan: Plan, save: Path) -> None:
    name, batch = cell
    start = time.monotonic()
    record = run(Plan([CATALOGUE[name]], [batch], plan.ways, plan.device, plan.dtype, plan.rounds, plan.tune), path=save, resume=True)
    found = record.cell(name, batch)
    assert found is not None
    for row in found["ways"].values():
        if "build_s" in row:
            row["build_s"] = None
    record.write(save)
    failed = "".join(f"; {way}: {row['failed']}" for way, row in found["ways"].items() if "failed" in row)
    ratio = f"{found['ratio']:.2f} times the fastest peer" if "ratio" in found else "no ratio"
    print(f"{name} at {batch}: {ratio}, {time.monotonic() - start:.0f} s{failed}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Compile, then measure; exits with 3 where cells are left."""
    parser = argparse.ArgumentParser(
        description="Compile the peers of many cells by all cores, then measure one cell after the other, in bfloat16. The peers that are "
        "measured unless others are named need a GPU."
    )
    parser.add_argument("--cells", required=True, type=Path, help="a file with a line a cell: a network and a batch")
    parser.add_argument(
        "--save", required=True, type=Path, help="the record, JSON; cells that it has with all peers are not measured again"
    )
    parser.add_argument("--claims", type=Path, help="a folder that processes share; default: beside the record, its own")
    parser.add_argument("--peers", default="eager-cl,recipe", help="with commas; default %(default)s")
    parser.add_argument(
        "--seconds",
        type=float,
        default=580,
        help="for everything; no cell is begun when fewer are left than the longest took; default %(default)s",
    )
    parser.add_argument(
        "--compilers", type=int, default=os.cpu_count() or 1, help="processes that compile; 0 for none; default %(default)s"
    )
    parser.add_argument("--compile-seconds", type=float, default=120, help="that compiling takes at most; default %(default)s")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    try:
        cells = cells_of(options.cells)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        ways = select(options.peers.split(","), device, torch.bfloat16)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not options.save.absolute().parent.is_dir():
        parser.error(f"there is no folder {options.save.parent}; make it first")
    plan = Plan([], [], ways, device, torch.bfloat16)
    try:
        record = Record.resumed(options.save, plan.about()) if options.save.is_file() else None
    except ValueError as error:
        parser.error(str(error))
    claims = Claims(options.claims or options.save.with_name(f"{options.save.name}.claims"))
    if record is not None:
        for cell in cells:
            there = record.cell(*cell)
            whole = there is not None and {way.name for way in ways} <= set(there["ways"])
            if whole or options.claims is None:  # else another process may have measured it, into another record
                claims.done(cell, whole)
    missing = [cell for cell in cells if not claims.is_done(cell)]
    try:
        if missing and options.compilers and device.type == "cuda":
            compile_peers(missing, options.compilers, options.compile_seconds)
        measure(missing, plan, options.save, claims, until)
    except DeviceLost as error:
        sys.exit(f"{error}; start again to go on")
    except KeyboardInterrupt:
        print("interrupted; start again to go on", file=sys.stderr)
        sys.exit(130)
    left = [cell for cell in cells if not claims.is_done(cell)]
    names = ", ".join(f"{name} at {batch}" for name, batch in left[:3]) + (f" and {len(left) - 3} more" if len(left) > 3 else "")
    print(f"{len(cells) - len(left)} of {len(cells)} cells are measured" + (f"; left: {names}" if left else ""))
    if left:
        sys.exit(3)


if __name__ == "__main__":
    main()
