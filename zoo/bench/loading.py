"""Construct and load, the peer beside ours: the same files, one process, alternating, medians."""

from __future__ import annotations

import gc
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from zoo.bench.subject import torchvision_builder
from zoo.networks.model import Model
from zoo.pretrained.trained import trained


@dataclass(frozen=True, slots=True)
class Timing:
    """The median time of one way to do a thing, and how often it fits into the first way's."""

    way: str
    seconds: float
    ratio: float


def alternate(ways: dict[str, Callable[[], object]], rounds: int) -> list[Timing]:
    """Time each way once a round, in turn, and return medians; the first way is the peer that ratios refer to.

    Args:
        ways: name -> what to time; each is called once more before, uncounted.
        rounds: counted calls of each.
    """
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):
        for name, call in ways.items():
            gc.collect()
            start = time.perf_counter()
            result = call()
            elapsed = time.perf_counter() - start
            del result
            if round_:
                spent[name].append(elapsed)
    medians = {name: statistics.median(times) for name, times in spent.items()}
    first = next(iter(medians.values()))
    return [Timing(name, seconds, first / seconds) for name, seconds in medians.items()]


def load(model: type[Model], rounds: int = 5, with_timm: bool = True) -> list[Timing]:
    """Time constructing and loading `model` from a warm cache: torchvision's and timm's way, and `trained` with each `verify`.

    timm is measured where it is installed and has the network under this name. The file holds random weights of the right names and
    shapes, made in a temporary folder with a cache of its own.
    """
    with tempfile.TemporaryDirectory(prefix="zoo-bench-") as folder, _cache(Path(folder) / "cache"):
        torch.manual_seed(0)
        file = Path(folder) / f"{model.__name__}.pth"
        torch.save(model().state_dict(), file)
        source = file.as_uri()
        trained(model, source, progress=False)  # installs it
        ways: dict[str, Callable[[], object]] = {}
        build = torchvision_builder(model)
        ways["torchvision" if build else "construct, torch.load, copy"] = lambda: _construct_and_load(build or model, file)
        if with_timm and (peer := _timm_peer(model, Path(folder))):
            ways["timm"] = peer
        ways["trained, verified"] = lambda: trained(model, source, progress=False)
        ways['trained, verify="stamp"'] = lambda: trained(model, source, verify="stamp", progress=False)
        return alternate(ways, rounds)


def _timm_peer(model: type[Model], folder: Path) -> Callable[[], nn.Module] | None:
    """Return timm's way of constructing and loading the network, from a file of its own names; None where it has no such network."""
    name = model.__name__.lower()
    try:
        import timm
    except ImportError:
        return None
    if not timm.is_model(name):
        return None
    file = folder / f"{name}.timm.pth"
    torch.save(timm.create_model(name).state_dict(), file)
    return lambda: _construct_and_load(lambda: timm.create_model(name), file)


def _construct_and_load(build: Callable[[], nn.Module], file: Path) -> nn.Module:
    network = build()
    network.load_state_dict(torch.load(file, weights_only=True))
    return network.eval()


@contextmanager
def _cache(folder: Path) -> Iterator[None]:
    """Let a measurement have a cache of its own, so that it neither finds nor leaves anything in the user's."""
    before = os.environ.get("ZOO_CACHE")
    os.environ["ZOO_CACHE"] = str(folder)
    log, level = logging.getLogger("zoo"), logging.getLogger("zoo").level
    log.setLevel(logging.ERROR)  # that a file of random weights is in no registry is no news
    try:
        yield
    finally:
        log.setLevel(level)
        if before is None:
            del os.environ["ZOO_CACHE"]
        else:
            os.environ["ZOO_CACHE"] = before
