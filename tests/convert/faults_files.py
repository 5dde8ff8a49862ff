"""`make faults-files`: 20,000 damaged files a reader, in steps that an interrupted run takes up again, and a report of what happened.

    python tests/convert/faults_files.py [--count 20000] [--format keras] [--structured] [--seed 0] [--report docs/notes/faults.md]

`--structured` changes what files say and keeps their containers whole (`structured.py`), for the formats of `STRUCTURED` if none is named.

Every thousand files are read by a process of their own, with a seed of their own, and noted in `STATE`; delete that to begin anew.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from hostile import READERS, REFERENCES, run
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".faults-files.json"
STEP = 1000
STRUCTURED = ("chainer", "coreml", "graphdef", "mxnet", "ncnn", "openvino", "paddle", "pytorch", "tfjs", "tflite", "torch7", "torchscript")
WHOLE = ", containers whole"
"""Behind a reader's name in the state and the report: of mutants by `structured.py`."""
err = Console(stderr=True)


@dataclass(slots=True)
class Reader:
    """What one reader has been through: seeds that are done, and what became of their files."""

    seeds: list[int] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        return len(self.seeds) * STEP


def campaign(names: list[str], count: int, seed: int, workers: int, state: dict[str, Reader]) -> None:
    """Run what is missing, one reader a worker, and note each step when it is done."""

    def work(name: str) -> None:
        done = state.setdefault(name, Reader())
        for number in range(seed, seed + -(-count // STEP)):
            if stopping or number in done.seeds:
                continue
            begun = time.monotonic()
            outcomes, faults = run(name.removesuffix(WHOLE), STEP, number, structure=name.endswith(WHOLE))
            done.seeds.append(number)
            done.outcomes = dict(Counter(done.outcomes) + Counter(outcomes))
            done.faults += faults[:20]
            done.seconds += time.monotonic() - begun
            save(state)
            shown.update(bars[name], completed=done.count, faults=f"{len(done.faults)} faults")

    stopping: list[bool] = []
    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[faults]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=err) as shown, ThreadPoolExecutor(workers) as pool:
        bars = {name: shown.add_task(name, total=count, completed=state[name].count if name in state else 0, faults="") for name in names}
        try:
            list(pool.map(work, names))
        except KeyboardInterrupt:
            stopping.append(True)
            err.print("[yellow]stopping after the files at hand; the next run goes on from there[/yellow]")
            raise


def save(state: dict[str, Reader]) -> None:
    """Note what is done, by one rename."""
    temporary = STATE.with_suffix(".tmp")
    temporary.write_text(json.dumps({name: asdict(reader) for name, reader in list(state.items())}))
    temporary.replace(STATE)


def report(state: dict[str, Reader], place: Path) -> None:
    """Write the section of the files into the report, and leave the others' alone."""
    from faults_page import write_section

    lines = [
        "Good files of each format, and pickles with code in them, damaged in one to four places (`tests/convert/hostile.py`). Rows with "
        "*containers whole* are of mutants in which one to three values are changed, and lengths, checksums and offsets written anew "
        "(`tests/convert/structured.py`). For each: "
        "a typed refusal or tensors; no signal, no more than 20 s, no more memory than twice the file and 200 MB, nothing opened outside "
        "of the input, written, started or run; and the numbers of the usual library in what is accepted "
        f"({', '.join(sorted(REFERENCES))}: the others' libraries do not survive such files, or there is none). What a C library opens "
        "by itself is not seen (tensorstore).",
        "",
        f"`make faults-files`, {datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {platform.system()}, Python {platform.python_version()}"
        ", " + ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", "safetensors", "onnx")) + ".",
        "",
        "| reader | files | seeds | read | refused | by | faults | seconds |",
        "|---|---:|---|---:|---:|---|---:|---:|",
    ]
    for name, done in sorted(state.items()):
        good = done.outcomes.get("read", 0)
        bad = {kind: count for kind, count in sorted(done.outcomes.items(), key=lambda item: -item[1]) if kind != "read"}
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in bad.items())
        seeds = f"{min(done.seeds)}-{max(done.seeds)}" if done.seeds else ""
        lines.append(
            f"| {name} | {done.count:,} | {seeds} | {good:,} | {sum(bad.values()):,} | {kinds} | {len(done.faults)} | {done.seconds:.0f} |"
        )
    total = sum(done.count for done in state.values())
    lines += ["", f"{total:,} files, {sum(len(done.faults) for done in state.values())} faults."]
    lines += ["", *(f"- {name}: {fault}" for name, done in state.items() for fault in done.faults)]
    write_section(place, "Files", "\n".join(lines))


def main() -> int:
    """Run the campaign; exit code 1 if there was a fault."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from convert.formats import formats

    parser = argparse.ArgumentParser()
    parser.add_argument("--format", action="append", choices=sorted({*formats(), *READERS}))
    parser.add_argument("--structured", action="store_true")
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--report", type=Path)
    wanted = parser.parse_args()
    state = {name: Reader(**told) for name, told in json.loads(STATE.read_text()).items()} if STATE.exists() else {}
    names = wanted.format or (STRUCTURED if wanted.structured else sorted(formats()))
    names = [f"{name}{WHOLE if wanted.structured else ''}" for name in names]
    try:
        campaign(names, wanted.count, wanted.seed, wanted.workers, state)
    except KeyboardInterrupt:
        return 130
    finally:
        if wanted.report and state:
            report(state, wanted.report)
    faults = [f"{name}: {fault}" for name, done in state.items() for fault in done.faults]
    for fault in faults[:50]:
        err.print(fault, markup=False)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
