"""docs/benchmarks.md: what was measured, for users, of the records `docs/benchmarks-*.json` and `training-scaling.json`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from making.tables import generated, page, table
from zoo.bench.peers import HALF, OURS, QUARTER
from zoo.bench.record import Record, trains

DOCS = Path(__file__).parents[1]
RECORDS = ("benchmarks-h200", "benchmarks-h100", "benchmarks-cpu", "benchmarks-train-h200", "benchmarks-train-h100")
"""The records, in the order of the page."""
PICTURE = "benchmarks-cuda-bfloat16-zoo.png"
"""Of the first record, as `zoo bench --docs` draws it."""
NOTHING = "-"
NARROW = {"openvino-shipped": "OpenVINO as shipped,", HALF: "`fast` bfloat16,", QUARTER: "`fast` int8,"}
"""Ways that compute in narrower types than the record's, and what their column is called."""
HEAD = """\
# Benchmarks

How fast is my network, on my device, at my batch? Find your device below, then your network. Every row was measured in one process. All
ways to run the network took turns there. A way without a correct result has no figure.

- **images/s**: median of `fast(network)`, or of `fast_step` where a network trains.
- **over rival**: our images/s divided by those of the fastest rival, which is any other way to run the network. Above 1, ours is faster.
- **rival's**: images/s of the fastest rival. `fold+compile+graph` is the strongest way to run stock PyTorch that we know. It folds
  BatchNorm, uses `torch.compile` and channels_last, and replays one CUDA graph. In other names `cl` is channels_last and `bf16` bfloat16.
- **ms**: time of one call that you wait for. Beside it stands the fastest rival's.
- **MiB**: memory that ours holds and uses at its peak. Beside it stands the memory of the rival that the column names.
- **ready after**: seconds from `fast(network)` to its first answer. It is missing where kernels had been compiled ahead. A later process
  takes less.
- **-**: not measured.

Your own machine will differ. Measure there:

```console
$ zoo bench --models ResNet50 --batches 1,32                # fast() beside eager, torch.compile and the rest
$ zoo bench --what train --models ResNet50 --batches 32     # a step of training
$ zoo bench --what load                                     # construct and load a network
```
"""
HOW = """\
## How it was measured

- Weights are random. BatchNorm's statistics come from made-up pictures. Rivals run torchvision's or timm's module with the same weights
  where there is one, else the zoo's.
- Our result counts if its error is at most 1.1 times that of plain eager PyTorch in the same dtype. A rival may have 2 times that error.
- `torch.backends.cudnn.benchmark` is on. Even so, rivals in the H200's rows at batch 1 and 32 ran as PyTorch ships, without cuDNN's
  search. So did some rivals in the H100's. [The notes](notes/benchmarks.md#at-1-and-32-images-peers-did-not-search) say which, and why.
- A time is the median of {samples} samples. Calls that you wait for are timed one by one, the others one behind another.
- A training step is forward, cross-entropy, backward and SGD with momentum.

`zoo bench --from-json docs/benchmarks-h200.json --docs page.md` writes everything that a record holds, with pictures: every way, its
spread, its error, its share of what the device allows. [The notes](notes/benchmarks.md) say which goals were missed and what holds them
back.

## Machines
"""


def write() -> dict[str, str]:
    """Return the text of the page by its name in docs/."""
    records = [Record.read(DOCS / f"{name}.json") for name in RECORDS]
    scaling, load = (json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8")) for name in ("training-scaling", "benchmarks-load"))
    parts = [part for record in records for part in _section(record, records[0])]
    text = page(
        generated("docs/benchmarks-*.json and docs/training-scaling.json"),
        HEAD,
        *parts,
        *_scaling(scaling),
        *_loading(load),
        HOW.format(samples=samples(records)),
        _machines(records, scaling, load),
    )
    return {"benchmarks.md": text}


def samples(records: Iterable[Record]) -> str:
    """Return how many samples a time is the median of."""
    found = sorted({cell["rounds"] for record in records for cell in record.cells if "rounds" in cell})
    return f"{found[0]} to {found[-1]}" if len(found) > 1 else f"{found[0]}"


def heading(record: Record) -> str:
    """Return what a record's section is called."""
    return f"{'Training' if trains(record) else 'Inference'}, {record.about['device']}, {record.about['dtype']}"


def rows(record: Record) -> list[list[str]]:
    """Return a row for each network and batch, in the order of names."""
    found = []
    for cell in sorted(record.cells, key=lambda cell: (cell["model"].lower(), cell["batch"])):
        ours, name = cell["ways"].get(OURS, {}), cell.get("fastest_peer", "")
        peer = cell["ways"].get(name, {})
        row = [cell["model"], str(cell["batch"]), _number(ours, "images_s"), f"{cell['ratio']:.2f}" if "ratio" in cell else NOTHING]
        named = "" if alike(record) else f" {record.label(name)}"
        row.append(f"{_number(peer, 'images_s')}{named}" if peer else NOTHING)
        if not trains(record):
            row += [_ms(ours), _ms(peer)]
        if record.about["type"] == "cuda":
            row += [_number(ours, "memory_mib"), _number(_beside(record, cell), "memory_mib")]
        row += [_ms(cell["ways"].get(name, {})) for name in _narrower(record)]
        found.append([*row, _number(ours, "build_s")])
    return found


def alike(record: Record) -> str:
    """Return what the fastest rival of every row is called, "" where they differ."""
    names = {record.label(cell["fastest_peer"]) for cell in record.cells if "fastest_peer" in cell}
    return names.pop() if len(names) == 1 else ""


def _section(record: Record, first: Record) -> Iterator[str]:
    told = [cell for cell in record.cells if "ratio" in cell]
    slow = sorted((cell for cell in told if cell["ratio"] < 1), key=lambda cell: cell["ratio"])
    yield f"## {heading(record)}"
    best, name = max(told, key=lambda cell: cell["ratio"]), "A step" if trains(record) else "`fast`"
    says = f"{name} is faster than every rival in {len(told) - len(slow)} of {len(told)} rows, and up to {best['ratio']:.1f} times as fast"
    says += f" ({best['model']} at batch {best['batch']})."
    if slow:
        says += f" The lowest row is {slow[0]['model']} at batch {slow[0]['batch']}, at {slow[0]['ratio']:.2f} times the rival's speed."
    if alike(record):
        says += f" The fastest rival is `{alike(record)}` in every row."
    heads = ["network", "batch", "images/s", "over rival", "rival's"]
    heads += [] if trains(record) else ["ms", "rival's ms"]
    if record.about["type"] == "cuda":
        heads += ["MiB", "compile's MiB" if trains(record) else "eager's MiB"]
    if record.about["type"] == "cpu":
        says += (
            f" All ways use {record.about['threads']} threads. `fast` runs onnxruntime or OpenVINO itself, so a ratio near 1 is expected."
        )
    if narrower := _narrower(record):
        says += (
            f" OpenVINO as it is shipped computes {record.about['dtype']} networks in bfloat16 on this CPU, and is no rival of float32: "
            "compare it with `fast` in bfloat16. int8 was measured on made-up pictures, where nothing is proven ([half the bits](int8.md))."
        )
        heads += [f"{NARROW[name]} ms" for name in narrower]
    if trains(record) and (absent := [cell for cell in told if "max-autotune" not in cell["ways"]]):
        says += f" In {len(absent)} rows `max-autotune` has no figure: it takes minutes to be ready, or failed."
    yield says
    if record is first:
        yield f"![Images a second over those of the fastest rival, {record.about['device']}]({PICTURE})"
    left = () if alike(record) else (4,)
    yield table([*heads, "ready after s"], rows(record), right=[number for number in range(1, len(heads) + 1) if number not in left])


def _narrower(record: Record) -> list[str]:
    """List the ways in narrower types that a record has, which are no rivals."""
    return [name for name in NARROW if any("us" in cell["ways"].get(name, {}) for cell in record.cells)]


def _beside(record: Record, cell: dict[str, Any]) -> dict[str, Any]:
    """Return the way whose memory stands beside ours: torch.compile's where a network trains, else the eager one that takes least."""
    if trains(record):
        return cell["ways"].get("compile", {})
    ways = [way for name, way in cell["ways"].items() if name.startswith("eager") and way.get("memory_mib") is not None]
    return min(ways, key=lambda way: way["memory_mib"], default={})


def _number(way: dict[str, Any], key: str) -> str:
    value = way.get(key)
    return NOTHING if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ms(way: dict[str, Any]) -> str:
    value = way.get("latency_us")
    return NOTHING if value is None else f"{value / 1000:,.2f}" if value < 1e5 else f"{value / 1000:,.0f}"


def _scaling(record: dict[str, Any]) -> Iterator[str]:
    yield "## Training on several GPUs"
    last = record["rows"][-1]
    yield (
        f"{record['model']}, {record['batch']} images for each {record['device']}, under DistributedDataParallel. "
        f"Each of {last['gpus']} GPUs reaches {last['a_gpu']:.3f} of what one alone does. "
        "`torchrun --nproc-per-node 4 recipes/training_scaling.py` measures it."
    )
    cells = [[str(row["gpus"]), f"{row['images_s']:,.0f}", f"{row['a_gpu']:.3f}"] for row in record["rows"]]
    yield table(["GPUs", "images/s", "of one GPU's speed, for each"], cells, right=(0, 1, 2))
    yield "![images a second on one, two and four GPUs](training-scaling.png)"


def _loading(record: dict[str, Any]) -> Iterator[str]:
    yield "## Construct and load"
    yield (
        "From the local disk to a network in eval mode, with the file in the page cache. `trained` hashes every byte, the rivals none. "
        '`verify="stamp"` believes the file\'s time and size instead.'
    )
    cells = []
    for network in dict.fromkeys(row["model"] for row in record["rows"]):
        ways = [row for row in record["rows"] if row["model"] == network]
        cells += [[network, way["way"], f"{way['ms']:,.1f}", f"{ways[0]['ms'] / way['ms']:.1f}"] for way in ways]
    yield table(["network", "way", "ms", "times as fast as torchvision"], cells, right=(2, 3))


def _machines(records: list[Record], scaling: dict[str, Any], load: dict[str, Any]) -> str:
    cells: list[list[str]] = []
    dates: list[str] = []
    for record in records:
        versions = record.caption().removeprefix(record.dates()).removeprefix(f", {record.about['device']}, ")
        cells.append([f"[{heading(record)}](#{_anchor(heading(record))})", versions])
        dates.append(f"{heading(record)}: {record.dates()}.")
    cells.append(["[Training on several GPUs](#training-on-several-gpus)", f"{scaling['device']}, torch {scaling['versions']['torch']}"])
    cells.append(["[Construct and load](#construct-and-load)", f"{load['device']}, {load['versions']}"])
    dates += [f"Several GPUs: {scaling['date']}.", f"Construct and load: {load['date']}."]
    return table(["table", "machine and versions"], cells) + "\n\n" + " ".join(dates)


def _anchor(words: str) -> str:
    return "".join(char for char in words.lower() if char.isalnum() or char in " -_").replace(" ", "-")
