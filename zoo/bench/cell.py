"""What cells of a measurement share: a way that fails leaves the others their figures, and the device is left as it was."""

from __future__ import annotations

import contextlib
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from zoo.bench.peers import OURS


class DeviceLost(RuntimeError):
    """A way has broken the device's context: nothing more can be measured in this process."""


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
