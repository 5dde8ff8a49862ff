"""Disks that fill up, and calls to the system that fail, at every place where something is written.

    python tests/disk/refusals.py [--only bundle] [--fault full] [--step 1]

A library that is loaded before others (`refusing.c`, built by `cc`) lets the n-th call on files below one folder fail: for each n, until
nothing fails any more. Then the error has to name the file, and of a full disk the need and the room; what was there before stays, or
what was to be written is there whole; and the same call, on a disk that works again, gives what it gives on one that always did.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
WRITE, SYNC, MOVE, MAKE = 1, 2, 4, 8
FAULTS = {
    "full": (WRITE | MAKE, errno.ENOSPC, True),
    "bad sector": (WRITE, errno.EIO, False),
    "sync": (SYNC, errno.EIO, False),
    "other disk": (MOVE, errno.EXDEV, False),
    "forbidden": (MOVE, errno.EACCES, False),
    "killed": (WRITE | SYNC | MOVE | MAKE, 0, False),
}
"""What fails, with which error, and whether all that follows fails too; "killed" ends the process there, as kill -9 does."""
WAYS = ("random", "two at once", "modes")
"""What is tried beside: kill -9 at random moments, two processes with one output, and masks for the modes of files."""
WRITTEN = (".safetensors", ".npz", ".pth", ".onnx", ".mat", ".h5", ".bson", ".jld2", ".msgpack", ".weights", ".pkl")
"""Formats that are written, by their endings."""
JOBS = (
    "lock", "bundle", "mirror", "embed .npy", "embed .safetensors", "embed .parquet",
    *(f"convert {ending}" for ending in WRITTEN), "finetune",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Something that writes.

    Attributes:
        act: writes into the folder; called again it goes on, or does nothing where all is there.
        result: of the folder, what has to be equal however it came about; fails where it isn't whole.
        old: puts there what `act` replaces.
        mode: of every file, where the user's mask doesn't matter.
    """

    act: Callable[[Path], object]
    result: Callable[[Path], object]
    old: Callable[[Path], object] = lambda folder: None
    mode: int | None = None


@dataclass
class Found:
    """What became of one job and kind of fault."""

    refused: int = 0
    passed: int = 0
    tried: int = 0
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


def digest(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def jobs(home: Path) -> dict[str, Job]:
    """Make every job, with small networks and pictures."""
    import numpy as np
    import torch
    from PIL import Image
    from small import Tiny, draw

    import weights
    from convert.formats import safetensors
    from weights import find
    from weights.bundle import bundle
    from weights.lock import Entry, Lock
    from weights.mirror import index, mirror
    from zoo import ResNet20, embed, finetune, trained
    from zoo.conversion.convert import convert
    from zoo.embedding import plan

    torch.set_num_threads(1)
    plan.PART_ROWS, plan.CHUNK = 4, 2
    photos = home / "photos"
    for number in range(10):
        (photos / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (40, 40, 3), np.uint8)
        Image.fromarray(pixels).save(photos / "ab"[number % 2] / f"{number}.png")
    (photos / "a" / "bad.png").write_bytes(b"no picture")
    pictures = draw(home / "pictures", {"cat": 6, "dog": 6})
    network = trained(ResNet20)
    row = find("ResNet20")
    source = home / "source.safetensors"
    safetensors.save(network.state_dict(), source, {})

    def embedding(name: str) -> Job:
        def act(folder: Path) -> None:
            with contextlib.suppress(FileExistsError):
                embed(network, photos, folder / name, batch_size=2, device="cpu", fast=False, workers=0, progress=False)

        def result(folder: Path) -> object:
            return {path.name: digest(path) for path in sorted(folder.glob(f"{name}*")) if path.is_file()}

        return Job(act, result)

    def converted(name: str) -> Job:
        def act(folder: Path) -> None:
            convert(source, folder / name, ResNet20, replace=True, prove=False, isolated=False)

        def old(folder: Path) -> None:
            (folder / name).write_bytes(b"old")

        def result(folder: Path) -> object:
            from convert import formats

            if (folder / name).read_bytes() == b"old":
                return "old"
            with formats.read(folder / name) as found:
                return sorted(tensor.load().tobytes() for tensor in found.tensors.values())

        return Job(act, result, old)

    def learn(folder: Path) -> None:
        run, how = folder / "run", {"epochs": 2, "batch_size": 4, "lr": 0.01, "device": "cpu", "workers": 0, "fast": False}
        begun = (run / "settings.json").exists()
        if begun:
            finetune(Tiny, out=run, resume=True, progress=False)
        else:
            torch.manual_seed(0)
            finetune(Tiny, pictures, run, from_scratch=True, val=pictures, progress=False, **how)  # pyright: ignore[reportArgumentType]

    def learnt(folder: Path) -> object:
        return digest(folder / "run" / "weights.safetensors"), (folder / "run" / "report.html").exists()

    def carry(folder: Path) -> None:
        bundle([row], folder / "zoo.tar")

    def mirrored(folder: Path) -> None:
        mirror(folder / "m", [row], progress=False)

    def served(folder: Path) -> object:
        known = index(folder / "m")
        assert all(digest(folder / "m" / one.name) == one.sha256 for one in known)
        return {one.name: one.sha256 for one in known}

    def lock(folder: Path) -> None:
        sha = "ab" * 32
        Lock({"Net:v1": Entry("Net:v1", "safetensors", ("https://example.org/w",), "MIT", sha, size_bytes=10)}, serial=2).write(
            folder / "weights.lock"
        )

    def older(folder: Path) -> None:
        Lock({}, serial=1).write(folder / "weights.lock")

    del weights
    return {
        "lock": Job(lock, lambda folder: Lock.read(folder / "weights.lock").serial, older),
        "bundle": Job(carry, lambda folder: digest(folder / "zoo.tar"), lambda folder: (folder / "zoo.tar").write_bytes(b"old")),
        "mirror": Job(mirrored, served, mode=0o644),
        "embed .npy": embedding("e.npy"),
        "embed .safetensors": embedding("e.safetensors"),
        "embed .parquet": embedding("e.parquet"),
        **{f"convert {name}": converted(f"n{name}") for name in WRITTEN},
        "finetune": Job(learn, learnt),
    }


class Disk:
    """The library that refuses."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.calls.restype = ctypes.c_long

    def arm(self, folder: Path, fault: str, nth: int) -> None:
        kind, number, lasting = FAULTS[fault]
        self._library.arm(os.fsencode(folder), kind, ctypes.c_long(nth), number, int(lasting))

    def disarm(self) -> int:
        """End it, and tell how many calls there were."""
        self._library.disarm()
        return int(self._library.calls())


def wrong(error: BaseException, fault: str, folder: Path) -> str:
    """Say what is wrong with an error; "" if nothing is."""
    from weights.errors import NoSpace, WeightsError

    said = str(error)
    if not isinstance(error, OSError | WeightsError):
        return f"{type(error).__name__} is none of ours: {said[:200]}"
    if str(folder) not in said:
        return f"it names no file: {type(error).__name__}: {said[:200]}"
    if fault == "full" and not (isinstance(error, NoSpace) and re.search(r"[\d,]+ bytes are free", said)):
        return f"a full disk is no NoSpace, or without need and room: {type(error).__name__}: {said[:250]}"
    return ""


def attempt(disk: Disk, job: Job, folder: Path, fault: str, nth: int, good: tuple[object, list[str]], result: Found) -> bool:
    """Let the n-th call fail; whether there was an n-th."""
    folder.mkdir()
    job.old(folder)
    before = outcome(job, folder)
    raised: BaseException | None = None
    problem = ""
    if fault == "killed":
        happened = in_child(lambda: (disk.arm(folder, fault, nth), job.act(folder))) == -signal.SIGKILL
    else:
        disk.arm(folder, fault, nth)
        try:
            job.act(folder)
        except BaseException as error:
            raised = error
        finally:
            happened = disk.disarm() >= nth
    if fault == "killed" and happened:
        result.refused += 1
        if (now := outcome(job, folder)) not in (before, good[0]) and not unfinished(now, good[0]):
            problem = f"what is there is neither the old nor the new: {now!r}"[:200]
    elif raised is None:
        result.passed += happened
        if outcome(job, folder) != good[0]:
            problem = "nothing was raised, and the result is another"
    else:
        result.refused += 1
        problem = wrong(raised, fault, folder) if happened else f"it failed by itself: {raised!r}"[:300]
        if not problem and (now := outcome(job, folder)) not in (before, good[0]) and not unfinished(now, good[0]):
            problem = "what is there is neither the old nor the new"
    if not problem:
        try:
            job.act(folder)
        except BaseException as error:
            problem = f"the next call fails: {error!r}"[:300]
        else:
            left = names(folder)
            if outcome(job, folder) != good[0]:
                problem = "the next call gives something else"
            elif left != good[1]:
                problem = f"{sorted(set(left) ^ set(good[1]))[:4]} is left over, or missing"
    if problem:
        result.faults.append(f"{fault}, call {nth}: {problem.replace(str(folder), '…')}")
    shutil.rmtree(folder, ignore_errors=True)
    return happened


def in_child(action: Callable[[], object]) -> int:
    """Do something in a process of its own; its exit code, or less than 0 for a signal."""
    child = os.fork()
    if not child:
        code = 1
        try:
            action()
            code = 0
        except Exception as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def two_at_once(job: Job, folder: Path, good: tuple[object, list[str]]) -> str:
    """Let two processes write the same output; what is wrong, "" if nothing is."""
    folder.mkdir()
    job.old(folder)
    children: list[int] = []
    for _ in range(2):
        if not (child := os.fork()):
            code = 9
            try:
                job.act(folder)
                code = 0
            except Exception as error:
                code = 1 if not wrong(error, "two", folder) or isinstance(error, ValueError) else 9
                if code == 9:
                    sys.stderr.write(f"{error!r}\n")
            finally:
                os._exit(code)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    problem = "" if codes in ([0, 0], [0, 1]) else f"they ended with {codes}"
    if not problem and outcome(job, folder) != good[0]:
        problem = "what is there is something else"
    if not problem and (left := names(folder)) != good[1]:
        problem = f"{sorted(set(left) ^ set(good[1]))[:4]} is left over, or missing"
    shutil.rmtree(folder)
    return problem


def killed_at_random(job: Job, folder: Path, good: tuple[object, list[str]], seed: str, seconds: float) -> str:
    """Kill a process that writes at a moment within so many seconds, and let another write again."""
    folder.mkdir()
    job.old(folder)
    before = outcome(job, folder)
    if not (child := os.fork()):
        with contextlib.suppress(BaseException):
            job.act(folder)
        os._exit(0)
    time.sleep(random.Random(seed).uniform(0, seconds))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    problem = ""
    if (now := outcome(job, folder)) not in (before, good[0]) and not unfinished(now, good[0]):
        problem = f"what is there is neither the old nor the new: {now!r}"[:200]
    job.act(folder)
    if not problem and outcome(job, folder) != good[0]:
        problem = "the next call gives something else"
    if not problem and (left := names(folder)) != good[1]:
        problem = f"{sorted(set(left) ^ set(good[1]))[:4]} is left over, or missing"
    shutil.rmtree(folder)
    return problem and f"seed {seed}: {problem}"


def modes(job: Job, folder: Path, mask: int) -> str:
    """Write with a mask for the modes of files, and say whose mode is another than it should be."""
    before = os.umask(mask)
    try:
        folder.mkdir()
        job.act(folder)
    finally:
        os.umask(before)
    usual = {path: (0o777 & ~mask if path.is_dir() else job.mode or 0o666 & ~mask) for path in folder.rglob("*")}
    odd = [f"{path.name} {path.stat().st_mode & 0o777:o}" for path, mode in usual.items() if path.stat().st_mode & 0o777 != mode]
    shutil.rmtree(folder)
    return f"with umask {mask:03o}: {', '.join(odd)}" if odd else ""


def unfinished(now: object, good: object) -> bool:
    """Whether what is there is a part of the right files, each of them whole."""
    return now is None or (isinstance(now, dict) and isinstance(good, dict) and all(good.get(name) == value for name, value in now.items()))


def outcome(job: Job, folder: Path) -> object:
    try:
        return job.result(folder)
    except FileNotFoundError:
        return None
    except Exception as error:
        return f"broken: {error!r}"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def campaign(only: list[str], step: int, faults: list[str]) -> dict[str, Found]:
    """Run jobs with every fault, or with every `step`-th call and the first."""
    disk, found = Disk(), {}
    with tempfile.TemporaryDirectory() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ |= {"ZOO_CACHE": f"{home}/cache", "ZOO_USER_REGISTRY": f"{home}/registry", "ZOO_OFFLINE": "1"}
        every = jobs(Path(home))
        if unknown := set(only) - set(every):
            raise SystemExit(f"there is no {', '.join(unknown)}: {', '.join(every)}")
        for name in only or every:
            work = Path(home) / "work"
            result, began = found.setdefault(name, Found()), time.monotonic()
            (usual := Path(home) / "usual").mkdir()
            every[name].old(usual)
            starts = time.monotonic()
            every[name].act(usual)
            usual_s = time.monotonic() - starts
            good = outcome(every[name], usual), names(usual)
            shutil.rmtree(usual)
            for fault in faults:
                if fault == "random":
                    again = [killed_at_random(every[name], work, good, f"{name}:{n}", usual_s) for n in range(max(1, 100 // step))]
                elif fault == "two at once":
                    again = [two_at_once(every[name], work, good) for _ in range(max(1, 10 // step))]
                elif fault == "modes":
                    again = [modes(every[name], work, mask) for mask in (0o000, 0o077)]
                else:
                    again = []
                result.tried += len(again)
                result.faults += [f"{fault}: {problem}" for problem in again if problem]
                if fault in WAYS:
                    continue
                nth = 1
                while attempt(disk, every[name], work, fault, nth, good, result):
                    nth += step if nth > 1 else max(1, step // 2)
            result.seconds = time.monotonic() - began
            sys.stderr.write(f"{name}: {result.refused} refused, {result.passed} passed over, {len(result.faults)} faults\n")
    return found


def built(folder: Path) -> Path:
    """Build the library.

    Raises:
        FileNotFoundError: there is no `cc`.
    """
    library = folder / "refusing.so"
    command = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("refusing.c")), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


def run(*arguments: str) -> dict[str, Any]:
    """Run the campaign in a process that has the library; what it found, by the job."""
    with tempfile.TemporaryDirectory() as place:
        paths = [ROOT, ROOT / "tests", ROOT / "tests/zoo/finetuning", ROOT / "tests/disk"]
        environment = {**os.environ, "LD_PRELOAD": str(built(Path(place))), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        environment |= {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--inside", *arguments]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"the campaign ended with {done.returncode}")
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inside", action="store_true", help="this process has the library")
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--fault", action="append", default=[], choices=[*FAULTS, *WAYS])
    parser.add_argument("--step", type=int, default=1)
    wanted = parser.parse_args()
    if wanted.inside:
        found = campaign(wanted.only, wanted.step, wanted.fault or [*FAULTS, *WAYS])
        json.dump({name: asdict(one) for name, one in found.items()}, sys.stdout)
        return 0
    found = run(*sys.argv[1:])
    for name, one in found.items():
        counts = f"{one['refused']} refused, {one['passed']} passed over, {one['tried']} tries beside"
        head = f"{name}: {counts}, {len(one['faults'])} faults, {one['seconds']:.0f} s"
        sys.stdout.write("\n  ".join([head, *one["faults"]]) + "\n")
    return int(any(one["faults"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
