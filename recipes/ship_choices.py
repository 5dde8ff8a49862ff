"""Measure which kernels are fastest for the zoo's networks on this GPU, for everybody who has such a one: the package brings the result.

    python recipes/ship_choices.py measure --seconds 500 --out h100.json ResNet50@1,8,32,64,256 VGG19@1,8,32    # on a GPU
    python recipes/ship_choices.py merge h100.json more.json                                                 # anywhere

`measure` tunes each network at each batch as `fast(network, tune="quick")` does, in bfloat16, with nothing known before, and writes what
it has after each. With --at-once several processes share a GPU, of which one measures at a time: `recipes/at_once.py`. With --claims FOLDER
runs on several GPUs share the list. Nothing is begun where --seconds are over, and what was not begun is said. `merge` adds files to
`zoo/data/kernel_choices`: a later file wins.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import zoo
from recipes.at_once import measured, processes
from zoo.kernels.tuning import choices
from zoo.kernels.tuning.choices import Choice, Choices

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "zoo" / "data" / "kernel_choices"


def measure(cell: str, options: argparse.Namespace) -> str:
    """Tune one NETWORK@BATCH, write all that was found so far, and return a row; or say why it was not begun."""
    name, _, number = cell.partition("@")
    if time.monotonic() > options.until:
        return f"{cell}: not begun, for time was over"
    try:
        (options.claims / cell).touch(exist_ok=False)
    except FileExistsError:
        return f"{cell}: another process has it"
    choices.SHIPPED = None
    device, batch = torch.device("cuda"), int(number)
    network = zoo.network(name).eval()
    side = int(network.input_size)
    images = torch.randn(batch, 3, side, side, device=device)
    start = time.monotonic()
    model = zoo.fast(network, device, tune="quick", example=images, progress=False)
    model(images)
    with FileLock(f"{options.out}.lock"):
        found = Choices(device).path.read_text()  # all that this device has found so far, in every process
        part = options.out.with_name(f".{options.out.name}.part")
        part.write_text(found)
        part.replace(options.out)
    del model, network
    torch.cuda.empty_cache()
    return f"| {name} | {batch} | {time.monotonic() - start:.1f} s | {len(json.loads(found)['choices'])} choices |"


def merge(files: Sequence[Path]) -> None:
    """Add what was measured to what the package brings."""
    SHIPPED.mkdir(exist_ok=True)
    for file in files:
        content: dict[str, Any] = json.loads(file.read_text())
        found = {key: Choice(**value) for key, value in content.pop("choices").items()}
        path = SHIPPED / f"{choices.slug(content['device'])}.json.gz"
        before = json.loads(gzip.decompress(path.read_bytes()))["choices"] if path.is_file() else {}
        old = {key: Choice(**dict(zip(choices.SHIPPED_FIELDS, value, strict=True))) for key, value in before.items()}
        path.write_bytes(choices.pack(content, old | found))
        print(f"{path.relative_to(ROOT)}: {len(old | found)} choices, {path.stat().st_size / 1e3:.0f} KB")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, or merge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    measuring = ways.add_parser("measure")
    measuring.add_argument("cells", nargs="+", help="NETWORK@BATCH,BATCH of the zoo")
    measuring.add_argument("--out", type=Path, required=True, help="file that is written")
    measuring.add_argument("--seconds", type=float, default=1e9, help="begin no network after so many seconds")
    measuring.add_argument("--claims", type=Path, help="folder in which processes say what they have begun; default a new one")
    processes(measuring)
    ways.add_parser("merge").add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    if options.way == "merge":
        merge(options.files)
        return
    cells = [f"{name}@{int(batch)}" for cell in options.cells for name, _, all_of in [cell.partition("@")] for batch in all_of.split(",")]
    options.until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as own:
        options.claims = options.claims or Path(own)
        options.claims.mkdir(parents=True, exist_ok=True)
        for row in measured(cells, measure, options):
            print(row, flush=True)


if __name__ == "__main__":
    main()
