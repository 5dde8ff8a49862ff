"""What cells of a measurement share: a way that fails leaves the others their figures, and the device is left as it was."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from zoo.bench.machine import facts, today
from zoo.bench.peers import OURS, Way
from zoo.kernels.comparing.precision import products
from zoo.networks.model import Model

FEWEST = 5
"""Rounds that the slowest network gets too."""


class DeviceLost(RuntimeError):
    """A way has broken the device's context: nothing more can be measured in this process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run measures.

    Attributes:
        models: networks of the catalogue.
        batches: images in a call.
        ways: ours and its peers.
        device: where.
        dtype: of the ways that are not bound to float32.
        rounds: samples of each way.
        tune: what `fast` is to tune: "none", "quick" or "full".
        what: "infer", calls, or "train", steps.
    """

    models: Sequence[type[Model]]
    batches: Sequence[int]
    ways: Sequence[Way]
    device: torch.device
    dtype: torch.dtype
    rounds: int = 20
    tune: str = "quick"
    what: str = "infer"

    def about(self) -> dict[str, Any]:
        """Describe the device, the versions and the settings, for the record."""
        what = {} if self.what == "infer" else {"what": self.what}
        return {**what, **facts(self.device), "dtype": str(self.dtype).removeprefix("torch."), "tune": self.tune, "date": today()}


def measured(plan: Plan, name: str, size: int, batch: int, act: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return a cell that `act` fills; where it fails, all ways say so. The device and its settings are left as they were."""
    start = time.monotonic()
    cell: dict[str, Any] = {"model": name, "batch": batch, "size": size, "date": today(), "ways": {}}
    try:  # stock PyTorch at its best: cuDNN may choose by timing; a way that uses TF32 says so call by call
        with current(plan.device), products(tf32=False, benchmark=True):
            act(cell)
    except Exception as error:
        cell["failed"] = words(error)
        for way in plan.ways:
            if "failed" not in cell["ways"].get(way.name, {}):
                cell["ways"][way.name] = {"failed": f"the cell failed: {words(error)}"}
        cell["device_lost"] = isinstance(error, DeviceLost)
    finally:
        forget(plan.device)
    cell["seconds"] = round(time.monotonic() - start, 1)
    return cell


def rounds_of(cell: dict[str, Any], plan: Plan, calls: dict[str, Callable[[], Any]], budget_us: float) -> int:
    """Run every way once more beside all others, drop those that fail so, and note how many rounds the rest gets; 0 if none is left."""
    spans = {}
    for name in list(calls):  # what fits alone may not fit beside the others
        took = attempt(cell["ways"][name], plan.device, partial(span, calls[name], plan.device))
        if took is None:
            del calls[name]
        else:
            spans[name] = took
    if not calls:
        return 0
    cell["rounds"] = max(min(FEWEST, plan.rounds), min(plan.rounds, int(budget_us / sum(max(2000.0, 2 * one) for one in spans.values()))))
    return cell["rounds"]


def attempt(row: dict[str, Any], device: torch.device, act: Callable[[], Any]) -> Any:
    """Return what `act` does, or None, and its error in the row: one way's failure is no reason to measure nothing."""
    try:
        return act()
    except Exception as error:
        row.clear()
        row["failed"] = words(error)
    gc.collect()  # outside of the except clause, whose traceback holds the way's tensors
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise DeviceLost(row["failed"]) from error
        torch.cuda.empty_cache()
    return None


def span(call: Callable[[], object], device: torch.device) -> float:
    """Return the microseconds of one call and the wait for it."""
    start = time.monotonic()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e6 * (time.monotonic() - start)


def compare(cell: dict[str, Any], beside: tuple[str, ...] = ()) -> None:
    """Put our images a second over those of the fastest peer of this cell; `beside` are other ways of ours."""
    rates = {name: row["images_s"] for name, row in cell["ways"].items() if "images_s" in row}
    peers = {name: rate for name, rate in rates.items() if name not in (OURS, *beside)}
    if peers:
        cell["fastest_peer"] = max(peers, key=lambda name: peers[name])
        if OURS in rates:
            cell["ratio"] = rates[OURS] / peers[cell["fastest_peer"]]


def words(error: BaseException) -> str:
    """Return an error's name and the first line of what it says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text[:200] if text.startswith("red:") else f"{type(error).__name__}: {text[:200]}".rstrip(": ")


def current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a GPU the current one for a while."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def forget(device: torch.device) -> None:
    """Free what the compiler and the allocator keep for the cell before."""
    if dynamo := sys.modules.get("torch._dynamo"):  # its import alone takes seconds
        dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # of a device that is lost
            torch.cuda.empty_cache()
