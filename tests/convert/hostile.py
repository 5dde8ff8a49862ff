"""Damaged and hostile weight files, made from good ones, and a process that reads them all.

    python tests/convert/hostile.py --count 10000 [--format keras]

A reader may accept a mutated file or refuse it by a ConvertError. Anything else is a fault: another exception, a crash, more than
`SECONDS` for one file, or more memory than twice the file and `SPARE_BYTES`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

SECONDS = 20
SPARE_BYTES = 200 * 2**20
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
HERE = Path(__file__).parent


def seeds(format: str, folder: Path) -> list[Path]:
    """Write the good files of a format, as its tests do."""
    place = HERE / "formats" / f"seeds_{format}.py"
    spec = importlib.util.spec_from_file_location(place.stem, place)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[place.stem] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module.seeds(folder)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Damage a file in one to four places: cut, flip, overwrite a number, move, repeat, insert, or blank."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        if not changed:
            break
        # headers are where the harm is: half of the damage goes into the first or the last 512 bytes
        near = draw.random()
        place = draw.randrange(len(changed))
        if near < 0.35:
            place = draw.randrange(min(512, len(changed)))
        elif near < 0.5:
            place = len(changed) - 1 - draw.randrange(min(512, len(changed)))
        what = draw.randrange(8)
        length = draw.choice((1, 2, 4, 8, 16, 64, 256))
        if what == 0:
            del changed[place:]
        elif what == 1:
            changed[place] ^= 1 << draw.randrange(8)
        elif what == 2:
            for index in range(place, min(place + length, len(changed))):
                changed[index] = draw.randrange(256)
        elif what == 3:
            number = struct.pack(draw.choice("<>") + "Q", draw.choice(EXTREMES))
            width = draw.choice((1, 2, 4, 8))
            part = number[:width] if draw.random() < 0.5 else number[-width:]
            changed[place : place + width] = part[: len(changed) - place]
        elif what == 4:
            other = draw.randrange(len(changed))
            changed[place : place + length] = changed[other : other + length]
        elif what == 5:
            changed[place:place] = changed[place : place + length] * draw.choice((1, 2, 50))
        elif what == 6:
            del changed[place : place + length]
        else:
            changed[place : place + length] = bytes(min(length, len(changed) - place))
    return bytes(changed)


def mutations(files: list[Path], count: int, folder: Path, seed: int) -> Iterator[Path]:
    """Write `count` damaged copies, one after the other, each with its companions beside it."""
    import shutil

    draw = random.Random(seed)
    for number in range(count):
        original = files[number % len(files)]
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        copy = folder / original.name
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            for companion in original.parent.iterdir():
                if companion.is_file() and (companion == original or companion.stem.split(".")[0] == original.stem.split(".")[0]):
                    shutil.copyfile(companion, folder / companion.name)
        inside = [path for path in (copy.rglob("*") if copy.is_dir() else folder.iterdir()) if path.is_file()]
        victim = copy if copy.is_file() and draw.random() < 0.8 else draw.choice(sorted(inside))
        victim.write_bytes(mutate(victim.read_bytes(), draw))
        yield copy


def read_everything(path: Path, format: str) -> str:
    """Read a file and all its tensors: "read", or the class of the error that refused it."""
    from convert import formats
    from weights.errors import ConvertError

    try:
        with formats.read(path, format) as source:
            for stored in source.tensors.values():
                stored.as_correlation("convolution").array()
    except ConvertError as error:
        return type(error).__name__
    return "read"


def child(format: str, count: int, seed: int) -> None:
    """Read `count` mutations and report a line of JSON each time something is wrong, and one in the end."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place:
        good, bad = Path(place) / "good", Path(place) / "bad"
        good.mkdir()
        bad.mkdir()
        files = seeds(format, good)
        for file in files:
            if (outcome := read_everything(file, format)) != "read":
                print(json.dumps({"fault": f"the good file {file.name} is refused: {outcome}"}), flush=True)
        for number, file in enumerate(mutations(files, count, bad, seed)):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            begun = time.monotonic()
            print(json.dumps({"at": number, "file": file.name}), flush=True)
            fault = ""
            signal.alarm(SECONDS)
            try:
                outcomes[read_everything(file, format)] += 1
            except BaseException as error:  # whatever it is, it is what we look for
                fault = f"{type(error).__name__}: {str(error)[:200]}"
            signal.alarm(0)
            size = sum(f.stat().st_size for f in bad.rglob("*") if f.is_file())
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
            if grown > 2 * size + SPARE_BYTES:
                fault = f"{grown / 2**20:.0f} MB of memory for {size} bytes"
            if fault:
                print(json.dumps({"fault": fault, "number": number, "file": file.name, "seconds": time.monotonic() - begun}), flush=True)
    print(json.dumps({"outcomes": outcomes}), flush=True)


def run(format: str, count: int, seed: int = 0) -> tuple[dict[str, int], list[str]]:
    """Read `count` mutations of a format in a process of its own: outcomes by name, and the faults."""
    command = [sys.executable, __file__, "--child", "--format", format, "--count", str(count), "--seed", str(seed)]
    root = str(HERE.parents[1])
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root}, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    faults = [f"mutation {line.get('number')} of {line.get('file')}: {line['fault']}" for line in lines if "fault" in line]
    outcomes = next((line["outcomes"] for line in lines if "outcomes" in line), {})
    if done.returncode or not outcomes:
        last = next((line for line in reversed(lines) if "at" in line), {"at": "none"})
        faults.append(f"the process died with {done.returncode} at mutation {last['at']} of {last.get('file')}: {done.stderr[-500:]}")
    return outcomes, faults


def main() -> int:
    """Fuzz the formats and print a table."""
    from convert.formats import formats

    parser = argparse.ArgumentParser()
    parser.add_argument("--format", action="append")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", action="store_true")
    wanted = parser.parse_args()
    if wanted.child:
        child(wanted.format[0], wanted.count, wanted.seed)
        return 0
    failed = 0
    for format in wanted.format or formats():
        begun = time.monotonic()
        outcomes, faults = run(format, wanted.count, wanted.seed)
        took = time.monotonic() - begun
        print(f"{format:16} {sum(outcomes.values()):6} files {took:6.0f} s  {len(faults)} faults  {outcomes}", flush=True)
        for fault in faults[:20]:
            print("   ", fault, flush=True)
        failed += len(faults)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
