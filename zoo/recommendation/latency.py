"""How long one image takes on this machine, through `fast`."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from weights.documents import table
from zoo.kernels import fast, why
from zoo.kernels.engines.race import SETTLE, undisturbed
from zoo.networks.model import Model

ROUNDS = 9
TURN_S = 0.05
"""Seconds of calls in a round, at least."""


@dataclass(frozen=True, slots=True)
class Latency:
    """What one image takes.

    Attributes:
        ms: milliseconds of a call with one image: the median of the faster half of the rounds.
        low: the fastest round.
        high: the slowest round.
        on: what ran it: "openvino" for example, or the kernels of a GPU.
    """

    ms: float
    low: float
    high: float
    on: str

    def facts(self) -> dict[str, Any]:
        """Return what a file keeps."""
        return asdict(self)

    @classmethod
    def of(cls, told: Any) -> Latency:
        """Read what a file kept.

        Raises:
            TypeError, KeyError: it holds something else.
        """
        facts = table(told, {"ms": (int, float), "low": (int, float), "high": (int, float), "on": str})
        return cls(float(facts["ms"]), float(facts["low"]), float(facts["high"]), facts["on"])


def measured(model: Model, device: torch.device, quick: bool) -> Latency:
    """Time single images of the checkpoint's own size.

    Args:
        model: with its checkpoint.
        device: where it is to run.
        quick: whether fewer kernels are tried and fewer rounds held.
    """
    assert model.checkpoint is not None
    side = model.checkpoint.preprocessing.crop or model.input_size
    image = torch.rand(1, model.in_channels, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    tune: Literal["none", "quick"] = "none" if quick else "quick"
    made = fast(model, device, tune=tune, example=image, progress=False)
    rounds = []
    with torch.inference_mode():
        made(image)
        for _ in range(3 if quick else ROUNDS):
            if device.type == "cpu":
                time.sleep(SETTLE)  # threads of the round before spin for a while
            _once(made, image, device)
            spent, count = 0.0, 0
            while spent < TURN_S:
                spent += _once(made, image, device)
                count += 1
            rounds.append(1000 * spent / count)
    return Latency(undisturbed(rounds), min(rounds), max(rounds), _engine(made))


def machine(device: torch.device) -> str:
    """Name what a latency depends on, besides the network."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        name = f"{platform.node()}, {platform.processor() or platform.machine()}, {cores} cores, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


def _once(made: Any, image: torch.Tensor, device: torch.device) -> float:
    begun = time.perf_counter()
    made(image)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begun


def _engine(made: Any) -> str:
    """Name what runs it: an engine on a CPU, on a GPU the zoo's kernels."""
    if made.device.type == "cuda":
        return "the zoo's kernels" if not made.unchanged else "PyTorch"
    rows = why(made).rows
    return rows[0].op if rows else "PyTorch"
