"""Damaged and hostile weight files, made from good ones, and a process that reads them all; `faults_files` runs it at length.

A reader may accept a mutated file or refuse it by a ConvertError. Anything else is a fault: another exception, a crash, more than
`SECONDS` for one file, more memory than twice the file and `SPARE_BYTES`, a file opened outside of the input, anything written, started
or run, and other numbers than the usual library reads in the same bytes.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from structured import structured

SECONDS = 20
SPARE_BYTES = 200 * 2**20
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**40, 2**62, 2**63 - 1, 2**64 - 1)
READERS = {"torchscript": "pytorch"}
"""What seeds are of that are no format of their own: the reader of their files."""
Change = Callable[[bytes, random.Random], bytes]
HERE = Path(__file__).parent
KEPT = HERE.parents[1] / ".faults"
"""Where files go that did harm."""
MEMORY = Path("/dev/shm")
"""Where files cost no disk; most of the time would go into deleting them."""


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


def family(path: Path) -> str:
    """Tell what files that belong together have in common: "net" of net.xml and net.bin, net-symbol.json, net_00001.weights.h5."""
    return re.split(r"[.-]|_(?=\d{5})", path.name)[0]


def mutations(files: list[Path], count: int, folder: Path, seed: int, change: Change = mutate) -> Iterator[Path]:
    """Write `count` damaged copies, one after the other, each with its companions beside it."""
    for number in range(count):
        draw = random.Random(f"{seed}/{number}")  # each of its own: torch's older files differ from run to run
        original = files[number % len(files)]
        for old in folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        copy = folder / original.name
        if original.is_dir():
            shutil.copytree(original, copy)
        else:
            for companion in original.parent.iterdir():
                if companion.is_file() and (companion == original or family(companion) == family(original)):
                    shutil.copyfile(companion, folder / companion.name)
        inside = [path for path in (copy.rglob("*") if copy.is_dir() else folder.iterdir()) if path.is_file()]
        victim = copy if copy.is_file() and draw.random() < 0.8 else draw.choice(sorted(inside))
        victim.write_bytes(change(victim.read_bytes(), draw))
        yield copy


def traps(format: str, folder: Path, canary: Path) -> list[Path]:
    """Write files that would make the folder `canary` if anything of them were run; those formats that hold pickles have some."""
    import pickle

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(canary),)

    if format == "theano":
        (folder / "trap.pkl").write_bytes(pickle.dumps({"values": [Code()]}, protocol=2))
        return [folder / "trap.pkl"]
    if format == "npz":
        import numpy as np

        np.save(folder / "trap.npy", np.array([Code()], dtype=object), allow_pickle=True)
        np.savez(folder / "trap.npz", a=np.array([Code()], dtype=object))
        return [folder / "trap.npy", folder / "trap.npz"]
    if format == "pytorch":
        import torch

        for name, zipped in (("trap.pth", True), ("trap.th", False)):
            torch.save({"state_dict": {"a": torch.ones(2)}, "hook": Code()}, folder / name, _use_new_zipfile_serialization=zipped)
        return [folder / "trap.pth", folder / "trap.th"]
    return []


class Watch:
    """Sees, by Python's audit events, what is opened and started while a file is read."""

    HARM = (
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "subprocess.Popen",
        "socket.",
        "os.mkdir",
        "os.remove",
        "os.rename",
        "os.symlink",
    )

    def __init__(self, inside: Path) -> None:
        self.inside, self.looking, self.seen = str(inside.resolve()), False, ""
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.looking or self.seen:
            return
        if event == "open":
            place = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes) else ""
            code = place.endswith((".py", ".pyc", ".so", ".pyd")) or "__pycache__" in place
            writes = isinstance(arguments[1], str) and arguments[1] not in ("r", "rb")
            outside = bool(place) and not os.path.realpath(place).startswith(self.inside)
            if writes or (outside and not code):
                self.seen = f"opened {place} ({arguments[1]})"
        elif event.startswith(self.HARM):
            self.seen = f"{event} {str(arguments)[:100]}"


def read_everything(path: Path, format: str) -> str:
    """Read a file and all its tensors: "read", or the class of the error that refused it.

    Raises:
        ValueError: it was read, and the usual library reads other numbers in it.
    """
    from convert import formats
    from weights.errors import ConvertError

    try:
        with formats.read(path, READERS.get(format, format)) as source:
            for stored in source.tensors.values():
                stored.as_correlation("convolution").array()
            if format in REFERENCES:
                _compare(source, path, format)
    except ConvertError as error:
        return type(error).__name__
    return "read"


def _compare(source: Any, path: Path, format: str) -> None:

    try:
        expected = REFERENCES[format](path)
    except Exception:  # the usual library refuses it, in whatever way: there is nothing to compare with
        return
    for stored in source.tensors.values():
        there = expected.get(stored.origin)
        if there is not None:
            here = stored.load()
            if (tuple(here.shape), here.astype(here.dtype.newbyteorder("<")).tobytes()) != there:
                raise ValueError(f"{stored.origin} is {here.dtype} {here.shape} and other numbers for the usual library")


def _of_torch(path: Path) -> dict[str, Any]:
    import torch

    from convert.formats.pytorch import NESTED

    with path.open("rb") as file:
        zipped = file.read(4) == b"PK\3\4"
    # torch's unmapped reader hands out memory that it never filled, for some damaged archives
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an archive looks like TorchScript's, which it then refuses
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    for _ in range(2):
        found = next((found[key] for key in NESTED if isinstance(found, dict) and isinstance(found.get(key), dict) and found[key]), found)
    tensors = {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}
    return {n: (tuple(t.shape), t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()}


def _of_numpy(path: Path) -> dict[str, Any]:
    import numpy as np

    found = np.load(path, allow_pickle=False)
    arrays = {"0": found} if isinstance(found, np.ndarray) else {name: found[name] for name in found.files}
    return {n: (a.shape, a.astype(a.dtype.newbyteorder("<")).tobytes()) for n, a in arrays.items()}


def _of_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import deserialize

    return {name: (tuple(told["shape"]), bytes(told["data"])) for name, told in deserialize(path.read_bytes())}


def _of_onnx(path: Path) -> dict[str, Any]:
    import onnx

    model = onnx.load_model(path, load_external_data=False)
    plain = [one for one in model.graph.initializer if not one.external_data]
    arrays = {one.name: onnx.numpy_helper.to_array(one) for one in plain}
    return {name: (array.shape, array.tobytes()) for name, array in arrays.items()}


REFERENCES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "pytorch": _of_torch, "npz": _of_numpy, "safetensors": _of_safetensors, "onnx": _of_onnx
}  # fmt: skip
"""The usual libraries, where they survive damaged files: h5py and SciPy's loadmat hang or die of them."""


def peak_bytes() -> int:
    """Tell the most memory of this process since `forget_peak`; what getrusage tells begins at that of the process that started it."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


def forget_peak() -> None:
    """Begin anew, so that a large file hides no other; where the kernel can't, the most memory ever is what is told."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def child(format: str, count: int, seed: int, *, structure: bool) -> None:
    """Read `count` mutations and report a line of JSON each time something is wrong, and one in the end."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, late)
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as place:
        good, bad, canary = Path(place) / "good", Path(place) / "bad", Path(place) / "canary"
        good.mkdir()
        bad.mkdir()
        files = seeds(format, good)
        for file in files:
            if (outcome := read_everything(file, format)) != "read":
                print(json.dumps({"fault": f"the good file {file.name} is refused: {outcome}"}), flush=True)
        for file in (set_traps := traps(format, good, canary)):
            if (outcome := read_everything(file, format)) != "UnsafeFormat":
                print(json.dumps({"fault": f"the trap {file.name} is no UnsafeFormat but {outcome}"}), flush=True)
        watch = Watch(bad)
        gc.collect()
        gc.freeze()  # what the libraries brought along needn't be looked through for every file
        for number, file in enumerate(mutations([*files, *set_traps], count, bad, seed, structured if structure else mutate)):
            forget_peak()
            before = peak_bytes()
            begun = time.monotonic()
            print(json.dumps({"at": number, "file": file.name}), flush=True)
            fault = ""
            signal.alarm(SECONDS)
            watch.looking, watch.seen = True, ""
            try:
                outcomes[read_everything(file, format)] += 1
            except BaseException as error:  # whatever it is, it is what we look for
                fault = f"{type(error).__name__}: {str(error)[:200]}"
            watch.looking = False
            signal.alarm(0)
            size = sum(f.stat().st_size for f in bad.rglob("*") if f.is_file())
            grown = peak_bytes() - before
            if grown > 2 * size + SPARE_BYTES:
                fault = f"{grown / 2**20:.0f} MB of memory for {size} bytes"
            if watch.seen or canary.exists():
                fault = watch.seen or "it ran what the file says"
            if fault:
                kept = KEPT / f"{format}-{'structured-' if structure else ''}{seed}-{number}"
                shutil.copytree(bad, kept, dirs_exist_ok=True)
                print(
                    json.dumps(
                        {"fault": f"{fault}; kept in {kept.name}", "number": number, "file": file.name, "seconds": time.monotonic() - begun}
                    ),
                    flush=True,
                )
    print(json.dumps({"outcomes": outcomes}), flush=True)


def run(format: str, count: int, seed: int = 0, *, structure: bool = False) -> tuple[dict[str, int], list[str]]:
    """Read `count` mutations of a format in a process of its own: outcomes by name, and the faults."""
    command = [sys.executable, __file__, "--format", format, "--count", str(count), "--seed", str(seed)]
    command += ["--structured"] if structure else []
    root = str(HERE.parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((root, str(HERE)))}
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    faults = [f"mutation {line.get('number')} of {line.get('file')}, seed {seed}: {line['fault']}" for line in lines if "fault" in line]
    outcomes = next((line["outcomes"] for line in lines if "outcomes" in line), {})
    if done.returncode or not outcomes:
        last = next((line for line in reversed(lines) if "at" in line), {"at": "none"})
        faults.append(f"the process died with {done.returncode} at mutation {last['at']} of {last.get('file')}: {done.stderr[-500:]}")
    return outcomes, faults


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--format", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--structured", action="store_true")
    wanted = parser.parse_args()
    child(wanted.format, wanted.count, wanted.seed, structure=wanted.structured)
