"""`make faults-long`: what is repeated for minutes and not in every test run, and what needs mounts, one after the other, with a report.

    python tests/long_runs.py [--docs docs/notes/faults.md] [--only kills] [--anew]

A run that is done is noted in .faults/long, so that the same command goes on where it was interrupted; several may share the work by
`--only`. The notes go when every run is there, or with `--anew`.

Each run is a test of the suite, with the number of rounds that is asked of it; what it counts stands in the report. Where a machine lets
nobody mount, the report says so, and the exit code is 3: nothing was proven of mounts there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

from disk.refusals import JOBS
from faults_page import write_section

ROOT = Path(__file__).parents[1]
NOTED = ROOT / ".faults/long"
MOUNTING = ("unshare", "--user", "--map-root-user", "--mount")
"""Gives a process mounts of its own, which are gone when it ends."""
NOT_RUN = 3


@dataclass(frozen=True, slots=True)
class Run:
    """Tests that belong together: what they do, in words, and which they are."""

    name: str
    words: str
    tests: tuple[str, ...]
    mounts: bool = False


@dataclass(slots=True)
class Result:
    """What came of a run."""

    run: Run
    passed: int = 0
    failed: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    seconds: float = 0.0
    why_not: str = ""


PROCESS = "tests/weights/test_faults_process.py::"
RUNS = (
    Run("pulls", "50 processes of 8 threads pull one checkpoint into a cold cache, with file locks and with locks that do nothing",
        (f"{PROCESS}test_many_processes_on_one_cold_cache",)),
    Run("living", "50 processes pull 20 checkpoints, 10 of them are killed meanwhile",
        (f"{PROCESS}test_the_living_are_served_while_others_are_killed",)),
    Run("kills", "100 kills (SIGKILL, SIGTERM, SIGINT) at random moments of a pull",
        (f"{PROCESS}test_processes_killed_at_random_moments_leave_what_the_next_one_resumes",)),
    Run("bits", "200 flipped bits of a cached file", (f"{PROCESS}test_flipped_bits_are_found_and_mended",)),
    Run("races", "500 loads while the file is cut, swapped and rewritten",
        (f"{PROCESS}test_a_blob_that_is_cut_swapped_or_rewritten_while_it_loads_is_right_or_refused",)),
    Run("gc", "1,000 loads while `gc` collects, sparing what was used within a minute, and sparing nothing",
        ("tests/weights/test_collecting.py::test_collecting_while_others_load_costs_them_a_download_at_most",)),
    Run("trips", "1,000 networks of random bits through every format that is written, both conventions, and back",
        ("tests/zoo/conversion/test_roundtrips.py::test_random_bits_come_home_from_every_format",)),
    *(Run(f"disk {job}", f"{job}: a full disk, errors, and kill -9 at every call that writes; 100 kills at random moments",
          (f"tests/disk/test_refusals.py::test_every_call_that_writes_may_fail[{job}]",)) for job in JOBS),
    Run("mounts", "tmpfs that is full at five places, without inodes, mounted read-only, or follows no links",
        ("tests/weights/test_mounts.py",), mounts=True),
)  # fmt: skip


def carried_out(run: Run) -> Result:
    """Run the tests in a process of their own."""
    result = Result(run)
    if run.mounts and (why := _why_no_mounts()):
        result.why_not = why
        return result
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        mark = "mounts" if run.mounts else "long"
        command = [*(MOUNTING if run.mounts else ()), sys.executable, "-m", "pytest", "-q", "-m", mark, *run.tests]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]  # the later one has no place for what a test counts
        here = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True, check=False)
        if not report.exists():
            result.failed = (f"no test ran: {(done.stderr or done.stdout)[-300:]}",)
            return result
        read(report, result)
    return result


def read(report: Path, result: Result) -> None:
    """Take in what pytest reports; a run without a test proves nothing, and is a failure."""
    failed, counted = [], []
    for case in ElementTree.parse(report).iter("testcase"):
        result.seconds += float(case.get("time", 0))
        counted += [f"{one.get('name')} {one.get('value')}" for one in case.iter("property")]
        if bad := [child for child in case if child.tag in ("failure", "error", "skipped")]:
            failed.append(f"{case.get('name')}: {(bad[0].get('message') or '')[:200]}")
        else:
            result.passed += 1
    result.failed, result.counted = tuple(failed) or (() if result.passed else ("no test ran",)), tuple(counted)


def note(result: Result) -> None:
    """Keep what came of a run until all are done, by one rename."""
    place = NOTED / f"{result.run.name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: value for name, value in asdict(result).items() if name != "run"}
    (unfinished := place.with_suffix(".tmp")).write_text(json.dumps(facts))
    unfinished.replace(place)


def noted(run: Run) -> Result | None:
    """Return what came of a run earlier; None where it is not known."""
    place = NOTED / f"{run.name}.json"
    if not place.is_file():
        return None
    facts = json.loads(place.read_text())
    return Result(run, **(facts | {"failed": tuple(facts["failed"]), "counted": tuple(facts["counted"])}))


def _why_no_mounts() -> str:
    try:
        tried = subprocess.run([*MOUNTING, "mount", "-t", "tmpfs", "tmpfs", "/tmp"], capture_output=True, text=True, check=False)
    except OSError as error:
        return f"unshare: {error.strerror}"
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["no word why"])[0]


def text_of(results: Sequence[Result]) -> str:
    """Write the section."""
    system = f"{platform.machine()}, {platform.system()} {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    lines = [
        f"`make faults-long`, {datetime.now(UTC):%Y-%m-%d}, {system}, {os.cpu_count()} cores.",
        "",
        "| what | tests | result | counted | seconds |",
        "|---|---:|---|---|---:|",
    ]
    for one in results:
        result = f"{len(one.failed)} failed" if one.failed else "right"
        if one.why_not:
            result = f"not run: this machine mounts nothing ({one.why_not})"
        lines.append(f"| {one.run.words} | {one.passed + len(one.failed)} | {result} | {'; '.join(one.counted)} | {one.seconds:.0f} |")
    return "\n".join([*lines, *(f"\n- {failure}" for one in results for failure in one.failed)]) + "\n"


def main() -> int:
    """Run what was asked for: 1 if anything failed, 3 if something could not be run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--only", action="append", choices=[run.name for run in RUNS])
    parser.add_argument("--anew", action="store_true", help="forget what earlier calls did")
    wanted = parser.parse_args()
    if wanted.anew:
        shutil.rmtree(NOTED, ignore_errors=True)
    chosen = [run for run in RUNS if not wanted.only or run.name in wanted.only]
    for run in chosen:
        if (before := noted(run)) is None:
            sys.stderr.write(f"{run.words} …\n")
            note(carried_out(run))
        else:
            sys.stderr.write(f"{run.words}: done before, {'failed' if before.failed else 'right'}\n")
    there = [found for run in RUNS if (found := noted(run)) is not None]
    if wanted.docs:
        write_section(wanted.docs, "Long runs", text_of(there))
    results = [one for one in there if one.run in chosen]
    sys.stdout.write(text_of(results))
    if len(there) == len(RUNS):
        shutil.rmtree(NOTED, ignore_errors=True)
    return 1 if any(one.failed for one in results) else NOT_RUN if any(one.why_not for one in results) else 0


if __name__ == "__main__":
    sys.exit(main())
