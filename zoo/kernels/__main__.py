"""`python -m zoo.kernels`: every op against its reference, then its time against the device's floor and PyTorch's own."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

from zoo.kernels.comparing import op_checks as checking
from zoo.kernels.measuring.fresh_thread import elsewhere
from zoo.kernels.measuring.roofline import floor_us, limits
from zoo.kernels.measuring.timing import NotCapturable, event_time_us, graph_time_us

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUICK = 6
"""Configs of a large case that are tried unless all are asked for."""

PIPE_WIDTH = 200
DO_NOT_FIT = ("OutOfResources", "cudnnGraphNotSupportedError")
"""Errors, by name, of configs that a device has no room for."""


@dataclass
class Row:
    """One check, and where it was a large case that passed, its times in microseconds.

    Attributes:
        op: the op's name.
        case: the case's name.
        dtype: what it ran in.
        error: relative, against the reference in float32; None where nothing ran.
        tolerance: what was allowed.
        ok: whether it passed; a refusal of a dtype passes.
        said: what was wrong, or why it was refused.
        config: the fastest config.
        us: its time.
        floor: the time that no kernel beats.
        aten: the time of the op's `rival`, or of the reference, in the same dtype, channels_last.
        tried: configs that were timed.
    """

    op: str
    case: str
    dtype: str
    error: float | None
    tolerance: float
    ok: bool
    said: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    us: float | None = None
    floor: float | None = None
    aten: float | None = None
    tried: int = 0


def main(
    ops: Annotated[list[str] | None, typer.Argument(metavar="[OP]...", help="Ops by name; all if left out.")] = None,
    large: Annotated[bool, typer.Option(help="Time real shapes too, on a GPU.")] = True,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, bfloat16 or float16; all for checks, bfloat16 for times.")] = None,
    every: Annotated[bool, typer.Option("--all-configs", help="Check every config of every case and time all, not the first few.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Threads that compile configs before they are timed; 0 for one a core.")] = 0,
    only: Annotated[str, typer.Option("--case", help="Cases whose name has this in it.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write what was found to this file.")] = None,
) -> None:
    """Check every op against its float32 reference; on a GPU, time it too. Exits with 1 if a check fails."""
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        console.print("There is no CUDA device. Set TRITON_INTERPRET=1 to check the kernels in Triton's interpreter, without times.")
        raise typer.Exit(1)
    from zoo.kernels.ops import discover  # imports triton, which reads TRITON_INTERPRET once

    found = discover()
    for named, known, what in ((ops, found, "OP"), (dtype, DTYPES, "--dtype")):
        if unknown := [name for name in named or () if name not in known]:
            raise typer.BadParameter(f"there is no {', '.join(unknown)}; there are {', '.join(known)}", param_hint=what)
    if not any(only in case["name"] for name in ops or found for case in (*found[name].CASES, *found[name].LARGE_CASES)):
        raise typer.BadParameter(f"no case of {', '.join(ops or found)} has {only!r} in its name", param_hint="--case")
    if json_file and not json_file.absolute().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.absolute().parent}; make it first", param_hint="--json")
    threads = (jobs or os.cpu_count() or 1) if device.type == "cuda" else 1  # Triton's interpreter runs one kernel at a time
    rows: list[Row] = []
    with checking.full_precision():
        for name in ops or found:
            table = _table(f"{name}: checks", ("case", "dtype", "error", "tolerance", ""))
            for row in _checks(name, found[name], dtype or list(DTYPES), device, every, threads, only):
                rows.append(row)
                table.add_row(row.case, row.dtype, _number(row.error, "{:.1e}"), f"{row.tolerance:.0e}", _verdict(row))
            console.print(table)
            if large and device.type == "cuda":
                table = _table(f"{name}: times", ("case", "dtype", "error", "us", "floor", "of floor", "ATen", "faster", "config", ""))
                for row in _times(name, found[name], dtype or ["bfloat16"], device, every, threads, only):
                    rows.append(row)
                    table.add_row(*_timed_cells(row))
                console.print(table)
    failures = [row for row in rows if not row.ok]
    if not rows:
        console.print(f"cases with {only!r} in their names are timed, on a GPU, and not checked")
    if json_file:
        about = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "Triton's interpreter", "torch": torch.__version__}
        json_file.write_text(json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1))
    console.print(
        f"{len(rows)} checks, {len(failures)} failed" + "".join(f"\n  {f.op} {f.case} {f.dtype}: {_verdict(f)}" for f in failures)
    )
    if failures:
        raise typer.Exit(1)


def _table(title: str, columns: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "dtype", "config", "") else "right", overflow="fold")
    return table


def _number(value: float | None, pattern: str = "{:.1f}") -> str:
    return "" if value is None else pattern.format(value)


def _verdict(row: Row) -> str:
    if row.ok:
        return f"[dim]{row.said}[/dim]" if row.said else "[green]ok[/green]"
    return f"[red]{row.said or 'wrong'}[/red]"


def _timed_cells(row: Row) -> list[str]:
    share = "" if not row.us or row.floor is None else f"{row.floor / row.us:.0%}"
    ratio = "" if not row.us or row.aten is None else f"{row.aten / row.us:.2f}x"
    config = f"{row.tried}: {json.dumps(row.config)}" if row.us else ""
    error = _number(row.error, "{:.1e}")
    return [row.case, row.dtype, error, _number(row.us), _number(row.floor), share, _number(row.aten), ratio, config, _verdict(row)]


def _row(name: str, case: str, dtype: torch.dtype, outcome: checking.Outcome) -> Row:
    error = outcome.error if math.isfinite(outcome.error) else None
    said = outcome.fault or ("" if error is not None else "elements not written, or not finite")
    return Row(name, case, str(dtype).removeprefix("torch."), error, outcome.tolerance, outcome.ok, said)


def _refused(name: str, op: ModuleType, case: str, dtype: torch.dtype, why: str) -> Row:
    return Row(name, case, str(dtype).removeprefix("torch."), None, op.TOLERANCE[dtype], True, f"refused: {why}")


def _broken(op: ModuleType, dtype: torch.dtype, error: Exception) -> checking.Outcome:
    return checking.Outcome(float("inf"), op.TOLERANCE[dtype], f"{type(error).__name__}: {str(error).strip()[:300]}")


def _checks(name: str, op: ModuleType, dtypes: list[str], device: torch.device, every: bool, threads: int, only: str) -> list[Row]:
    """Check every case in threads: on a GPU nearly all the time goes into compiling."""

    def check(task: tuple[checking.Arguments, torch.dtype]) -> Row:
        case, dtype = task
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            args = checking.draw(op, case, dtype, device)
            if refused := op.supports(**args):
                return _refused(name, op, case["name"], dtype, refused)
            return _row(name, case["name"], dtype, _check_configs(op, args, dtype, every))

    tasks = [(case, DTYPES[dtype]) for case in op.CASES if only in case["name"] for dtype in dtypes]
    if threads == 1 or not tasks:
        return [check(task) for task in tasks]
    first = check(tasks[0])  # alone, as it starts what the threads then share
    with ThreadPoolExecutor(threads) as pool:
        return [first, *pool.map(check, tasks[1:])]


def _check_configs(op: ModuleType, args: checking.Arguments, dtype: torch.dtype, every: bool) -> checking.Outcome:
    """Return the worst outcome of a case's configs, each dense and into a slice."""
    worst = None
    try:
        references = checking.expected(op, args)
        configs = op.configs(**checking.packed(op, args))
        for index, config in enumerate(configs if every else configs[:1]):
            for sliced in (False, True):
                try:
                    outcome = checking.check(op, args, dtype, config=config, sliced=sliced, references=references)
                except Exception as error:
                    if index and type(error).__name__ in DO_NOT_FIT:  # tuning leaves such a config out; the first guess must run everywhere
                        continue
                    raise
                if worst is None or not outcome.ok or outcome.error > worst.error:
                    worst = outcome
                if not outcome.ok:
                    return outcome
    except Exception as error:  # a table of all ops is worth more than the first traceback
        return _broken(op, dtype, error)
    return worst or checking.Outcome(0.0, op.TOLERANCE[dtype])


@dataclass
class _Task:
    case: str
    dtype: torch.dtype
    args: checking.Arguments
    packed: checking.Arguments
    configs: list[checking.Config]
    raised: dict[int, Exception]


def _times(
    name: str, op: ModuleType, dtypes: list[str], device: torch.device, every: bool, threads: int, only: str
) -> Iterator[Row]:  # fmt: skip
    """Time the large cases, as many at a time as memory holds, so that compiling keeps all threads busy."""
    waiting: list[_Task] = []
    room = torch.cuda.get_device_properties(device).total_memory / 4
    taken = 0.0
    for case, dtype in ((case, DTYPES[dtype]) for case in op.LARGE_CASES if only in case["name"] for dtype in dtypes):
        args = checking.draw(op, case, dtype, device)
        if refused := op.supports(**args):
            yield _refused(name, op, case["name"], dtype, refused)
            continue
        moved = 3 * op.cost(**args)[1]
        if waiting and taken + moved > room:
            yield from _time_all(name, op, waiting, device, threads)
            waiting, taken = [], 0.0
        try:
            arguments = checking.packed(op, args)
            configs = op.configs(**arguments)[: None if every else QUICK]
            waiting.append(_Task(case["name"], dtype, args, arguments, configs, {}))
            taken += moved
        except Exception as error:  # as above
            yield _row(name, case["name"], dtype, _broken(op, dtype, error))
    yield from _time_all(name, op, waiting, device, threads)


def _time_all(name: str, op: ModuleType, tasks: list[_Task], device: torch.device, threads: int) -> Iterator[Row]:
    everything = [(task, index) for task in tasks for index in range(len(task.configs))]
    launches = [functools.partial(op.launch, **task.packed, config=task.configs[index]) for task, index in everything]
    for at, error in checking.compile_all(launches, device, threads).items():
        task, index = everything[at]
        task.raised[index] = error
    for task in tasks:
        try:
            yield _time(name, op, task, device)
        except Exception as error:  # as above
            yield _row(name, task.case, task.dtype, _broken(op, task.dtype, error))
    torch.cuda.empty_cache()


def _time(name: str, op: ModuleType, task: _Task, device: torch.device) -> Row:
    """Check and time a large case: the best guess first, for nothing is timed on a red check; then the fastest config again."""
    with elsewhere() as do:  # or PyTorch's own way would be timed by the guess that is right enough here
        references = do(lambda: checking.expected(op, task.args))
    outcome = checking.check(op, task.args, task.dtype, config=task.configs[0], references=references)
    if not outcome.ok:
        return _row(name, task.case, task.dtype, outcome)
    calls = {i: functools.partial(op.launch, **task.packed, config=config) for i, config in enumerate(task.configs) if i not in task.raised}
    with torch.inference_mode():
        times = {index: graph_time_us(call, target_ms=2) for index, call in calls.items()}
        best = min(times, key=lambda index: times[index])
        outcome = checking.check(op, task.args, task.dtype, config=task.configs[best], references=references)
        row = _row(name, task.case, task.dtype, outcome)
        row.config, row.tried = task.configs[best], len(times)
        if not outcome.ok:
            return row
        flop, moved = op.cost(**task.args)
        row.us = graph_time_us(calls[best], target_ms=10)
        row.floor = floor_us(flop, moved, task.dtype, limits(device), tf32=bool(task.args.get("tf32")))
        row.aten = _reference_time(op, task.args)
    if task.raised:
        row.said = f"{len(task.raised)} configs don't run: " + ", ".join(sorted({type(error).__name__ for error in task.raised.values()}))
    return row


def _reference_time(op: ModuleType, args: checking.Arguments) -> float | None:
    """Time PyTorch's own way in the same dtype, maps and weights in channels_last; None where it can't be timed."""
    rival = getattr(op, "rival", op.reference)
    ordered = {
        key: value.contiguous(memory_format=torch.channels_last) if isinstance(value, Tensor) and value.dim() == 4 else value
        for key, value in args.items()
    }
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=False, allow_tf32=bool(args.get("tf32"))):
        try:
            return graph_time_us(lambda: rival(**ordered), target_ms=4)
        except NotCapturable:
            return event_time_us(lambda: rival(**ordered), target_ms=20)
        except RuntimeError as error:
            warnings.warn(f"{op.__name__}: the reference can't be timed: {error}", stacklevel=2)
            return None


if __name__ == "__main__":
    typer.run(main)
